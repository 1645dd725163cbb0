"""`HiddenTokenAttribution` inside running models, against Jacobians of their whole forward."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch.func import jacfwd

from attnlens import AttnLensError, EffectiveAttention, HeadStatistics, HiddenTokenAttribution, Lens
from attnlens.attribution.contributions import AttributionMatrices
from attnlens.attribution.tallies import DISTANCE_GROUPS
from attnlens.errors import InputError, MemoryBoundError, UnsupportedAttentionError
from attnlens.tap.sites import Catalogue
from tests.support.chains import CHAINS, FLOAT32_PARTS, build_chain, jacobian_norms
from tests.support.hooks import Siamese, is_clean
from tests.support.models import LAYERS, TEXT, VOCABULARY, initialise, outputs, pixels, text_inputs

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
WAYS = [contextlib.nullcontext, torch.no_grad, torch.inference_mode]


def look(model: nn.Module, *batches: dict[str, Any], **settings: Any) -> HiddenTokenAttribution:
    """Attribute some batches without gradients."""
    kinds = settings.pop("kinds", None)
    observer = HiddenTokenAttribution(**settings)
    with torch.no_grad(), Lens(model, observer, kinds=kinds):
        for batch in batches:
            model(**batch)
    return observer


def layers_of(model: nn.Module, stack: str) -> list[nn.Module]:
    return [layer.module for layer in Catalogue(model).layers() if layer.stack == stack]


def assert_equals_jacobian(
    name: str, matrices: AttributionMatrices, example: int, reference: Tensor, tolerance: float
) -> None:
    real = matrices.mask[example]
    norm = matrices.norm[:, example].double()
    assert norm[:, ~real].count_nonzero() == norm[..., ~real].count_nonzero() == 0
    expected = reference[:, real][..., real]
    error = (norm[:, real][..., real] - expected).abs().max() / expected.max()
    assert error < tolerance, f"{name}: norms are off by {error:.1e}"
    shares = matrices.contribution[:, example][:, real][..., real].double()
    error = (shares - expected / expected.sum(1, keepdim=True)).abs().max()
    assert error < tolerance, f"{name}: contributions are off by {error:.1e}"


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", CHAINS)
def test_exact_equals_the_jacobian_of_the_whole_encoder(name: str, dtype: torch.dtype) -> None:
    model = build_chain(name).to(dtype)
    inputs = {
        key: tensor.to(dtype) if tensor.is_floating_point() else tensor
        for key, tensor in CHAINS[name].inputs().items()
    }
    stacks = look(model, inputs, probes=None, keep="matrices").matrices
    assert len(stacks) == (2 if name == "clip" else 1)
    for matrices in stacks:
        layers = layers_of(model, matrices.stack)
        assert matrices.layers == tuple(range(LAYERS))
        for example in (0, 1) if dtype == torch.float64 else (1,):
            args = (model, inputs, layers, example, name == "xlnet")
            expected = jacobian_norms(*args)
            if name in FLOAT32_PARTS and dtype == torch.float64:
                # Forward and reverse derivatives of parts in float32 differ by its rounding
                # (2e-9 measured); the same direction agrees to float64.
                assert_equals_jacobian(name, matrices, example, expected, 1e-8)
                expected = jacobian_norms(*args, method=jacfwd)
            assert_equals_jacobian(name, matrices, example, expected, TOLERANCE[dtype])


@pytest.mark.parametrize("name", CHAINS)
def test_padding_is_neither_source_nor_target(name: str) -> None:
    inputs = CHAINS[name].inputs()
    (*_, matrices) = look(build_chain(name), inputs, probes=1, keep="matrices").matrices
    lengths = {"vit": [17, 17], "wav2vec2": [24, 15]}.get(name, [19, 6])
    assert matrices.mask.sum(-1).tolist() == lengths
    shares = matrices.contribution.sum(-2)  # over the sources
    torch.testing.assert_close(shares, matrices.mask.to(shares.dtype).expand_as(shares))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CHAINS)
def test_the_model_does_not_notice(name: str, way: Any) -> None:
    model, inputs = build_chain(name), CHAINS[name].inputs()
    with way():
        plain = outputs(model(**inputs))
        state = torch.get_rng_state()
        with Lens(model, HiddenTokenAttribution(probes=1), HeadStatistics()):
            looked = outputs(model(**inputs))
    assert torch.equal(torch.get_rng_state(), state)
    assert plain.keys() == looked.keys()
    assert all(torch.equal(plain[path], looked[path]) for path in plain)
    assert all(plain[path].requires_grad == looked[path].requires_grad for path in plain)
    assert is_clean(model)


def test_gradients_are_unchanged() -> None:
    gradients = []
    for observers in ([], [HiddenTokenAttribution(probes=2)]):
        model = build_chain("bert")
        with Lens(model, *observers) if observers else contextlib.nullcontext():
            model(**text_inputs()).last_hidden_state.square().sum().backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    assert all(torch.equal(left, right) for left, right in zip(*gradients, strict=True))


def test_autocast_is_that_of_the_forward() -> None:
    model, inputs = build_chain("bert"), text_inputs()
    exact = look(model, inputs, probes=None, keep="matrices").matrices[0]
    observer = HiddenTokenAttribution(probes=None, keep="matrices")
    with torch.no_grad(), Lens(model, observer), torch.autocast("cpu", dtype=torch.bfloat16):
        model(**inputs)
    error = (observer.matrices[0].norm - exact.norm).abs().max() / exact.norm.max()
    assert 1e-5 < error < 0.03


def test_other_observers_hear_each_call_once() -> None:
    model, inputs = build_chain("bert"), text_inputs()
    alone, beside = EffectiveAttention(), EffectiveAttention()
    with torch.no_grad():
        with Lens(model, alone):
            model(**inputs)
        with Lens(model, beside), Lens(model, HiddenTokenAttribution(probes=2)):
            model(**inputs)
    pairs = zip(alone.compute(), beside.compute(), strict=True)
    assert all(torch.equal(left.raw, right.raw) for left, right in pairs)


def batches() -> list[dict[str, Tensor]]:
    return [text_inputs(lengths, seed) for seed, lengths in enumerate([(9, 4), (7, 7), (14, 3)])]


def labels_of(inputs: dict[str, Any]) -> Tensor:
    return inputs["input_ids"] % 4 - 1  # one in four tokens has no label


@pytest.mark.parametrize("labels", [None, labels_of])
def test_aggregates_equal_loops_over_matrices(labels: Any) -> None:
    names = ("all",) if labels is None else ("a", "b", "c")
    settings: dict[str, Any] = {"probes": None, "keep": "matrices", "radius": 5}
    observer = look(build_chain("bert"), *batches(), labels=labels, label_names=names, **settings)
    result = observer.compute()
    groups = len(names)
    for row in range(LAYERS):
        own: list[list[float]] = [[] for _ in names]
        overtaken = torch.zeros(groups, dtype=torch.float64)
        pairs = torch.zeros(groups, 6, 2, dtype=torch.float64)
        offset = torch.zeros(groups, 11, dtype=torch.float64)
        by_label = torch.zeros(groups, groups, dtype=torch.float64)
        for batch, kept in zip(batches(), observer.matrices, strict=True):
            label = torch.zeros_like(kept.mask.long()) if labels is None else labels_of(batch)
            for b, i, j in kept.mask[:, :, None].expand(-1, -1, kept.mask.shape[1]).nonzero():
                target = int(label[b, j])
                if target < 0 or not kept.mask[b, j]:
                    continue
                share, distance = float(kept.contribution[row, b, i, j]), int(i - j)
                if distance == 0:
                    own[target].append(share)
                    overtaken[target] += share < kept.contribution[row, b, :, j].max()
                elif abs(distance) <= 5:
                    offset[target, 5 + distance] += share
                for place, (first, last) in enumerate(DISTANCE_GROUPS):
                    if first <= abs(distance) <= (last or 99):
                        pairs[target, place] += torch.tensor([share, 1.0])
                if label[b, i] >= 0:
                    by_label[target, label[b, i]] += share
        count = torch.tensor([float(len(values)) for values in own]).double()
        close = torch.testing.assert_close
        close(result.tokens[row], count)
        close(result.own[row], torch.tensor([sum(v) / len(v) for v in own]).double())
        close(result.not_main[row], overtaken / count)
        close(result.distance[row], pairs[..., 0] / pairs[..., 1], equal_nan=True)
        close(result.offset[row], offset / count[:, None])
        close(result.by_label[row], by_label / count[:, None])
        for group, values in enumerate(own):
            points = torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)
            quartiles = torch.tensor(values).double().quantile(points)
            close(result.own_box[row, group, 1:4], quartiles, rtol=0, atol=1.3e-4)
    profile = result.distance_profile.nansum(0)
    torch.testing.assert_close(profile, 100.0 * (profile > 0).double())
    for name, tensor in result.tensors().items():
        if name.endswith("_error"):
            assert not tensor.any()


@pytest.mark.parametrize("probes", [3, None])
def test_two_halves_merged_equal_one_run(probes: int | None) -> None:
    model = build_chain("albert")
    settings: dict[str, Any] = {"probes": probes, "keep": "matrices", "radius": 4}
    whole = look(model, *batches(), **settings)
    first = look(model, *batches()[:2], **settings)
    second = look(model, *batches()[2:], seed=2, **settings)
    restored = HiddenTokenAttribution(**settings)
    restored.load_state_dict(first.state_dict())
    merged = first.merge(second).compute()
    for name, tensor in whole.compute().tensors().items():
        torch.testing.assert_close(getattr(merged, name), tensor, msg=name, equal_nan=True)
    assert len(first.matrices) == 3
    with torch.no_grad(), Lens(model, restored):  # a run resumed draws on where it stopped
        model(**batches()[2])
    for name, tensor in whole.compute().tensors().items():
        torch.testing.assert_close(getattr(restored.compute(), name), tensor, equal_nan=True)
    first.reset()
    assert not first.matrices
    with pytest.raises(AttnLensError, match="no complete forward pass"):
        first.compute()


def test_noise_of_the_sketch_is_what_its_error_says() -> None:
    model, batch = build_chain("bert"), text_inputs((8, 5))
    exact = look(model, batch, probes=None).compute()
    runs = [look(model, batch, probes=8, seed=seed).compute() for seed in range(40)]
    for name in ("own", "distance", "offset"):
        draws = torch.stack([getattr(run, name) for run in runs])
        variance = torch.stack([getattr(run, f"{name}_error") for run in runs]).square()
        deviation = draws - getattr(exact, name)
        told, true = variance.nanmean(), deviation.square().nanmean()
        # Errors of tokens that share a basis partly cancel in means, which the estimate ignores.
        assert (0.3 if name == "own" else 0.7) < true / told < 1.1
        bias = deviation.mean(0) / (draws.std(0) / len(runs) ** 0.5)
        assert bias.nan_to_num(0.0).abs().max() < 4


def test_every_pass_has_probes_of_its_own() -> None:
    batch = text_inputs()
    first, second = look(build_chain("bert"), batch, batch, keep="matrices").matrices
    assert not torch.equal(first.norm, second.norm)


@pytest.mark.parametrize("layers", [[1], [-1]])
def test_one_target_at_one_layer_is_pulled_back(layers: list[int]) -> None:
    model, batch = build_chain("bert"), text_inputs()
    every = look(model, batch, probes=None, keep="matrices").matrices[0]
    observer = look(model, batch, probes=None, targets=[0], layers=layers, keep="matrices")
    chosen = observer.matrices[0]
    assert chosen.reverse and not every.reverse
    assert chosen.layers == (1,)
    torch.testing.assert_close(chosen.norm, every.norm[1:, :, :, :1])
    with pytest.raises(AttnLensError, match="matrices"):
        observer.compute()


def test_a_lens_chooses_layers_by_index_or_name() -> None:
    model = build_chain("bert")
    for layers in (1, -1, "encoder.layer.1.attention.self"):
        observer = HiddenTokenAttribution(probes=1)
        with torch.no_grad(), Lens(model, observer, layers=layers):
            model(**text_inputs())
        assert observer.compute().layers == (("encoder.layer.*", 1),)


def test_labels_may_be_set_before_each_pass() -> None:
    model, batch = build_chain("bert"), batches()[0]
    expected = look(model, batch, labels=labels_of, label_names="abc").compute()
    observer = HiddenTokenAttribution(label_names="abc")
    with torch.no_grad(), Lens(model, observer):
        observer.labels = labels_of(batch)
        model(**batch)
        torch.testing.assert_close(observer.compute().own, expected.own, equal_nan=True)
        observer.labels = torch.zeros(3, 3, dtype=torch.long)
        with pytest.raises(InputError, match="labels"):
            model(**batch)
    assert is_clean(model)


def test_siamese_models_have_two_chains() -> None:
    encoder = build_chain("bert")
    left, right = text_inputs((9, 4)), text_inputs((6, 6), seed=1)
    separate = look(encoder, left, right, probes=None).compute()
    observer = HiddenTokenAttribution(probes=None)
    model = Siamese(encoder)
    with torch.no_grad(), Lens(model, observer):
        model(left, right)
    torch.testing.assert_close(observer.compute().own, separate.own)


def test_every_other_pass() -> None:
    model, observer = build_chain("bert"), HiddenTokenAttribution(probes=1, keep="matrices")
    with torch.no_grad(), Lens(model, observer, every=2):
        for batch in batches():
            model(**batch)
    assert [kept.mask.shape[1] for kept in observer.matrices] == [9, 14]


def test_trained_tokens_lose_themselves_with_depth(minilm: Any, real_text: list[str]) -> None:
    observer = look(minilm.model, minilm.tokenize(real_text[:3]), probes=4)
    own = observer.compute().own[:, 0]
    assert own[0] > 0.4 > own[-1]
    assert (own.diff() < 0.02).all()


def test_dropout_is_refused() -> None:
    model = build_chain("bert").train()
    state = torch.get_rng_state()
    with pytest.raises(InputError, match=r"model\.eval\(\)"):
        look(model, text_inputs())
    assert is_clean(model)
    assert not torch.equal(torch.get_rng_state(), state)  # the model's own dropout


def test_a_decoder_attributes_to_no_later_token() -> None:
    config = hf.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=VOCABULARY)
    model = initialise(hf.GPT2Model, config)
    observer = look(model, text_inputs((7, 7)), keep="matrices")
    upper = observer.matrices[0].contribution.tril(-1)  # sources after their target
    assert not upper.any()


def test_streams_that_are_no_chain_are_refused() -> None:
    swin = {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [1, 1]}
    refused = {
        r"encoder\.layers\.0 turns \[2, 64, 8\] into \[2, 16, 16\]": (
            initialise(hf.SwinModel, hf.SwinConfig(**swin, num_heads=[1, 2], window_size=2)),
            {"pixel_values": pixels()},
        ),
        r"encoder\.blocks\.1\.0": (
            initialise(
                hf.FunnelModel,
                hf.FunnelConfig(
                    vocab_size=VOCABULARY,
                    d_model=32,
                    n_head=4,
                    d_head=8,
                    d_inner=48,
                    block_sizes=[1, 1],
                ),
                "eager",
            ),
            text_inputs((8, 8)),
        ),
    }
    for message, (model, inputs) in refused.items():
        with pytest.raises(UnsupportedAttentionError, match=message):
            look(model, inputs, probes=1)
        assert is_clean(model)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_interrupted_passes_count_for_nothing(error: type[BaseException]) -> None:
    model, batch = build_chain("bert"), text_inputs()

    def stop(*args: Any) -> None:
        raise error

    observer = HiddenTokenAttribution(probes=1, keep="matrices")
    with torch.no_grad(), Lens(model, observer):
        handle = model.encoder.layer[1].register_forward_pre_hook(stop)
        with pytest.raises(error):
            model(**batch)
        handle.remove()
        assert not observer.matrices
        model(**batch)
        assert len(observer.matrices) == 1
    with pytest.raises(error), torch.no_grad(), Lens(model, observer):
        model.encoder.layer[1].register_forward_pre_hook(stop)
        model(**batch)
    assert not observer._chains
    assert len(observer.matrices) == 1


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"keep": "everything"}, "keep"),
        ({"targets": [0]}, "matrices"),
        ({"probes": 0}, "probes"),
        ({"norm": "spectral"}, "probes=None"),
        ({"norm": "nuclear", "probes": None}, "norm"),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(InputError, match=named):
        HiddenTokenAttribution(**settings)


def test_matrices_have_a_bound() -> None:
    with pytest.raises(MemoryBoundError, match="max_bytes"):
        look(build_chain("bert"), text_inputs(), keep="matrices", max_bytes=1000)


def test_models_without_layers_are_refused_on_entry() -> None:
    with pytest.raises(UnsupportedAttentionError, match="no encoder layers"):
        Lens(nn.Linear(3, 3), HiddenTokenAttribution()).__enter__()


def test_layers_without_attention_are_attributed_too() -> None:
    model = initialise(hf.FNetModel, hf.FNetConfig(**TEXT), "eager")
    ids = {"input_ids": text_inputs((8, 8))["input_ids"]}
    matrices = look(model, ids, probes=None, keep="matrices").matrices[0]
    layers = layers_of(model, matrices.stack)
    expected = jacobian_norms(model, ids, layers, 0)
    assert_equals_jacobian("fnet", matrices, 0, expected, 1e-5)
