"""Aggregates of Hidden Token Attribution over many texts.

Every ``tally_*`` function reduces the contributions c [..., B, K, K] of a batch (source, then
target; leading dimensions such as layers are kept) to a ``Tally`` of sums and counts. Tallies
of batches add up, so a corpus takes the memory of one. Sums are kept apart by the label of the
target token (part of speech, special token): G labels, or G = 1 if none are given.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from attnlens.errors import InputError

DISTANCE_GROUPS = ((1, 1), (2, 2), (3, 3), (4, 5), (6, 10), (11, None))
"""First and last distance of each group of neighbours, on both sides of a token."""

HISTOGRAM_BINS = 4096
"""Bins of equal width on [0, 1]: quantiles are right to half a bin, 1.3e-4."""


@dataclass(frozen=True)
class Tally:
    """Sums and counts of a quantity; tallies of disjoint data add with ``+``.

    Attributes:
        total: sums, [..., G, F] in float64.
        count: number of terms in each sum, broadcastable to ``total``.
    """

    total: Tensor
    count: Tensor

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(self.total + other.total, self.count + other.count)

    def mean(self) -> Tensor:
        """Divide the sums by their counts.

        Returns:
            Means, shaped as ``total``; NaN where nothing was counted.
        """
        return self.total / self.count


def own_contribution(contribution: Tensor) -> Tensor:
    """Take the contribution c_jj of every token to its own hidden state.

    Args:
        contribution: contributions, [..., B, K, K].

    Returns:
        Own contributions, [..., B, K] in [0, 1].
    """
    return contribution.diagonal(dim1=-2, dim2=-1)


def tally_own(
    contribution: Tensor, mask: Tensor, labels: Tensor | None = None, num_labels: int = 1
) -> Tally:
    """Tally the own contributions of real tokens.

    Args:
        contribution: contributions, [..., B, K, K].
        mask: True for real tokens, [B, K].
        labels: integer label of every token, [B, K]; tokens whose label is not in
            0 … G - 1 are left out. ``None``: all tokens share label 0.
        num_labels: G, the number of labels.

    Returns:
        Own contribution by label, [..., G, 1], with counts of tokens.
    """
    members = _members(mask, labels, num_labels)
    own = own_contribution(_real(contribution, mask))
    return _tally_tokens(own, members)


def tally_not_main(
    contribution: Tensor, mask: Tensor, labels: Tensor | None = None, num_labels: int = 1
) -> Tally:
    """Tally the real tokens to which another token contributes more than they do themselves.

    Args:
        contribution: contributions, [..., B, K, K].
        mask: True for real tokens, [B, K].
        labels: integer label of every token, [B, K], as for :func:`tally_own`.
        num_labels: G, the number of labels.

    Returns:
        Tokens that are not their own main contributor by label, [..., G, 1], with counts of
        tokens; its mean is their share.
    """
    members = _members(mask, labels, num_labels)
    contribution = _real(contribution, mask)
    overtaken = own_contribution(contribution) < contribution.amax(-2)
    return _tally_tokens(overtaken, members)


def tally_distance(
    contribution: Tensor, mask: Tensor, labels: Tensor | None = None, num_labels: int = 1
) -> Tally:
    """Tally the contributions of neighbours by their distance, on both sides together.

    Args:
        contribution: contributions, [..., B, K, K].
        mask: True for real tokens, [B, K].
        labels: integer label of every token, [B, K], as for :func:`tally_own`; the target's
            label counts.
        num_labels: G, the number of labels.

    Returns:
        Contribution by label and group of :data:`DISTANCE_GROUPS`, [..., G, 6], with counts of
        pairs. See :func:`layer_profile` for the share of each layer.
    """
    distance = _offsets(mask).abs()
    firsts = torch.tensor([first for first, _ in DISTANCE_GROUPS], device=mask.device)
    groups = torch.bucketize(distance, firsts, right=True) - 1  # -1: the token itself
    members = _members(mask, labels, num_labels)
    return _tally_pairs(contribution, mask, members, groups, len(DISTANCE_GROUPS))


def tally_offset(
    contribution: Tensor,
    mask: Tensor,
    labels: Tensor | None = None,
    num_labels: int = 1,
    *,
    radius: int = 64,
) -> Tally:
    """Tally contributions by the signed offset of the source, the own position left out.

    Args:
        contribution: contributions, [..., B, K, K].
        mask: True for real tokens, [B, K].
        labels: integer label of every token, [B, K], as for :func:`tally_own`; the target's
            label counts.
        num_labels: G, the number of labels.
        radius: R, the largest offset kept, in tokens.

    Returns:
        Contribution by label and offset, [..., G, 2R + 1], with counts of pairs. Entry R + d
        belongs to sources d positions after the target (before it if d < 0); entry R is empty.
    """
    offset = _offsets(mask)
    kept = (offset.abs() <= radius) & (offset != 0)
    groups = torch.where(kept, offset + radius, -1)
    members = _members(mask, labels, num_labels)
    return _tally_pairs(contribution, mask, members, groups, 2 * radius + 1)


def tally_labels(contribution: Tensor, mask: Tensor, labels: Tensor, num_labels: int) -> Tally:
    """Tally what tokens of each label contribute to tokens of each label.

    Two labels, chosen and other, give the contributions to chosen tokens such as ``[CLS]``.

    Args:
        contribution: contributions, [..., B, K, K].
        mask: True for real tokens, [B, K].
        labels: integer label of every token, [B, K], as for :func:`tally_own`.
        num_labels: G, the number of labels.

    Returns:
        Contribution by label of the target and of the source, [..., G, G], with counts of
        targets, [G, 1]; the means of a target label sum to one over labelled sources.
    """
    members = _members(mask, labels, num_labels)
    total = torch.einsum("...bij,gbj,hbi->...gh", _real(contribution, mask), members, members)
    return Tally(total, members.sum((1, 2))[:, None])


def jackknife_total(totals: Tensor, hidden_size: int) -> tuple[Tensor, Tensor]:
    """Correct a total of sketched contributions for its bias, and estimate its variance.

    Contributions are ratios of square roots, so a sketch of few probes is biased by a part of
    order 1/k that no number of texts averages out. The correction removes it. Variances of texts
    with different probes add up.

    Args:
        totals: the total with all k probes, then without each in turn, [1 + k, ...]. A total of
            exact contributions comes alone, [1, ...].
        hidden_size: M, the number of directions that the probes were taken from.

    Returns:
        Corrected total and variance, [...]. With a single probe the total is as it was and the
        variance NaN; an exact total has variance zero.

    References:
        Efron and Stein, "The Jackknife Estimate of Variance", Annals of Statistics 1981.
    """
    total, replicates = totals[0], totals[1:]
    probes = len(replicates)
    if probes == 0:
        return total, torch.zeros_like(total)
    if probes == 1:
        return total, torch.full_like(total, torch.nan)
    # Probes are a sample without replacement: both shrink to zero at k = M.
    scale = (probes - 1) * (1 - probes / hidden_size)
    corrected = total + scale * (total - replicates.mean(0))
    return corrected, scale * replicates.var(0, correction=0)


def own_histogram(
    contribution: Tensor, mask: Tensor, labels: Tensor | None = None, num_labels: int = 1
) -> Tensor:
    """Count own contributions of real tokens in fine bins; histograms of batches add.

    Args:
        contribution: contributions, [..., B, K, K].
        mask: True for real tokens, [B, K].
        labels: integer label of every token, [B, K], as for :func:`tally_own`.
        num_labels: G, the number of labels.

    Returns:
        Counts by label in :data:`HISTOGRAM_BINS` bins of equal width on [0, 1],
        [..., G, bins], int64.
    """
    members = _members(mask, labels, num_labels).flatten(1).long()  # [G, B·K]
    own = own_contribution(_real(contribution, mask)).flatten(-2)  # [..., B·K]
    bins = (own * HISTOGRAM_BINS).long().clamp_(0, HISTOGRAM_BINS - 1)
    shape = (*bins.shape[:-1], num_labels)
    counts = members.new_zeros(*shape, HISTOGRAM_BINS)
    index = bins[..., None, :].expand(*shape, -1)
    return counts.scatter_add_(-1, index, members.expand_as(index))


def histogram_quantiles(counts: Tensor, probabilities: Tensor) -> Tensor:
    """Read quantiles off histograms on [0, 1], right to half the width of a bin.

    Args:
        counts: counts of values in bins of equal width, [..., bins].
        probabilities: probabilities in [0, 1], [N].

    Returns:
        Quantiles, interpolated linearly between order statistics, [..., N] in float64; NaN for
        an empty histogram.
    """
    cumulative = counts.cumsum(-1)
    size = cumulative[..., -1:]
    rank = probabilities.to(counts.device, torch.float64) * (size - 1).clamp_min(0)
    low, high = rank.floor(), rank.ceil()
    # The r-th smallest value, from 0, lies in the first bin whose cumulative count exceeds r.
    lower, upper = (
        (torch.searchsorted(cumulative, r.long(), right=True) + 0.5) / counts.shape[-1]
        for r in (low, high)
    )
    quantiles = torch.lerp(lower.double(), upper.double(), rank - low)
    return quantiles.masked_fill(size == 0, torch.nan)


def box_statistics(counts: Tensor) -> Tensor:
    """Summarise histograms on [0, 1] as box plots do.

    Args:
        counts: counts of values in bins of equal width, [..., bins].

    Returns:
        Lower whisker, first quartile, median, third quartile and upper whisker, [..., 5] in
        float64; NaN for an empty histogram. Quartiles are right to half the width of a bin.
        Whiskers are the centres of the outermost occupied bins within 1.5 interquartile ranges
        of the quartiles.
    """
    bins = counts.shape[-1]
    quartiles = torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)
    first, median, third = histogram_quantiles(counts, quartiles).unbind(-1)
    reach = 1.5 * (third - first)
    centre = (torch.arange(bins, device=counts.device, dtype=torch.float64) + 0.5) / bins
    inside = (centre >= (first - reach)[..., None]) & (centre <= (third + reach)[..., None])
    inside &= counts > 0
    low = torch.where(inside, centre, torch.inf).amin(-1)
    high = torch.where(inside, centre, -torch.inf).amax(-1)
    box = torch.stack([low, first, median, third, high], dim=-1)
    return box.masked_fill(median.isnan()[..., None], torch.nan)


def layer_profile(means: Tensor) -> Tensor:
    """Scale each curve over the layers so that it sums to 100 %.

    Args:
        means: means of a tally with layers first, [L, ..., G, F].

    Returns:
        Percentages in [0, 100], shaped as ``means``; NaN for curves without data.

    References:
        Brunner et al., "On Identifiability in Transformers", ICLR 2020, figure 4a.
    """
    return 100 * means / means.sum(0)


def _real(contribution: Tensor, mask: Tensor) -> Tensor:
    if contribution.ndim < 3 or contribution.shape[-3:] != (*mask.shape, mask.shape[-1]):
        raise InputError(
            "contribution must be [..., B, K, K] for a mask [B, K] of real tokens. Got "
            f"{list(contribution.shape)} and {list(mask.shape)}."
        )
    pairs = mask[:, :, None] & mask[:, None, :]
    return contribution.double().masked_fill(~pairs, 0.0)


def _members(mask: Tensor, labels: Tensor | None, num_labels: int) -> Tensor:
    # Membership of real tokens in each label, [G, B, K], 0 or 1 in float64.
    if mask.ndim != 2 or mask.dtype != torch.bool:
        raise InputError(
            f"mask must be boolean [B, K], True for real tokens. Got {mask.dtype} "
            f"{list(mask.shape)}."
        )
    labels = torch.zeros_like(mask, dtype=torch.long) if labels is None else labels
    if labels.shape != mask.shape:
        raise InputError(
            f"labels must have the shape of mask, {list(mask.shape)}. Got {list(labels.shape)}."
        )
    every = torch.arange(num_labels, device=mask.device)
    return ((labels == every[:, None, None]) & mask).double()


def _offsets(mask: Tensor) -> Tensor:
    """Return the position of the source minus that of the target, [K, K]."""
    position = torch.arange(mask.shape[-1], device=mask.device)
    return position[:, None] - position


def _tally_tokens(values: Tensor, members: Tensor) -> Tally:
    total = torch.einsum("...bj,gbj->...g", values.double(), members)
    return Tally(total[..., None], members.sum((1, 2))[:, None])


def _tally_pairs(
    contribution: Tensor, mask: Tensor, members: Tensor, groups: Tensor, num_groups: int
) -> Tally:
    # Pairs of a group below 0 are left out, by way of a last group that is cut off.
    index = torch.where(groups < 0, num_groups, groups).flatten()

    def by_group(pairs: Tensor) -> Tensor:
        sums = pairs.new_zeros(*pairs.shape[:-2], num_groups + 1)
        return sums.index_add_(-1, index, pairs.flatten(-2))[..., :-1]

    total = torch.einsum("...bij,gbj->...gij", _real(contribution, mask), members)
    count = torch.einsum("bi,gbj->gij", mask.double(), members)
    return Tally(by_group(total), by_group(count))
