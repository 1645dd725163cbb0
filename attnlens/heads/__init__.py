"""Mask heads, prune them, save what is left, and measure what they are worth."""
