"""Statistics of attention rows, tile by tile: the PyTorch twin."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from attnlens.kernels.returned import RowStatistics
from attnlens.kernels.tiles import blocks, row_tiles, tile_elements

# Logit of a key that may not be attended to: finite, because 0 · (−inf) is NaN, and so large that
# adding any true logit to it changes nothing.
MASKED = -1e30


class Rows(NamedTuple):
    """The arguments of `attnlens.kernels.row_statistics`, checked."""

    query: Tensor
    key: Tensor
    basis: Tensor | None
    mask: Tensor | None
    bias: Tensor | None
    causal: bool
    scaling: float


def row_statistics(rows: Rows) -> RowStatistics:
    """Return the statistics tile by tile; see `attnlens.kernels.row_statistics`."""
    query, key, basis, mask, bias, causal, scaling = rows
    batch, heads, queries, _ = query.shape
    if batch > 1 and mask is None and bias is None:  # examples are as good as heads
        query, key = query.flatten(0, 1)[None], key.flatten(0, 1)[None]
        basis = None if basis is None else basis.flatten(0, 1)[None]
        folded = row_statistics(rows._replace(query=query, key=key, basis=basis))
        return RowStatistics._make(
            part if part is None else part[0].unflatten(0, (batch, heads)) for part in folded
        )
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    statistics = query.new_zeros((5, batch, heads, queries), dtype=dtype)
    statistics[0] = MASKED
    coordinates = None
    if basis is not None:
        coordinates = query.new_zeros((batch, heads, queries, basis.shape[-1]), dtype=dtype)
    for example in range(batch):
        keys = _AttendedKeys.of(example, heads, key, basis, mask, bias, dtype)
        _fill_example(
            query[example].to(dtype),
            keys,
            causal,
            scaling,
            statistics[:, example],
            None if coordinates is None else coordinates[example],
        )
    empty = statistics[0] <= MASKED / 2
    statistics[1:].masked_fill_(empty, 0.0)
    statistics[0].masked_fill_(empty, -torch.inf)
    if coordinates is not None:
        coordinates.masked_fill_(empty[..., None], 0.0)
    return RowStatistics._make([*statistics, coordinates])


@dataclass(frozen=True)
class _AttendedKeys:
    """The keys of one example that some row attends to; the others are dropped unread."""

    positions: Tensor  # [K'], ascending
    columns: Tensor | slice  # the same, as a slice where they follow one another
    key: Tensor  # [H, K', D]
    basis: Tensor | None  # [H, K', R]
    mask: Tensor | None  # [1|H, 1|Q, K], None where every row sees all of these keys
    bias: Tensor | None  # [1|H, 1|Q, K]
    masking_bias: bool  # whether some entries of the bias hide their keys

    @classmethod
    def of(
        cls,
        example: int,
        heads: int,
        key: Tensor,
        basis: Tensor | None,
        mask: Tensor | None,
        bias: Tensor | None,
        dtype: torch.dtype,
    ) -> _AttendedKeys:
        """Return the keys of one example, repeated for every query head."""
        positions = torch.arange(key.shape[-2], device=key.device)
        mask, bias = (_of_example(tensor, example) for tensor in (mask, bias))
        if mask is not None:
            flags = mask.view(torch.uint8)  # reduced twenty times as fast as booleans
            seen, unanimous = flags.amax((0, 1)).bool(), flags.amin((0, 1)).bool()
            positions = seen.nonzero()[:, 0]
            if torch.equal(seen, unanimous):
                mask = None
        columns: Tensor | slice = positions
        if len(positions):
            first, stop = int(positions[0]), int(positions[-1]) + 1
            columns = slice(first, stop) if stop - first == len(positions) else positions

        def select(rows: Tensor) -> Tensor:
            rows = rows[example][:, columns]
            group = heads // len(rows)
            return (rows.repeat_interleave(group, 0) if group > 1 else rows).to(dtype)

        selected = None if basis is None else select(basis)
        masking = bias is not None and bool((bias <= MASKED / 2).any())
        return cls(positions, columns, select(key), selected, mask, bias, masking)

    def hidden(self, heads: slice, rows: slice, block: slice, causal: bool) -> Tensor | None:
        """Return which keys of a block rows may not attend to, `[1|h, 1|q, k]`, or None."""
        positions = self.positions[block]
        hidden = None if self.mask is None else ~self._of_block(self.mask, heads, rows, block)
        if self.masking_bias and self.bias is not None:
            low = self._of_block(self.bias, heads, rows, block) <= MASKED / 2
            hidden = low if hidden is None else hidden | low
        if causal:
            row_positions = torch.arange(rows.start, rows.stop, device=positions.device)
            future = positions > row_positions[:, None]
            hidden = future[None] if hidden is None else hidden | future
        return hidden

    def logit_bias(
        self, heads: slice, rows: slice, block: slice, hidden: Tensor | None
    ) -> Tensor | None:
        """Return what is added to the scaled logits of a block, `[1|h, 1|q, k]`, or None."""
        added = None
        if self.bias is not None:
            added = self._of_block(self.bias, heads, rows, block).to(self.key.dtype)
            added = added.clamp_min(MASKED)
        if hidden is None:
            return added
        return torch.where(hidden, MASKED, self.key.new_zeros(()) if added is None else added)

    def _of_block(self, tensor: Tensor, heads: slice, rows: slice, block: slice) -> Tensor:
        """Return the block's part of a tensor `[1|H, 1|Q, K]`."""
        tensor = tensor[heads] if len(tensor) > 1 else tensor
        tensor = tensor[:, rows] if tensor.shape[1] > 1 else tensor
        if isinstance(self.columns, Tensor):
            return tensor[..., self.columns[block]]
        first = self.columns.start
        return tensor[..., first + block.start : first + block.stop]

    def visible(self, row: int) -> int:
        """Return how many of these keys a row may attend to under a causal mask."""
        return int(torch.searchsorted(self.positions, row + 1))


def _of_example(tensor: Tensor | None, example: int) -> Tensor | None:
    return None if tensor is None else tensor[example if len(tensor) > 1 else 0]


def _fill_example(
    query: Tensor,
    keys: _AttendedKeys,
    causal: bool,
    scaling: float,
    statistics: Tensor,
    coordinates: Tensor | None,
) -> None:
    """Write the statistics `[5, H, Q]` and the coordinates `[H, Q, R]` of one example."""
    heads, queries, _ = query.shape
    count = len(keys.positions)
    buffers = query.new_empty((2, tile_elements(heads, queries, count)))
    for group, rows in row_tiles(heads, queries, count):
        everywhere, stop = (
            (keys.visible(rows.start), keys.visible(rows.stop - 1)) if causal else (count, count)
        )
        tile_query, sums = query[group, rows], None
        for block in blocks(count, stop):
            hidden = keys.hidden(group, rows, block, block.stop > everywhere)
            if hidden is not None and bool(hidden.view(torch.uint8).amin()):
                continue  # as most blocks of a sliding window
            bias = keys.logit_bias(group, rows, block, hidden)
            tile_key = keys.key[group, block]
            shape = (*tile_query.shape[:2], tile_key.shape[1])
            scores, probabilities = (buffer[: math.prod(shape)].view(shape) for buffer in buffers)
            torch.baddbmm(
                scores if bias is None else bias,
                tile_query,
                tile_key.mT,
                beta=0.0 if bias is None else 1.0,
                alpha=scaling,
                out=scores,
            )
            basis = None if keys.basis is None else keys.basis[group, block]
            part = _exponential_sums(scores, probabilities, hidden, basis)
            sums = part if sums is None else sums.merged(part)
        if sums is not None:
            statistics[:, group, rows] = sums.statistics()
            if coordinates is not None and sums.products is not None:
                coordinates[group, rows] = sums.products / sums.total[..., None]


@dataclass(frozen=True)
class _ExponentialSums:
    """Sums of e = exp(s − m) over keys, m the largest logit of the row so far.

    Nothing is lost to the size of the logits, and blocks of keys can be merged: Milakov and
    Gimelshein, "Online normalizer calculation for softmax", 2018 (arXiv 1805.02867). Squares are
    about the mean, so that nearly uniform rows keep their differences, and are merged as Chan,
    Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample
    Variances", 1979.
    """

    largest: Tensor  # m, [h, q]
    total: Tensor  # Σ e
    size: Tensor  # number of keys n, [h, q] or less
    centred: Tensor  # Σ (e − mean e)²
    weighted: Tensor  # Σ e (s − m)
    products: Tensor | None  # Σ e u, [h, q, R]

    def merged(self, other: _ExponentialSums) -> _ExponentialSums:
        """Add the sums over other keys."""
        largest = torch.maximum(self.largest, other.largest)
        one, two = self._about(largest), other._about(largest)
        size = one.size + two.size
        # (mean − mean')² n n' / (n + n'), which is 0 where one side has no key
        apart = (one.total * two.size - two.total * one.size).square_()
        apart /= (one.size * two.size * size).clamp(min=1)
        products = None
        if one.products is not None and two.products is not None:
            products = one.products + two.products
        return _ExponentialSums(
            largest,
            one.total + two.total,
            size,
            one.centred + two.centred + apart,
            one.weighted + two.weighted,
            products,
        )

    def _about(self, largest: Tensor) -> _ExponentialSums:
        """Return the same sums with another m."""
        shift = self.largest - largest
        scale = shift.exp()
        return _ExponentialSums(
            largest,
            self.total * scale,
            self.size,
            self.centred * scale.square(),
            torch.addcmul(self.weighted, self.total, shift) * scale,
            None if self.products is None else self.products * scale[..., None],
        )

    def statistics(self) -> Tensor:
        """Return log-sum-exp, centred squares, entropy, maximum and size, `[5, h, q]`."""
        logarithm = self.total.log()
        entropy = (logarithm - self.weighted / self.total).clamp_min_(0.0)
        centred = self.centred / self.total.square()
        size = self.size.expand_as(self.total)
        return torch.stack([
            self.largest + logarithm,
            centred,
            entropy,
            self.total.reciprocal(),
            size,
        ])


def _exponential_sums(
    scores: Tensor, probabilities: Tensor, hidden: Tensor | None, basis: Tensor | None
) -> _ExponentialSums:
    """Sum over a block of keys; overwrite both buffers."""
    largest = scores.amax(-1)
    # softmax is faster than exp; the largest e is 1, so e is p over the largest p
    torch.softmax(scores.sub_(largest[..., None]), -1, out=probabilities)
    total = probabilities.amax(-1).reciprocal_()
    weighted = scores.mul_(probabilities).sum(-1).mul_(total)
    products = None if basis is None else (probabilities @ basis).mul_(total[..., None])
    size = total.new_full((), scores.shape[-1])
    if hidden is not None:
        size = size - hidden.sum(-1, dtype=total.dtype)
    centred = probabilities.sub_(size.clamp(min=1).reciprocal()[..., None])
    if hidden is not None:
        centred = centred.masked_fill_(hidden, 0.0)
    return _ExponentialSums(
        largest,
        total,
        size,
        torch.linalg.vector_norm(centred, dim=-1).mul_(total).square_(),
        weighted,
        products,
    )
