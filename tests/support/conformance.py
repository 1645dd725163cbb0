"""The conformance suite's findings as a table, and the script that writes it down.

    python -m tests.support.conformance

builds every architecture of the zoo, asks `attnlens.check` for its verdict and rewrites the
page of architectures between the two markers.
"""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import transformers

from attnlens.checking import Verdict, check
from tests.support.zoo import NAMES, build, names

PAGE = Path(__file__).parents[2] / "docs" / "pages" / "architectures.md"
BEGIN, END = "<!-- architectures: begin -->", "<!-- architectures: end -->"
TRACED, NO_PROJECTION, REFUSED = "°", "†", "✗"
MODALITIES = {
    "text": "text",
    "vision": "vision",
    "dense": "dense prediction",
    "video": "video",
    "packed_vision": "packed vision",
    "audio": "audio",
    "multimodal": "multimodal",
    "encoder_decoder": "encoder-decoder",
    "detection": "detection",
    "time_series": "time series",
    "decoder": "decoder",
}


def verdict(name: str) -> Verdict:
    """Check one architecture of the zoo."""
    example = build(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return check(example.model, example.inputs)


def marks(found: Verdict) -> str:
    """Summarise a verdict: how attention was seen and whether W_O was found."""
    if not found.supported:
        return REFUSED
    traced = any(site.traced for site in found.sites)
    unknown = any(site.projection is None for site in found.sites)
    return TRACED * traced + NO_PROJECTION * unknown


def documented() -> tuple[str, dict[str, str]]:
    """Read the table in the documentation: the version of transformers, and the marks by name."""
    section = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    version = re.search(r"transformers (\S+)", section)
    entries = re.findall(r"`([\w.-]+)`([°†✗]*)", section)
    return (version.group(1) if version else ""), dict(entries)


def section(found: dict[str, str]) -> str:
    """Write the table."""
    supported = sum(REFUSED not in mark for mark in found.values())
    known = sum(not mark for mark in found.values()) + sum(
        mark == TRACED for mark in found.values()
    )
    lines = [
        BEGIN,
        f"Checked on transformers {transformers.__version__} with a tiny random model of each of "
        f"{len(found)} architectures: **{supported} work**, with bit-identical outputs and "
        f"`A·V = O` at every attention call, and for {known} of them the output projection H is "
        f"known at every call.",
        "",
        f"{TRACED} has attention outside transformers' attention interface, seen by tracing; "
        f"{NO_PROJECTION} something sits between attention and the output projection somewhere, "
        f"so H is refused there and V stands in for T; {REFUSED} no softmax·V attention, refused "
        f"with the reason.",
        "",
        "| | |",
        "|---|---|",
    ]
    for modality, title in MODALITIES.items():
        cells = [f"`{name}`{found[name]}" for name in sorted(names(modality)) if name in found]
        if cells:
            lines.append(f"| {title} | {' '.join(cells)} |")
    return "\n".join([*lines, END])


def main() -> None:
    """Rewrite the table."""
    found = {name: marks(verdict(name)) for name in NAMES}
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(before + section(found) + after, encoding="utf-8")


if __name__ == "__main__":
    main()
