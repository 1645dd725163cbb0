"""attnlens: the part of attention that can influence the output."""
