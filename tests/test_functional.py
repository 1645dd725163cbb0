"""`attnlens.functional`: every public function is there, documented and executed."""

from __future__ import annotations

import doctest
import inspect

import pytest
import torch

from attnlens import HeadStatistics, LabelAttention, functional
from attnlens.algebra.problem import problem
from tests.support.captures import synthetic_capture

FUNCTIONS = [name for name in functional.__all__ if inspect.isfunction(getattr(functional, name))]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_has_an_executed_example(name: str) -> None:
    function = getattr(functional, name)
    finder = doctest.DocTestFinder(recurse=False)
    names = {"torch": torch, **vars(functional)}
    (found,) = finder.find(function, name, globs=names) or [None]
    assert found is not None and found.examples, f"{name} has no example"
    results = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(found)
    assert results.failed == 0


@pytest.mark.parametrize("causal", [False, True])
def test_statistics_of_tensors_are_those_of_the_observer(causal: bool) -> None:
    projection = torch.randn(4, 8, 32, generator=torch.Generator().manual_seed(9)).double()
    mask = torch.arange(26) < torch.tensor([26, 15, 5])[:, None]
    rows = mask[:, None, None]
    if causal:
        rows = rows & torch.ones(26, 26, dtype=torch.bool).tril()
    call = synthetic_capture(projection=projection, mask=rows, dtype=torch.float64)
    observer = HeadStatistics()
    observer.update(call)
    result = observer.compute().tensors()
    found = functional.head_statistics(call.attention(), call.value, rows, projection)
    for name, values in found.items():
        expected = result[name][0]
        reduced = {"nullity_min": values.amin(0), "nullity_max": values.amax(0)}
        mean = reduced.get(name, values.nanmean(0))
        torch.testing.assert_close(mean, expected, rtol=1e-10, atol=1e-12, msg=name)


def test_label_attention_of_tensors_is_that_of_the_observer() -> None:
    call = synthetic_capture(dtype=torch.float64)
    labels = torch.arange(26).expand(3, -1) % 4
    observer = LabelAttention(labels, ("a", "b", "c"))
    observer.update(call)
    found = functional.label_attention(call.attention(), call.value, labels, 3)
    result = observer.compute()
    torch.testing.assert_close(found.raw.mean(0), result.raw[0], rtol=1e-12, atol=0)
    torch.testing.assert_close(found.effective.mean(0), result.effective[0], rtol=1e-10, atol=1e-12)


def test_two_observers_of_one_call_share_its_factorisation(monkeypatch: pytest.MonkeyPatch) -> None:
    from attnlens.algebra import factors, rowwise
    from attnlens.attention import EffectiveAttention

    counted: list[str] = []

    def counting(module: object, name: str) -> None:
        function = getattr(module, name)

        def count(*args: object, **kwargs: object) -> object:
            counted.append(name)
            return function(*args, **kwargs)

        monkeypatch.setattr(module, name, count)

    counting(factors, "gram_factor")
    counting(rowwise, "_whitened")
    for mask in (None, torch.ones(26, 26, dtype=torch.bool).tril()[None, None]):
        call = synthetic_capture(mask=mask)
        observers = [HeadStatistics(), LabelAttention(), EffectiveAttention()]
        counts = []
        for observer in observers:
            observer.update(call)
            counts.append(len(counted))
        assert counts[0] > 0 and len(set(counts)) == 1, counted
        counted.clear()
    assert problem(call) is problem(call)
