"""Head importance: gates written out, and every way a backward pass can run."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import peft
import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from transformers import PreTrainedModel

from attnlens import Capture, HeadImportance, Lens, record
from attnlens.attention import Recording
from attnlens.attention.gates import gate_sums, head_importance, unit_layers
from attnlens.attention.importance import HeadImportanceResult
from attnlens.errors import AttnLensWarning, CaptureError, InputError
from attnlens.observer import GradientObserver
from tests.support import models
from tests.support.hooks import hooks, is_clean, patched
from tests.support.reference import effective_attention

GATED = ["bert", "roberta", "distilbert", "vit", "t5"]


class Gradients(GradientObserver):
    """Keep every capture with its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Capture, Tensor]] = []

    def update(self, capture: Capture) -> None:
        pass

    def update_gradient(self, capture: Capture, gradient: Tensor) -> None:
        self.seen.append((capture, gradient))

    def compute(self) -> None:
        raise NotImplementedError

    reset = merge = state_dict = load_state_dict = compute  # type: ignore[assignment]


def scalar_loss(hidden: Tensor, mask: Tensor | None = None) -> Tensor:
    """A loss that weighs every real position and component differently."""
    weight = torch.linspace(-1, 2, hidden[0].numel(), dtype=hidden.dtype).view(hidden[0].shape)
    terms = (hidden * weight).sin()
    return terms.sum() if mask is None else (terms * mask[..., None]).sum()


def run(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    hidden = model(**inputs).last_hidden_state
    mask = inputs.get("attention_mask")
    return scalar_loss(hidden, None if mask is None else mask.to(hidden.dtype))


@contextmanager
def gated(model: PreTrainedModel, inputs: dict[str, Tensor]) -> Iterator[Tensor]:
    """Multiply each head's slice of the input of W_O by a gate: `[L, B, H]`, all one."""
    captures = record(model, **inputs)
    batch, heads, *_ = captures[0].shape
    gates = torch.ones(len(captures), batch, heads, dtype=torch.float64, requires_grad=True)

    def hook(layer: int) -> Callable[[nn.Module, tuple[Tensor]], tuple[Tensor]]:
        def apply(module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
            split = args[0].unflatten(-1, (heads, -1))
            return ((split * gates[layer][:, None, :, None]).flatten(-2),)

        return apply

    with ExitStack() as stack:
        for layer, capture in enumerate(captures):
            assert capture.output_projection is not None
            module = model.get_submodule(capture.output_projection.name)
            stack.callback(module.register_forward_pre_hook(hook(layer)).remove)
        yield gates


def by_gates(model: PreTrainedModel, inputs: dict[str, Tensor]) -> Tensor:
    """`E_x |∂L/∂ξ_h|`, `[L, H]`."""
    with gated(model, inputs) as gates:
        loss = run(model, inputs)
    return torch.autograd.grad(loss, gates)[0].abs().mean(1)


def importance(
    model: nn.Module, inputs: dict[str, Tensor], observer: HeadImportance | None = None
) -> HeadImportanceResult:
    observer = observer or HeadImportance()
    with Lens(model, observer):
        run(model, inputs).backward()
    return observer.compute()


def small(name: str) -> tuple[PreTrainedModel, dict[str, Tensor]]:
    """A family in float64 and its inputs."""
    inputs = models.inputs(name)
    model = models.build(name).double()
    return model, {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}


@pytest.mark.parametrize("name", GATED)
def test_importance_is_the_derivative_with_respect_to_a_gate(name: str) -> None:
    model, inputs = small(name)
    expected = by_gates(model, inputs)
    found = importance(model, inputs)
    assert (found.importance / expected - 1).abs().max() < 1e-10
    assert expected.min() > 1e-6
    assert found.examples.eq(2).all() and found.seen.eq(2).all() and found.skipped.eq(0).all()
    assert found.without_gradient == ()
    assert is_clean(model)


@pytest.mark.parametrize(
    ("name", "implementation"),
    [("bert", "sdpa"), ("bert", "eager"), ("modernbert", "sdpa"), ("eurobert", "sdpa")],
)
def test_the_gradient_sees_effective_attention_only(name: str, implementation: str) -> None:
    model = models.build(name, implementation).double()
    inputs, observer, recording = models.inputs(name), Gradients(), Recording()
    with Lens(model, observer, recording):
        run(model, inputs).backward()
    kept = {capture.layer: capture for capture in recording.captures}
    assert len(observer.seen) == len(kept) == models.LAYERS
    for seen, gradient in observer.seen:
        capture = kept[seen.layer]
        attention = capture.attention()
        mask = capture.support.mask(0, capture.shape[2])
        by_attention = gradient @ capture.value.mT  # ∂L/∂A
        effective = effective_attention(attention, capture.value, mask, capture.projection)
        whole = (attention * by_attention).sum((-1, -2))
        part = (effective * by_attention).sum((-1, -2))
        context = (seen.context * gradient).sum((-1, -2))
        scale = whole.abs().max()
        assert (whole - part).abs().max() / scale < 1e-10
        assert (whole - context).abs().max() / scale < 1e-10
        assert (attention - effective).abs().max() > 1e-3  # the two do differ


def _deberta() -> PreTrainedModel:
    config = hf.DebertaV2Config(**models.TEXT, relative_attention=True, pos_att_type=["p2c", "c2p"])
    return models.initialise(hf.DebertaV2Model, config, "eager").double()


def _xlnet() -> PreTrainedModel:
    config = hf.XLNetConfig(vocab_size=96, d_model=32, n_layer=2, n_head=4, d_inner=48)
    return models.initialise(hf.XLNetModel, config, "eager").double()


class TorchEncoder(nn.Module):
    """torch's own encoder, which calls scaled dot-product attention directly."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 48, 0.0, batch_first=True, dtype=torch.float64)
        self.embed = nn.Embedding(96, 32, dtype=torch.float64)
        self.stack = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, input_ids: Tensor) -> Any:
        hidden = self.embed(input_ids)
        for layer in self.stack.layers:
            if self.training:
                hidden = torch.utils.checkpoint.checkpoint(layer, hidden, use_reentrant=True)
            else:
                hidden = layer(hidden)
        return hf.modeling_outputs.BaseModelOutput(hidden)


def _torch_encoder() -> nn.Module:
    torch.manual_seed(0)
    return TorchEncoder().eval()


# How each traced family multiplies A by V, and the parameter that is W_O.
TRACED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "bmm of folded heads": (_deberta, "encoder.layer.{}.attention.output.dense.weight"),
    "einsum": (_xlnet, "layer.{}.rel_attn.o"),
    "direct sdpa": (_torch_encoder, "stack.layers.{}.self_attn.out_proj.weight"),
}


@pytest.mark.parametrize("name", TRACED)
def test_attention_outside_the_interface(name: str) -> None:
    build, weight_name = TRACED[name]
    model = build()
    inputs = {"input_ids": models.text_inputs((19,))["input_ids"]}
    found = importance(model, inputs).importance
    for layer in range(2):
        weight = model.get_parameter(weight_name.format(layer))
        assert weight.grad is not None
        product = (weight * weight.grad).reshape(32, 4, 8)  # a gate scales a head's columns
        expected = product.sum((0, 2)).abs()
        assert (found[layer] / expected - 1).abs().max() < 1e-10


@pytest.mark.parametrize(
    ("name", "reentrant"),
    [(name, mode) for name in ("bert", "t5", "deberta") for mode in (False, True)]
    + [("torch", True)],  # it checkpoints in one way only
)
def test_gradient_checkpointing(name: str, reentrant: bool) -> None:
    traced = {"deberta": _deberta, "torch": _torch_encoder}
    model = traced[name]() if name in traced else models.build(name).double()
    inputs = models.text_inputs()
    if name == "torch":
        inputs.pop("attention_mask")
    expected = importance(model, inputs)
    without_dropout(model)
    if isinstance(model, PreTrainedModel):
        model.activation_checkpointing_enable({"use_reentrant": reentrant})
    before = hooks(model)
    found = importance(model.train(), inputs)
    assert hooks(model) == before and not patched()
    for quantity, tensor in expected.tensors().items():
        assert torch.allclose(found.tensors()[quantity], tensor, rtol=1e-12, atol=0), quantity


def without_dropout(model: nn.Module) -> None:
    """So that training mode computes what evaluation mode does."""
    for module in model.modules():
        for name in ("p", "dropout_prob", "dropout", "attention_dropout", "drop_prob"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


class Repeated(nn.Module):
    """One layer that is its own successor, checkpointed the reentrant way when training."""

    def __init__(self) -> None:
        super().__init__()
        self.bert = models.build("bert").double()

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        hidden = self.bert.embeddings(input_ids)
        mask = attention_mask[:, None, None].bool()
        for _ in range(3):
            layer = partial(self.bert.encoder.layer[0], attention_mask=mask)
            if self.training:
                hidden = torch.utils.checkpoint.checkpoint(layer, hidden, use_reentrant=True)
            else:
                hidden = layer(hidden)
        return hf.modeling_outputs.BaseModelOutput(hidden)


def test_each_replay_belongs_to_its_own_layer_and_forward() -> None:
    """One module is replayed once per layer, and two forward passes wait for one backward pass."""
    model = Repeated().eval()
    batches = [models.text_inputs((19, 6), seed=1), models.text_inputs((11, 9, 8), seed=2)]

    def both() -> Tensor:
        observer = HeadImportance()
        with Lens(model, observer):
            (run(model, batches[0]) + 3 * run(model, batches[1])).backward()
        assert observer.compute().examples.eq(5).all()
        return observer.compute().importance

    expected = both()
    assert (expected[0] / expected[2] - 1).abs().min() > 1e-3
    without_dropout(model)
    model.train()
    assert torch.allclose(both(), expected, rtol=1e-12, atol=0)


def test_gradient_accumulation_and_merging() -> None:
    model, batches = models.build("bert"), [models.text_inputs((9, 19), seed) for seed in range(3)]
    whole, parts = HeadImportance(), [HeadImportance() for _ in batches]
    with Lens(model, whole):
        for batch in batches:
            run(model, batch).backward()
    for batch, part in zip(batches, parts, strict=True):
        importance(model, batch, part)
    merged = parts[0].merge(parts[1]).merge(parts[2])
    restored = HeadImportance()
    restored.load_state_dict(merged.state_dict())
    for name, tensor in whole.compute().tensors().items():
        assert torch.equal(restored.compute().tensors()[name], tensor), name


def test_loss_scale_is_divided_out() -> None:
    model, inputs = small("bert")
    expected = importance(model, inputs).importance
    for scale in (1024.0, lambda: torch.tensor(1024.0)):
        observer = HeadImportance(loss_scale=scale)
        with Lens(model, observer):
            (run(model, inputs) * 1024).backward()
        assert torch.allclose(observer.compute().importance, expected, rtol=1e-12, atol=0)


def test_frozen_layers_are_named_and_not_zero() -> None:
    model, inputs = small("bert")
    model.embeddings.requires_grad_(False)
    model.encoder.layer[0].requires_grad_(False)
    found = importance(model, inputs)
    assert found.without_gradient == (found.layers[0],)
    assert found.importance[0].isnan().all() and found.importance[1].gt(0).all()
    assert found.seen.eq(2).all() and found.examples[0].eq(0).all()


def test_no_backward_pass_is_said() -> None:
    model, inputs = small("bert")
    observer = HeadImportance()
    with pytest.warns(AttnLensWarning, match="No gradient reached"), Lens(model, observer):
        loss = run(model, inputs)
    loss.backward()  # too late: the lens is closed
    assert observer.compute().importance.isnan().all()
    assert len(observer.compute().without_gradient) == models.LAYERS


def test_an_example_that_is_not_finite_is_skipped_and_counted() -> None:
    model, inputs = small("bert")
    expected, observer = HeadImportance(), HeadImportance()
    with Lens(model, expected):
        scalar_loss(model(**inputs).last_hidden_state[:1]).backward()
    with Lens(model, observer):
        hidden = model(**inputs).last_hidden_state
        (scalar_loss(hidden[:1]) + (hidden[1] * torch.nan).sum()).backward()
    found = observer.compute()
    assert found.examples.eq(1).all() and found.skipped.eq(1).all()
    assert torch.allclose(found.importance, 2 * expected.compute().importance, rtol=1e-9, atol=0)


def test_a_nan_loss_spoils_nothing() -> None:
    model, inputs = small("bert")
    observer = HeadImportance()
    expected = importance(model, inputs).importance
    with Lens(model, observer):
        run(model, inputs).backward()
        (run(model, inputs) * torch.nan).backward()
    found = observer.compute()
    assert torch.equal(found.importance, expected)
    assert found.examples.eq(2).all() and found.skipped.eq(2).all() and found.seen.eq(4).all()


def test_padding_counts_nowhere() -> None:
    """Even where the loss depends on padded positions."""
    model = models.build("bert").double()
    short = models.text_inputs((6,))
    alone = importance(model, short)
    ids = torch.cat([short["input_ids"], torch.full((1, 5), 7)], 1)
    mask = (torch.arange(11) < 6).long()[None]
    observer = HeadImportance()
    with Lens(model, observer):
        hidden = model(input_ids=ids, attention_mask=mask).last_hidden_state
        (scalar_loss(hidden[:, :6]) + 1e3 * hidden[:, 6:].sum()).backward()
    found = observer.compute()
    assert torch.allclose(found.token_importance, alone.token_importance, rtol=1e-9, atol=0)
    assert torch.allclose(found.importance, alone.importance, rtol=1e-9, atol=0)


def test_positions_that_the_loss_does_not_use_are_not_counted() -> None:
    model, inputs = small("bert")
    observer, recorded = HeadImportance(), Gradients()
    with Lens(model, observer, recorded):
        model(**inputs).last_hidden_state[:, 0].sin().sum().backward()
    found = observer.compute()
    capture, gradient = next(s for s in recorded.seen if s[0].layer == models.LAYERS - 1)
    first = (capture.context * gradient)[:, :, 0].sum(-1)  # the last layer: only [CLS] is used
    assert torch.allclose(found.token_importance[-1], first.abs().mean(0), rtol=1e-12, atol=0)
    assert torch.allclose(found.importance[-1], first.abs().mean(0), rtol=1e-9, atol=0)
    assert (found.token_importance[0] < found.importance[0]).all()


def test_normalised_layers_have_unit_norm() -> None:
    model, inputs = small("bert")
    plain, unit = (
        importance(model, inputs),
        importance(model, inputs, HeadImportance(normalise=True)),
    )
    norm = plain.importance.norm(dim=1, keepdim=True)
    assert torch.allclose(unit.importance, plain.importance / norm, rtol=1e-12, atol=0)
    rows = torch.tensor([[3.0, 4.0, torch.nan], [0.0, 0.0, 0.0]])
    scaled = unit_layers(rows)
    assert torch.allclose(scaled[0, :2], torch.tensor([0.6, 0.8])) and scaled[0, 2].isnan()
    assert scaled[1].eq(0).all()


def test_the_pure_function_is_a_loop() -> None:
    generator = torch.Generator().manual_seed(0)
    context, gradient = (
        torch.randn(3, 2, 5, 4, dtype=torch.float64, generator=generator) for _ in range(2)
    )
    mask = torch.arange(5) < torch.tensor([5, 2, 0])[:, None]
    expected = torch.zeros(2, dtype=torch.float64)
    for head in range(2):
        for example in range(3):
            total = 0.0
            for position in range(5):
                if mask[example, position]:
                    row = context[example, head, position] * gradient[example, head, position]
                    total += row.sum().item()
            expected[head] += abs(total) / 3
    assert torch.allclose(head_importance(context, gradient, mask), expected, rtol=1e-14, atol=0)
    half = head_importance(context, gradient, mask, loss_scale=2.0)
    assert torch.allclose(half * 2, expected, rtol=1e-14, atol=0)
    windows = gate_sums(
        context.repeat_interleave(2, 0), gradient.repeat_interleave(2, 0), windows=2
    )
    alone = gate_sums(context, gradient)
    assert torch.allclose(windows.derivative, 2 * alone.derivative, rtol=1e-14, atol=0)
    assert torch.equal(windows.positions, 2 * alone.positions)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"gradient": torch.ones(1, 1, 2, 3)}, "one shape"),
        ({"mask": torch.ones(1, 2)}, "mask must be bool"),
        ({"loss_scale": 0.0}, "loss_scale"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], match: str) -> None:
    tensor = torch.ones(1, 2, 3, 4)
    with pytest.raises(InputError, match=match):
        head_importance(**{"context": tensor, "gradient": tensor} | arguments)
    with pytest.raises(InputError, match="loss_scale"):
        HeadImportance(loss_scale=-1.0)


def test_low_rank_adapters() -> None:
    model = models.build("bert").double()
    expected = importance(model, models.text_inputs()).importance
    config = peft.LoraConfig(target_modules=["query", "value"], r=2, lora_dropout=0.0)
    adapted = peft.get_peft_model(model, config)
    found = importance(adapted, models.text_inputs())
    # The first layer's queries and values are trainable, so every context has a gradient.
    assert torch.allclose(found.importance, expected, rtol=1e-12, atol=0)


def test_autocast() -> None:
    model, inputs = models.build("bert"), models.text_inputs()
    exact = importance(model, inputs).importance
    observer = HeadImportance()
    with Lens(model, observer), torch.autocast("cpu", torch.bfloat16):
        run(model, inputs).backward()
    found = observer.compute().importance
    assert found.dtype == torch.float64
    assert ((found - exact).norm() / exact.norm()) < 0.1
    assert not torch.equal(found, exact)


def test_losses_and_gradients_are_bit_identical() -> None:
    gradients = []
    for lens in (False, True):
        model = models.build("bert").train()
        torch.manual_seed(3)
        with ExitStack() as stack:
            if lens:
                stack.enter_context(Lens(model, HeadImportance()))
            run(model, models.text_inputs()).backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_a_context_changed_in_place_is_an_error() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, hidden: Tensor) -> Tensor:
            attention = (self.linear(hidden) @ hidden.mT).softmax(-1)
            context = attention @ hidden
            return self.linear(context.mul_(2))

    model = InPlace()
    with pytest.raises(CaptureError, match="in place"), Lens(model, HeadImportance()):
        model(torch.randn(1, 3, 4)).sum().backward()
    assert is_clean(model)


def test_nothing_is_kept_alive() -> None:
    model, inputs = small("bert")
    observer = HeadImportance()
    gc.collect()
    gc.disable()
    try:
        with Lens(model, observer) as lens:
            assert lens._tap is not None and lens._tap.gradients is not None
            hidden = model(**inputs).last_hidden_state
            alive = [weakref.ref(hook) for hook in lens._tap.gradients._hooks]
            assert len(alive) == models.LAYERS
            scalar_loss(hidden).backward()
            del hidden
            assert not any(hook() for hook in alive)
    finally:
        gc.enable()


def test_unfinished_backward_passes_leave_no_hook() -> None:
    model, inputs = small("bert")
    observer = HeadImportance()
    with Lens(model, observer) as lens:
        run(model, inputs).backward()
        late = run(model, inputs)
        assert lens._tap is not None and lens._tap.gradients is not None
        waiting = list(lens._tap.gradients._hooks)
    assert waiting and not any(hook.handle.hooks_dict_ref() for hook in waiting)
    before = observer.compute().examples
    late.backward()
    assert torch.equal(observer.compute().examples, before)


def test_only_chosen_layers() -> None:
    model, inputs = small("bert")
    assert [layer for _, layer in importance(model, inputs, HeadImportance(layers=[1])).layers] == [
        1
    ]
