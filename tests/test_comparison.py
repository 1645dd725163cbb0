"""Drift of heads between two models, against maps written out in float64."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from typer.testing import CliRunner

from attnlens import HeadImportance, HeadStatistics, Lens, compare, record
from attnlens.cli.commands import app
from attnlens.demo import model_folder
from attnlens.errors import InputError
from tests.conftest import Encoder
from tests.support import models, reference
from tests.support.commands import without_frame
from tests.support.finetuning import NO_DROPOUT, Sentences, classifier
from tests.support.hooks import is_clean


def moved(model: PreTrainedModel, by: float = 0.3) -> PreTrainedModel:
    """A copy whose weights went somewhere else."""
    generator = torch.Generator().manual_seed(7)
    other = copy.deepcopy(model)
    for parameter in other.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.data += by * parameter.data.std().nan_to_num() * noise.to(parameter.dtype)
    return other


def by_maps(model_a: PreTrainedModel, model_b: PreTrainedModel, inputs: Any) -> dict[str, Tensor]:
    """Mean cosines `[L, H]` from dense maps, example by example and head by head."""
    rows: dict[str, list[list[float]]] = {"raw_cosine": [], "effective_cosine": []}
    pairs = zip(record(model_a, **inputs), record(model_b, **inputs), strict=True)
    for pair in pairs:
        batch, heads, queries, *_ = pair[0].shape
        real = pair[0].real_rows.expand(batch, heads, queries)
        maps: dict[str, list[Tensor]] = {"raw_cosine": [], "effective_cosine": []}
        for capture in pair:
            attention = capture.attention().double()
            mask = capture.support.mask(0, queries)
            maps["raw_cosine"].append(attention)
            maps["effective_cosine"].append(
                reference.effective_attention(attention, capture.value, mask, capture.projection)
            )
        for name, (one, other) in maps.items():
            row = []
            for head in range(heads):
                total = 0.0
                for example in range(batch):
                    shown = real[example, head]
                    x, y = (
                        one[example, head][shown].flatten(),
                        other[example, head][shown].flatten(),
                    )
                    total += (x @ y / (x.norm() * y.norm())).item() / batch
                row.append(total)
            rows[name].append(row)
    return {name: torch.tensor(row, dtype=torch.float64) for name, row in rows.items()}


@pytest.mark.parametrize("name", ["bert", "modernbert", "vit", "t5", "eurobert"])
def test_cosines_are_those_of_the_maps(name: str) -> None:
    model = models.build(name)
    other, inputs = moved(model), models.inputs(name)
    drift = compare(model, other, inputs)
    for quantity, expected in by_maps(model, other, inputs).items():
        found = drift.tensors()[quantity]
        assert (found - expected).abs().max() < 1e-5, quantity
        assert expected.max() < 0.999  # the models do differ
    assert drift.examples.eq(2).all()
    assert drift.importance_change.isnan().all()
    assert is_clean(model) and is_clean(other)


def test_a_model_has_not_moved_from_itself() -> None:
    model = models.build("bert")
    drift = compare(model, copy.deepcopy(model), models.text_inputs())
    assert torch.allclose(drift.raw_cosine, torch.ones(2, 4, dtype=torch.float64), atol=1e-12)
    assert torch.allclose(drift.effective_cosine, torch.ones(2, 4, dtype=torch.float64), atol=1e-6)
    assert drift.effective_fraction_change.eq(0).all()


def test_changes_are_differences_of_observers() -> None:
    model = classifier(**NO_DROPOUT).eval()
    other = moved(model)
    data = Sentences()
    batches = [data.batch(0, 1, 2), data.batch(7, 8)]
    drift = compare(model, other, iter(batches))
    results = []
    for side in (model, other):
        statistics, importance = HeadStatistics(), HeadImportance()
        with Lens(side, statistics, importance):
            for batch in batches:
                side(**batch).loss.backward()
        side.zero_grad()
        results.append((statistics.compute(), importance.compute()))
    fraction = results[1][0].effective_fraction - results[0][0].effective_fraction
    importance_change = results[1][1].importance - results[0][1].importance
    assert torch.equal(drift.effective_fraction_change, fraction)
    assert torch.allclose(drift.importance_change, importance_change, rtol=1e-9, atol=0)
    assert drift.examples.eq(5).all()
    assert torch.equal(drift.after.entropy, results[1][0].entropy)
    mean = [by_maps(model, other, batch)["raw_cosine"] for batch in batches]
    assert torch.allclose(drift.raw_cosine, (3 * mean[0] + 2 * mean[1]) / 5, atol=1e-6)


def test_no_parameter_is_touched() -> None:
    model = classifier().eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    compare(model, moved(model), Sentences().batch(0, 1))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_task_model_against_its_encoder() -> None:
    """Names differ, the calls correspond."""
    model = classifier().eval()
    drift = compare(model.bert, model, models.text_inputs((12, 5)))
    assert torch.allclose(drift.raw_cosine, torch.ones(2, 4, dtype=torch.float64), atol=1e-12)
    assert drift.layers[0][0] == "encoder.layer.*.attention.self"


def test_examples_that_are_not_finite_do_not_count() -> None:
    model, other = models.build("vit"), moved(models.build("vit"))
    inputs = models.inputs("vit")
    expected = compare(model, other, {"pixel_values": inputs["pixel_values"][:1]})
    inputs["pixel_values"][1] = torch.nan
    with pytest.warns(UserWarning, match="NaN or Inf"):
        drift = compare(model, other, inputs)
    assert drift.examples.eq(1).all()
    assert torch.allclose(drift.effective_cosine, expected.effective_cosine, atol=1e-6)


def test_what_cannot_be_compared() -> None:
    model, inputs = models.build("bert"), models.text_inputs()
    with pytest.raises(InputError, match=r"model_b\.eval\(\)"):
        compare(model, models.build("bert").train(), inputs)
    with pytest.raises(InputError, match="same heads"):
        config = copy.deepcopy(model.config)
        config.num_attention_heads = 2
        compare(model, models.initialise(type(model), config), inputs)
    with pytest.raises(InputError, match="2 attention calls and model_b 1"):
        config = copy.deepcopy(model.config)
        config.num_hidden_layers = 1
        compare(model, models.initialise(type(model), config), inputs)
    with pytest.raises(InputError, match="no batch"):
        compare(model, model, [])


# The command


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(
        "The ferry leaves at seven, whether or not the baker has finished loading his crates, and "
        "nobody on the quay has ever seen it wait for anyone.\n\nRain again.\n",
        encoding="utf-8",
    )
    return path


@pytest.fixture
def tuned(tmp_path: Path, minilm: Encoder) -> Path:
    folder = tmp_path / "tuned"
    moved(minilm.model, 0.05).save_pretrained(folder)
    minilm.tokenizer.save_pretrained(folder)
    return folder


def call(*arguments: Any) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_command(text: Path, tuned: Path, minilm: Encoder) -> None:
    result = call("compare", model_folder(), tuned, "--text", text, "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    paragraphs = text.read_text(encoding="utf-8").strip().split("\n\n")
    other = type(minilm.model).from_pretrained(tuned).eval()
    drift = compare(minilm.model, other, minilm.tokenize(paragraphs))
    found = torch.tensor(document["drift"]["effective_cosine"], dtype=torch.float64)
    assert torch.allclose(found, drift.effective_cosine, atol=1e-5)
    assert document["examples"] == 2
    assert math.isclose(document["drift"]["raw_cosine"][0][0], drift.raw_cosine[0, 0], abs_tol=1e-5)

    shown = call("compare", model_folder(), tuned, "--text", text, "--field", "raw_cosine")
    assert shown.exit_code == 0, shown.output
    row, head = divmod(int(drift.raw_cosine.argmin()), 12)
    moved = f"head {head} of layer {row} moved most: {drift.raw_cosine.min():.3f}"
    assert moved in " ".join(shown.stdout.split())
    rows = [line.split() for line in shown.stdout.splitlines() if line.split()]
    assert [len(line) for line in rows if line[0] in set("012345")] == [1 + 12] * 6


def test_command_errors(text: Path, tuned: Path) -> None:
    wrong = call("compare", model_folder(), tuned, "--text", text, "--field", "entropy")
    assert wrong.exit_code == 2
    assert "'entropy' is not one of 'effective_cosine'" in without_frame(wrong.stderr)
    nowhere = call("compare", model_folder(), tuned / "none", "--text", text)
    assert nowhere.exit_code == 2
