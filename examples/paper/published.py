"""Numbers of the paper beside ours, where the setting is the paper's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from examples.paper.setting import Setting

FILE = Path(__file__).with_name("published.json")


def compare(setting: Setting, found: Mapping[str, Any]) -> dict[str, Any]:
    """Print our values beside the published ones, if the model is BERT-base and the data MRPC.

    Args:
        setting: the run.
        found: our values by name, a list by layer or a mapping; names unknown there are left out.

    Returns:
        Both, and their largest difference, by name; nothing in another setting.
    """
    if not setting.is_the_papers:
        return {}
    series = json.loads(FILE.read_text(encoding="utf-8"))["series"]
    known = {name: ours for name, ours in found.items() if name in series}
    return {"published": {name: _beside(series[name], ours) for name, ours in known.items()}}


def _beside(series: Mapping[str, Any], ours: Any) -> dict[str, Any]:
    published = series["values"]
    if isinstance(published, dict):
        places = [place for place in published if place in ours]
        published, ours = ([values[p] for p in places] for values in (published, ours))
    pairs = [
        (mine, theirs) for mine, theirs in zip(ours, published, strict=True) if theirs is not None
    ]
    print(
        f"\nFigure {series['figure']}: {series['what']} (read off the figure, ± {series['error']})"
    )
    print("  here       " + " ".join(f"{mine:7.3f}" for mine, _ in pairs))
    print("  published  " + " ".join(f"{theirs:7.3f}" for _, theirs in pairs))
    largest = max(abs(mine - theirs) for mine, theirs in pairs)
    return {"here": list(ours), "published": published, "largest_difference": largest}
