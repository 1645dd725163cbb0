"""Which keys each query row may attend to, reduced to the cheapest exact form.

A boolean mask is large and usually says little: padding masks are equal in every row, causal
and sliding-window masks are intervals. :class:`Support` finds that out once, in chunks of rows,
so that everything downstream can work per example or per interval instead of per entry.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from attnlens.errors import InputError

_CHUNK_ELEMENTS = 1 << 20


@dataclass(frozen=True)
class Support:
    """The keys `S_i` that query row `i` may attend to.

    Exactly one of three forms holds:

    - *shared*: every row attends to `keys`; `first`, `last` and `rows` are None.
    - *interval*: row `i` attends to `keys` within `[first_i, last_i)`.
    - *rows*: row `i` attends to `rows[..., i, :]`, arbitrary.

    Attributes:
        keys: `[B, G, K]` bool, the real keys (the union over rows); G is 1 or H.
        first: `[B, G, Q]` int64 or None.
        last: `[B, G, Q]` int64 or None, exclusive.
        rows: `[B, G, Q, K]` bool or None.
    """

    keys: Tensor
    first: Tensor | None = None
    last: Tensor | None = None
    rows: Tensor | None = None

    @property
    def shared(self) -> bool:
        """Whether every query row has the same support."""
        return self.first is None and self.rows is None

    @property
    def tokens(self) -> Tensor:
        """Number of real keys, `[B, G]` int64."""
        return self.keys.sum(-1)

    def sizes(self) -> Tensor:
        """Count the keys of every row.

        Returns:
            `[B, G, Q]` int64 (`[B, G, 1]` when shared), in `[0, K]`.
        """
        if self.shared:
            return self.tokens[..., None]
        if self.rows is not None:
            return self.rows.sum(-1)
        assert self.first is not None and self.last is not None
        counts = _running_count(self.keys)
        return counts.gather(-1, self.last) - counts.gather(-1, self.first)

    def active(self, queries: int, *, cross: bool = False) -> Tensor:
        """Tell which query rows are real.

        In self-attention (as many queries as keys) a row is real when its own token is a real
        key; elsewhere every row that sees a key is real.

        Args:
            queries: number of query rows Q.
            cross: queries and keys are different tokens, even where there are as many.

        Returns:
            `[B, G, Q]` bool.
        """
        sizes = self.sizes().expand(*self.keys.shape[:2], queries)
        real = sizes > 0
        return real if cross or queries != self.keys.shape[-1] else real & self.keys

    def restricted(self, rows: Tensor) -> Support:
        """Take the keys away from some rows, and drop the keys that only those could see.

        Args:
            rows: `[B, G, Q]` bool, the rows to keep; G may be 1.

        Returns:
            The support; a shared one is returned as it is, its keys being the same in every row.
        """
        if self.rows is not None:
            kept = self.rows & rows[..., None]
            return Support(kept.any(-2), rows=kept)
        if self.first is None or self.last is None:
            return self
        last = torch.where(rows, self.last, self.first)
        steps = torch.zeros(*self.keys.shape[:2], self.keys.shape[-1] + 1, device=last.device)
        open_ = (last > self.first).to(steps.dtype)
        steps.scatter_add_(-1, self.first, open_).scatter_add_(-1, last, -open_)
        covered = steps.cumsum(-1)[..., :-1] > 0
        return Support(self.keys & covered, self.first.expand_as(last), last)

    def mask(self, start: int, stop: int) -> Tensor:
        """Materialise the rows `start:stop` of the mask.

        Args:
            start: first query row.
            stop: one past the last query row.

        Returns:
            `[B, G, stop − start, K]` bool, broadcast over rows when shared.
        """
        if self.rows is not None:
            return self.rows[:, :, start:stop]
        keys = self.keys[:, :, None]
        if self.first is None or self.last is None:
            return keys.expand(-1, -1, stop - start, -1)
        position = torch.arange(keys.shape[-1], device=keys.device)
        inside = position >= self.first[:, :, start:stop, None]
        return inside & (position < self.last[:, :, start:stop, None]) & keys


def support_of(
    mask: Tensor | None,
    batch: int,
    queries: int,
    keys: int,
    *,
    causal: bool = False,
    device: torch.device | None = None,
) -> Support:
    """Find the cheapest exact form of a boolean attention mask.

    Args:
        mask: bool (or integer, nonzero meaning True) and broadcastable to `[B, H, Q, K]`, or a
            key-padding mask `[B, K]`; True where a query may attend. None means everywhere.
        batch: B.
        queries: Q.
        keys: K.
        causal: apply in addition the rule that row `i` sees no key after `i`.
        device: device of the result where `mask` is None.

    Returns:
        The support, with leading dimensions `[B, 1]` or `[B, H]`.

    Raises:
        InputError: if the mask is floating point or does not broadcast.
    """
    if mask is None:
        real = torch.ones((batch, 1, keys), dtype=torch.bool, device=device)
        return _causal(real, queries) if causal else Support(real)
    mask = boolean_mask(mask, batch, queries, keys)
    if mask.shape[-2] == 1 or mask.stride(-2) == 0 or torch.equal(mask, _first_row(mask)):
        real = mask[..., 0, :]
        return _causal(real, queries) if causal else Support(real)
    if causal:
        mask = mask & mask.new_ones(queries, keys).tril()
    return _interval(mask) or Support(mask.any(-2), rows=mask)


def boolean_mask(mask: Tensor, batch: int, queries: int, keys: int) -> Tensor:
    """Bring a user's mask to `[B, G, Q or 1, K]` bool.

    Args:
        mask: bool or integer; `[B, K]` or broadcastable to `[B, H, Q, K]`.
        batch: B.
        queries: Q.
        keys: K.

    Returns:
        The mask with the batch dimension expanded, rows left broadcast where they were.

    Raises:
        InputError: if the mask is floating point or does not broadcast.
    """
    if mask.is_floating_point():
        raise InputError(
            f"The mask must be boolean (True = may attend); an additive mask is ambiguous. "
            f"Convert it with `mask > torch.finfo(mask.dtype).min / 2`. Got {mask.dtype}."
        )
    mask = mask if mask.dtype == torch.bool else mask != 0
    if mask.dim() == 2 and mask.shape == (batch, keys):
        mask = mask[:, None, None]
    while mask.dim() < 4:
        mask = mask[None]
    fits = mask.dim() == 4 and all(
        size in allowed
        for size, allowed in zip(
            (mask.shape[0], mask.shape[2], mask.shape[3]),
            ((1, batch), (1, queries), (1, keys)),
            strict=True,
        )
    )
    if not fits:
        raise InputError(
            f"The mask must be [B, K] or broadcast to [B, H, Q, K] = "
            f"[{batch}, H, {queries}, {keys}]. Got {list(mask.shape)}."
        )
    return mask.expand(batch, -1, -1, keys)


def _first_row(mask: Tensor) -> Tensor:
    return mask[..., :1, :].expand_as(mask)


def _running_count(keys: Tensor) -> Tensor:
    """Number of real keys before each position: `[B, G, K + 1]`."""
    return torch.nn.functional.pad(keys.cumsum(-1), (1, 0))


def _causal(keys: Tensor, queries: int) -> Support:
    last = torch.arange(1, queries + 1, device=keys.device).clamp(max=keys.shape[-1])
    last = last.expand(*keys.shape[:2], -1)
    return Support(keys, torch.zeros_like(last), last)


def row_chunks(rows: int, elements_per_row: int) -> Iterator[tuple[int, int]]:
    """Cut `rows` into ranges of a few megabytes each.

    Args:
        rows: number of rows to cut.
        elements_per_row: elements that one row costs.

    Yields:
        `(start, stop)` pairs that cover `range(rows)`.
    """
    step = max(1, _CHUNK_ELEMENTS // max(1, elements_per_row))
    for start in range(0, rows, step):
        yield start, min(start + step, rows)


def _interval(mask: Tensor) -> Support | None:
    """Recognise rows that are intervals of the real keys; None where one is not."""
    keys = mask.any(-2)  # [B, G, K]
    counts = _running_count(keys)
    first, last, exact = [], [], True
    for start, stop in row_chunks(mask.shape[-2], mask[..., 0, :].numel()):
        rows = mask[..., start:stop, :].to(torch.uint8)
        size = rows.sum(-1, dtype=torch.int64)
        begin = rows.argmax(-1)
        end = torch.where(size > 0, rows.shape[-1] - rows.flip(-1).argmax(-1), begin)
        inside = counts.gather(-1, end) - counts.gather(-1, begin)
        exact = exact and torch.equal(inside, size)
        first.append(begin)
        last.append(end)
    return Support(keys, torch.cat(first, -1), torch.cat(last, -1)) if exact else None
