"""Which keys each query row may attend to, reduced to the cheapest exact form.

A boolean mask is large and usually says little: padding masks are equal in every row, causal
and sliding-window masks are intervals. :class:`Support` finds that out once, in chunks of rows,
so that everything downstream can work per example or per interval instead of per entry.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from attnlens.errors import InputError

_CHUNK_ELEMENTS = 1 << 20


@dataclass(frozen=True)
class Support:
    """The keys `S_i` that query row `i` may attend to, and the rows that count.

    Exactly one of three forms holds:

    - *shared*: every row attends to `keys`; `first`, `last` and `rows` are None.
    - *interval*: row `i` attends to `keys` within `[first_i, last_i)`.
    - *rows*: row `i` attends to `rows[..., i, :]`, arbitrary.

    Attributes:
        keys: `[B, G, K]` bool, the real keys (those that some row sees); G is 1 or H.
        active: `[B, G, Q]` bool, the rows that count.
        first: `[B, G, Q]` int64 or None.
        last: `[B, G, Q]` int64 or None, exclusive.
        rows: `[B, G, Q, K]` bool or None.
    """

    keys: Tensor
    active: Tensor
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

    @property
    def queries(self) -> int:
        """Number of query rows Q."""
        return self.active.shape[-1]

    @cached_property
    def sizes(self) -> Tensor:
        """Number of keys of every row, `[B, G, Q]` int64 (`[B, G, 1]` when shared)."""
        if self.shared:
            return self.tokens[..., None]
        if self.rows is not None:
            return self.rows.sum(-1)
        assert self.first is not None and self.last is not None
        counts = _running_count(self.keys)
        return counts.gather(-1, self.last) - counts.gather(-1, self.first)

    def counted(self, *, own: bool = True, padding: Tensor | None = None) -> Support:
        """Keep the rows that count, and the keys that they see.

        Args:
            own: whether queries and keys are the same tokens; a row then counts only if its own
                token is a real key.
            padding: `[B, Q]` bool, the rows that may count; None leaves it to the mask.

        Returns:
            The support of those rows. A shared one keeps its keys, which are the same in every
            row.
        """
        active = self.active
        if own and self.queries == self.keys.shape[-1]:
            active = active & self.keys
        if padding is not None:
            active = active & padding[:, None]
        if self.shared:
            return replace(self, active=active)
        return self._of_rows(active)._simplest()

    def _of_rows(self, active: Tensor) -> Support:
        """Keep some rows, and the keys that they see."""
        if self.rows is not None:
            rows = self.rows & active[..., None]
            return Support(rows.any(-2), active, rows=rows)
        assert self.first is not None and self.last is not None
        last = torch.where(active, self.last, self.first)
        steps = torch.zeros(*self.keys.shape[:2], self.keys.shape[-1] + 1, device=last.device)
        open_ = (last > self.first).to(steps.dtype)
        steps.scatter_add_(-1, self.first, open_).scatter_add_(-1, last, -open_)
        covered = steps.cumsum(-1)[..., :-1] > 0
        return Support(self.keys & covered, active, self.first, last)

    def _simplest(self) -> Support:
        """The shared form where all rows that count see all real keys."""
        whole = (self.sizes == self.tokens[..., None]) | ~self.active
        return Support(self.keys, self.active) if bool(whole.all()) else self

    def part(self, examples: Tensor, rows: int, keys: int) -> Support:
        """Take the first rows and keys of some examples.

        Args:
            examples: `[N]` int64, batch indices.
            rows: number of query rows.
            keys: number of keys; no row that is taken sees others.

        Returns:
            The support of N examples.
        """

        def taken(part: Tensor | None) -> Tensor | None:
            return None if part is None else part[examples, :, :rows]

        real = self.keys[examples, :, :keys]
        active = self.active[examples, :, :rows]
        if self.rows is not None:
            return Support(real, active, rows=self.rows[examples, :, :rows, :keys])
        first, last = (taken(part) for part in (self.first, self.last))
        return Support(real, active, first, None if last is None else last.clamp(max=keys))

    def of_heads(self, example: Tensor, head: Tensor) -> Support:
        """Take single heads of examples, each as an example of its own.

        Args:
            example: `[P]` int64, batch indices.
            head: `[P]` int64, indices of query heads.

        Returns:
            The support of P examples of one head.
        """
        index = head if self.keys.shape[1] > 1 else torch.zeros_like(head)

        def taken(part: Tensor | None) -> Tensor | None:
            return None if part is None else part[example, index][:, None]

        parts = (self.keys[example, index][:, None], self.active[example, index][:, None])
        return Support(*parts, taken(self.first), taken(self.last), taken(self.rows))

    def mask(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Materialise the rows `start:stop` of the mask.

        Args:
            start: first query row.
            stop: one past the last query row; all that follow by default.

        Returns:
            `[B, G, stop − start, K]` bool, broadcast over rows when shared.
        """
        stop = self.queries if stop is None else stop
        if self.rows is not None:
            return self.rows[:, :, start:stop]
        keys = self.keys[:, :, None]
        if self.first is None or self.last is None:
            return keys.expand(-1, -1, stop - start, -1)
        position = torch.arange(keys.shape[-1], device=keys.device)
        inside = position >= self.first[:, :, start:stop, None]
        return inside & (position < self.last[:, :, start:stop, None]) & keys

    def seen(self, example: int, index: int, rows: Tensor, span: slice = slice(None)) -> Tensor:
        """Materialise some rows of one mask.

        Args:
            example: batch index.
            index: index of the mask.
            rows: `[r]` int64, query rows.
            span: range of keys.

        Returns:
            `[r, k]` bool.
        """
        if self.rows is not None:
            return self.rows[example, index, rows, span]
        keys = self.keys[example, index]
        if self.first is None or self.last is None:
            return keys[span].expand(len(rows), -1)
        position = torch.arange(len(keys), device=keys.device)[span]
        first, last = (bound[example, index, rows, None] for bound in (self.first, self.last))
        return (position >= first) & (position < last) & keys[span]


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
        return _causal(real, queries) if causal else _shared(real, queries)
    mask = boolean_mask(mask, batch, queries, keys)
    if mask.shape[-2] == 1 or mask.stride(-2) == 0 or torch.equal(mask, _first_row(mask)):
        real = mask[..., 0, :]
        return _causal(real, queries) if causal else _shared(real, queries)
    if causal:
        mask = mask & mask.new_ones(queries, keys).tril()
    return _interval(mask) or Support(mask.any(-2), mask.any(-1), rows=mask)


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


def _shared(keys: Tensor, queries: int) -> Support:
    return Support(keys, keys.any(-1, keepdim=True).expand(-1, -1, queries))


def _causal(keys: Tensor, queries: int) -> Support:
    keys = keys & (torch.arange(keys.shape[-1], device=keys.device) < queries)
    last = torch.arange(1, queries + 1, device=keys.device).clamp(max=keys.shape[-1])
    last = last.expand(*keys.shape[:2], -1)
    active = _running_count(keys).gather(-1, last) > 0
    return Support(keys, active, torch.zeros_like(last), last)


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
    active = mask.any(-1)
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
    return Support(keys, active, torch.cat(first, -1), torch.cat(last, -1)) if exact else None
