"""Hidden Token Attribution against full Jacobians from ``torch.func.jacrev``."""

import contextlib
import functools
import math

import hypothesis.strategies as st
import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from torch import nn
from torch.func import jacrev
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import profile
from transformers import BertConfig, BertModel, ModernBertConfig, ModernBertModel

from attnlens.attribution.jacobian import (
    attribution_norms,
    hidden_token_attribution,
    squared_norms,
)
from attnlens.attribution.sketches import (
    contributions,
    jackknife_error,
    seed_tangents,
    source_probes,
)
from attnlens.attribution.tangents import pull_back, push_forward
from attnlens.errors import InputError, MemoryBoundError

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
FAMILIES = {
    "bert": (BertModel, BertConfig, {"max_position_embeddings": 16}),
    "modernbert": (
        ModernBertModel,
        ModernBertConfig,
        {"local_attention": 4, "global_attn_every_n_layers": 2, "pad_token_id": 0},
    ),
}


def encoder_layers(depth=2, size=8, dtype=torch.float64, seed=0, **options):
    torch.manual_seed(seed)
    layer = functools.partial(nn.TransformerEncoderLayer, size, 2, 2 * size, batch_first=True)
    return [layer(**options).to(dtype).eval() for _ in range(depth)]


def hidden_states(batch=2, tokens=5, size=8, dtype=torch.float64, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, tokens, size, generator=generator, dtype=torch.float64).to(dtype)


def reference_norms(layers, example, ord=None):
    """Norms [L, K, K] of one example [K, M], block by block from the Jacobian of the chain."""

    def chain(state, depth):
        state = state[None]
        for layer in layers[: depth + 1]:
            state = layer(state)
        return state[0]

    tokens = len(example)
    norms = torch.zeros(len(layers), tokens, tokens, dtype=torch.float64)
    for depth in range(len(layers)):
        with sdpa_kernel(SDPBackend.MATH):
            jacobian = jacrev(functools.partial(chain, depth=depth))(example).double()
        for i in range(tokens):
            for j in range(tokens):
                norms[depth, i, j] = torch.linalg.matrix_norm(jacobian[j, :, i], ord=ord or "fro")
    return norms


def assert_close(result, expected, tolerance):
    error = (result.double() - expected).abs().max() / expected.abs().max()
    assert error <= tolerance, f"relative error {error:.2e}"


def bert_like(family, dtype):
    """A tiny model's layers in a padded batch: (layers with their arguments, inputs, mask)."""
    model_class, config_class, options = FAMILIES[family]
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24}
    sizes["initializer_range"] = 0.3  # far from the identity that a fresh model nearly is
    torch.manual_seed(0)
    config = config_class(vocab_size=40, num_hidden_layers=3, **sizes, **options)
    model = model_class(config).to(dtype).eval()
    ids = torch.randint(1, 40, (2, 7))
    mask = torch.ones(2, 7, dtype=torch.bool)
    mask[1, 4:] = False
    return (*captured(model, ids, mask), mask, model, ids)


def captured(model, ids, mask):
    inputs, layers = [], []

    def keep(module, args, kwargs):
        state = args[0] if args else kwargs.pop("hidden_states")
        inputs.append(state)
        layers.append(functools.partial(call, module, args[1:], kwargs))

    def call(module, args, kwargs, state):
        output = module(state, *args, **kwargs)
        return output if isinstance(output, torch.Tensor) else output[0]

    blocks = model.encoder.layer if hasattr(model, "encoder") else model.layers
    handles = [b.register_forward_pre_hook(keep, with_kwargs=True) for b in blocks]
    model(ids, attention_mask=mask.long())
    for handle in handles:
        handle.remove()
    return layers, inputs


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("norm_first", [False, True])
def test_exact_equals_full_jacobian(dtype, reverse, norm_first):
    layers = encoder_layers(dtype=dtype, norm_first=norm_first)
    hidden = hidden_states(dtype=dtype)
    result = hidden_token_attribution(layers, hidden, probes=None, reverse=reverse)
    expected = torch.stack([reference_norms(layers, example) for example in hidden], dim=1)
    assert_close(result.norm, expected, TOLERANCE[dtype])
    assert_close(result.contribution, expected / expected.sum(-2, keepdim=True), TOLERANCE[dtype])
    assert not result.standard_error.any()
    assert result.reverse is reverse


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("bert", torch.float64),
        ("bert", torch.float32),
        ("modernbert", torch.float32),  # rotates in float32 whatever its dtype
    ],
)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_padded_batch_equals_each_example_alone(family, mode, reverse, dtype):
    with mode():
        layers, inputs, mask, model, ids = bert_like(family, dtype)
        result = hidden_token_attribution(
            layers, inputs, mask=mask[:, None, None], probes=None, reverse=reverse
        )
    for example, length in enumerate(mask.sum(-1).tolist()):
        own = slice(example, example + 1)
        with torch.no_grad():
            alone, states = captured(model, ids[own, :length], mask[own, :length])
            expected = reference_norms(alone, states[0][0])
        norms = result.norm[:, example]
        assert_close(norms[:, :length, :length], expected, TOLERANCE[dtype])
        assert norms[:, length:].count_nonzero() == norms[..., length:].count_nonzero() == 0
        assert result.contribution[:, example, :, length:].count_nonzero() == 0
        assert_close(
            result.contribution[:, example, :, :length].sum(-2), torch.ones(3, length), 1e-5
        )


@pytest.mark.parametrize("reverse", [False, True])
def test_spectral_norm_is_the_largest_singular_value(reverse):
    layers, hidden = encoder_layers(), hidden_states()
    result = hidden_token_attribution(layers, hidden, probes=None, norm="spectral", reverse=reverse)
    expected = torch.stack([reference_norms(layers, example, ord=2) for example in hidden], dim=1)
    assert_close(result.norm, expected, 1e-10)


@pytest.mark.parametrize("probes", [3, None])
@pytest.mark.parametrize("reverse", [False, True])
def test_chosen_tokens_and_layers_are_slices_of_all(reverse, probes):
    layers, hidden = encoder_layers(depth=3), hidden_states()
    kwargs = {"probes": probes, "reverse": reverse}
    every = hidden_token_attribution(layers, hidden, **kwargs)
    some = hidden_token_attribution(
        layers, hidden, sources=[4, 0], targets=[1, 3, 2], at=[2, 0], **kwargs
    )
    assert some.layers == (0, 2)
    assert some.sources.tolist() == [4, 0]
    assert some.targets.tolist() == [1, 3, 2]
    expected = every.norm[[0, 2]][:, :, [4, 0]][..., [1, 3, 2]]
    assert_close(some.norm, expected, 1e-12)
    assert_close(some.contribution, expected / expected.sum(-2, keepdim=True), 1e-12)


def test_direction_is_chosen_by_cost():
    layers, hidden = encoder_layers(depth=3), hidden_states()
    run = functools.partial(hidden_token_attribution, layers, hidden, probes=1)
    assert run(targets=[0], at=[2]).reverse
    assert run(targets=[0]).reverse  # 1 + 2 + 3 layers back, 5 · 3 forward
    assert not run(targets=[0, 1, 2]).reverse
    assert not run(targets=[0], sources=[1], at=[2]).reverse
    assert not run().reverse


@pytest.mark.parametrize("probes", [3, None])
def test_captured_inputs_save_running_the_layers(probes):
    layers, hidden = encoder_layers(), hidden_states()
    calls = []

    def counted(layer, state):
        calls.append(layer)
        return layer(state)

    counting = [functools.partial(counted, layer) for layer in layers]
    computed = hidden_token_attribution(counting, hidden, probes=probes)
    first = len(calls)
    with torch.no_grad():
        states = [hidden, layers[0](hidden)]
    given_states = hidden_token_attribution(counting, states, probes=probes)
    assert len(calls) - first == first - 1
    assert_close(given_states.norm, computed.norm, 1e-12)


def sketches(layer, hidden, probes, runs):
    """Squared norms of many independent sketches of one layer, [runs, k, B, S, K]."""
    batch, tokens, size = hidden.shape
    draws = [
        source_probes(size, probes, range(tokens), seed=seed, dtype=hidden.dtype)
        for seed in range(runs)
    ]
    tangents = push_forward(
        layer, hidden, seed_tangents(hidden, torch.arange(tokens), torch.cat(draws, 1))
    )
    squares = squared_norms(tangents).reshape(tokens, runs, probes, batch, tokens)
    return squares.permute(1, 2, 3, 0, 4)


def test_sketch_is_unbiased_for_the_squared_norm():
    layer, hidden, runs = encoder_layers(depth=1)[0], hidden_states(), 2000
    exact = hidden_token_attribution([layer], hidden, probes=None).norm[0].square()
    draws = sketches(layer, hidden, probes=2, runs=runs).sum(1)
    deviation = (draws.mean(0) - exact) / (draws.std(0) / math.sqrt(runs))
    assert deviation.abs().max() < 4  # of 50 entries, in standard errors
    assert deviation.square().mean() < 2


@pytest.mark.parametrize("probes", [8, 16])
def test_standard_error_covers_the_true_error(probes):
    size = 32
    layer, hidden = encoder_layers(depth=1, size=size)[0], hidden_states(size=size)
    exact = hidden_token_attribution([layer], hidden, probes=None).contribution[0]
    scores = torch.stack([
        (contributions(draw.sum(0).sqrt()) - exact).abs() / jackknife_error(draw, size)
        for draw in sketches(layer, hidden, probes, runs=400)
    ])
    for nominal in (0.5, 0.8, 0.95):
        width = scipy.stats.t(probes - 1).ppf((1 + nominal) / 2)
        assert (scores < width).double().mean() == pytest.approx(nominal, abs=0.025)


def test_attribution_is_the_sketch_of_its_seed():
    layer, hidden = encoder_layers(depth=1)[0], hidden_states()
    draw = sketches(layer, hidden, probes=3, runs=5)[4]
    result = hidden_token_attribution([layer], hidden, probes=3, seed=4)
    assert result.probes == 3
    assert_close(result.norm[0], draw.sum(0).sqrt(), 1e-12)
    assert_close(result.contribution[0], contributions(draw.sum(0).sqrt()), 1e-12)
    assert_close(result.standard_error[0], jackknife_error(draw, 8), 1e-12)


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_jackknife_equals_leaving_out_each_probe(data):
    probes = data.draw(st.integers(2, 5))
    size = data.draw(st.integers(probes + 1, 12))
    torch.manual_seed(data.draw(st.integers(0, 99)))
    squares = torch.rand(probes, 2, 4, 3, dtype=torch.float64)
    real = torch.tensor(data.draw(st.lists(st.booleans(), min_size=4, max_size=4)))
    replicates = []
    for left_out in range(probes):
        rest = sum(squares[p] for p in range(probes) if p != left_out).sqrt()
        rest[:, ~real] = 0
        replicates.append(rest / rest.sum(1, keepdim=True).clamp_min(1e-300))
    centre = sum(replicates) / probes
    variance = sum((r - centre) ** 2 for r in replicates) * (probes - 1) / probes
    expected = ((1 - probes / size) * variance).sqrt()
    result = jackknife_error(squares.masked_fill(~real[:, None], 0.0), size)
    torch.testing.assert_close(result, expected, rtol=1e-9, atol=1e-12)


def test_jackknife_at_the_extremes():
    squares = torch.rand(1, 2, 4, 4)
    assert jackknife_error(squares, 8).isnan().all()
    assert jackknife_error(squares.expand(8, -1, -1, -1), 8).count_nonzero() == 0


@settings(max_examples=50, deadline=None)
@given(st.lists(st.booleans(), min_size=10, max_size=10), st.integers(0, 99))
def test_contributions_under_any_mask(flags, seed):
    torch.manual_seed(seed)
    norms = torch.rand(3, 2, 5, 5, dtype=torch.float64)
    mask = torch.tensor(flags).reshape(2, 5)
    norms.masked_fill_(~mask[:, :, None], torch.nan)
    result = contributions(norms, mask, mask)
    assert not result.isnan().any()
    for example in range(2):
        for j in range(5):
            total = sum(norms[1, example, i, j] for i in range(5) if mask[example, i])
            for i in range(5):
                real = mask[example, i] and mask[example, j]
                expected = norms[1, example, i, j] / total if real else 0.0
                assert result[1, example, i, j] == pytest.approx(float(expected), abs=1e-14)


@pytest.mark.parametrize("mode", [contextlib.nullcontext, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("reverse", [False, True])
def test_modes_agree_and_nothing_is_left_behind(mode, reverse):
    expected = hidden_token_attribution(encoder_layers(), hidden_states(), reverse=reverse)
    layers = encoder_layers()
    state = torch.get_rng_state()
    fastpath = torch.backends.mha.get_fastpath_enabled()
    with mode():
        hidden = hidden_states()
        result = hidden_token_attribution(layers, hidden, reverse=reverse)
    assert torch.equal(result.norm, expected.norm)
    assert torch.equal(result.standard_error, expected.standard_error)
    assert not result.norm.requires_grad
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.backends.mha.get_fastpath_enabled() is fastpath


def test_autocast_stays_near_full_precision():
    layers = encoder_layers(dtype=torch.float32)
    hidden = hidden_states(dtype=torch.float32)
    expected = hidden_token_attribution(layers, hidden).norm.double()
    for reverse in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            result = hidden_token_attribution(layers, hidden, probes=None, reverse=reverse)
        assert result.norm.dtype == torch.float32
        assert_close(result.norm, expected, 2**-5)


def test_dropout_is_refused_before_it_draws():
    layers = [layer.train() for layer in encoder_layers()]
    hidden = hidden_states()
    state = torch.get_rng_state()
    for given_states in (hidden, [hidden, hidden]):
        with pytest.raises(InputError, match="dropout"):
            hidden_token_attribution(layers, given_states)
    assert torch.equal(torch.get_rng_state(), state)


def test_padding_that_is_not_finite_does_not_spread():
    mask = torch.tensor([[True, True, False], [True, True, True]])
    weight = hidden_states(1, 4, 4)[0]

    def layer(state):
        return (state @ weight).masked_fill(~mask[..., None], torch.nan)

    result = hidden_token_attribution([layer], hidden_states(2, 3, 4), mask=mask, probes=2)
    for values in (result.norm, result.contribution, result.standard_error):
        assert values.isfinite().all()
    assert torch.equal(result.contribution[0, 1], torch.eye(3, dtype=torch.float64))


def allocated_peak(function):
    """Peak of what the allocator handed out while ``function`` ran, in bytes."""
    with profile(profile_memory=True) as recorded:
        function()
    events = recorded.profiler.kineto_results.events()
    sizes = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
    live = peak = 0
    for _, size in sorted(sizes, key=lambda event: event[0]):
        live += size
        peak = max(peak, live)
    return peak


@pytest.mark.parametrize("step", [push_forward, pull_back])
def test_memory_budget_bounds_the_chunks(step):
    layer = encoder_layers(depth=1, size=16)[0]
    hidden = hidden_states(size=16)
    tangents = torch.randn(4, 10, *hidden.shape, dtype=torch.float64)
    calls = []

    def counted(state):
        calls.append(state)
        return layer(state)

    def run(budget):
        calls.clear()
        out = torch.empty_like(tangents)
        peak = allocated_peak(
            lambda: step(counted, hidden, tangents, memory_budget=budget, out=out)
        )
        return out, len(calls), peak

    whole, few, unbounded = run(2**30)
    assert few == 2  # one tangent to see what it takes, then all others
    for budget in (unbounded // 2, unbounded // 8):
        chunked, many, peak = run(budget)
        assert peak <= budget
        assert many > few
        assert_close(chunked, whole, 1e-12)
    assert run(0)[1] == 40


@pytest.mark.parametrize("reverse", [False, True])
def test_memory_budget_bounds_bundle_and_temporaries_together(reverse):
    layers, hidden = encoder_layers(size=16), hidden_states(size=16)
    run = functools.partial(hidden_token_attribution, layers, hidden, probes=None, reverse=reverse)
    results = 6 * run().norm.nbytes  # norms, errors, contributions and what they are made from
    unbounded = allocated_peak(run)
    for budget in (unbounded // 2, unbounded // 4):
        assert allocated_peak(lambda b=budget: run(memory_budget=b)) <= budget + results


@pytest.mark.parametrize(("norm", "probes"), [("fro", None), ("fro", 3), ("spectral", None)])
@pytest.mark.parametrize("reverse", [False, True])
def test_small_budgets_do_not_change_the_result(norm, probes, reverse):
    layers, hidden = encoder_layers(), hidden_states()
    run = functools.partial(
        hidden_token_attribution, layers, hidden, norm=norm, probes=probes, reverse=reverse
    )
    expected = run()
    tangent = hidden.nbytes
    for budget in (2 * 8 * tangent, 2 * 20 * tangent):
        result = run(memory_budget=budget)
        assert_close(result.norm, expected.norm, 1e-12)
        torch.testing.assert_close(
            result.standard_error, expected.standard_error, rtol=1e-9, atol=1e-12
        )
    if norm == "fro":
        assert_close(run(memory_budget=1).norm, expected.norm, 1e-12)
    else:
        with pytest.raises(MemoryBoundError, match="memory_budget"):
            run(memory_budget=tangent)


def test_result_may_replace_the_tangents():
    layer, hidden = encoder_layers(depth=1)[0], hidden_states()
    tangents = torch.randn(3, 2, *hidden.shape, dtype=torch.float64)
    before = tangents.clone()
    for step in (push_forward, pull_back):
        fresh = step(layer, hidden, tangents)
        assert torch.equal(tangents, before)
        replaced = step(layer, hidden, bundle := tangents.clone(), out=bundle)
        assert replaced is bundle
        assert torch.equal(replaced, fresh)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 12), st.data())
def test_probes_are_orthogonal_and_reproducible(size, data):
    count = data.draw(st.integers(1, size))
    state = torch.get_rng_state()
    draw = functools.partial(source_probes, size, count, dtype=torch.float64)
    probes = draw(range(7), seed=3)
    gram = torch.eye(count, dtype=torch.float64) * size / count
    torch.testing.assert_close(probes @ probes.mT, gram.expand(7, -1, -1))
    assert torch.equal(probes, draw(range(7), seed=3))
    torch.testing.assert_close(draw([5, 2], seed=3), probes[[5, 2]])
    assert torch.equal(torch.get_rng_state(), state)
    if count < size:
        assert not torch.equal(probes, draw(range(7), seed=4))
        served = size // count
        for first in range(0, 7, served):  # tokens that share a basis
            rows = probes[first : first + served].flatten(0, 1)
            gram = torch.eye(len(rows), dtype=torch.float64) * size / count
            torch.testing.assert_close(rows @ rows.mT, gram)


def test_seeds_carry_each_probe_at_its_own_token():
    hidden, probes = hidden_states(batch=2, tokens=4, size=3), torch.randn(2, 2, 3)
    tangents = seed_tangents(hidden, torch.tensor([2, 0]), probes)
    expected = torch.zeros(2, 2, 2, 4, 3, dtype=torch.float64)
    for row, position in enumerate([2, 0]):
        for k in range(2):
            for example in range(2):
                expected[row, k, example, position] = probes[row, k]
    assert torch.equal(tangents, expected)


@pytest.mark.parametrize("norm", ["fro", "spectral"])
def test_norms_of_a_bundle_equal_norms_of_its_blocks(norm):
    bundle = torch.randn(3, 4, 2, 5, 4, dtype=torch.float64)
    result = attribution_norms(bundle, norm)
    for s in range(3):
        for b in range(2):
            for j in range(5):
                block = bundle[s, :, b, j]
                expected = torch.linalg.matrix_norm(block, ord=2 if norm == "spectral" else "fro")
                torch.testing.assert_close(result[b, s, j], expected)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"probes": 9}, "probes"),
        ({"probes": 0}, "probes"),
        ({"norm": "nuclear"}, "norm"),
        ({"norm": "spectral", "probes": 4}, "probes=None"),
        ({"sources": [5]}, "sources"),
        ({"targets": [-1]}, "targets"),
        ({"targets": []}, "targets"),
        ({"at": [1, 1]}, "at"),
        ({"mask": torch.ones(2, 5)}, "mask"),
        ({"mask": torch.ones(2, 4, dtype=torch.bool)}, "mask"),
        ({"hidden": torch.randn(5, 8)}, "hidden"),
        ({"hidden": [torch.randn(2, 5, 8)]}, "hidden"),
        ({"hidden": [torch.randn(2, 5, 8), torch.randn(2, 4, 8)]}, "hidden"),
        ({"layers": [nn.Linear(8, 4).double()]}, "shape"),
    ],
)
def test_wrong_arguments_are_named(arguments, named):
    call = {"layers": encoder_layers(), "hidden": hidden_states(), **arguments}
    with pytest.raises(InputError, match=named):
        hidden_token_attribution(**call)
