"""What commands say, as one line."""

from __future__ import annotations

import re


def without_frame(said: str) -> str:
    """Take away the frame that typer draws around its messages, and line breaks."""
    return re.sub(r"[\s│╭╮╰╯─]+", " ", said)
