"""Statistics and label attention of plain tensors, for those who have no model at hand."""

from __future__ import annotations

import torch
from torch import Tensor

from attnlens.algebra.minimal_distribution import MinimalDistributions, minimal_distributions
from attnlens.algebra.null_space import null_space
from attnlens.algebra.problem import Problem, plain_problem
from attnlens.attention.health import health_fields
from attnlens.attention.label_sums import LabelMeans, label_means
from attnlens.attention.norms import norm_fields
from attnlens.attention.statistics import example_fields
from attnlens.errors import InputError
from attnlens.observer import label_members


@torch.no_grad()
def head_statistics(
    attention: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    projection: Tensor | None = None,
    rtol: float | None = None,
    *,
    cross: bool = False,
) -> dict[str, Tensor]:
    """Compute what `HeadStatistics` averages, for every example and head.

    Args:
        attention: `[B, H, Q, K]` attention probabilities before dropout.
        value: `[B, H, K, D]` value vectors as the model multiplies them by A.
        mask: bool, broadcastable to `[B, H, Q, K]`, True where a query may attend.
        projection: `[H, D, M]` per-head slice of the output projection; None takes T = V.
        rtol: relative threshold for the numerical rank, in `[1e-7, 1)`; by default
            `max(n, D) · eps(float32)`, n the number of real keys.
        cross: whether queries and keys are different tokens, even where there are as many.

    Returns:
        `[B, H]` float64 by name, see :class:`~attnlens.attention.HeadStatisticsResult`.

    Raises:
        InputError: if shapes, types or the threshold do not fit.
        NonFiniteError: if a value that is attended to, or the projection, is not finite.

    References:
        Brunner et al., "On Identifiability in Transformers", ICLR 2020, section 3.

    Examples:
        >>> attention = torch.tensor([[[[0.5, 0.3, 0.2]]]])
        >>> value = torch.tensor([[[[1.0], [1.0], [0.0]]]])  # the first two values are equal
        >>> head_statistics(attention, value)["effective_fraction"]
        tensor([[0.8421]], dtype=torch.float64)
    """
    posed = _posed(attention, value, mask, projection, rtol, cross)
    return example_fields(posed, *null_space(posed, with_rows=True))


@torch.no_grad()
def head_health(
    attention: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    projection: Tensor | None = None,
    sinks: Tensor | None = None,
    *,
    cross: bool = False,
) -> dict[str, Tensor]:
    """Compute what `HeadStatistics(fields="health")` adds, for every example and head.

    Args:
        attention: `[B, H, Q, K]` attention probabilities before dropout.
        value: `[B, H, K, D]` value vectors as the model multiplies them by A.
        mask: bool, broadcastable to `[B, H, Q, K]`, True where a query may attend.
        projection: `[H, D, M]` per-head slice of the output projection; None takes T = V.
        sinks: `[B, K]` bool, the keys that count as the sink; by default the first real key.
        cross: whether queries and keys are different tokens, even where there are as many.

    Returns:
        `[B, H]` float64 by name, see :class:`~attnlens.attention.HeadHealthResult`, and
        `received_key`, the key that receives most. `max_logit` is NaN: A does not tell it.

    Raises:
        InputError: if shapes or types do not fit.
        NonFiniteError: if a value that is attended to, or the projection, is not finite.

    References:
        Zhai et al., ICML 2023; Voita et al., ACL 2019; Gu et al., ICLR 2025; Roy and Vetterli,
        "The Effective Rank: A Measure of Effective Dimensionality", EUSIPCO 2007.

    Examples:
        >>> attention = torch.tensor([[[[0.5, 0.5], [0.9, 0.1]]]])
        >>> health = head_health(attention, torch.eye(2)[None, None])
        >>> health["received"].item(), health["stable_rank"].item()
        (0.699..., 2.0)
    """
    return health_fields(_posed(attention, value, mask, projection, None, cross), sinks)


@torch.no_grad()
def norm_statistics(
    attention: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    projection: Tensor | None = None,
    *,
    cross: bool = False,
) -> dict[str, Tensor]:
    """Compute what `NormStatistics` averages, for every example and head.

    Args:
        attention: `[B, H, Q, K]` attention probabilities before dropout.
        value: `[B, H, K, D]` value vectors as the model multiplies them by A.
        mask: bool, broadcastable to `[B, H, Q, K]`, True where a query may attend.
        projection: `[H, D, M]` per-head slice of the output projection; None takes T = V.
        cross: whether queries and keys are different tokens, even where there are as many.

    Returns:
        `[B, H]` float64 by name, see :class:`~attnlens.attention.NormStatisticsResult`.

    Raises:
        InputError: if shapes or types do not fit.
        NonFiniteError: if a value that is attended to, or the projection, is not finite.

    References:
        Kobayashi et al., "Attention Is Not Only a Weight", EMNLP 2020.

    Examples:
        >>> attention = torch.tensor([[[[0.5, 0.5]]]])
        >>> value = torch.tensor([[[[1.0], [-1.0]]]])  # two values that cancel
        >>> norm_statistics(attention, value)["cancellation"]
        tensor([[0.]], dtype=torch.float64)
    """
    return norm_fields(_posed(attention, value, mask, projection, None, cross))


@torch.no_grad()
def minimal_distribution(
    attention: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    projection: Tensor | None = None,
    *,
    cross: bool = False,
) -> MinimalDistributions:
    """Find the attention of least norm that is ≥ 0, keeps row sums and gives the same output.

    For every row, `argmin ‖x‖²` subject to `x ≥ 0`, `supp x ⊆ S_i`, `Σ x = Σ a`, `x T = a T`: the
    simplest distribution that does the same as `a`. It exists, because `a` is one, and is unique.

    Args:
        attention: `[B, H, Q, K]` attention probabilities before dropout.
        value: `[B, H, K, D]` value vectors as the model multiplies them by A.
        mask: bool, broadcastable to `[B, H, Q, K]`, True where a query may attend.
        projection: `[H, D, M]` per-head slice of the output projection; None takes T = V.
        cross: whether queries and keys are different tokens, even where there are as many.

    Returns:
        The distributions, `[B, H, Q, K]` float64, with residual and duality gap of every row. A
        row that did not converge is returned as it is and says so.

    Raises:
        InputError: if shapes or types do not fit.
        NonFiniteError: if a value that is attended to, or the projection, is not finite.

    References:
        Mehrotra, "On the Implementation of a Primal-Dual Interior Point Method", SIAM Journal on
        Optimization, 1992.

    Examples:
        >>> attention = torch.tensor([[[[0.6, 0.0, 0.3, 0.1]]]])
        >>> value = torch.tensor([[[[1.0], [1.0], [0.0], [0.0]]]])  # two pairs of equal values
        >>> minimal_distribution(attention, value).distribution
        tensor([[[[0.3000, 0.3000, 0.2000, 0.2000]]]], dtype=torch.float64)
    """
    return minimal_distributions(_posed(attention, value, mask, projection, None, cross))


@torch.no_grad()
def label_attention(
    attention: Tensor,
    value: Tensor,
    labels: Tensor,
    num_labels: int,
    mask: Tensor | None = None,
    projection: Tensor | None = None,
    *,
    cross: bool = False,
) -> LabelMeans:
    """Average raw and effective attention to each of G labels over query rows.

    Args:
        attention: `[B, H, Q, K]` attention probabilities before dropout.
        value: `[B, H, K, D]` value vectors as the model multiplies them by A.
        labels: `[B, K]` integer label of every key; those not in 0 … G − 1 are left out.
        num_labels: G.
        mask: bool, broadcastable to `[B, H, Q, K]`, True where a query may attend.
        projection: `[H, D, M]` per-head slice of the output projection; None takes T = V.
        cross: whether queries and keys are different tokens, even where there are as many.

    Returns:
        Raw and effective means, `[B, H, G]` float64.

    Raises:
        InputError: if shapes or types do not fit.
        NonFiniteError: if a value that is attended to, or the projection, is not finite.

    References:
        Brunner et al., ICLR 2020, figures 1b, 1c and 5.

    Examples:
        >>> attention = torch.tensor([[[[0.5, 0.3, 0.2]]]])
        >>> value = torch.tensor([[[[1.0], [1.0], [0.0]]]])
        >>> label_attention(attention, value, torch.tensor([[0, 1, 1]]), 2).effective
        tensor([[[0.4000, 0.4000]]], dtype=torch.float64)
    """
    posed = _posed(attention, value, mask, projection, None, cross)
    return label_means(posed, label_members(labels, posed.support.keys.any(1), num_labels))


def _posed(
    attention: Tensor,
    value: Tensor,
    mask: Tensor | None,
    projection: Tensor | None,
    rtol: float | None,
    cross: bool,
) -> Problem:
    shapes = attention.shape, value.shape
    fits = all(len(shape) == 4 for shape in shapes) and (
        (*shapes[0][:2], shapes[0][3]) == tuple(shapes[1][:3])
    )
    if not fits:
        raise InputError(
            f"attention and value must be [B, H, Q, K] and [B, H, K, D]. "
            f"Got {list(shapes[0])} and {list(shapes[1])}."
        )
    return plain_problem(
        value, shapes[0][2], attention, mask=mask, projection=projection, rtol=rtol, cross=cross
    )
