"""Layers found by structure, chains verified by identity, calls that can be repeated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from attnlens import Lens
from attnlens.attention import Recording
from attnlens.capture import LayerCapture
from attnlens.errors import UnsupportedAttentionError
from attnlens.observer import LayerObserver
from attnlens.tap.hooks import is_suspended, suspended
from attnlens.tap.sites import Catalogue
from tests.support.chains import CHAINS, build_chain
from tests.support.hooks import is_clean
from tests.support.models import TEXT, initialise, outputs, text_inputs
from tests.support.tiny import TinyAttention, hidden_states


class Layers(LayerObserver):
    """Keep every layer capture, and call a function at the end of each pass."""

    def __init__(self, at_end: Callable[[list[LayerCapture]], None] = lambda seen: None) -> None:
        super().__init__()
        self.seen: list[LayerCapture] = []
        self.at_end = at_end

    def update_layer(self, layer: LayerCapture) -> None:
        self.seen.append(layer)

    def end_forward(self, completed: bool) -> None:
        self.at_end(self.seen)

    def compute(self) -> None:
        raise NotImplementedError

    reset = merge = state_dict = load_state_dict = compute  # type: ignore[assignment]


def layers_of(model: nn.Module, *args: Any, kinds: Any = None, **inputs: Any) -> list[LayerCapture]:
    observer = Layers()
    with torch.no_grad(), Lens(model, observer, kinds=kinds):
        model(*args, **inputs)
    return observer.seen


def test_layers_are_found_by_structure() -> None:
    expected = {
        "albert": ["encoder.albert_layer_groups.0"],
        "xlnet": ["layer.0", "layer.1"],  # members of a list: XLNet cannot be checkpointed
        "wav2vec2": ["encoder.layers.0", "encoder.layers.1"],  # its convolutions are no layers
        "t5": ["encoder.block.0", "encoder.block.1"],
        "clip": [
            f"{tower}_model.encoder.layers.{index}"
            for tower in ("text", "vision")
            for index in (0, 1)
        ],
    }
    for name, names in expected.items():
        assert [layer.name for layer in Catalogue(build_chain(name)).layers()] == names


def test_encoders_and_decoders_are_told_apart() -> None:
    model, inputs = build_chain("bart"), CHAINS["bart"].inputs()
    assert [c.name for c in layers_of(model, **inputs)] == ["encoder.layers.0", "encoder.layers.1"]
    seen = layers_of(model, **inputs, kinds=("encoder", "decoder"))
    assert [c.name for c in seen][2:] == ["decoder.layers.0", "decoder.layers.1"]
    assert [c.link for c in seen] == ["first", "next", "first", "next"]
    assert [c.layer for c in seen] == [0, 1, 0, 1]


def test_a_shared_layer_counts_by_call() -> None:
    config = hf.AlbertConfig(**{**TEXT, "num_hidden_layers": 12}, embedding_size=16)
    seen = layers_of(initialise(hf.AlbertModel, config), **text_inputs())
    assert [c.layer for c in seen] == list(range(12))
    assert [c.link for c in seen] == ["first", *["next"] * 11]


@pytest.mark.parametrize("name", CHAINS)
def test_a_layer_can_be_repeated(name: str) -> None:
    model, inputs = build_chain(name), CHAINS[name].inputs()
    heard: list[int] = []

    def repeat(seen: list[LayerCapture]) -> None:
        for layer in seen:
            torch.testing.assert_close(layer.rerun(layer.hidden), layer.output)
        heard.append(len(seen))

    first, other = Layers(repeat), Layers()
    state = torch.get_rng_state()
    with torch.no_grad(), Lens(model, first), Lens(model, other):
        model(**inputs)
    assert torch.equal(torch.get_rng_state(), state)
    assert heard == [len(other.seen)] == [len(first.seen)]
    repeat(first.seen)  # also when everything is over
    assert is_clean(model)


def test_suspension_ends_with_its_block() -> None:
    with pytest.raises(RuntimeError), suspended():
        assert is_suspended()
        raise RuntimeError
    assert not is_suspended()


def test_sequence_major_states_are_turned_under_dropout_too() -> None:
    state = torch.get_rng_state()
    model = build_chain("xlnet").train()
    model(**text_inputs())
    drawn = torch.get_rng_state()
    torch.set_rng_state(state)
    first, second = layers_of(model, **text_inputs())
    assert first.output.shape == second.output.shape == (2, 19, 32)
    assert torch.equal(torch.get_rng_state(), drawn)


@pytest.mark.parametrize("lengths", [(19, 6), (5, 3, 5, 2, 5), (7,)])
def test_sequence_major_states_are_turned(lengths: tuple[int, ...]) -> None:
    """Five sequences of five tokens too, where the shape does not tell."""
    inputs, tokens = text_inputs(lengths), max(lengths)
    for name in ("xlnet", "bert"):
        model = build_chain(name)
        expected = model(**inputs, output_hidden_states=True).hidden_states[1:]
        seen = layers_of(model, **inputs)
        for layer, states in zip(seen, expected, strict=True):
            assert layer.output.shape == (len(lengths), tokens, 32)
            torch.testing.assert_close(layer.output, states)
            torch.testing.assert_close(layer.rerun(layer.hidden), layer.output)
            assert layer.mask.sum(-1).tolist() == list(lengths)


class Block(GradientCheckpointingLayer):
    def __init__(self) -> None:
        super().__init__()
        self.attention = TinyAttention()

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.attention(hidden)


class Stack(nn.Module):
    """Two blocks with something in between, and a norm at the end."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.between = between
        self.norm = nn.LayerNorm(32)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.norm(self.blocks[1](self.between(self.blocks[0](hidden))))


@pytest.mark.parametrize(
    ("between", "link"),
    [
        (lambda state: state, "next"),
        (nn.Identity(), "next"),
        (nn.Dropout(0.5).eval(), "next"),
        (lambda state: state + 0, "broken"),
        (lambda state: state.add_(1), "broken"),
        (lambda state: state.clone(), "broken"),
    ],
)
def test_a_chain_is_the_same_tensor(between: Callable[[Tensor], Tensor], link: str) -> None:
    seen = layers_of(Stack(between).eval(), hidden_states())
    assert [layer.link for layer in seen] == ["first", link]


def test_states_changed_in_place_are_kept_as_they_entered() -> None:
    class InPlace(Block):
        def forward(self, hidden: Tensor) -> Tensor:
            return hidden.add_(self.attention(hidden))

    model = Stack(nn.Identity()).eval()
    model.blocks = nn.ModuleList([InPlace(), InPlace()])
    hidden = hidden_states()
    entered = hidden.clone()
    first, _ = layers_of(model, hidden)
    assert torch.equal(first.hidden, entered)
    torch.testing.assert_close(
        first.rerun(first.hidden.clone()), entered + model.blocks[0].attention(entered)
    )


def test_masks_of_towers_do_not_mix() -> None:
    """As many text tokens as image patches: the text's padding is not the image's."""
    inputs = {**CHAINS["clip"].inputs(), **text_inputs((17, 6))}
    for layer in layers_of(build_chain("clip"), **inputs):
        expected = [17, 17] if "vision" in layer.stack else [17, 6]
        assert layer.mask.sum(-1).tolist() == expected


def test_a_lens_beside_a_rerun_hears_nothing_of_it() -> None:
    """Attention that a layer runs again is not a call of the model."""
    for name in ("bert", "deberta"):
        model, inputs = build_chain(name), CHAINS[name].inputs()
        recording = Recording()
        observer = Layers(lambda seen: [layer.rerun(layer.hidden) for layer in seen] and None)
        with torch.no_grad(), Lens(model, recording, observer):
            model(**inputs)
        assert [capture.layer for capture in recording.compute()] == [0, 1]


def test_positional_arguments_are_known_by_name() -> None:
    inputs = text_inputs()
    seen = layers_of(build_chain("bert"), inputs["input_ids"], inputs["attention_mask"])
    assert seen[0].mask.sum(-1).tolist() == [19, 6]


def test_packed_examples_are_one() -> None:
    hidden = hidden_states(1)
    model = Stack(nn.Identity()).eval()
    expected = layers_of(model, hidden)

    class Packed(Block):
        def __init__(self, block: nn.Module) -> None:
            super().__init__()
            self.block = block

        def forward(self, hidden: Tensor) -> Tensor:
            return self.block(hidden[None])[0]

    model.blocks = nn.ModuleList(Packed(block) for block in model.blocks)
    seen = layers_of(model, hidden[0])
    for ours, theirs in zip(seen, expected, strict=True):
        assert torch.equal(ours.output, theirs.output)
        torch.testing.assert_close(ours.rerun(ours.hidden), ours.output)


def test_layers_that_are_not_called_as_modules_are_an_error() -> None:
    model = Stack(nn.Identity()).eval()
    model.forward = lambda hidden: model.blocks[0].forward(hidden)  # type: ignore[assignment]
    with pytest.raises(UnsupportedAttentionError, match=r"called a layer such as blocks\.0"):
        layers_of(model, hidden_states())
    assert is_clean(model)


@pytest.mark.parametrize("name", ["bert", "bart", "t5", "xlnet"])
def test_recorded_outputs_of_the_model_are_its_own(name: str) -> None:
    """The model collects its hidden states by hooks, which a repeated layer must not reach."""
    model, inputs = build_chain(name), text_inputs((5, 3, 5, 2, 5))
    if name == "bart":
        inputs["decoder_input_ids"] = inputs["input_ids"]
    looked_at = model.encoder if name == "bart" else model
    with torch.no_grad():
        plain = outputs(model(**inputs, output_hidden_states=True))
        with Lens(looked_at, Layers(lambda seen: [c.rerun(c.hidden) for c in seen] and None)):
            looked = outputs(model(**inputs, output_hidden_states=True))
    assert plain.keys() == looked.keys()
    assert all(torch.equal(plain[path], looked[path]) for path in plain)
