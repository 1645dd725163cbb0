"""Draw the table that `attnlens demo` prints, as the README shows it."""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path

import torch
from rich.console import Console
from transformers import AutoModel, AutoTokenizer

from attnlens import HeadStatistics, Lens
from attnlens.demo import model_folder, paragraphs
from attnlens.reporting.tables import explanation, head_table

PICTURE = Path(__file__).parent / "pictures" / "heads.svg"


def draw(path: Path, width: int = 80) -> None:
    """Write the table of the packaged model and paragraphs as an SVG file."""
    model = AutoModel.from_pretrained(model_folder())
    tokenizer = AutoTokenizer.from_pretrained(model_folder())
    statistics = HeadStatistics()
    with Lens(model, statistics), torch.no_grad():
        model(**tokenizer(paragraphs(), padding=True, return_tensors="pt"))
    result = statistics.compute()
    with open(os.devnull, "w") as nowhere:
        console = Console(record=True, width=width, file=nowhere, highlight=False)
        console.print(head_table(result, width=width))
        console.print(f"\n{explanation(result)}")
    drawing = console.export_svg(title="attnlens demo")
    without_remote_fonts = re.sub(r"@font-face \{.*?\}", "", drawing, flags=re.DOTALL)
    path.write_text(without_remote_fonts, encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", nargs="?", type=Path, default=PICTURE)
    draw(parser.parse_args().path)
