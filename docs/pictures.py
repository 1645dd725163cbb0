"""Draw the pictures of the pages: `python docs/pictures.py`."""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
import torch
from transformers import AutoModel, AutoTokenizer

from attnlens import EffectiveAttention, HeadStatistics, Lens
from attnlens.demo import model_folder, paragraphs

FOLDER = Path(__file__).parent / "pages" / "pictures"
LENGTHS = (8, 16, 24, 32, 40, 48, 64, 80, 96, 120)


def main(folder: Path = FOLDER) -> None:
    """Draw all of them."""
    plt.rcParams |= {"svg.hashsalt": "attnlens", "svg.fonttype": "none"}
    model = AutoModel.from_pretrained(model_folder()).eval()
    tokenizer = AutoTokenizer.from_pretrained(model_folder())
    ids = tokenizer(" ".join(paragraphs()), return_tensors="pt", truncation=True, max_length=128)
    for name, draw in (("nullity", _nullity), ("split", _split)):
        figure = draw(model, ids["input_ids"])
        figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
        plt.close(figure)


def _nullity(model: torch.nn.Module, ids: torch.Tensor) -> plt.Figure:
    """Rank and nullity of a head by length of the text."""
    ranks, nullities, fractions = [], [], []
    for length in LENGTHS:
        statistics = HeadStatistics(layers=[3])
        with Lens(model, statistics), torch.no_grad():
            model(input_ids=ids[:, :length])
        result = statistics.compute()
        ranks.append(result.rank.mean().item())
        nullities.append(result.nullity.mean().item())
        fractions.append(result.effective_fraction[0])
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3), layout="constrained")
    left.stackplot(LENGTHS, ranks, nullities, labels=["rank of T", "null space"], alpha=0.8)
    left.set(xlabel="tokens", ylabel="dimensions", title="Where a row of A is free")
    left.legend(loc="upper left")
    right.plot(LENGTHS, torch.stack(fractions), color="tab:blue", alpha=0.5)
    right.set(xlabel="tokens", ylim=(0, 1.05), title="Effective fraction of 12 heads")
    return figure


def _split(model: torch.nn.Module, ids: torch.Tensor) -> plt.Figure:
    """One attention map, and the two parts it is the sum of."""
    maps = EffectiveAttention(layers=[4], heads=[2])
    with Lens(model, maps), torch.no_grad():
        model(input_ids=ids[:, :80])
    (one,) = maps.compute()
    raw, effective = one.raw[0, 0], one.effective[0, 0]
    limit = raw.abs().max().item() / 4
    figure, axes = plt.subplots(1, 3, figsize=(9, 3.2), layout="constrained")
    titles = ("A", "A⊥: what the output depends on", "A − A⊥: what it cannot see")
    for axis, title, part in zip(axes, titles, (raw, effective, raw - effective), strict=True):
        image = axis.imshow(part, cmap="RdBu_r", vmin=-limit, vmax=limit)
        axis.set(title=title, xticks=[], yticks=[])
    figure.colorbar(image, ax=axes, extend="both")
    return figure


if __name__ == "__main__":
    main()
