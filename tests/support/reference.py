"""Slow float64 twins: loops over examples, heads and rows, scipy and numpy, no cleverness."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import scipy.linalg
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[np.float64]
EPS = float(np.finfo(np.float32).eps)

# The accuracy bar: relative Frobenius error per head, by the precision of the inputs.
BARS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-5, torch.float16: 1e-5}


def dense_mask(mask: Tensor | None, batch: int, heads: int, queries: int, keys: int) -> Tensor:
    """Expand a mask to `[B, H, Q, K]` bool."""
    if mask is None:
        return torch.ones(batch, heads, queries, keys, dtype=torch.bool)
    if mask.dim() == 2:
        mask = mask[:, None, None]
    return mask.bool().expand(batch, heads, queries, keys)


def seen_values(value: Tensor, head: int, projection: Tensor | None = None) -> Array:
    """`T = V H` of one head, or V without H."""
    seen = value.double().numpy()
    return seen if projection is None else seen @ projection[head].double().numpy()


def threshold(values: Array, width: int) -> float:
    """`max(n, D) · eps(float32)`, n the number of keys that take part."""
    return max(len(values), width) * EPS


def supports(mask: Tensor) -> Iterator[tuple[list[int], Array]]:
    """Group the rows of one head's `[Q, K]` mask by support: `(rows, keys)`."""
    groups: dict[bytes, list[int]] = {}
    for row, keys in enumerate(mask.numpy()):
        groups.setdefault(keys.tobytes(), []).append(row)
    for rows in groups.values():
        yield rows, np.flatnonzero(mask[rows[0]].numpy())


def projector(values: Array, rtol: float, simplex: bool = False) -> Array:
    """Orthogonal projector onto the column space of T, or of `[T, 1]`.

    A singular value counts when it exceeds `rtol` times the largest of T. With the constant vector
    what counts are the values less their mean, measured by the same.
    """
    sigma = np.linalg.svd(values, compute_uv=False)
    cut = rtol * sigma.max(initial=0.0)
    if not simplex:
        free = scipy.linalg.null_space(values.T, rcond=rtol)
        return np.eye(len(values)) - free @ free.T
    left, apart, _ = np.linalg.svd(values - values.mean(0), full_matrices=False)
    kept = left[:, apart > cut]
    return np.full((len(values),) * 2, 1 / len(values)) + kept @ kept.T


def effective_attention(
    attention: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    projection: Tensor | None = None,
    simplex: bool = False,
) -> Tensor:
    """`A⊥`, head by head and support by support, `[B, H, Q, K]` float64."""
    batch, heads, queries, keys = attention.shape
    dense = dense_mask(mask, batch, heads, queries, keys)
    result = np.zeros(attention.shape)
    for example in range(batch):
        for head in range(heads):
            values = seen_values(value[example, head], head, projection)
            given = attention[example, head].double().numpy()
            for rows, seen in supports(dense[example, head]):
                if len(seen):
                    block = np.ix_(rows, seen)
                    rtol = threshold(values[seen], value.shape[-1])
                    projected = given[block] @ projector(values[seen], rtol, simplex)
                    result[example, head][block] = projected
    return torch.from_numpy(result)


def ranks(
    value: Tensor,
    mask: Tensor | None = None,
    queries: int = 1,
    projection: Tensor | None = None,
    simplex: bool = False,
) -> Tensor:
    """Numerical rank of the values each row may attend to, `[B, H, Q]`; of `[T, 1]` if simplex."""
    batch, heads, keys, width = value.shape
    dense = dense_mask(mask, batch, heads, queries, keys)
    result = torch.zeros(batch, heads, queries, dtype=torch.int64)
    for example in range(batch):
        for head in range(heads):
            values = seen_values(value[example, head], head, projection)
            for rows, seen in supports(dense[example, head]):
                found = rank(values[seen], threshold(values[seen], width), simplex)
                result[example, head, rows] = found
    return result


def rank(values: Array, rtol: float, simplex: bool = False) -> int:
    """Singular values of T above the threshold; for `[T, 1]` one, and those of T less its mean."""
    if not len(values):
        return 0
    cut = rtol * np.linalg.svd(values, compute_uv=False).max(initial=0.0)
    apart = np.linalg.svd(values - simplex * values.mean(0), compute_uv=False)
    return min(int((apart > cut).sum()) + simplex, len(values))


def attention(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None = None,
    scaling: float | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Softmax attention, row by row, `[B, H, Q, K]` float64; rows that see nothing are zero."""
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    logits = scaling * torch.einsum("bhqd,bhkd->bhqk", query.double(), key.double())
    logits = logits if bias is None else logits + bias.double()
    dense = dense_mask(mask, *logits.shape)
    result = torch.zeros_like(logits)
    for index in np.ndindex(*logits.shape[:3]):
        seen = dense[index]
        weights = (logits[index][seen] - logits[index].max()).exp()
        result[index][seen] = weights / weights.sum()
    return result


def relative_errors(found: Tensor, expected: Tensor) -> Tensor:
    """Relative Frobenius error per example and head, `[B, H]`; absolute where nothing is there."""
    error = (found.double() - expected.double()).square().sum((-2, -1)).sqrt()
    scale = expected.double().square().sum((-2, -1)).sqrt()
    return error / torch.where(scale > 0, scale, 1.0)


def head_statistics(
    attention: Tensor,
    value: Tensor,
    mask: Tensor | None,
    real: Tensor,
    projection: Tensor | None = None,
) -> dict[str, Tensor]:
    """Every field of `HeadStatistics`, from dense float64 matrices, averaged over examples.

    Args:
        attention: `[B, H, Q, K]`, zero where masked.
        value: `[B, H, K, D]`.
        mask: bool, broadcastable to `[B, H, Q, K]`, or None.
        real: `[B, Q]` bool, the query rows that count.
        projection: `[H, D, M]` or None.

    Returns:
        `[H]` float64 by name. Examples without a real row do not count.
    """
    batch, heads, queries, keys = attention.shape
    dense = dense_mask(mask, batch, heads, queries, keys)
    effective = effective_attention(attention, value, dense, projection)
    rank = ranks(value, dense, queries, projection)
    simplex_rank = ranks(value, dense, queries, projection, simplex=True)
    per_head = []
    for head in range(heads):
        examples, raw_entries, effective_entries = [], [], []
        for example in range(batch):
            rows = real[example].numpy()
            if not rows.any():
                continue
            seen = dense[example, head].numpy()[rows]
            raw = attention[example, head].double().numpy()[rows]
            visible = effective[example, head].numpy()[rows]
            # of values that are constant to the threshold, effective attention is too
            constant = simplex_rank[example, head].numpy()[rows] <= 1
            mean = visible.sum(1, keepdims=True) / np.maximum(seen.sum(1, keepdims=True), 1)
            visible = np.where(constant[:, None] & seen, mean, visible)
            keys_seen = seen.any(0)
            values = seen_values(value[example, head], head, projection)
            sizes = seen.sum(1)
            nullity = sizes - rank[example, head].numpy()[rows]
            examples.append({
                "tokens": keys_seen.sum(),
                "rank": rank[example, head].numpy()[rows].mean(),
                "nullity": nullity.mean(),
                "nullity_min": nullity.min(),
                "nullity_max": nullity.max(),
                "simplex_nullity": (sizes - simplex_rank[example, head].numpy()[rows]).mean(),
                "condition": condition(
                    values[keys_seen], threshold(values[keys_seen], value.shape[-1])
                ),
                "attention_norm": np.linalg.norm(raw),
                "effective_norm": np.linalg.norm(visible),
                "effective_fraction": np.sum(visible**2) / np.sum(raw**2),
                "correlation": pearson(raw[seen], visible[seen]),
                "entropy": -np.sum(raw[raw > 0] * np.log(raw[raw > 0])) / rows.sum(),
                "output_norm": np.linalg.norm(raw @ np.where(keys_seen[:, None], values, 0)),
            })
            raw_entries.append(raw[seen])
            effective_entries.append(visible[seen])
        summary = {name: _mean([float(e[name]) for e in examples]) for name in examples[0]}
        summary["nullity_min"] = min(e["nullity_min"] for e in examples)
        summary["nullity_max"] = max(e["nullity_max"] for e in examples)
        pooled = pearson(np.concatenate(raw_entries), np.concatenate(effective_entries))
        per_head.append({**summary, "pooled_correlation": pooled, "examples": len(examples)})
    return {
        name: torch.tensor([float(head[name]) for head in per_head], dtype=torch.float64)
        for name in per_head[0]
    }


def label_attention(attention: Tensor, labels: Tensor, real: Tensor, count: int) -> Array:
    """Attention to each label of every example with a real row, `[N, H, count]` float64.

    Args:
        attention: `[B, H, Q, K]`, raw or effective, zero where masked.
        labels: `[B, K]`; labels outside 0 … count − 1 are left out.
        real: `[B, Q]` bool, the query rows that count.
        count: number of labels.
    """
    examples = []
    for maps, of_keys, rows in zip(attention.double(), labels.tolist(), real, strict=True):
        if not rows.any():
            continue
        received = np.zeros((len(maps), count))
        for key, label in enumerate(of_keys):
            if 0 <= label < count:
                received[:, label] += maps[:, rows, key].mean(-1).numpy()
        examples.append(received)
    return np.stack(examples)


def condition(values: Array, rtol: float) -> float:
    """Largest over smallest singular value above the threshold."""
    sigma = np.linalg.svd(values, compute_uv=False)
    kept = sigma[sigma > rtol * sigma[0]]
    return float(kept[0] / kept[-1])


def pearson(first: Array, second: Array, resolution: float = 1e-13) -> float:
    """Correlation of two vectors; NaN where one does not vary beyond rounding."""
    if any(entries.std() <= resolution * np.abs(entries).max() for entries in (first, second)):
        return float("nan")
    return float(np.corrcoef(first, second)[0, 1])


def _mean(values: list[float]) -> float:
    defined = [value for value in values if not np.isnan(value)]
    return float(np.mean(defined)) if defined else float("nan")


def head_health(
    attention: Tensor,
    logits: Tensor | None,
    value: Tensor,
    mask: Tensor | None,
    real: Tensor,
    projection: Tensor | None = None,
    sinks: Tensor | None = None,
) -> list[dict[str, Tensor]]:
    """What health says of every example with a real row, from dense float64 matrices; `[H]` each.

    Args:
        attention: `[B, H, Q, K]`, zero where masked.
        logits: of the softmax, or None where they are not known.
        value: `[B, H, K, D]`.
        mask: bool, broadcastable to `[B, H, Q, K]`, or None.
        real: `[B, Q]` bool, the query rows that count.
        projection: `[H, D, M]` or None.
        sinks: `[B, K]` bool; by default the first key that some row sees.
    """
    dense = dense_mask(mask, *attention.shape)
    effective = effective_attention(attention, value, dense, projection)
    examples = []
    for example, head in np.ndindex(*attention.shape[:2]):
        rows = real[example].numpy()
        if not rows.any():
            continue
        seen = dense[example, head].numpy()[rows]
        raw = attention[example, head].double().numpy()[rows]
        projected = effective[example, head].numpy()[rows]
        keys = np.flatnonzero(seen.any(0))
        shares = {key: raw[:, key].sum() / seen[:, key].sum() for key in keys}
        most = max(shares, key=lambda key: shares[key])
        every = dense[example].numpy()[:, rows].any((0, 1))
        sink = [int(np.flatnonzero(every)[0])] if sinks is None else np.flatnonzero(sinks[example])
        sink = [key for key in sink if key in shares]
        values = seen_values(value[example, head], head, projection)
        norms = np.linalg.norm(values, axis=1)
        sigma = np.linalg.svd(values[keys], compute_uv=False)
        sigma = sigma[sigma > threshold(values[keys], value.shape[-1]) * sigma[0]]
        share = sigma / sigma.sum()
        relative = [
            -(p[p > 0] * np.log(p[p > 0])).sum() / np.log(s.sum())
            for p, s in zip(raw, seen, strict=True)
            if s.sum() > 1
        ]
        largest = np.nan
        if logits is not None:
            largest = logits[example, head].double().numpy()[rows][seen].max()
        fields = {
            "max_logit": largest,
            "relative_entropy": np.mean(relative) if relative else np.nan,
            "confidence": raw.max(1).mean(),
            "received": shares[most],
            "received_key": most,
            "sink_first": float(most in sink),
            "sink_mass": raw[:, sink].sum(1).mean(),
            "effective_sink_mass": projected[:, sink].sum(1).mean(),
            "sink_value_norm": norms[sink].mean() / norms[keys].mean() if sink else np.nan,
            "effective_rank": np.exp(-(share * np.log(share)).sum()),
            "stable_rank": (sigma**2).sum() / sigma[0] ** 2,
        }
        if head == 0:
            examples.append({name: [] for name in fields})
        for name, found in fields.items():
            examples[-1][name].append(float(found))
    return [{name: torch.tensor(v, dtype=torch.float64) for name, v in e.items()} for e in examples]
