"""Box plots of shares over a corpus, from histograms that add up over batches."""

from __future__ import annotations

import torch
from torch import Tensor

HISTOGRAM_BINS = 4096
"""Bins of equal width on [0, 1]: quantiles are right to half a bin, 1.3e-4."""


def share_histogram(shares: Tensor, members: Tensor) -> Tensor:
    """Count shares in fine bins, by label; histograms of batches add.

    Args:
        shares: one for each token, `[..., B, K]` in `[0, 1]`; NaN is left out.
        members: `[B, K, G]` bool, the tokens of each label.

    Returns:
        Counts by label in :data:`HISTOGRAM_BINS` bins of equal width on `[0, 1]`,
        `[..., G, bins]` int64.

    Examples:
        >>> counts = share_histogram(torch.tensor([[0.75, 0.5]]), torch.ones(1, 2, 1).bool())
        >>> counts.nonzero()[:, 1] / 4096
        tensor([0.5000, 0.7500])
    """
    bins = (shares.double() * HISTOGRAM_BINS).nan_to_num(0.0).long()
    counted = members & ~shares.isnan()[..., None]  # [..., B, K, G]
    index = bins.clamp_(0, HISTOGRAM_BINS - 1)[..., None].expand_as(counted)
    counts = bins.new_zeros(*bins.shape[:-2], members.shape[-1], HISTOGRAM_BINS)
    return counts.scatter_add_(-1, index.flatten(-3, -2).mT, counted.flatten(-3, -2).mT.long())


def histogram_quantiles(counts: Tensor, probabilities: Tensor) -> Tensor:
    """Read quantiles off histograms on `[0, 1]`, right to half the width of a bin.

    Args:
        counts: counts of values in bins of equal width, `[..., bins]`.
        probabilities: probabilities in `[0, 1]`, `[N]`.

    Returns:
        Quantiles, interpolated linearly between order statistics, `[..., N]` float64; NaN for an
        empty histogram.

    Examples:
        >>> histogram_quantiles(torch.tensor([1, 0, 0, 1]), torch.tensor([0.0, 0.5])).tolist()
        [0.125, 0.5]
    """
    cumulative = counts.cumsum(-1)
    size = cumulative[..., -1:]
    rank = probabilities.to(counts.device, torch.float64) * (size - 1).clamp_min(0)
    low = rank.floor()
    # The r-th smallest value, from 0, lies in the first bin whose cumulative count exceeds r.
    lower, upper = (
        (torch.searchsorted(cumulative, r.long(), right=True).double() + 0.5) / counts.shape[-1]
        for r in (low, rank.ceil())
    )
    return torch.lerp(lower, upper, rank - low).masked_fill(size == 0, torch.nan)


def box_statistics(counts: Tensor) -> Tensor:
    """Summarise histograms on `[0, 1]` as box plots do.

    Args:
        counts: counts of values in bins of equal width, `[..., bins]`.

    Returns:
        Lower whisker, first quartile, median, third quartile and upper whisker, `[..., 5]`
        float64; NaN for an empty histogram. Quartiles are right to half the width of a bin.
        Whiskers are the centres of the outermost occupied bins within 1.5 interquartile ranges
        of the quartiles.

    Examples:
        >>> box_statistics(torch.tensor([0, 1, 1, 0])).tolist()
        [0.375, 0.4375, 0.5, 0.5625, 0.625]
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
