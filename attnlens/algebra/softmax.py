"""Attention rows: A on demand, and what can be summed of it without building it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from attnlens.algebra.supports import Support, row_chunks
from attnlens.algebra.values import repeated, working_dtype
from attnlens.errors import CaptureError
from attnlens.kernels import Backend, row_statistics

EmptyRows = Literal["zero", "uniform"]


def attention_weights(
    query: Tensor,
    key: Tensor,
    *,
    scaling: float | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    empty_rows: EmptyRows = "zero",
) -> Tensor:
    """Compute `softmax(cap(QKᵀ · s) + bias)` over the keys each row may attend to.

    Args:
        query: `[B, H, Q, D]`.
        key: `[B, H, K, D]`.
        scaling: factor s on the logits; by default `D**-0.5`.
        mask: bool, broadcastable to `[B, H, Q, K]`, True where a query may attend.
        bias: additive, broadcastable to `[B, H, Q, K]`.
        softcap: c in `c · tanh(x / c)`, applied before the bias.
        sinks: `[H]` or broadcastable to `[B, H, Q, 1]`; logits of an extra column that takes
            probability and is dropped, so that rows sum to less than one.
        empty_rows: what a row with nothing to attend to becomes: all zero (scaled dot-product
            attention with a boolean mask) or uniform (a finite additive mask). With sinks, zero.

    Returns:
        `[B, H, Q, K]` in `[0, 1]`; float64 for float64 queries, else float32.

    Examples:
        >>> query = torch.zeros(1, 1, 2, 4)
        >>> attention_weights(query, torch.randn(1, 1, 5, 4))[0, 0, 0]
        tensor([0.2000, 0.2000, 0.2000, 0.2000, 0.2000])
    """
    logits = attention_logits(query, key, scaling=scaling, mask=mask, bias=bias, softcap=softcap)
    return _softmax(logits, mask, sinks, empty_rows)


def attention_logits(
    query: Tensor,
    key: Tensor,
    *,
    scaling: float | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Compute what `attention_weights` takes the softmax of; −inf where a row may not attend."""
    working = working_dtype(query)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    logits = (query.to(working) * scaling) @ key.to(working).mT
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if bias is not None:
        logits = logits + bias.to(working)
    return logits if mask is None else logits.masked_fill(~mask, -torch.inf)


def _softmax(
    logits: Tensor, mask: Tensor | None, sinks: Tensor | None, empty_rows: EmptyRows
) -> Tensor:
    if sinks is not None:
        column = sinks.reshape(1, -1, 1, 1) if sinks.dim() == 1 else sinks
        column = column.to(logits.dtype).expand(*logits.shape[:-1], 1)
        return torch.cat([logits, column], -1).softmax(-1)[..., :-1]
    if mask is None:
        return logits.softmax(-1)
    empty = ~mask.any(-1, keepdim=True)
    weights = logits.masked_fill(empty, 0.0).softmax(-1)
    return weights if empty_rows == "uniform" else weights.masked_fill(empty, 0.0)


class RowSums(NamedTuple):
    """Sums over attention rows, each `[B, H, Q]` float64.

    Attributes:
        total: row sums of A; 1 unless a sink takes a part.
        centred: `Σ_j (p_ij − total_i / n_i)²` over the n keys that the row sees.
        entropy: `−Σ_j p_ij log p_ij` in nats.
        resolution: what `centred` may be by rounding alone; a row below it is constant.
        maximum: the largest entry of the row.
        logsumexp: of the logits, an extra column's included; NaN where only A was seen.
    """

    total: Tensor
    centred: Tensor
    entropy: Tensor
    resolution: Tensor
    maximum: Tensor
    logsumexp: Tensor


@dataclass(frozen=True, eq=False)
class AttentionRows:
    """How the rows of A of one call come about.

    Attributes:
        shape: `(B, H, Q, K)`.
        query: `[B, H, Q, R]`, or None where only A was seen.
        key: `[B, Hkv, K, R]`, not repeated for grouped queries; None likewise.
        scaling: factor on the logits; None for the default.
        mask: bool, broadcastable to `[B, H, Q, K]`, True where a query may attend; or None.
        bias: additive, broadcastable to `[B, H, Q, K]`; or None.
        causal: in addition, row `i` sees no key after `i`.
        softcap: c in `c · tanh(logits / c)`, or None.
        sinks: logits of an extra softmax column, or None.
        empty_rows: what becomes of a row with nothing to attend to.
        observed: `[B, H, Q, K]` A as seen in the model, where it was seen; else None.
        eps: precision of A; by default that of what it is computed from.
        backend: which kernels sum the rows.
        site: name of the call, for messages.
    """

    shape: tuple[int, int, int, int]
    query: Tensor | None = None
    key: Tensor | None = None
    scaling: float | None = None
    mask: Tensor | None = None
    bias: Tensor | None = None
    causal: bool = False
    softcap: float | None = None
    sinks: Tensor | None = None
    empty_rows: EmptyRows = "zero"
    observed: Tensor | None = None
    eps: float | None = None
    backend: Backend = "auto"
    site: str = "This call"

    @property
    def known(self) -> bool:
        """Whether A can be had at all."""
        return self.observed is not None or (self.query is not None and self.key is not None)

    @property
    def streams(self) -> bool:
        """Whether A follows from queries, keys, mask and bias alone, row by row."""
        seen = self.observed is not None or self.query is None
        return not seen and self.softcap is None and self.sinks is None

    def attention(self, rows: slice | None = None) -> Tensor:
        """Compute A of some query rows, or of all by default, before dropout.

        Args:
            rows: which rows.

        Returns:
            `[B, H, rows, K]`, in float64 where queries, or the A that was seen, are.

        Raises:
            CaptureError: naming the call, if neither A nor queries and keys are there.
        """
        rows = slice(None) if rows is None else rows
        if self.observed is not None:
            return self.observed[:, :, rows].to(working_dtype(self.observed))
        logits = self.logits(rows)
        if logits is None:
            raise CaptureError(
                f"{self.site} was captured without A and without queries and keys, so attention "
                f"cannot be recomputed."
            )
        return _softmax(logits, self.mask_rows(rows), _rows_of(self.sinks, rows), self.empty_rows)

    def logits(self, rows: slice) -> Tensor | None:
        """Return the scaled, capped, biased and masked logits of some rows.

        Args:
            rows: query rows to compute.

        Returns:
            `[B, H, q, K]`, −inf at masked keys; None where only A was seen.
        """
        if self.query is None or self.key is None:
            return None
        return attention_logits(
            self.query[:, :, rows],
            repeated(self.key, self.shape[1]),
            scaling=self.scaling,
            mask=self.mask_rows(rows),
            bias=_rows_of(self.bias, rows),
            softcap=self.softcap,
        )

    def chunks(self) -> Iterator[tuple[slice, Tensor]]:
        """Visit A in blocks of query rows, never as one `[B, H, Q, K]` tensor.

        Yields:
            `(rows, attention[:, :, rows])`.
        """
        batch, heads, queries, keys = self.shape
        for start, stop in row_chunks(queries, batch * heads * keys):
            rows = slice(start, stop)
            yield rows, self.attention(rows)

    def mask_rows(self, rows: slice | Tensor) -> Tensor | None:
        """Return the mask of some rows, with the causal rule made explicit for those only."""
        mask = _rows_of(self.mask, rows)
        if not self.causal:
            return mask
        tensor = self.query if self.observed is None else self.observed
        device = None if tensor is None else tensor.device
        index = torch.arange(self.shape[2], device=device)[rows][:, None]
        seen = torch.arange(self.shape[3], device=device) <= index
        return seen if mask is None else seen & mask

    def sums(self, support: Support, values: Tensor | None = None) -> tuple[RowSums, Tensor | None]:
        """Sum every row that counts, and multiply it by the values if there are any.

        Args:
            support: the keys of every row, and the rows that count.
            values: `[B, Hv, K, E]`; rows at masked keys may hold anything where A streams.

        Returns:
            The sums, zero in rows that do not count, and `A V`, `[B, H, Q, E]`, or None.
        """
        if self.streams:
            sums, context = self._streamed(values)
        else:
            sums, context = self._visited(support, values)
        active = support.active
        return RowSums(*(torch.where(active, part, 0.0) for part in sums)), context

    def product(self, columns: Tensor) -> Tensor:
        """Multiply A, before dropout, by columns that all heads share, without building it.

        Args:
            columns: `[B, K, N]`, zero at masked keys.

        Returns:
            `A M`, `[B, H, Q, N]` float32 or float64.
        """
        if not self.streams:
            return torch.cat([a @ columns[:, None].to(a.dtype) for _, a in self.chunks()], -2)
        assert self.query is not None
        # fused kernels want values as wide as keys; others would write the matrix
        width = self.query.shape[-1]
        parts = columns.to(working_dtype(self.query))[:, None].split(width, -1)
        wide = (pad(part, (0, width - part.shape[-1])) for part in parts)
        products = [self.context(part)[..., : parts[0].shape[-1]] for part in wide]
        return torch.cat(products, -1)[..., : columns.shape[-1]]

    def context(self, values: Tensor) -> Tensor:
        """Multiply A, before dropout, by values.

        Args:
            values: `[B, Hv, K, E]`, zero at masked keys.

        Returns:
            `A V`, `[B, H, Q, E]` in the working precision.
        """
        if not self.streams:
            values = repeated(values, self.shape[1])
            return torch.cat([_product(a, values) for _, a in self.chunks()], -2)
        if self.bias is not None:
            product = self._streamed(values)[1]
            assert product is not None
            return product
        assert self.query is not None and self.key is not None
        heads, dtype = self.shape[1], working_dtype(self.query)
        query, key, values = (t.to(dtype) for t in (self.query, self.key, values))
        return scaled_dot_product_attention(
            query,
            repeated(key, heads),
            repeated(values, heads),
            attn_mask=self.mask,
            is_causal=self.causal,
            scale=self.scaling,
        )

    def part(self, examples: Tensor, rows: int, keys: int) -> AttentionRows:
        """Take the first rows and keys of some examples.

        Args:
            examples: `[N]` int64, batch indices.
            rows: number of query rows.
            keys: number of keys.

        Returns:
            A call of N examples.
        """
        return self._picked(lambda whole: whole[examples], slice(rows), slice(keys))

    def taken(
        self, example: Tensor, head: Tensor, rows: Tensor | None = None, keys: slice = slice(None)
    ) -> AttentionRows:
        """Take some heads of some examples, in float64, as a call of their own.

        Args:
            example: `[P]` int64, batch indices.
            head: `[P]` int64, head indices.
            rows: `[r]` int64, query rows; all by default.
            keys: keys; all by default.

        Returns:
            A call of P examples with one head each and r rows.
        """

        def pick(whole: Tensor) -> Tensor:
            index = head * whole.shape[1] // self.shape[1]
            chosen = whole[example, index][:, None]
            return chosen.double() if chosen.is_floating_point() else chosen

        found = self._picked(pick, slice(None) if rows is None else rows, keys)
        eps = self.precision if self.observed is not None else None
        return replace(found, eps=eps, backend="torch")

    def _picked(
        self, pick: Callable[[Tensor], Tensor], rows: slice | Tensor, keys: slice
    ) -> AttentionRows:
        """Apply a choice of examples and heads to every tensor, then take rows and keys."""
        causal = self.causal and isinstance(rows, slice)
        mask = _rows_of(self.mask, rows) if causal == self.causal else self.mask_rows(rows)

        def taken(tensor: Tensor | None, *, keyed: bool = True) -> Tensor | None:
            if tensor is None:
                return None
            tensor = tensor[(None,) * (4 - tensor.dim())]
            chosen = pick(tensor.expand(self.shape[0], -1, -1, -1))
            return chosen[..., keys] if keyed and chosen.shape[3] > 1 else chosen

        sinks = self.sinks
        if sinks is not None and sinks.dim() == 1:
            sinks = sinks.reshape(1, -1, 1, 1)
        query = taken(None if self.query is None else self.query[:, :, rows], keyed=False)
        observed = taken(_rows_of(self.observed, rows))
        key = None if self.key is None else pick(self.key)[:, :, keys]
        source = query if observed is None else observed
        assert source is not None
        length = len(range(*keys.indices(self.shape[3])))
        return replace(
            self,
            shape=(*source.shape[:3], length),
            query=query,
            key=key,
            scaling=self.scale,
            mask=taken(mask),
            bias=taken(_rows_of(self.bias, rows)),
            causal=causal,
            sinks=taken(_rows_of(sinks, rows), keyed=False),
            observed=observed,
        )

    @property
    def precision(self) -> float:
        """Relative rounding of the entries of A."""
        source = self.query if self.observed is None else self.observed
        if self.eps is not None or source is None:
            return self.eps or 0.0
        return torch.finfo(working_dtype(source)).eps

    @property
    def scale(self) -> float:
        """Factor on the logits, the default made explicit."""
        if self.scaling is not None or self.query is None:
            return 1.0 if self.scaling is None else self.scaling
        return float(self.query.shape[-1] ** -0.5)

    def _streamed(self, values: Tensor | None) -> tuple[RowSums, Tensor | None]:
        """Sums and products from queries and keys, in one pass."""
        assert self.query is not None and self.key is not None
        rows = row_statistics(
            self.query,
            self.key,
            values,
            mask=self.mask,
            bias=self.bias,
            causal=self.causal,
            scaling=self.scale,
            backend=self.backend,
        )
        size = rows.size.double().clamp(min=1)
        total = torch.isfinite(rows.logsumexp).double()  # a row with keys sums to one
        # logits are right to eps of their size, of which an even row tells
        logits = 1 + (rows.logsumexp.double() - size.log()).abs()
        resolution = (_ROUNDINGS * self.precision * logits) ** 2 / size
        sums = RowSums(
            total,
            rows.centred.double(),
            rows.entropy.double(),
            torch.where(total > 0, resolution, 0),
            rows.maximum.double(),
            rows.logsumexp.double(),
        )
        return sums, rows.coordinates

    def _visited(self, support: Support, values: Tensor | None) -> tuple[RowSums, Tensor | None]:
        """The same for any attention, from blocks of A."""
        parts, products = [], []
        for rows, attention in self.chunks():
            if values is not None:
                products.append(_product(attention, repeated(values, self.shape[1])))
            visible = support.mask(rows.start, rows.stop)
            parts.append(row_sums(attention, visible, self.precision, self._logsumexp(rows)))
        sums = RowSums(*(torch.cat(part, -1) for part in zip(*parts, strict=True)))
        return sums, torch.cat(products, -2) if products else None

    def _logsumexp(self, rows: slice) -> Tensor | None:
        """Log-sum-exp of some rows, an extra column's logit included; None where A was seen."""
        logits = None if self.observed is not None else self.logits(rows)
        if logits is None:
            return None
        total = logits.logsumexp(-1).double()
        sinks = _rows_of(self.sinks, rows)
        if sinks is None:
            return total
        column = sinks[:, None] if sinks.dim() == 1 else sinks[..., 0]
        return torch.logaddexp(total, column.double())


# Roundings of the entries of a row, within which it counts as constant.
_ROUNDINGS = 4


def row_sums(
    attention: Tensor, visible: Tensor, eps: float, logsumexp: Tensor | None = None
) -> RowSums:
    """Sum attention rows that are at hand.

    Args:
        attention: `[B, H, Q, K]` probabilities.
        visible: bool, broadcastable to `attention`, the keys of each row; others do not count.
        eps: relative rounding of the entries.
        logsumexp: `[B, H, Q]` of the logits, where they are known.

    Returns:
        The sums, in float64.
    """
    seen = torch.where(visible, attention, 0.0)
    total = seen.sum(-1, dtype=torch.float64)
    size = visible.sum(-1).clamp(min=1)
    mean = total / size
    apart = torch.where(visible, attention - mean[..., None].to(attention.dtype), 0.0)
    entropy = torch.special.entr(seen).sum(-1, dtype=torch.float64)
    resolution = (_ROUNDINGS * eps * total).square() / size
    centred = apart.square().sum(-1, dtype=torch.float64)
    logsumexp = torch.full_like(total, torch.nan) if logsumexp is None else logsumexp
    return RowSums(total, centred, entropy, resolution, seen.amax(-1).double(), logsumexp)


def _product(attention: Tensor, values: Tensor) -> Tensor:
    """`A V` in the wider precision of both."""
    dtype = torch.promote_types(attention.dtype, values.dtype)
    return attention.to(dtype) @ values.to(dtype)


def _rows_of(tensor: Tensor | None, rows: slice | Tensor) -> Tensor | None:
    """Pick query rows of a tensor broadcastable to `[B, H, Q, K]`."""
    if tensor is None or tensor.dim() < 2 or tensor.shape[-2] == 1:
        return tensor
    return tensor[..., rows, :]
