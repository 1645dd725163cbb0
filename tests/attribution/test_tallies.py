"""Aggregates of contributions against loops over examples, targets and sources."""

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from attnlens.attribution.box_plots import (
    HISTOGRAM_BINS,
    box_statistics,
    histogram_quantiles,
    share_histogram,
)
from attnlens.attribution.sketches import contributions, jackknife
from attnlens.attribution.tallies import (
    DISTANCE_GROUPS,
    Tally,
    layer_profile,
    own_contribution,
    tally_distance,
    tally_labels,
    tally_not_main,
    tally_offset,
    tally_own,
)
from attnlens.errors import InputError
from attnlens.observer import label_members

LAYERS, BATCH, TOKENS, LABELS, RADIUS = 2, 3, 14, 3, 4


def texts(seed=0, flags=None):
    """Contributions [L, B, K, K], masks and labels (some of them outside 0 … G - 1)."""
    generator = torch.Generator().manual_seed(seed)
    norms = torch.rand(LAYERS, BATCH, TOKENS, TOKENS, generator=generator, dtype=torch.float64)
    norms.diagonal(dim1=-2, dim2=-1).mul_(2)
    if flags is None:
        lengths = torch.tensor([TOKENS, 5, 1])
        mask = torch.arange(TOKENS) < lengths[:, None]
    else:
        mask = torch.tensor(flags).reshape(BATCH, TOKENS)
    labels = torch.randint(-1, LABELS + 1, (BATCH, TOKENS), generator=generator)
    return contributions(norms, mask, mask), mask, labels


masks = st.lists(st.booleans(), min_size=BATCH * TOKENS, max_size=BATCH * TOKENS)


def real_targets(mask, labels):
    for example in range(BATCH):
        for target in range(TOKENS):
            label = 0 if labels is None else int(labels[example, target])
            if mask[example, target] and 0 <= label < (1 if labels is None else LABELS):
                yield example, target, label


def naive_tally(contribution, mask, labels, width, entries):
    """Sums and counts [L, G, F] by loops; ``entries`` yields (column, value) of one target."""
    groups = 1 if labels is None else LABELS
    total = np.zeros((LAYERS, groups, width))
    count = np.zeros((LAYERS, groups, width))
    for layer in range(LAYERS):
        for example, target, label in real_targets(mask, labels):
            sources = [i for i in range(TOKENS) if mask[example, i]]
            shares = {i: float(contribution[layer, example, i, target]) for i in sources}
            for column, value in entries(shares, target):
                total[layer, label, column] += value
                count[layer, label, column] += 1
    return total, count


def own_entries(shares, target):
    yield 0, shares[target]


def not_main_entries(shares, target):
    yield 0, float(max(shares.values()) > shares[target])


def distance_entries(shares, target):
    for source, value in shares.items():
        for column, (first, last) in enumerate(DISTANCE_GROUPS):
            if first <= abs(source - target) <= (last or TOKENS):
                yield column, value


def offset_entries(shares, target):
    for source, value in shares.items():
        if 0 < abs(source - target) <= RADIUS:
            yield source - target + RADIUS, value


def tally_near(*args):
    return tally_offset(*args, radius=RADIUS)


TALLIES = {
    "own": (tally_own, 1, own_entries),
    "not_main": (tally_not_main, 1, not_main_entries),
    "distance": (tally_distance, len(DISTANCE_GROUPS), distance_entries),
    "offset": (tally_near, 2 * RADIUS + 1, offset_entries),
}


@pytest.mark.parametrize("labelled", [False, True])
@pytest.mark.parametrize("quantity", TALLIES)
@settings(max_examples=8, deadline=None)
@given(flags=st.none() | masks, seed=st.integers(0, 99))
def test_tallies_equal_loops(quantity, labelled, flags, seed):
    tally, width, entries = TALLIES[quantity]
    contribution, mask, labels = texts(seed, flags)
    members = label_members(labels, mask, LABELS) if labelled else None
    result = tally(contribution, mask, members)
    total, count = naive_tally(contribution, mask, labels if labelled else None, width, entries)
    np.testing.assert_allclose(result.total, total, atol=1e-12)
    np.testing.assert_array_equal(result.count.expand_as(result.total), count)


@settings(max_examples=10, deadline=None)
@given(flags=st.none() | masks, seed=st.integers(0, 99))
def test_contributions_between_labels_equal_loops(flags, seed):
    contribution, mask, labels = texts(seed, flags)
    result = tally_labels(contribution, mask, label_members(labels, mask, LABELS))
    total, count = np.zeros((LAYERS, LABELS, LABELS)), np.zeros(LABELS)
    for example, target, label in real_targets(mask, labels):
        count[label] += 1
        for source in range(TOKENS):
            other = int(labels[example, source])
            if mask[example, source] and 0 <= other < LABELS:
                total[:, label, other] += contribution[:, example, source, target].numpy()
    np.testing.assert_allclose(result.total, total, atol=1e-12)
    np.testing.assert_array_equal(result.count[:, 0], count)


def test_contributions_to_chosen_tokens_sum_to_one():
    contribution, mask, _ = texts()
    first = (torch.arange(TOKENS) == 0).long().expand(BATCH, -1)
    means = tally_labels(contribution, mask, label_members(first, mask, 2)).mean()
    torch.testing.assert_close(means.sum(-1), torch.ones(LAYERS, 2, dtype=torch.float64))
    expected = contribution[:, :, 0, 0].mean(1)  # every example's first token is real
    torch.testing.assert_close(means[:, 1, 1], expected)


@pytest.mark.parametrize("quantity", TALLIES)
def test_tallies_of_parts_add_up_to_the_whole(quantity):
    tally, _, _ = TALLIES[quantity]
    contribution, mask, labels = texts()
    members = label_members(labels, mask, LABELS)
    whole = tally(contribution, mask, members)
    parts = [
        tally(contribution[:, rows], mask[rows], members[rows])
        for rows in (slice(0, 1), slice(1, 3))
    ]
    merged = parts[0] + parts[1]
    torch.testing.assert_close(merged.total, whole.total, rtol=0, atol=1e-12)
    assert torch.equal(merged.count, whole.count)
    torch.testing.assert_close(merged.mean(), whole.mean(), equal_nan=True)


def test_padding_changes_nothing_even_if_not_finite():
    contribution, mask, labels = texts()
    garbage = contribution.masked_fill(~(mask[:, :, None] & mask[:, None, :]), torch.nan)
    for tally, _, _ in TALLIES.values():
        assert torch.equal(tally(garbage, mask).total, tally(contribution, mask).total)
    members = label_members(labels, mask, LABELS)
    counts = [share_histogram(own_contribution(c), members) for c in (garbage, contribution)]
    assert torch.equal(*counts)
    between = tally_labels(garbage, mask, members).total
    assert torch.equal(between, tally_labels(contribution, mask, members).total)


def test_equal_contributions_leave_a_token_its_own_main_contributor():
    mask = torch.ones(1, 4, dtype=torch.bool)
    assert tally_not_main(torch.full((1, 4, 4), 0.25), mask).total.item() == 0


@pytest.mark.parametrize("labelled", [False, True])
def test_histograms_count_every_real_token_in_its_bin(labelled):
    contribution, mask, labels = texts()
    members = label_members(labels, mask, LABELS) if labelled else mask[..., None]
    counts = share_histogram(own_contribution(contribution), members)
    expected = np.zeros((LAYERS, LABELS if labelled else 1, HISTOGRAM_BINS))
    for example, target, label in real_targets(mask, labels if labelled else None):
        for layer in range(LAYERS):
            own = float(contribution[layer, example, target, target])
            expected[layer, label, min(int(own * HISTOGRAM_BINS), HISTOGRAM_BINS - 1)] += 1
    np.testing.assert_array_equal(counts, expected)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=40))
def test_quantiles_are_right_to_half_a_bin(values):
    counts = histogram_of(values)
    probabilities = torch.linspace(0, 1, 9, dtype=torch.float64)
    result = histogram_quantiles(counts, probabilities)
    expected = np.quantile(values, probabilities.numpy())
    np.testing.assert_allclose(result, expected, rtol=0, atol=0.5 / HISTOGRAM_BINS + 1e-12)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, HISTOGRAM_BINS - 1), min_size=1, max_size=40))
def test_box_statistics_equal_the_definition(bins):
    values = (np.array(bins) + 0.5) / HISTOGRAM_BINS  # on the grid, where nothing is rounded
    first, median, third = np.quantile(values, [0.25, 0.5, 0.75])
    reach = 1.5 * (third - first)
    inside = values[(values >= first - reach) & (values <= third + reach)]
    expected = [inside.min(), first, median, third, inside.max()]
    result = box_statistics(histogram_of(values))
    np.testing.assert_allclose(result, expected, rtol=0, atol=1e-12)


def test_empty_histograms_have_no_quantiles():
    counts = torch.stack([torch.zeros(HISTOGRAM_BINS, dtype=torch.long), histogram_of([0.5])])
    box = box_statistics(counts)
    assert box[0].isnan().all()
    np.testing.assert_allclose(box[1], 0.5, atol=1 / HISTOGRAM_BINS)


def histogram_of(values):
    shares = torch.tensor(np.array(values))[None]
    return share_histogram(shares, torch.ones(1, len(values), 1, dtype=torch.bool))[0]


def test_layer_profiles_sum_to_a_hundred_percent():
    contribution, mask, _ = texts()
    means = tally_distance(contribution, mask).mean()
    profile = layer_profile(means)
    torch.testing.assert_close(profile.sum(0), torch.full((1, 6), 100.0, dtype=torch.float64))
    torch.testing.assert_close(profile[0] / profile[1], means[0] / means[1])


def test_one_layer_at_a_time_equals_all_at_once():
    contribution, mask, labels = texts()
    for tally, _, _ in TALLIES.values():
        members = label_members(labels, mask, LABELS)
        layers = [tally(c, mask, members).total for c in contribution]
        together = tally(contribution, mask, members).total
        torch.testing.assert_close(torch.stack(layers), together, rtol=0, atol=1e-12)


def test_own_contribution_is_the_diagonal():
    contribution, _, _ = texts()
    own = own_contribution(contribution)
    for j in range(TOKENS):
        assert torch.equal(own[..., j], contribution[..., j, j])


def test_mean_of_nothing_is_nan():
    assert Tally(torch.zeros(1, 1), torch.zeros(1, 1)).mean().isnan().all()


@pytest.mark.parametrize(
    ("contribution", "mask", "members", "named"),
    [
        (torch.rand(2, 3, 4), torch.ones(2, 3, dtype=torch.bool), None, "contribution"),
        (torch.rand(3, 3), torch.ones(2, 3, dtype=torch.bool), None, "contribution"),
        (torch.rand(2, 3, 3), torch.ones(2, 3), None, "boolean"),
        (torch.rand(2, 3, 3), torch.ones(2, 1, 1, 3, dtype=torch.bool), None, "mask"),
        (torch.rand(2, 3, 3), torch.ones(2, 3, dtype=torch.bool), torch.zeros(3), "members"),
    ],
)
@pytest.mark.parametrize("tally", [tally_own, tally_distance, tally_labels])
def test_wrong_arguments_are_named(tally, contribution, mask, members, named):
    with pytest.raises(InputError, match=named):
        tally(contribution, mask, members)


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 6), st.integers(0, 99))
def test_jackknife_equals_pseudo_values(probes, seed):
    """The corrected total is the mean of the pseudo-values, as far as k probes are no sample."""
    size = probes + 3
    totals = torch.rand(1 + probes, 2, 3, generator=torch.Generator().manual_seed(seed)).double()
    whole, rest = totals[0], list(totals[1:])
    pseudo = torch.stack([probes * whole - (probes - 1) * without for without in rest])
    sampled = 1 - probes / size
    corrected, variance = jackknife(totals[0], totals[1:], size)
    torch.testing.assert_close(corrected, whole + sampled * (pseudo.mean(0) - whole))
    torch.testing.assert_close(variance, sampled * pseudo.var(0) / probes)


def test_jackknife_at_the_extremes():
    totals = torch.rand(2, 3)
    exact, none = jackknife(totals[0], totals[:0], 8)
    assert torch.equal(exact, totals[0]) and not none.any()
    single, unknown = jackknife(totals[0], totals[1:], 8)
    assert torch.equal(single, totals[0]) and unknown.isnan().all()
    _, certain = jackknife(totals[0], torch.rand(8, 3), 8)
    assert not certain.any()


def test_jackknife_removes_the_bias_of_a_square_root():
    """The mean of √(sample mean) of k of M numbers is too small by a part of order 1/k."""
    generator = torch.Generator().manual_seed(0)
    population = torch.rand(40, generator=generator, dtype=torch.float64).pow(3)
    exact, probes, runs = population.mean().sqrt(), 6, 4000
    samples = torch.stack([
        population[torch.randperm(40, generator=generator)[:probes]] for _ in range(runs)
    ]).T  # [k, runs]
    rest = (samples.sum(0) - samples) / (probes - 1)
    plain = samples.mean(0).sqrt()
    corrected, _ = jackknife(plain, rest.sqrt(), 40)
    error = plain.std() / runs**0.5
    assert exact - plain.mean() > 6 * error
    assert abs(corrected.mean() - exact) < 3 * error
