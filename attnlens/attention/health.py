"""Health of attention: growing logits, collapsing entropy, sinks, and the spectrum of values."""

from __future__ import annotations

import torch
from torch import Tensor

from attnlens.algebra.factors import kept_spectrum
from attnlens.algebra.problem import Problem
from attnlens.algebra.received import received_sums
from attnlens.algebra.values import repeated
from attnlens.attention.label_sums import label_means
from attnlens.errors import InputError


def health_fields(problem: Problem, sinks: Tensor | None = None) -> dict[str, Tensor]:
    """Say of every example and head how healthy its attention is.

    Args:
        problem: the call.
        sinks: `[B, K]` bool, the keys that count as the sink; by default the first real key, or
            the extra column of the softmax where the model has one, whose value is zero.

    Returns:
        `[B, H]` float64 by the name of the field in the result; NaN where an example has none.
    """
    raw, active = problem.row_sums, problem.active
    rows = active.sum(-1)
    several = (problem.sizes > 1) & active
    relative = raw.entropy / problem.sizes.clamp(min=2).double().log()
    largest = torch.where(active, raw.logsumexp + raw.maximum.log(), -torch.inf).amax(-1)
    columns, seen = received_sums(problem)
    share = torch.where(seen > 0, columns / seen.clamp(min=1), -1.0)
    received, key = share.max(-1)
    return {
        "max_logit": largest,
        "relative_entropy": mean_of(relative, several),
        "confidence": mean_of(raw.maximum, active),
        "received": torch.where(rows > 0, received, torch.nan),
        "received_key": key.double(),
        **_spectral_ranks(problem),
        **_sink_fields(problem, sinks, columns, key),
    }


def _spectral_ranks(problem: Problem) -> dict[str, Tensor]:
    """Ranks that vary smoothly, from the singular values σ of T that count; NaN where none does."""
    rank = repeated(problem.over_all_keys.rank, problem.heads)
    sigma = kept_spectrum(problem.spectrum, rank)
    q = sigma / sigma.sum(-1, keepdim=True)
    return {
        "effective_rank": torch.special.entr(q).sum(-1).exp(),
        "stable_rank": sigma.square().sum(-1) / sigma[..., 0].square(),
    }


def _sink_fields(
    problem: Problem, sinks: Tensor | None, columns: Tensor, most: Tensor
) -> dict[str, Tensor]:
    """How much attention a set of keys takes, and how much of it the output can see."""
    batch = problem.rows.shape[0]
    real = problem.support.keys
    if sinks is None and problem.rows.sinks is not None:
        nothing = torch.zeros_like(columns[..., 0])
        return {
            "sink_mass": learned_sink_mass(problem),
            "effective_sink_mass": nothing,
            "sink_value_norm": nothing,
            "sink_first": nothing,
        }
    if sinks is None:
        first = real.any(1)
        sinks = first & (first.cumsum(-1) == 1)
    if sinks.dtype != torch.bool or sinks.shape != (batch, real.shape[-1]):
        raise InputError(
            f"sinks must be bool [B, K] = [{batch}, {real.shape[-1]}], True at the keys that count "
            f"as the sink. Got {sinks.dtype} {list(sinks.shape)}."
        )
    sinks = sinks.to(real.device)
    means = label_means(problem, sinks[..., None], columns)
    norms = problem.value_norms
    return {
        "sink_mass": means.raw[..., 0],
        "effective_sink_mass": means.effective[..., 0],
        "sink_value_norm": mean_of(norms, sinks[:, None] & real) / mean_of(norms, real),
        "sink_first": sinks.gather(-1, most).double(),
    }


def learned_sink_mass(problem: Problem) -> Tensor:
    """Average what a learned sink column takes of each row, `[B, H]`; zero where there is none."""
    if problem.rows.sinks is None:
        return torch.zeros(
            problem.rows.shape[:2], dtype=torch.float64, device=problem.active.device
        )
    return mean_of(1 - problem.row_sums.total, problem.active)


def mean_of(quantity: Tensor, counted: Tensor) -> Tensor:
    """Mean over the last axis of what counts; NaN where nothing does."""
    counted = counted.expand_as(quantity)
    mean: Tensor = torch.where(counted, quantity, 0.0).sum(-1) / counted.sum(-1)
    return mean
