"""Figures 3 and 4: where the information in each hidden state comes from."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnlens import HiddenTokenAttribution, Lens
from attnlens.attribution.contributions import HiddenTokenAttributionResult
from examples.attribution_profile import COLUMNS, print_distances
from examples.paper.published import compare
from examples.paper.setting import TYPES, Setting, prepare, print_layers, report

BOX = ("lower whisker", "first quartile", "median", "third quartile", "upper whisker")
SHOWN = (-20, -10, -5, -3, -2, -1, 1, 2, 3, 5, 10, 20)

Batch = tuple[dict[str, Tensor], Tensor]


def run(setting: Setting) -> dict[str, Any]:
    """Attribute all hidden states, once over all tokens and once by their labels."""
    sentences = setting.first[: setting.options.attributed]
    batches = list(setting.batches(sentences))
    observer = look(setting, batches)
    result = observer.compute()
    found = series(result)
    names = [*(f"own {name}" for name in BOX), "not main"]
    print_layers(
        "Own contribution and share of tokens to which another contributes most, %",
        [(name.removeprefix("own "), found[name]) for name in names],
        places=1,
    )
    print_distances(f"{len(sentences)} sentences", observer)
    print_layers(
        "Contribution of neighbours at each distance, in % of the sum over layers",
        [(column, found[f"distance {column}"]) for column in COLUMNS],
        places=2,
    )
    print_layers(
        "Total contribution by offset, the largest being 1",
        [
            (f"{o:+}", [found[f"offset {layer + 1}"][str(o)] for _, layer in result.layers])
            for o in SHOWN
        ],
    )
    draw(setting, result)
    numbers = {
        "sentences": len(sentences),
        "probes": observer.probes,
        "series": found,
        **result.tensors(),
    }
    if setting.options.halves:
        numbers["halves_differ_by"] = halves_differ_by(setting, batches, result)
    return numbers | {"by_label": by_label(setting, batches)} | compare(setting, found)


def look(setting: Setting, batches: list[Batch], seed: int = 0) -> HiddenTokenAttribution:
    """Attribute the hidden states of some batches."""
    observer = HiddenTokenAttribution(setting.options.probes, seed=seed)
    with Lens(setting.model.model, observer), torch.no_grad():
        for inputs, _ in batches:
            setting.model.model(**inputs)
    return observer


def series(result: HiddenTokenAttributionResult) -> dict[str, Any]:
    """Give the curves of the figures by name, numbering layers from 1 as the paper does."""
    found: dict[str, Any] = {}
    for place, name in enumerate(BOX):
        found[f"own {name}"] = (100 * result.own_box[:, 0, place]).tolist()
    found["not main"] = (100 * result.not_main[:, 0]).tolist()
    for place, column in enumerate(COLUMNS):
        found[f"distance {column}"] = result.distance_profile[:, 0, place].tolist()
    radius = result.offset.shape[-1] // 2
    for (_, layer), row in zip(result.layers, result.offset[:, 0], strict=True):
        relative = (row / row.max()).tolist()
        found[f"offset {layer + 1}"] = {
            str(offset): relative[offset + radius] for offset in range(-radius, radius + 1)
        }
    return found


def by_label(setting: Setting, batches: list[Batch]) -> dict[str, Any]:
    """Print own contributions by part of speech or type of token, and those to `[CLS]`."""
    known = bool(setting.tag_names)
    names = (*TYPES[:2], *setting.tag_names) if known else TYPES
    observer = HiddenTokenAttribution(setting.options.probes, label_names=names)
    with Lens(setting.model.model, observer), torch.no_grad():
        for inputs, tags in batches:
            types = setting.type_of_token[inputs["input_ids"]]
            spoken = torch.where(tags < 0, -1, tags + 2)
            observer.labels = torch.where(types < 2, types, spoken) if known else types
            setting.model.model(**inputs)
    result = observer.compute()
    own = 100 * result.own
    shares = 100 * result.by_label[:, 0]  # of each label in [CLS]
    columns = list(enumerate(names))
    print_layers("Own contribution, %", [(name, own[:, place]) for place, name in columns], 1)
    print_layers(
        "Contribution to [CLS], %", [(name, shares[:, place]) for place, name in columns], 1
    )
    return {"labels": names, "tokens": result.tokens[0], "own": own, "to_cls": shares}


def halves_differ_by(
    setting: Setting, batches: list[Batch], whole: HiddenTokenAttributionResult
) -> float:
    """Attribute both halves of the batches on their own, merge, and compare with one run."""
    middle = len(batches) // 2
    first = look(setting, batches[:middle])
    merged = first.merge(look(setting, batches[middle:], seed=middle)).compute()
    pairs = zip(merged.tensors().values(), whole.tensors().values(), strict=True)
    largest = max(float((one - other).abs().nan_to_num().max()) for one, other in pairs)
    print(f"\nTwo halves merged differ from one run by at most {largest:.1e}")
    return largest


def draw(setting: Setting, result: HiddenTokenAttributionResult) -> None:
    """Draw figures 3a, 3b, 4a and 4b."""
    for figure in (
        "own_contribution",
        "not_main_share",
        "contribution_by_distance",
        "contribution_by_offset",
    ):
        setting.draw(figure, figure, result)


if __name__ == "__main__":
    report(prepare(__doc__.splitlines()[0]), "attribution", run)
