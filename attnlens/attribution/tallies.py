"""Aggregates of Hidden Token Attribution over many texts.

Every tally reduces the contributions c `[..., B, K, K]` of a batch (source, then target; leading
dimensions such as layers are kept) to sums and counts, which add up over batches, so that a corpus
takes the memory of one. They are kept apart by the label of the target token (part of speech,
special token), with `members` `[B, K, G]`, the tokens of each label, which
:func:`~attnlens.observer.label_members` finds; without, all real tokens share one label.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnlens.errors import InputError

DISTANCE_GROUPS = ((1, 1), (2, 2), (3, 3), (4, 5), (6, 10), (11, None))
"""First and last distance of each group of neighbours, on both sides of a token."""


@dataclass(frozen=True)
class Tally:
    """Sums and counts of a quantity; tallies of disjoint data add with `+`.

    Attributes:
        total: sums, `[..., G, F]` float64.
        count: number of terms in each sum, broadcastable to `total`.
    """

    total: Tensor
    count: Tensor

    def __add__(self, other: Tally) -> Tally:
        return Tally(self.total + other.total, self.count + other.count)

    def mean(self) -> Tensor:
        """Divide the sums by their counts: `[..., G, F]`, NaN where nothing was counted."""
        return self.total / self.count


def tally_own(contribution: Tensor, mask: Tensor, members: Tensor | None = None) -> Tally:
    """Tally the contributions c_jj of real tokens to their own hidden states.

    Args:
        contribution: contributions, `[..., B, K, K]`; anything at padding.
        mask: `[B, K]` bool, the real tokens.
        members: `[B, K, G]` bool, the tokens of each label; None: all share one.

    Returns:
        Own contribution by label, `[..., G, 1]`, with counts of tokens.

    Raises:
        InputError: if the shapes do not go together, or the mask is not boolean.

    Examples:
        >>> shares = torch.tensor([[[0.75, 0.5], [0.25, 0.5]]])
        >>> tally_own(shares, torch.ones(1, 2, dtype=torch.bool)).mean().item()
        0.625
    """
    shares, members = _checked(contribution, mask, members)
    return _tally_tokens(own_contribution(shares), members)


def tally_not_main(contribution: Tensor, mask: Tensor, members: Tensor | None = None) -> Tally:
    """Tally the real tokens to which another token contributes more than they do themselves.

    Args:
        contribution: as in :func:`tally_own`, also in what follows.
        mask: as there.
        members: as there.

    Returns:
        Tokens that are not their own main contributor by label, `[..., G, 1]`, with counts of
        tokens, so that the mean is their share; NaN where a contribution is.

    Raises:
        InputError: as there.

    Examples:
        >>> shares = torch.tensor([[[0.75, 0.6], [0.25, 0.4]]])
        >>> tally_not_main(shares, torch.ones(1, 2, dtype=torch.bool)).total.item()
        1.0
    """
    shares, members = _checked(contribution, mask, members)
    overtaken = (shares > own_contribution(shares)[..., None, :]).any(-2).double()
    return _tally_tokens(overtaken.masked_fill(shares.isnan().any(-2), torch.nan), members)


def tally_distance(contribution: Tensor, mask: Tensor, members: Tensor | None = None) -> Tally:
    """Tally the contributions of neighbours by their distance, on both sides together.

    Args:
        contribution: contributions.
        mask: real tokens.
        members: tokens of each label; the label of the target counts.

    Returns:
        Contribution by label and group of :data:`DISTANCE_GROUPS`, `[..., G, 6]`, with counts of
        pairs. See :func:`layer_profile` for the share of each layer.

    Raises:
        InputError: as :func:`tally_own` does.

    Examples:
        >>> shares = torch.tensor([[[0.75, 0.5], [0.25, 0.5]]])
        >>> tally_distance(shares, torch.ones(1, 2, dtype=torch.bool)).mean()[0, 0].item()
        0.375
    """
    firsts = torch.tensor([first for first, _ in DISTANCE_GROUPS], device=mask.device)
    groups = torch.bucketize(_offsets(mask).abs(), firsts, right=True) - 1  # -1: the token itself
    return _tally_pairs(contribution, mask, members, groups, len(DISTANCE_GROUPS))


def tally_offset(
    contribution: Tensor, mask: Tensor, members: Tensor | None = None, *, radius: int = 64
) -> Tally:
    """Tally contributions by the signed offset of the source, the own position left out.

    Args:
        contribution: contributions.
        mask: real tokens.
        members: tokens of each label; the label of the target counts.
        radius: R, the largest offset to tally, in tokens.

    Returns:
        Contribution by label and offset, `[..., G, 2R + 1]`, with counts of pairs. Entry R + d
        belongs to sources d positions after the target (before it if d < 0); entry R is empty.

    Raises:
        InputError: as :func:`tally_own` does.

    Examples:
        >>> shares = torch.tensor([[[0.75, 0.5], [0.25, 0.5]]])
        >>> tally_offset(shares, torch.ones(1, 2, dtype=torch.bool), radius=1).total.tolist()
        [[0.5, 0.0, 0.25]]
    """
    offset = _offsets(mask)
    near = (offset.abs() <= radius) & (offset != 0)
    groups = torch.where(near, offset + radius, -1)
    return _tally_pairs(contribution, mask, members, groups, 2 * radius + 1)


def tally_labels(contribution: Tensor, mask: Tensor, members: Tensor) -> Tally:
    """Tally what tokens of each label contribute to tokens of each label.

    Two labels, chosen and other, give the contributions to chosen tokens such as `[CLS]`.

    Args:
        contribution: contributions.
        mask: real tokens.
        members: tokens of each label.

    Returns:
        Contribution by label of the target and of the source, `[..., G, G]`, with counts of
        targets, `[G, 1]`; the means of a target label sum to one over labelled sources.

    Raises:
        InputError: as :func:`tally_own` does.

    Examples:
        >>> shares = torch.tensor([[[0.75, 0.5], [0.25, 0.5]]])
        >>> first_and_other = torch.eye(2).bool()[None]
        >>> tally_labels(shares, torch.ones(1, 2, dtype=torch.bool), first_and_other).total
        tensor([[0.7500, 0.2500],
                [0.5000, 0.5000]], dtype=torch.float64)
    """
    shares, members = _checked(contribution, mask, members)
    total = torch.einsum("...bij,bjg,bih->...gh", shares, members, members)
    return Tally(total, members.sum((0, 1))[:, None])


def own_contribution(contribution: Tensor) -> Tensor:
    """Take the contribution c_jj of every token to its own hidden state.

    Args:
        contribution: contributions, `[..., K, K]`.

    Returns:
        Own contributions, `[..., K]` in `[0, 1]`.
    """
    return contribution.diagonal(dim1=-2, dim2=-1)


def layer_profile(means: Tensor) -> Tensor:
    """Scale each curve over the layers so that it sums to 100 %.

    Args:
        means: means of a tally with layers first, `[L, ..., G, F]`.

    Returns:
        Percentages in `[0, 100]`, shaped as `means`; NaN for curves without data.

    Examples:
        >>> layer_profile(torch.tensor([[0.25], [0.75]])).tolist()
        [[25.0], [75.0]]

    References:
        Brunner et al., "On Identifiability in Transformers", ICLR 2020, figure 4a.
    """
    return 100 * means / means.sum(0)


def _checked(contribution: Tensor, mask: Tensor, members: Tensor | None) -> tuple[Tensor, Tensor]:
    """Contributions, zero at padding, and members, 0 or 1, in float64."""
    if mask.ndim != 2 or mask.dtype != torch.bool:
        raise InputError(
            f"mask must be boolean [B, K], True for real tokens. Got {mask.dtype} "
            f"{list(mask.shape)}."
        )
    if contribution.ndim < 3 or contribution.shape[-3:] != (*mask.shape, mask.shape[-1]):
        raise InputError(
            "contribution must be [..., B, K, K] for a mask [B, K] of real tokens. Got "
            f"{list(contribution.shape)} and {list(mask.shape)}."
        )
    members = mask[..., None] if members is None else members
    if members.ndim != 3 or members.shape[:2] != mask.shape:
        raise InputError(
            f"members must be [B, K, G] for a mask [B, K] of {list(mask.shape)}. Got "
            f"{list(members.shape)}."
        )
    pairs = mask[:, :, None] & mask[:, None, :]
    return contribution.double().masked_fill(~pairs, 0.0), (members & mask[..., None]).double()


def _offsets(mask: Tensor) -> Tensor:
    """Position of the source minus that of the target, `[K, K]`."""
    position = torch.arange(mask.shape[-1], device=mask.device)
    return position[:, None] - position


def _tally_tokens(values: Tensor, members: Tensor) -> Tally:
    total = torch.einsum("...bj,bjg->...g", values, members)
    return Tally(total[..., None], members.sum((0, 1))[:, None])


def _tally_pairs(
    contribution: Tensor, mask: Tensor, members: Tensor | None, groups: Tensor, num_groups: int
) -> Tally:
    # Pairs of a group below 0 are left out, by way of a last group that is cut off.
    shares, members = _checked(contribution, mask, members)
    index = torch.where(groups < 0, num_groups, groups).flatten()

    def by_group(pairs: Tensor) -> Tensor:
        sums = pairs.new_zeros(*pairs.shape[:-2], num_groups + 1)
        return sums.index_add_(-1, index, pairs.flatten(-2))[..., :-1]

    total = torch.einsum("...bij,bjg->...gij", shares, members)
    count = torch.einsum("bi,bjg->gij", mask.double(), members)
    return Tally(by_group(total), by_group(count))
