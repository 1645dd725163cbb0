"""Runnable scripts, one for each claim; `python -m examples.paper` repeats a paper."""
