"""Observers of one's own: two methods are enough, and what they lack is said in words."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from attnlens import (
    Capture,
    EffectiveAttention,
    HeadStatistics,
    HiddenTokenAttribution,
    LabelAttention,
    Lens,
    LensCallback,
    Observer,
    TokenSaliency,
)
from attnlens.errors import InputError
from attnlens.observer import SumObserver
from tests.support import models
from tests.support.scanning import scan, texts


class Calls(Observer):
    """Counts attention calls, without calling the base's `__init__`."""

    def __init__(self) -> None:
        self.calls = 0

    def update(self, capture: Capture) -> None:
        self.calls += 1

    def compute(self) -> int:
        return self.calls


class Saved(Calls):
    """The same, with a state."""

    def reset(self) -> None:
        self.calls = 0

    def state_dict(self) -> dict[str, Tensor]:
        return {"calls": torch.tensor(self.calls)}

    def add_state(self, state: Any) -> None:
        self.calls += int(state["calls"])


def test_two_methods_are_enough_for_a_lens() -> None:
    model, calls = models.build("bert"), Calls()
    with Lens(model, calls), torch.no_grad():
        model(**models.inputs("bert"))
    assert calls.compute() == 2
    calls.seek(3)
    assert calls.wants(None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "use",
    [
        Calls.reset,
        Calls.state_dict,
        Calls.sync,
        lambda calls: calls.merge(Calls()),
        lambda calls: calls.load_state_dict({}),
        lambda calls: calls.add_state({}),
        lambda calls: scan(texts(3), [calls]),
    ],
)
def test_what_needs_a_state_names_the_methods_that_are_missing(
    use: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 2)
    calls = Calls()
    calls.calls = 7
    with pytest.raises(InputError, match=r"Calls has no state.*reset\(\), state_dict\(\), add_st"):
        use(calls)
    assert calls.compute() == 7


def test_a_trainer_refuses_observers_without_sums() -> None:
    with pytest.raises(InputError, match="Only observers whose state is sums"):
        LensCallback([Calls()])


def test_the_rest_follows_from_three_more_methods(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = Saved(), Saved()
    first.calls, second.calls = 3, 4
    assert first.merge(second) is first and (first.calls, second.calls) == (7, 4)
    first.load_state_dict(second.state_dict())
    assert first.calls == 4
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 2)

    def gather(parts: list[Any], state: Any, group: Any) -> None:
        parts[:] = [state, {"calls": torch.tensor(10)}]

    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    first.sync()
    assert first.calls == 14
    with pytest.raises(InputError, match="Cannot merge Calls into Saved"):
        first.merge(Calls())
    monkeypatch.undo()
    whole = scan(texts(24), [Saved()], out=tmp_path).observers[0].compute()
    assert whole == scan(texts(24), [Saved()]).observers[0].compute() > 24 // 4


@pytest.mark.parametrize(
    ("one", "other", "name"),
    [
        (HeadStatistics(), HeadStatistics(fields="null_space"), "fields"),
        (HeadStatistics(), HeadStatistics(rtol=1e-3), "rtol"),
        (LabelAttention(label_names="ab".split()), LabelAttention(), "label_names"),
        (TokenSaliency(positions=3), TokenSaliency(), "positions"),
        (HiddenTokenAttribution(radius=3), HiddenTokenAttribution(), "radius"),
    ],
)
def test_observers_of_other_settings_are_not_merged(
    one: Observer, other: Observer, name: str
) -> None:
    with pytest.raises(InputError, match=f"different {name} cannot be merged"):
        one.merge(other)


def test_maps_beyond_the_bound_are_not_loaded() -> None:
    model, maps = models.build("bert"), EffectiveAttention()
    with Lens(model, maps), torch.no_grad():
        model(**models.inputs("bert"))
    with pytest.raises(MemoryError, match="crosses max_bytes"):
        EffectiveAttention(max_bytes=100).load_state_dict(maps.state_dict())


def test_sums_of_other_shapes_are_refused() -> None:
    class Total(SumObserver):
        def update(self, capture: Capture) -> None: ...

        def compute(self) -> Any: ...

    total = Total()
    total.add(("stack", 0), {"value": torch.zeros(2)})
    with pytest.raises(InputError, match=r"value of shape \[2\] and now has \[3\]"):
        total.add(("stack", 0), {"value": torch.zeros(3)})
    with pytest.raises(InputError, match=r"other of shape none and now has \[2\]"):
        total.add(("stack", 0), {"other": torch.zeros(2)})
