"""What is known of some query rows of an example in the values that each of them sees."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class RowChunk(ABC):
    """Some query rows of one example, for value heads that share a mask.

    The h value heads of a chunk serve g query heads each.

    Attributes:
        example: batch index.
        heads: the value heads, as a slice or `[h]` int64.
        shared: g, query heads that share a value head.
        rows: `[r]` int64, the query rows.
        span: the k keys that the chunk is about; no row of it may attend to others.
        values: `[h, k, D]` float64.
    """

    example: int
    heads: slice | Tensor
    shared: int
    rows: Tensor
    span: slice
    values: Tensor

    @property
    @abstractmethod
    def row_sizes(self) -> Tensor:
        """Number of keys of each row, `[r]` int64."""

    @property
    @abstractmethod
    def row_rank(self) -> Tensor:
        """Numerical rank of T in the keys of each row, `[h, r]` int64."""

    @property
    @abstractmethod
    def row_simplex_rank(self) -> Tensor:
        """The same of `[T, 1]`."""

    @property
    @abstractmethod
    def row_bound(self) -> Tensor:
        """At least the squared condition number, or Inf where the rank is not proven, `[h, r]`."""

    @property
    @abstractmethod
    def row_total(self) -> Tensor:
        """Sum of the values of each row, `[h, r, D]`."""

    @property
    @abstractmethod
    def row_outside(self) -> Tensor:
        """Squared sine of the angle of 1 to the column space of each row, `[h, r]`."""

    @abstractmethod
    def seen(self) -> Tensor:
        """Which keys of the span each row sees, `[r, k]` bool."""

    @abstractmethod
    def solve(self, rows: Tensor) -> Tensor:
        """Solve `G x = o` for every row, so that `a⊥_i = x_i V_Sᵀ`.

        Args:
            rows: `[h, g, r, D]` float64 outputs `o_i = a_i V`.

        Returns:
            `x`, `[h, g, r, D]`.
        """

    @abstractmethod
    def forms(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Sum effective rows and their squares.

        Args:
            rows: `[h, g, r, D]` float64, in the row space of the values of each.

        Returns:
            `⟨Σv, G⁺ o⟩` and `⟨o, G⁺ o⟩`, each `[h, g, r]`.
        """

    @abstractmethod
    def label_sums(self, rows: Tensor, members: Tensor) -> Tensor:
        """Sum effective rows over the keys of each label.

        Args:
            rows: `[h, g, r, D]` float64 outputs.
            members: `[k, G]` float64, the keys of each label.

        Returns:
            `[h, g, r, G]`.
        """

    def pieces(self, elements: int) -> Iterator[RowChunk]:
        """Cut the chunk where dense rows of it would be too large.

        Args:
            elements: how many entries of dense rows are wanted at once.

        Yields:
            Parts that cover it.
        """
        yield self

    def near(self, some: Tensor) -> tuple[slice, Tensor]:
        """Return the keys around some of the rows, and their values.

        Args:
            some: `[s]` int64, positions in `rows`.

        Returns:
            A part of `span`, and of `values`.
        """
        return self.span, self.values

    def scatter(self, target: Tensor, source: Tensor) -> None:
        """Write per-row results into a tensor over all rows.

        Args:
            target: `[B, H, Q, ...]`, changed in place; H counts query heads.
            source: `[h, g or 1, r, ...]`.
        """
        grouped = target.unflatten(1, (-1, self.shared))[self.example]
        if isinstance(self.heads, slice):
            grouped[self.heads][:, :, self.rows] = source.to(target.dtype)
            return
        which = torch.arange(self.shared, device=self.rows.device)[:, None]
        grouped[self.heads[:, None, None], which, self.rows] = source.to(target.dtype)

    def take(self, source: Tensor) -> Tensor:
        """Pick this chunk's rows, `[B, H, Q, ...]` to `[h, g, r, ...]`."""
        return self.of_heads(source)[:, :, self.rows]

    def of_heads(self, source: Tensor) -> Tensor:
        """Pick this chunk's heads, `[B, H, ...]` to `[h, g, ...]`."""
        heads: Tensor = source.unflatten(1, (-1, self.shared))[self.example, self.heads]
        return heads
