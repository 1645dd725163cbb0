"""Pure batched tensor mathematics, by topic; no state, no models."""

from attnlens.functional.nullspace import ValueBasis, effective_attention, value_basis
from attnlens.functional.rowwise import RowwiseBasis

__all__ = ["RowwiseBasis", "ValueBasis", "effective_attention", "value_basis"]
