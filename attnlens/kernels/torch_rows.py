"""Statistics of attention rows, tile by tile: the PyTorch twin."""

from dataclasses import dataclass

import torch
from torch import Tensor

from attnlens.kernels.results import RowStatistics
from attnlens.kernels.tiles import row_tiles, tile_buffers

# Logit of a key that may not be attended to: finite, because 0 · (−inf) is NaN, and so large that
# adding any true logit to it changes nothing.
MASKED = -1e30


def row_statistics(
    query: Tensor,
    key: Tensor,
    basis: Tensor | None,
    *,
    mask: Tensor | None,
    bias: Tensor | None,
    causal: bool,
    scaling: float,
) -> RowStatistics:
    """Return the statistics tile by tile; see ``attnlens.kernels.row_statistics``."""
    batch, heads, queries, _ = query.shape
    if batch > 1 and mask is None and bias is None:  # examples are as good as heads
        query, key = query.flatten(0, 1)[None], key.flatten(0, 1)[None]
        basis = None if basis is None else basis.flatten(0, 1)[None]
        folded = row_statistics(
            query, key, basis, mask=None, bias=None, causal=causal, scaling=scaling
        )
        found = {
            name: part[0].unflatten(0, (batch, heads))
            for name, part in folded._asdict().items()
            if part is not None
        }
        return RowStatistics(**({"coordinates": None} | found))
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    statistics = query.new_zeros((4, batch, heads, queries), dtype=dtype)
    statistics[0] = MASKED
    coordinates = None
    if basis is not None:
        coordinates = query.new_zeros((batch, heads, queries, basis.shape[-1]), dtype=dtype)
    buffers = tile_buffers(2, query, key.shape[2], dtype)

    for example in range(batch):
        keys = _AttendedKeys.of(example, heads, key, basis, mask, bias, dtype)
        _fill_example(
            query[example].to(dtype),
            keys,
            causal,
            scaling,
            buffers,
            statistics[:, example],
            None if coordinates is None else coordinates[example],
        )
    logsumexp, square_sum, entropy, maximum = statistics
    empty = logsumexp <= MASKED / 2
    logsumexp.masked_fill_(empty, -torch.inf)
    for statistic in (square_sum, entropy, maximum):
        statistic.masked_fill_(empty, 0.0)
    if coordinates is not None:
        coordinates.masked_fill_(empty[..., None], 0.0)
    return RowStatistics(logsumexp, square_sum, entropy, maximum, coordinates)


@dataclass(frozen=True)
class _AttendedKeys:
    """The keys of one example that some row attends to; the others are dropped unread."""

    positions: Tensor  # [K'], ascending
    key: Tensor  # [H, K', D]
    basis: Tensor | None  # [H, K', R]
    mask: Tensor | None  # [1|H, 1|Q, K], None where every row sees all of these keys
    bias: Tensor | None  # [1|H, 1|Q, K]

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
    ) -> "_AttendedKeys":
        """Return the keys of one example, repeated for every query head."""
        positions = torch.arange(key.shape[-2], device=key.device)
        mask, bias = (_of_example(tensor, example) for tensor in (mask, bias))
        if mask is not None:
            flags = mask.view(torch.uint8)  # reduced twenty times as fast as booleans
            seen, unanimous = flags.amax((0, 1)).bool(), flags.amin((0, 1)).bool()
            positions = seen.nonzero()[:, 0]
            if torch.equal(seen, unanimous):
                mask = None

        def select(rows: Tensor) -> Tensor:
            rows = rows[example]
            if len(positions) < rows.shape[-2]:
                rows = rows[:, positions]
            group = heads // len(rows)
            return (rows.repeat_interleave(group, 0) if group > 1 else rows).to(dtype)

        return cls(positions, select(key), None if basis is None else select(basis), mask, bias)

    def logit_bias(self, rows: slice, heads: slice, stop: int, causal: bool) -> Tensor | None:
        """Return what is added to the scaled logits of a tile, [1|h, 1|q, stop], or None."""
        positions = self.positions[:stop]
        added = None
        if self.bias is not None:
            added = _tile(self.bias, rows, heads)[..., positions].to(self.key.dtype)
            added = added.clamp_min(MASKED)
        hidden = None if self.mask is None else ~_tile(self.mask, rows, heads)[..., positions]
        if causal:
            row_positions = torch.arange(rows.start, rows.stop, device=positions.device)
            future = positions > row_positions[:, None]
            hidden = future[None] if hidden is None else hidden | future
        if hidden is None:
            return added
        if added is None:
            added = self.key.new_zeros(())
        return torch.where(hidden, MASKED, added)


def _of_example(tensor: Tensor | None, example: int) -> Tensor | None:
    return None if tensor is None else tensor[example if len(tensor) > 1 else 0]


def _tile(tensor: Tensor, rows: slice, heads: slice) -> Tensor:
    """Return the tile's part of a tensor [1|H, 1|Q, K]."""
    tensor = tensor[heads] if len(tensor) > 1 else tensor
    return tensor[:, rows] if tensor.shape[1] > 1 else tensor


def _fill_example(
    query: Tensor,
    keys: _AttendedKeys,
    causal: bool,
    scaling: float,
    buffers: Tensor,
    statistics: Tensor,
    coordinates: Tensor | None,
) -> None:
    """Write the statistics [4, H, Q] and the coordinates [H, Q, R] of one example."""
    heads, queries, _ = query.shape
    if not len(keys.positions):
        return
    per_head = any(part is not None and len(part) > 1 for part in (keys.mask, keys.bias))
    for rows, head_group in row_tiles(heads, queries, len(keys.positions)):
        stop = len(keys.positions)
        if causal:
            stop = int(torch.searchsorted(keys.positions, rows.stop))
            if not stop:
                continue
        if per_head or head_group.start == 0:
            bias = keys.logit_bias(rows, head_group, stop, causal)
        tile_query = query[head_group, rows]
        shape = (*tile_query.shape[:2], stop)
        scores, probabilities = (
            buffer[: shape[0] * shape[1] * stop].view(shape) for buffer in buffers
        )
        torch.baddbmm(
            scores if bias is None else bias,
            tile_query,
            keys.key[head_group, :stop].mT,
            beta=0.0 if bias is None else 1.0,
            alpha=scaling,
            out=scores,
        )
        statistics[:, head_group, rows] = _softmax_statistics(scores, probabilities)
        if coordinates is not None and keys.basis is not None:
            coordinates[head_group, rows] = probabilities @ keys.basis[head_group, :stop]


def _softmax_statistics(scores: Tensor, probabilities: Tensor) -> Tensor:
    """Return log-sum-exp, Σ p², entropy and maximum of each row [4, h, q]; reuse both buffers.

    The row maximum is subtracted first: log p = score + log max p then loses nothing to the size
    of the logits, and softmax costs less than log_softmax followed by exp.
    """
    largest = scores.amax(-1, keepdim=True)
    scores.sub_(largest)
    torch.softmax(scores, -1, out=probabilities)
    maximum = probabilities.amax(-1)
    log_maximum = maximum.log()
    square_sum = torch.linalg.vector_norm(probabilities, dim=-1).square_()
    entropy = scores.mul_(probabilities).sum(-1).add_(log_maximum).neg_().clamp_min_(0.0)
    return torch.stack([largest.squeeze(-1) - log_maximum, square_sum, entropy, maximum])
