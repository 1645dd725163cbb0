"""`TokenSaliency` against gradients from `torch.autograd.grad`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from attnlens import AttnLensError, HiddenTokenAttribution, Lens, TokenSaliency
from attnlens.errors import InputError
from attnlens.tap.passing import output_tensors
from attnlens.tap.sites import Catalogue
from tests.support.chains import build_chain
from tests.support.hooks import Siamese, hooks, is_clean
from tests.support.models import LAYERS, text_inputs


def loss_of(output: Any) -> Tensor:
    state = output.last_hidden_state
    weight = torch.linspace(-1, 1, state.shape[-1])
    return (state * weight).tanh().sum()


def expected(model: nn.Module, inputs: dict[str, Any]) -> list[tuple[Tensor, Tensor]]:
    """Gradient norms and products `[B, K]` of the embeddings and of every layer's output."""
    output = model(**inputs, output_hidden_states=True)
    gradients = torch.autograd.grad(loss_of(output), output.hidden_states)
    return [
        (gradient.norm(dim=-1).double(), (gradient * state).sum(-1).double())
        for gradient, state in zip(gradients, output.hidden_states, strict=True)
    ]


def batches() -> list[dict[str, Tensor]]:
    return [text_inputs(lengths, seed) for seed, lengths in enumerate([(9, 4), (7, 7), (12, 3)])]


def assert_pass(saliency: Any, reference: list[tuple[Tensor, Tensor]], mask: Tensor) -> None:
    assert [layer for _, layer in saliency.layers] == [-1, *range(LAYERS)]
    for row, (norm, product) in enumerate(reference):
        close = torch.testing.assert_close
        close(saliency.norm[row], norm.where(mask, 0.0), rtol=1e-4, atol=1e-6)
        close(saliency.product[row], product.where(mask, 0.0), rtol=1e-4, atol=1e-5)


def bert() -> Any:
    """A model in training mode, as checkpoints need it, but without dropout."""
    model = build_chain("bert").train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


class Checkpointed(nn.Module):
    """A checkpoint around a whole layer, hooks included, as earlier transformers made them."""

    def __init__(self, layer: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.layer = layer
        self.reentrant = reentrant

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        run = functools.partial(self.layer, **kwargs)
        return checkpoint(run, hidden, *args, use_reentrant=self.reentrant)


def checkpoint_forwards(model: Any, reentrant: bool) -> None:
    model.activation_checkpointing_enable({"use_reentrant": reentrant})


def checkpoint_layers(model: Any, reentrant: bool) -> None:
    layers = model.encoder.layer
    model.encoder.layer = nn.ModuleList(Checkpointed(layer, reentrant) for layer in layers)


WAYS: dict[str, Callable[[Any], None]] = {
    "plain": lambda model: None,
    "forwards": functools.partial(checkpoint_forwards, reentrant=False),
    "forwards, reentrant": functools.partial(checkpoint_forwards, reentrant=True),
    "layers": functools.partial(checkpoint_layers, reentrant=False),
    "layers, reentrant": functools.partial(checkpoint_layers, reentrant=True),
}


@pytest.mark.parametrize("way", WAYS)
def test_gradients_under_accumulation_and_checkpointing(way: str) -> None:
    model = bert()
    references = [expected(model, batch) for batch in batches()]
    saliency = TokenSaliency(positions=10)
    WAYS[way](model)
    with Lens(model, saliency):
        for batch, reference in zip(batches(), references, strict=True):
            loss_of(model(**batch)).backward()
            assert len(saliency.last) == 1
            assert_pass(saliency.last[0], reference, batch["attention_mask"] > 0)
    result = saliency.compute()
    assert [layer for _, layer in result.layers] == [-1, *range(LAYERS)]
    masks = [batch["attention_mask"] > 0 for batch in batches()]
    for row in range(LAYERS + 1):
        norms = [reference[row][0] for reference in references]
        products = [reference[row][1] for reference in references]
        for values, whole, place in (
            (norms, result.norm, result.position_norm),
            (products, result.product, result.position_product),
            ([p.abs() for p in products], result.magnitude, result.position_magnitude),
        ):
            real = torch.cat([v[mask] for v, mask in zip(values, masks, strict=True)])
            torch.testing.assert_close(whole[row, 0], real.mean(), rtol=1e-4, atol=1e-5)
            for position in (0, 3, 9):
                at = [
                    value[example, position]
                    for value, mask in zip(values, masks, strict=True)
                    for example in range(2)
                    if position < mask.shape[1] and mask[example, position]
                ]
                mean = torch.stack(at).mean()
                torch.testing.assert_close(place[row, position], mean, rtol=1e-4, atol=1e-5)
    assert result.tokens[0].tolist() == [sum(int(mask.sum()) for mask in masks)]


@pytest.mark.parametrize("name", ["xlnet", "albert", "distilbert", "modernbert", "t5"])
def test_families(name: str) -> None:
    model, batch = build_chain(name), text_inputs((8, 8))
    kept: list[Tensor] = []
    layer = Catalogue(model).layers()[0].module
    handle = layer.register_forward_hook(lambda m, args, out: kept.extend(output_tensors(out)[:1]))
    loss = loss_of(model(**batch))
    handle.remove()
    gradient = torch.autograd.grad(loss, kept[0])[0]
    gradient = gradient.transpose(0, 1) if name == "xlnet" else gradient
    saliency = TokenSaliency()
    with Lens(model, saliency):
        loss_of(model(**batch)).backward()
    (seen,) = saliency.last
    row = [layer for _, layer in seen.layers].index(0)
    torch.testing.assert_close(seen.norm[row], gradient.norm(dim=-1).double(), rtol=1e-4, atol=1e-6)


def test_gradients_are_unchanged_beside_attribution() -> None:
    gradients = []
    for observers in ([], [TokenSaliency(), HiddenTokenAttribution(probes=1)]):
        model = build_chain("bert")
        for _ in range(2):
            if observers:
                with Lens(model, *observers):
                    loss_of(model(**text_inputs())).backward()
            else:
                loss_of(model(**text_inputs())).backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
        assert is_clean(model)
    assert all(torch.equal(left, right) for left, right in zip(*gradients, strict=True))


def test_labels() -> None:
    model, batch = build_chain("bert"), text_inputs()

    def labels(inputs: dict[str, Any]) -> Tensor:
        return inputs["input_ids"] % 3 - 1

    saliency = TokenSaliency(labels=labels, label_names=("even", "odd"))
    with Lens(model, saliency):
        loss_of(model(**batch)).backward()
    reference, mask = expected(model, batch), batch["attention_mask"] > 0
    result = saliency.compute()
    for group in (0, 1):
        chosen = (labels(batch) == group) & mask
        assert result.tokens[1, group] == chosen.sum()
        mean = reference[1][0][chosen].mean()
        torch.testing.assert_close(result.norm[1, group], mean, rtol=1e-4, atol=1e-6)
    saliency.labels = torch.zeros(1, 1, dtype=torch.long)
    with pytest.raises(InputError, match="labels"), Lens(model, saliency):
        loss_of(model(**batch)).backward()


def test_two_passes_of_one_backward() -> None:
    encoder = build_chain("bert")
    left, right = batches()[:2]
    saliency = TokenSaliency()
    model = Siamese(encoder)
    with Lens(model, saliency):
        model(left, right).sum().backward()
    assert [tuple(seen.norm[0].shape) for seen in saliency.last] == [(2, 9), (2, 7)]
    assert saliency.compute().tokens[0, 0] == 13 + 14


def test_chosen_layers_only() -> None:
    model, saliency = build_chain("bert"), TokenSaliency(layers=[1])
    with Lens(model, saliency):
        loss_of(model(**text_inputs())).backward()
    assert saliency.compute().layers == (("encoder.layer.*", 1),)


def test_merge_and_state() -> None:
    model = build_chain("bert")

    def run(*parts: dict[str, Tensor]) -> TokenSaliency:
        saliency = TokenSaliency()
        with Lens(model, saliency):
            for part in parts:
                loss_of(model(**part)).backward()
        return saliency

    whole, first, second = run(*batches()), run(batches()[0]), run(*batches()[1:])
    restored = TokenSaliency()
    restored.load_state_dict(first.merge(second).state_dict())
    for name, tensor in whole.compute().tensors().items():
        torch.testing.assert_close(getattr(restored.compute(), name), tensor, equal_nan=True)
    first.reset()
    assert not first.last


def test_a_backward_after_the_lens_is_not_seen() -> None:
    model, saliency = build_chain("bert"), TokenSaliency()
    with Lens(model, saliency):
        loss = loss_of(model(**text_inputs()))
    loss.backward()
    assert hooks(model) == 0
    with pytest.raises(AttnLensError, match="backward"):
        saliency.compute()


def test_nothing_is_kept_without_gradients() -> None:
    model, saliency = build_chain("bert"), TokenSaliency()
    with torch.no_grad(), Lens(model, saliency) as lens:
        model(**text_inputs())
        layers = lens._tap.layers if lens._tap is not None else None
        assert layers is not None and not layers._late and not layers._tails
    assert not saliency.last


def test_positions_count_from_the_first_real_token_on_either_side_of_padding() -> None:
    from attnlens import Lens, TokenSaliency
    from tests.support import models

    model, sides = models.build("bert"), []
    ids = torch.tensor([[5, 6, 7, 8, 9, 10], [11, 12, 13, 14, 15, 16]])
    for mask in ([[1] * 6, [1] * 4 + [0] * 2], [[1] * 6, [0] * 2 + [1] * 4]):
        keep = torch.tensor(mask)
        real = keep.bool()
        shifted = torch.ones_like(ids)
        for row in range(2):
            shifted[row, real[row]] = ids[row, : int(keep[row].sum())]
        positions = (keep.cumsum(1) - 1).clamp(min=0)
        with Lens(model, saliency := TokenSaliency(positions=8)):
            output = model(shifted, attention_mask=keep, position_ids=positions)[0]
            (output.square().sum(-1) * keep).sum().backward()
        sides.append(saliency.compute())
    right, left = sides
    for name in ("position_norm", "position_product", "position_magnitude"):
        found, expected = getattr(left, name), getattr(right, name)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6, equal_nan=True)
