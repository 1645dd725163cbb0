"""NaN and Inf in what enters or leaves a layer, and other inputs with nothing to attribute."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attnlens import HiddenTokenAttribution, Lens, TokenSaliency
from attnlens.attribution.jacobian import attribution_norms, hidden_token_attribution
from attnlens.attribution.sketches import contributions
from attnlens.attribution.tallies import tally_not_main
from attnlens.attribution.tangents import push_forward
from attnlens.capture import HiddenState, LayerCapture
from attnlens.errors import AttnLensWarning, InputError
from tests.support.chains import build_chain
from tests.support.models import LAYERS, text_inputs

WAYS: dict[str, dict[str, Any]] = {
    "sketch": {"probes": 3},
    "single probe": {"probes": 1},
    "exact": {"probes": None},
    "spectral": {"probes": None, "norm": "spectral"},
}
BAD = [torch.nan, torch.inf, -torch.inf]
# Where an example stops being finite: module, and the number of layers it is finite at.
PLACES: dict[str, tuple[Callable[[Any], nn.Module], int]] = {
    "entered": (lambda model: model.embeddings, 0),
    "left the first layer": (lambda model: model.encoder.layer[0], 0),
    "left the last layer": (lambda model: model.encoder.layer[-1], LAYERS - 1),
}


def spoilt(model: Any, place: Callable[[Any], nn.Module], value: float) -> Any:
    """Let one number of the second example's third token be something else."""

    def spoil(module: nn.Module, args: Any, output: Any) -> Any:
        state = output if isinstance(output, Tensor) else output[0]
        chosen = torch.zeros_like(state, dtype=torch.bool)
        chosen[1, 2, 5] = True
        state = torch.where(chosen, value, state)
        return state if isinstance(output, Tensor) else (state, *output[1:])

    place(model).register_forward_hook(spoil)
    return model


def first_alone(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor[:1] for name, tensor in batch.items()}


def attributed(model: Any, *batches: dict[str, Tensor], **settings: Any) -> HiddenTokenAttribution:
    observer = HiddenTokenAttribution(**settings)
    with torch.no_grad(), Lens(model, observer):
        for batch in batches:
            model(**batch)
    return observer


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("way", WAYS)
def test_an_example_that_is_not_finite_is_left_out_and_counted(
    way: str, place: str, value: float
) -> None:
    batch, (where, finite) = text_inputs((9, 6)), PLACES[place]
    model = spoilt(build_chain("bert"), where, value)
    observer = attributed(model, batch, keep="matrices", **WAYS[way])
    with pytest.warns(AttnLensWarning, match=r"1 example\(s\) held NaN or Inf and were left out"):
        result = observer.compute()
    assert result.skipped.tolist() == [0.0] * finite + [1.0] * (LAYERS - finite)
    every = attributed(build_chain("bert"), batch, **WAYS[way]).compute()
    alone = attributed(build_chain("bert"), first_alone(batch), **WAYS[way]).compute()
    for name, tensor in result.tensors().items():
        if name in ("skipped", "distance_profile"):
            continue
        for row in range(LAYERS):
            expected = getattr(every if row < finite else alone, name)[row]
            torch.testing.assert_close(tensor[row], expected, equal_nan=True, msg=name)
    (matrices,) = observer.matrices
    shares = [matrices.contribution, matrices.norm, matrices.standard_error]
    for tensor in shares if way != "single probe" else shares[:2]:
        assert tensor[:, 0].isfinite().all() and tensor[:finite].isfinite().all()
        assert tensor[finite:, 1, :6, :6].isnan().all()


@pytest.mark.parametrize("way", WAYS)
def test_nothing_but_nan_is_reported_where_no_example_is_finite(way: str) -> None:
    batch = {name: tensor[1:].expand(2, -1) for name, tensor in text_inputs((9, 9)).items()}
    model = build_chain("bert")
    with torch.no_grad():
        model.encoder.layer[0].output.dense.bias[3] = torch.nan
    observer = attributed(model, batch, batch, **WAYS[way])
    with pytest.warns(AttnLensWarning, match=r"4 example\(s\)"):
        result = observer.compute()
    assert result.skipped.tolist() == [4.0] * LAYERS
    assert not result.tokens.any()
    for name in ("own", "own_error", "own_box", "not_main", "distance", "offset", "by_label"):
        assert getattr(result, name).isnan().all(), name


def test_skipped_examples_are_merged_and_kept_in_the_state() -> None:
    batch = text_inputs((9, 6))
    model = spoilt(build_chain("bert"), PLACES["entered"][0], torch.nan)
    first, second = (attributed(model, batch, seed=seed) for seed in (0, 1))
    restored = HiddenTokenAttribution()
    restored.load_state_dict(first.merge(second).state_dict())
    with pytest.warns(AttnLensWarning, match=r"2 example\(s\)"):
        assert restored.compute().skipped.tolist() == [2.0] * LAYERS


def test_finite_examples_raise_no_warning() -> None:
    observer = attributed(build_chain("bert"), text_inputs((9, 6)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not observer.compute().skipped.any()


# Pure functions


def mixing(tokens: int) -> Callable[[Tensor], Tensor]:
    weight = torch.randn(tokens, tokens, generator=torch.Generator().manual_seed(3))
    return lambda state: (weight @ state).tanh()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("reverse", [False, True])
def test_chains_report_nan_from_where_an_example_is_not_finite(way: str, reverse: bool) -> None:
    states = [torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(s)) for s in range(3)]
    layers, settings = [mixing(4)] * 2, {"reverse": reverse, **WAYS[way]}
    whole = hidden_token_attribution(layers, states, **settings)
    spoilt = [state.clone() for state in states]
    spoilt[1][1, 2, 0], spoilt[2][2, 0, 5] = torch.inf, torch.nan
    found = hidden_token_attribution(layers, spoilt, **settings)
    bad = torch.tensor([[False, True, False], [False, True, True]])
    for name in ("norm", "contribution"):
        tensor = getattr(found, name)
        assert tensor[bad].isnan().all(), name
        assert torch.equal(tensor[~bad], getattr(whole, name)[~bad])
    assert found.standard_error[bad].isnan().all()
    without_last = hidden_token_attribution(layers, spoilt[:2], **settings)
    assert without_last.norm[1, 2].isfinite().all()


def test_derivatives_that_are_not_finite_are_reported() -> None:
    hidden = torch.ones(2, 3, 4)
    hidden[1, 1] = 0.0
    found = hidden_token_attribution([lambda state: state.abs().sqrt().cumsum(1)], hidden, probes=2)
    assert found.norm[0, 0].isfinite().all() and found.norm[0, 1].isnan().all()


@pytest.mark.parametrize("way", WAYS)
def test_norms_that_overflow_are_reported(way: str) -> None:
    """The square of each probe's image is finite in float32, or not; their sum is not."""
    hidden = torch.ones(2, 1, 4)
    scale = torch.tensor([[[1.0]], [[1.5e19]]])
    found = hidden_token_attribution([lambda state: scale * state], hidden, **WAYS[way])
    assert found.norm[0, 0].isfinite().all()
    assert found.norm[0, 1].isnan().all() == (way != "spectral")
    assert found.contribution[0, :, 0, 0].isnan().tolist() == [False, way != "spectral"]


def test_norms_and_contributions_of_nan_are_nan() -> None:
    tangents = torch.randn(2, 3, 2, 4, 3, generator=torch.Generator().manual_seed(0))
    tangents[1, 0, 1, 2, 0] = torch.nan
    for norm in ("fro", "spectral"):
        found = attribution_norms(tangents, norm)
        assert found.isnan().nonzero().tolist() == [[1, 1, 2]]
    for value in BAD[:2]:
        shares = contributions(torch.tensor([[value, 1.0], [2.0, 3.0]]))
        assert shares[:, 0].isnan().all() and shares[:, 1].tolist() == [0.25, 0.75]
    shares = torch.full((1, 2, 2), torch.nan)
    assert tally_not_main(shares, torch.ones(1, 2, dtype=torch.bool)).total.isnan().all()


@pytest.mark.parametrize("shape", [(0, 4, 6), (2, 0, 6)])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("reverse", [False, True])
def test_empty_batches_have_empty_matrices(shape: tuple[int, ...], way: str, reverse: bool) -> None:
    layers = [lambda state: state.tanh()] * 2
    found = hidden_token_attribution(layers, torch.zeros(shape), reverse=reverse, **WAYS[way])
    assert found.norm.shape == (2, shape[0], shape[1], shape[1])
    pushed = push_forward(torch.tanh, torch.ones(1, 2, 3), torch.zeros(0, 1, 2, 3))
    assert pushed.shape == (0, 1, 2, 3)
    with pytest.raises(InputError, match="at must hold"):
        hidden_token_attribution([], torch.zeros(shape))


@pytest.mark.parametrize("shape", [(0, 4, 6), (2, 0, 6)])
@pytest.mark.parametrize("way", WAYS)
def test_empty_batches_count_for_nothing(way: str, shape: tuple[int, ...]) -> None:
    full = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(2))
    attribution, saliency = HiddenTokenAttribution(**WAYS[way], keep="matrices"), TokenSaliency()
    results = []
    for hidden in (torch.zeros(shape), full):
        mask, output = torch.ones(hidden.shape[:2], dtype=torch.bool), hidden.tanh()
        attribution.begin_forward({})
        attribution.update_layer(
            LayerCapture("layer.0", "layer.*", 0, hidden, output, mask, torch.tanh)
        )
        attribution.end_forward(True)
        saliency.begin_forward({})
        receive = saliency.watch_hidden(HiddenState("layer.*", 0, output, mask))
        assert receive is not None
        receive(torch.ones_like(output))
        results.append((attribution.compute(), saliency.compute()))
    (nothing, no_gradient), (everything, gradient) = results
    assert not nothing.tokens.any() and nothing.own.isnan().all() and nothing.not_main.isnan().all()
    assert not no_gradient.tokens.any() and no_gradient.norm.isnan().all()
    assert everything.tokens.item() == gradient.tokens.item() == 8
    assert torch.equal(everything.own, torch.ones(1, 1, dtype=torch.float64))
    torch.testing.assert_close(gradient.norm.item(), 6**0.5)
    assert [len(matrices.mask) for matrices in attribution.matrices] == [shape[0], 2]


# Texts with nothing, or next to nothing, to attribute


@pytest.mark.parametrize("way", WAYS)
def test_a_single_token_makes_all_of_itself(way: str) -> None:
    batch = {name: tensor[:, :1] for name, tensor in text_inputs((3, 3)).items()}
    result = attributed(build_chain("bert"), batch, **WAYS[way]).compute()
    assert torch.equal(result.own, torch.ones(LAYERS, 1, dtype=torch.float64))
    assert not result.not_main.any() and not result.skipped.any()
    assert result.distance.isnan().all()


@pytest.mark.parametrize("way", WAYS)
def test_texts_of_padding_alone_count_for_nothing(way: str) -> None:
    batch = text_inputs((7, 7))
    half = {**batch, "attention_mask": batch["attention_mask"] * torch.tensor([[1], [0]])}
    none = {**batch, "attention_mask": torch.zeros_like(batch["attention_mask"])}
    model = build_chain("bert")
    result = attributed(model, half, **WAYS[way]).compute()
    alone = attributed(model, first_alone(batch), **WAYS[way]).compute()
    for name, tensor in alone.tensors().items():
        torch.testing.assert_close(getattr(result, name), tensor, equal_nan=True, msg=name)
    nothing = attributed(model, none, **WAYS[way]).compute()
    assert nothing.own.isnan().all() and nothing.not_main.isnan().all()
    assert not nothing.tokens.any() and not nothing.skipped.any()


# Saliency


def backward(model: Any, *batches: dict[str, Tensor], factor: float = 1.0) -> TokenSaliency:
    """Run backward passes whose gradient is multiplied in the second example's third token."""
    observer = TokenSaliency()
    with Lens(model, observer):
        for batch in batches:
            state = model(**batch).last_hidden_state
            weight = torch.ones_like(state)
            weight[1:, 2] = factor
            (state * weight).tanh().sum().backward()
    return observer


@pytest.mark.parametrize("value", BAD[:2])
def test_saliency_leaves_out_examples_with_a_gradient_that_is_not_finite(value: float) -> None:
    batch = text_inputs((9, 6))
    observer = backward(build_chain("bert"), batch, factor=value)
    with pytest.warns(AttnLensWarning, match=r"1 example\(s\) held NaN or Inf and were left out"):
        result = observer.compute()
    assert result.skipped.tolist() == [1.0] * (LAYERS + 1)
    alone = backward(build_chain("bert"), first_alone(batch)).compute()
    for name, tensor in alone.tensors().items():
        if name != "skipped":
            found = getattr(result, name)
            torch.testing.assert_close(found, tensor, equal_nan=True, rtol=1e-4, atol=1e-6)
    (last,) = observer.last
    assert all(norm[0].isfinite().all() and norm[1].isnan().any() for norm in last.norm)


def test_saliency_leaves_out_examples_with_a_state_that_is_not_finite() -> None:
    batch = text_inputs((9, 6))
    model = spoilt(build_chain("bert"), PLACES["left the last layer"][0], torch.inf)
    with pytest.warns(AttnLensWarning):
        result = backward(model, batch).compute()
    assert result.skipped[-1].item() == 1.0
    assert result.tokens[:, 0].tolist() == [15.0] * LAYERS + [9.0]
    assert result.norm.isfinite().all() and result.product.isfinite().all()


# Merging, and passes that fail


def test_merging_with_an_observer_that_saw_nothing_changes_nothing() -> None:
    batch = text_inputs((9, 6))
    for kind, seen in (
        (HiddenTokenAttribution, attributed(build_chain("bert"), batch)),
        (TokenSaliency, backward(build_chain("bert"), batch)),
    ):
        expected = seen.compute().tensors()
        for merged in (seen.merge(kind()), kind().merge(seen)):
            for name, tensor in merged.compute().tensors().items():
                torch.testing.assert_close(tensor, expected[name], equal_nan=True)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (HiddenTokenAttribution, {"probes": None, "norm": "spectral"}),
        (HiddenTokenAttribution, {"label_names": ("other",)}),
        (HiddenTokenAttribution, {"radius": 3}),
        (TokenSaliency, {"label_names": ("other",)}),
        (TokenSaliency, {"positions": 5}),
    ],
)
def test_observers_of_other_settings_are_not_merged(kind: Any, settings: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="cannot be merged"):
        kind().merge(kind(**settings))
    with pytest.raises(InputError, match="Cannot merge"):
        kind().merge(
            TokenSaliency() if kind is HiddenTokenAttribution else HiddenTokenAttribution()
        )


def test_a_pass_with_wrong_labels_leaves_nothing_behind() -> None:
    model, batch = build_chain("bert"), text_inputs((9, 6))
    observer = HiddenTokenAttribution(keep="matrices", labels=torch.zeros(2, 3, dtype=torch.long))
    with torch.no_grad(), Lens(model, observer):
        with pytest.raises(InputError, match="labels"):
            model(**batch)
        assert not observer.sums and not observer.matrices
        observer.labels = None
        model(**batch)
    expected = attributed(build_chain("bert"), batch).compute().tensors()
    for name, tensor in observer.compute().tensors().items():
        torch.testing.assert_close(tensor, expected[name], equal_nan=True, msg=name)
