"""What is added up of the contributions of one batch, and the averages it becomes."""

from __future__ import annotations

import torch
from torch import Tensor

from attnlens.attribution.box_plots import box_statistics, share_histogram
from attnlens.attribution.sketches import jackknife
from attnlens.attribution.tallies import (
    own_contribution,
    tally_distance,
    tally_labels,
    tally_not_main,
    tally_offset,
    tally_own,
)
from attnlens.observer import Sums


def contribution_sums(
    contribution: Tensor,
    replicates: Tensor,
    hidden_size: int,
    mask: Tensor,
    members: Tensor,
    radius: int,
) -> Sums:
    """Sum the contributions of a batch at one layer over its target tokens, by label.

    Args:
        contribution: contributions, `[B, K, K]`; examples with NaN are left out and counted.
        replicates: contributions without each probe in turn, `[k, B, K, K]`; none, `[0, …]`,
            where they are exact.
        hidden_size: M, the number of directions that probes are taken from.
        mask: `[B, K]` bool, the real tokens.
        members: `[B, K, G]` bool, the tokens of each label.
        radius: R, the largest offset to tell apart.

    Returns:
        Sums, variances and counts in float64, `[G, …]`; the number of examples `skipped`, a scalar.
    """
    finite = contribution.isfinite().flatten(1).all(1)  # [B]
    mask, members = mask & finite[:, None], members & finite[:, None, None]
    not_main = tally_not_main(contribution, mask, members)
    every = torch.cat([contribution[None], replicates])  # [1 + k, B, K, K]
    tallies = {
        "own": tally_own(every, mask, members),
        "distance": tally_distance(every, mask, members),
        "offset": tally_offset(every, mask, members, radius=radius),
        "by_label": tally_labels(every, mask, members),
    }
    sums = {
        "skipped": (~finite).sum().double(),
        "tokens": not_main.count,
        "not_main": not_main.total,
        "histogram": share_histogram(own_contribution(contribution), members),
        "pairs": tallies["distance"].count,
    }
    for name, tally in tallies.items():
        whole, rest = tally.total[0], tally.total[1:]
        sums[name], sums[f"{name}_variance"] = jackknife(whole, rest, hidden_size)
    return sums


def contribution_means(sums: Sums) -> Sums:
    """Turn the sums of a layer into fields of the result.

    Args:
        sums: of :func:`contribution_sums`, or their sums over batches.

    Returns:
        Means and errors by the name of the field, `[G, …]`; `skipped` is a scalar.
    """
    tokens = sums["tokens"]  # [G, 1]
    counts = {"own": tokens, "distance": sums["pairs"], "offset": tokens, "by_label": tokens}
    means = {name: sums[name] / count for name, count in counts.items()}
    errors = {
        f"{name}_error": sums[f"{name}_variance"].sqrt() / count for name, count in counts.items()
    }
    single = {"tokens": tokens, "not_main": sums["not_main"] / tokens}
    single |= {"own": means.pop("own"), "own_error": errors.pop("own_error")}
    return {
        **{name: tensor[:, 0] for name, tensor in single.items()},
        **means,
        **errors,
        "skipped": sums["skipped"],
        "own_box": box_statistics(sums["histogram"]),
    }
