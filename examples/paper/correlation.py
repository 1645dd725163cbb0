"""Figure 1a: does effective attention still look like attention, and from what length on not?

Up to n = D tokens nothing is hidden from a head's output, and the correlation is 1.
"""

from __future__ import annotations

from typing import Any

import torch

from attnlens import HeadStatistics, Lens
from attnlens.attention.statistics import pooled_correlation
from examples.paper.published import compare
from examples.paper.setting import Encoded, Setting, prepare, report

BIN = 8  # tokens
READ_OFF = (64, 70, 80, 90, 100, 110, 120, 128)  # lengths at which the figure was read


def run(setting: Setting) -> dict[str, Any]:
    """Correlate raw and effective attention, sequence by sequence."""
    chosen = spread(setting, setting.options.limit)
    lengths = [len(encoded) for encoded in chosen]
    found = [correlate(setting, encoded) for encoded in chosen]
    rows = by_length(lengths, found, setting.width)
    print(f"Pearson's r of raw and effective attention over all heads, D = {setting.width}")
    print("    tokens  sequences    mean  lowest  highest")
    for row in rows:
        span = f"{row['shortest']}–{row['longest']}"
        values = "  ".join(f"{row[name]:.4f}" for name in ("mean", "lowest", "highest"))
        print(f"  {span:>8}  {row['sequences']:9}  {values}")
    setting.draw("correlation", "correlation_by_length", lengths, found)
    ranges = near_lengths(lengths, found)
    ours = {
        "lowest correlation": {length: min(values) for length, values in ranges.items()},
        "highest correlation": {length: max(values) for length, values in ranges.items()},
    }
    return {
        "head_dimension": setting.width,
        "by_length": rows,
        "length": lengths,
        "correlation": found,
        **compare(setting, ours),
    }


def spread(setting: Setting, limit: int) -> list[Encoded]:
    """Choose sentences of all lengths there are, as many of each as the limit allows."""
    everything = setting.encode(setting.sentences)
    if len(everything) <= limit:
        return everything
    bins: dict[int, list[Encoded]] = {}
    for encoded in everything:
        bins.setdefault((len(encoded) - 1) // BIN, []).append(encoded)
    each = max(1, limit // len(bins))
    return [encoded for place in sorted(bins) for encoded in bins[place][:each]]


def correlate(setting: Setting, encoded: Encoded) -> float:
    """Correlate the entries of all heads of all layers together."""
    statistics = HeadStatistics()
    with Lens(setting.model.model, statistics), torch.no_grad():
        for inputs, _ in setting.batches([encoded]):
            setting.model.model(**inputs)
    layers = statistics.sums.values()
    names = next(iter(layers))
    return float(pooled_correlation({n: sum(layer[n].sum() for layer in layers) for n in names}))


def by_length(lengths: list[int], found: list[float], width: int) -> list[dict[str, Any]]:
    """Summarise up to n = D, and in bins beyond."""
    bins: dict[int, list[int]] = {}
    for place, length in enumerate(lengths):
        bins.setdefault(max(0, -(-(length - width) // BIN)), []).append(place)
    return [
        {
            "shortest": min(lengths[place] for place in places),
            "longest": max(lengths[place] for place in places),
            "sequences": len(places),
            "mean": sum(found[place] for place in places) / len(places),
            "lowest": min(found[place] for place in places),
            "highest": max(found[place] for place in places),
        }
        for _, places in sorted(bins.items())
    ]


def near_lengths(lengths: list[int], found: list[float]) -> dict[str, list[float]]:
    """Collect the correlations of sequences of about each length read off the figure."""
    near: dict[str, list[float]] = {}
    for length, value in zip(lengths, found, strict=True):
        for read in READ_OFF:
            if abs(length - read) <= 2 or (read == READ_OFF[0] and length <= read):
                near.setdefault(str(read), []).append(value)
    return near


if __name__ == "__main__":
    report(prepare(__doc__.splitlines()[0]), "correlation", run)
