"""What other code does around a forward pass: threads, tasks, transforms, counters, patches."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import eval_frame
from torch._subclasses import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import DebertaV2Config, DebertaV2Model
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from attnlens import HeadImportance, HeadStatistics, HiddenTokenAttribution, Lens, TokenSaliency
from attnlens.errors import AttnLensWarning
from tests.support import models
from tests.support.hooks import is_clean

INPUTS = models.text_inputs()
NAMES = ["bert", "deberta"]


def build(name: str) -> nn.Module:
    if name != "deberta":
        return models.build(name)
    torch.manual_seed(0)
    sizes = {**models.SIZES, "vocab_size": models.VOCABULARY}
    return DebertaV2Model(DebertaV2Config(**sizes, relative_attention=True)).eval()


@pytest.fixture(params=NAMES)
def model(request: pytest.FixtureRequest) -> nn.Module:
    return build(request.param)


def in_threads(*works: Callable[[], Any]) -> None:
    errors: list[BaseException] = []

    def run(work: Callable[[], Any]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_a_lens_counts_the_forward_passes_of_its_own_thread(model: nn.Module) -> None:
    statistics, alone = HeadStatistics(), HeadStatistics()
    with torch.no_grad():
        expected = model(**INPUTS)[0]
        with Lens(model, alone):
            model(**INPUTS)

    def others() -> None:
        for _ in range(5):
            with torch.no_grad():
                assert torch.equal(model(**INPUTS)[0], expected)

    def own() -> None:
        with Lens(model, statistics), torch.no_grad():
            in_threads(others, others, lambda: None)
            for _ in range(3):
                assert torch.equal(model(**INPUTS)[0], expected)
            in_threads(others)

    own()
    found = statistics.compute()
    assert found.layers == alone.compute().layers
    assert found.examples.eq(6).all()
    torch.testing.assert_close(found.effective_norm, alone.compute().effective_norm)


def test_threads_with_lenses_of_their_own_on_one_model(model: nn.Module) -> None:
    observers = [HeadStatistics() for _ in range(3)]
    barrier = threading.Barrier(3)

    def work(observer: HeadStatistics) -> Callable[[], None]:
        def run() -> None:
            with Lens(model, observer), torch.no_grad():
                for _ in range(4):
                    barrier.wait(timeout=1200)
                    model(**INPUTS)
                barrier.wait(timeout=1200)

        return run

    in_threads(*map(work, observers))
    assert is_clean(model)
    first, *rest = observers
    for other in rest:
        assert other.compute().examples.eq(8).all()
        first.merge(other)
    assert first.compute().examples.eq(24).all()
    assert len(first.compute().layers) == models.LAYERS


def test_forward_passes_of_other_threads_alone_are_told_of(model: nn.Module) -> None:
    with pytest.warns(AttnLensWarning, match=r"2 began in other threads: open a lens.*merge"):
        with Lens(model):
            in_threads(lambda: model(**INPUTS), lambda: model(**INPUTS))


def test_tasks_whose_forward_yields(model: nn.Module) -> None:
    class Yielding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = model

        async def forward(self, **inputs: Tensor) -> Tensor:
            await asyncio.sleep(0)
            output = self.encoder(**inputs)
            await asyncio.sleep(0)
            return output[0]

    async def several() -> None:
        await asyncio.gather(*(wrapper(**INPUTS) for _ in range(4)))

    wrapper, statistics = Yielding(), HeadStatistics()
    with Lens(wrapper, statistics), torch.no_grad():
        asyncio.run(several())
    assert statistics.compute().examples.eq(8).all()
    assert len(statistics.compute().layers) == models.LAYERS


def test_the_model_inside_a_wrapper_may_be_called_itself(model: nn.Module) -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, **inputs: Tensor) -> Any:
            return self.model(**inputs)

    wrapper, statistics = Wrapper(), HeadStatistics()
    with torch.no_grad():
        expected = model(**INPUTS)[0]
        with Lens(wrapper, statistics, HiddenTokenAttribution()):
            for run in (model, model, wrapper, model):
                assert torch.equal(run(**INPUTS)[0], expected)
    assert statistics.compute().examples.eq(8).all()
    assert is_clean(wrapper)


def embedded(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda hidden: model(inputs_embeds=hidden)[0]


def hidden_of(model: nn.Module) -> Tensor:
    return model.get_input_embeddings()(INPUTS["input_ids"]).detach()


def gradients(model: nn.Module) -> list[Tensor]:
    def loss(parameters: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, parameters, (), INPUTS)[0].square().sum()

    return list(torch.func.grad(loss)(dict(model.named_parameters())).values())


def tangents(model: nn.Module) -> list[Tensor]:
    hidden = hidden_of(model)
    with sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        return list(torch.func.jvp(embedded(model), (hidden,), (hidden,)))


def mapped(model: nn.Module) -> list[Tensor]:
    run = embedded(model)
    with torch.no_grad():
        return [torch.vmap(lambda hidden: run(hidden[None]))(hidden_of(model))]


def exported(model: nn.Module) -> list[Tensor]:
    program = torch.export.export(model, (), INPUTS)
    with torch.no_grad():
        return [program.module()(**INPUTS)[0]]


class FirstOutput(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(ids)[0]


def traced(model: nn.Module) -> list[Tensor]:
    ids = INPUTS["input_ids"]
    with torch.no_grad():
        return [torch.jit.trace(FirstOutput(model).eval(), ids, check_trace=False)(ids)]


def faked(model: nn.Module) -> list[Tensor]:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        output = model(input_ids=mode.from_tensor(INPUTS["input_ids"]))[0]
    return [torch.zeros(output.shape)]


TRANSFORMS = {
    "a torch.func transform": [gradients, tangents, mapped],
    "torch.export": [exported],
    "torch.jit.trace": [traced],
    "fake or meta tensors": [faked],
}


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*jit.*")
@pytest.mark.parametrize(
    ("named", "transform"),
    [(named, transform) for named, several in TRANSFORMS.items() for transform in several],
)
def test_transforms_run_as_without_a_lens_which_says_so(
    model: nn.Module, named: str, transform: Callable[[nn.Module], list[Tensor]]
) -> None:
    expected = transform(model)
    lens = Lens(model, HeadStatistics(), HiddenTokenAttribution())
    with pytest.warns(AttnLensWarning, match=rf"Forward passes under {named} ran inside the lens"):
        with lens:
            found = transform(model)
    assert len(found) == len(expected) and all(map(torch.equal, found, expected))
    assert is_clean(model)
    with lens, torch.no_grad():  # and afterwards all is as ever
        model(**INPUTS)
    assert lens.observers[0].compute().examples.eq(2).all()


@pytest.mark.parametrize("backward", [False, True])
def test_own_work_is_not_counted(model: nn.Module, backward: bool) -> None:
    observers = (HeadStatistics(), HiddenTokenAttribution(), TokenSaliency(), HeadImportance())

    def run() -> None:
        with torch.set_grad_enabled(backward):
            output = model(**INPUTS)[0]
            if backward:
                output.sum().backward()

    def count() -> int:
        with FlopCounterMode(display=False) as counter:
            run()
        return counter.get_total_flops()

    expected = count()
    with Lens(model, *observers[: 4 if backward else 2]):
        assert count() == expected
    assert observers[1].compute().layers


class Names(TorchFunctionMode):
    """Write down which torch functions run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


def test_own_work_is_not_seen_by_modes_of_the_user(model: nn.Module) -> None:
    def names() -> list[str]:
        with Names() as mode, torch.no_grad():
            model(**INPUTS)
        return mode.names

    expected = names()
    statistics = HeadStatistics()
    with Lens(model, statistics, HiddenTokenAttribution()):
        assert names() == expected
        assert names() == expected
    assert statistics.compute().examples.eq(4).all()


@pytest.fixture(params=["class", "instance"])
def patched(request: pytest.FixtureRequest) -> Iterator[list[str]]:
    """Someone else's patch of the attention interface, which lists the implementations asked."""
    asked: list[str] = []
    original = AttentionInterface.get_interface
    owner: Any = AttentionInterface if request.param == "class" else ALL_ATTENTION_FUNCTIONS

    def of_class(self: Any, implementation: str, default: Any) -> Any:
        asked.append(implementation)
        return original(self, implementation, default)

    def of_instance(implementation: str, default: Any) -> Any:
        return of_class(ALL_ATTENTION_FUNCTIONS, implementation, default)

    patch = of_class if owner is AttentionInterface else of_instance
    before = vars(owner).get("get_interface")
    owner.get_interface = patch
    yield asked
    assert vars(owner)["get_interface"] is patch
    if before is None:
        del owner.get_interface
    else:
        owner.get_interface = before


@pytest.mark.parametrize("name", ["bert", "vit"])
def test_patches_of_others_go_on_and_stay(name: str, patched: list[str]) -> None:
    model, inputs = models.build(name), models.inputs(name)
    statistics = HeadStatistics()
    with Lens(model, statistics), torch.no_grad():
        model(**inputs)
    assert patched == ["sdpa"] * models.LAYERS
    assert len(statistics.compute().layers) == models.LAYERS


@pytest.mark.parametrize("name", NAMES)
def test_a_stance_that_is_set_inside_stays(name: str) -> None:
    model, before = build(name), eval_frame._stance
    try:
        with Lens(model), torch.no_grad():
            assert eval_frame._stance.stance == "force_eager"
            model(**INPUTS)
        assert eval_frame._stance is before
        with Lens(model), torch.no_grad():
            model(**INPUTS)
            torch.compiler.set_stance("eager_on_recompile")
        assert eval_frame._stance.stance == "eager_on_recompile"
    finally:
        eval_frame._set_stance(before)
