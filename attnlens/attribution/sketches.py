"""Sketches of Jacobians: random probes, the contributions they show, and how far these are off."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from attnlens.errors import InputError


def source_probes(
    hidden_size: int,
    probes: int | None = None,
    positions: Sequence[int] = (0,),
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Draw orthogonal probes ω of length √(M/k), for which Σ‖Jω‖² is an estimate of ‖J‖²_F.

    The estimate is unbiased, and exact when k = M. Every token has probes of its own, and
    neighbouring tokens share a basis while it lasts, ⌊M/k⌋ of them. Blocks of the Jacobian are
    alike from token to token: with the same probes for all, their errors would not average out
    over tokens, and with separate directions they nearly cancel.

    The global random state is left alone, and a seed gives the same probes on every device.

    Args:
        hidden_size: M, the number of components of a hidden state.
        probes: k, the number of probes per token; None means M, the coordinate axes.
        positions: positions of the tokens, `[S]`.
        seed: seed of the probes.
        dtype: floating dtype of the result.
        device: device of the result.

    Returns:
        Probes as rows, `[S, k, M]`.

    Raises:
        InputError: if `probes` lies outside 1 … M.

    Examples:
        >>> probes = source_probes(6, 2, range(3), dtype=torch.float64)
        >>> (probes @ probes.mT).allclose(3 * torch.eye(2, dtype=torch.float64))
        True
    """
    if probes is None or probes == hidden_size:
        axes = torch.eye(hidden_size, dtype=dtype, device=device)
        return axes.expand(len(positions), -1, -1)
    if not 1 <= probes <= hidden_size:
        raise InputError(
            f"probes must lie between 1 and the hidden size, {hidden_size} "
            f"(None means exact). Got {probes}."
        )
    generator = torch.Generator().manual_seed(seed)
    served = hidden_size // probes  # tokens that one basis serves
    rows = torch.empty(len(positions), probes, hidden_size, dtype=torch.float64)
    for first in range(0, max(positions, default=-1) + 1, served):
        shape = (hidden_size, served * probes)
        gaussian = torch.randn(shape, generator=generator, dtype=torch.float64)
        places = {p - first: row for row, p in enumerate(positions) if first <= p < first + served}
        if places:
            needed = gaussian[:, : (max(places) + 1) * probes]
            frames = torch.linalg.qr(needed).Q.mT.reshape(-1, probes, hidden_size)
            rows[list(places.values())] = frames[list(places)]
    return rows.mul_(math.sqrt(hidden_size / probes)).to(device, dtype)


def seed_tangents(hidden: Tensor, positions: Tensor, probes: Tensor) -> Tensor:
    """Place the probes of every given token at it.

    Examples do not influence one another, so one tangent carries the token at a position of
    every example of the batch.

    Args:
        hidden: hidden states, `[B, K, M]`; only shape, dtype and device are used.
        positions: token positions, `[S]`.
        probes: probes of each token as rows, `[S, k, M]`.

    Returns:
        Tangents, `[S, k, B, K, M]`, zero except at their own token.

    Examples:
        >>> tangents = seed_tangents(torch.zeros(1, 3, 2), torch.tensor([2]), torch.ones(1, 1, 2))
        >>> tangents[0, 0, 0].tolist()
        [[0.0, 0.0], [0.0, 0.0], [1.0, 1.0]]
    """
    batch, tokens, size = hidden.shape
    tangents = hidden.new_zeros(*probes.shape[:2], batch, tokens, size)
    rows = torch.arange(len(positions), device=hidden.device)
    tangents[rows, :, :, positions] = probes[:, :, None].to(hidden)  # left side: [S, k, B, M]
    return tangents


def contributions(
    norms: Tensor, source_mask: Tensor | None = None, target_mask: Tensor | None = None
) -> Tensor:
    """Normalise Jacobian norms to contributions `c_ij = ‖J_ij‖ / Σ_k ‖J_kj‖`.

    Args:
        norms: norms of the blocks, `[..., S, T]`.
        source_mask: True for real source tokens, broadcastable to `[..., S]`.
        target_mask: True for real target tokens, broadcastable to `[..., T]`.

    Returns:
        Contributions, `[..., S, T]` in `[0, 1]`; for a real target they sum to one over the real
        sources. Padded sources and targets, and targets that depend on no source, hold zero;
        targets with a norm of NaN or Inf hold NaN.

    Examples:
        >>> contributions(torch.tensor([[3.0, 0.0], [1.0, 0.0]])).tolist()
        [[0.75, 0.0], [0.25, 0.0]]

    References:
        Brunner et al., "On Identifiability in Transformers", ICLR 2020, section 5.
    """
    if source_mask is not None:
        norms = norms.masked_fill(~source_mask[..., :, None], 0.0)
    if target_mask is not None:
        norms = norms.masked_fill(~target_mask[..., None, :], 0.0)
    total = norms.sum(-2, keepdim=True)
    return norms / torch.where(total.isinf(), torch.nan, total.masked_fill(total == 0, 1.0))


def leave_one_out(squares: Tensor) -> Tensor:
    """Compute the contributions that remain when each probe in turn is left out.

    Args:
        squares: squared norms by probe, `[k, ..., S, T]`, zero at padding.

    Returns:
        Contributions without each probe, `[k, ..., S, T]` in `[0, 1]`.

    Examples:
        >>> leave_one_out(torch.tensor([[[9.0], [9.0]], [[0.0], [16.0]]]))[..., 0].tolist()
        [[0.0, 1.0], [0.5, 0.5]]
    """
    rest = (squares.sum(0) - squares).clamp_min_(0)  # [k, ..., S, T]
    return contributions(rest.sqrt_())


def jackknife(total: Tensor, replicates: Tensor, hidden_size: int) -> tuple[Tensor, Tensor]:
    """Correct a sketched quantity for its bias, and estimate its variance.

    Contributions are ratios of square roots, so a sketch of few probes is biased by a part of
    order 1/k that no number of texts averages out. The correction removes it. Variances of texts
    with different probes add up. Probes are k of M orthogonal directions, a sample without
    replacement: correction and variance carry the factor 1 − k/M and vanish at k = M.

    Args:
        total: the quantity with all probes, `[...]`.
        replicates: the same without each probe in turn, `[k, ...]`; none, `[0, ...]`, where the
            quantity is exact.
        hidden_size: M, the number of directions that the probes were taken from.

    Returns:
        Corrected quantity and variance, `[...]`. With a single probe the quantity is as it was
        and the variance NaN; an exact quantity has variance zero.

    Examples:
        >>> corrected, variance = jackknife(torch.tensor(2.0), torch.tensor([1.0, 2.0]), 4)
        >>> corrected.item(), variance.item()
        (2.25, 0.125)

    References:
        Efron and Stein, "The Jackknife Estimate of Variance", Annals of Statistics 1981.
    """
    probes = len(replicates)
    if probes in (0, hidden_size) or not total.numel():
        return total, torch.zeros_like(total)
    if probes == 1:
        return total, torch.full_like(total, torch.nan)
    scale = (probes - 1) * (1 - probes / hidden_size)
    corrected = total + scale * (total - replicates.mean(0))
    return corrected, scale * replicates.var(0, correction=0)


def jackknife_error(squares: Tensor, hidden_size: int) -> Tensor:
    """Estimate the standard error of contributions by leaving out each probe in turn.

    Args:
        squares: squared norms by probe, `[k, ..., S, T]`, zero at padding.
        hidden_size: M, the number of directions that the probes were taken from.

    Returns:
        Standard errors, `[..., S, T]`, at least 0; zero if k = M, NaN if there is one probe of
        several directions. True errors divided by them follow Student's t with k − 1 degrees of
        freedom, nearly.

    Examples:
        >>> squares = torch.tensor([[[9.0], [9.0]], [[0.0], [16.0]]])
        >>> jackknife_error(squares, hidden_size=4)[..., 0]
        tensor([0.1768, 0.1768])
    """
    total = contributions(squares.sum(0).sqrt_())
    return jackknife(total, leave_one_out(squares), hidden_size)[1].sqrt_()
