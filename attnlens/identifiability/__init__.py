"""Families of attention that give the same output: their dimensions, and members as witnesses."""

from attnlens.identifiability.of_captures import (
    identify,
    realisability_rank,
    simplex_witness,
    softmax_witness,
)

__all__ = ["identify", "realisability_rank", "simplex_witness", "softmax_witness"]
