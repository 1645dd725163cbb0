"""Draw the growth of time and memory: `python -m benchmarks.picture [RESULTS] [PICTURE]`."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

from benchmarks.growth import HEADS, LENGTHS

RESULTS = Path(__file__).parent / "results"
WAYS = {
    "bare forward": "forward pass",
    "null-space fields": "with null-space fields",
    "every field": "with every field",
}


def draw(report: dict[str, Any], picture: Path) -> None:
    """Plot what the case `growth` measured.

    Args:
        report: as written by `python -m benchmarks growth --json FILE`.
        picture: file to write; its suffix says the format.
    """
    import matplotlib

    matplotlib.use("agg")
    matplotlib.rcParams.update({"svg.hashsalt": "attnlens", "svg.fonttype": "none"})
    from matplotlib import pyplot

    (case,) = (case for case in report["cases"] if case["name"] == "growth")
    seconds, extra = curves(case["comparisons"])
    figure, (time, memory) = pyplot.subplots(1, 2, figsize=(8, 3.2), layout="constrained")
    styles = {
        name: {"marker": "o", "markersize": 3, "color": f"C{place}", "label": WAYS[name]}
        for place, name in enumerate(WAYS)
    }
    for name, values in seconds.items():
        time.loglog(LENGTHS, values, **styles[name])
    time.set(xlabel="tokens", ylabel="seconds, one layer")
    time.legend(frameon=False)
    dense = [HEADS * n**2 * 4 / 2**20 for n in LENGTHS]
    memory.loglog(LENGTHS, dense, color="0.5", linestyle="--", label="one dense [H, n, n]")
    for name, values in extra.items():
        memory.loglog(LENGTHS, values, **styles[name])
    memory.set(xlabel="tokens", ylabel="MiB beside the forward pass")
    memory.legend(frameon=False)
    figure.savefig(picture, metadata={"Date": None} if picture.suffix == ".svg" else None)
    pyplot.close(figure)


def curves(comparisons: list[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Seconds and extra MiB of every way, by length."""
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    extra: dict[str, list[float]] = {name: [] for name in list(WAYS)[1:]}
    for entry in comparisons:
        if re.fullmatch(r"n = \d+", entry["setting"]) is None:
            continue
        if entry["unit"] == "s":
            name = entry["subject"].removesuffix(", forward included")
            seconds[name].append(entry["value"])
            if name == "null-space fields":
                seconds["bare forward"].append(entry["baseline_value"])
        else:
            extra[entry["subject"].removeprefix("extra memory, ")].append(entry["value"] / 1024)
    return seconds, extra


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", nargs="?", type=Path, default=RESULTS / "cpu-2-cores.json")
    parser.add_argument("picture", nargs="?", type=Path, default=RESULTS / "growth.svg")
    chosen = parser.parse_args()
    draw(json.loads(chosen.results.read_text()), chosen.picture)
