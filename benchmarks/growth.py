"""How time and memory grow with the length of the input."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from benchmarks.registry import Check, Comparison, Step, case

LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192)
HEADS, WIDTH = 12, 64
RESOLVED = 1024  # KiB; peaks of two processes differ by as much, so that less counts as this
# One layer of BERT-base shape; each length and way runs in a process of its own, so that the peak
# memory is its own.
PROGRAM = """
import json, resource, sys, time
import torch
from attnlens import HeadStatistics, Lens
from benchmarks.models import bert, tokens

length, way, repeats = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
model, inputs = bert(1, positions=length), tokens(1, length)
statistics = HeadStatistics(fields="null_space" if way == "null_space" else "all")
def forward():
    with torch.no_grad():
        return model(**inputs)
def looked():
    with Lens(model, statistics):
        return forward()
run = forward if way == "bare" else looked
bert_small = bert(1, positions=8)
with torch.no_grad():
    bert_small(**tokens(1, 8))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
times = []
for _ in range(repeats + 1):
    start = time.perf_counter()
    run()
    times.append(time.perf_counter() - start)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(json.dumps({"seconds": sorted(times[1:])[repeats // 2], "kibibytes": peak}))
"""


@case("growth")
def steps() -> Iterator[Step]:
    """Statistics of one layer at n = 128 … 8192: time, peak memory and their exponents."""
    figures = {
        way: [_measure(length, way) for length in LENGTHS] for way in ("bare", "null_space", "all")
    }
    for way, title in (("null_space", "null-space fields"), ("all", "every field")):
        for length, bare, ours in zip(LENGTHS, figures["bare"], figures[way], strict=True):
            yield Comparison(
                f"n = {length}",
                f"{title}, forward included",
                ours["seconds"],
                "bare forward",
                bare["seconds"],
                ratio_is="cost",
            )
        own = _exponent([f["seconds"] for f in figures[way]])
        forward = _exponent([f["seconds"] for f in figures["bare"]])
        yield Comparison(
            "exponent of time, n ≥ 1024", title, own, "bare forward", forward, "", "cost"
        )
    for way, title in (("null_space", "null-space fields"), ("all", "every field")):
        for length, bare, ours in zip(LENGTHS, figures["bare"], figures[way], strict=True):
            extra = max(ours["kibibytes"] - bare["kibibytes"], RESOLVED)
            dense = HEADS * length**2 * 4 / 1024
            subject, baseline = f"extra memory, {title}", "dense [H, n, n]"
            yield Comparison(f"n = {length}", subject, extra, baseline, dense, "KiB", "cost")
        yield Check(f"extra memory of {title} over dense [H, n, n] at 8192", extra / dense, 0.05)


def _measure(length: int, way: str) -> dict[str, Any]:
    repeats = 3 if length < 4096 else 1
    command = [sys.executable, "-c", PROGRAM, str(length), way, str(repeats)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return json.loads(output.splitlines()[-1])


def _exponent(times: list[float]) -> float:
    """Slope of log time over log length, by least squares over the longer half."""
    points = [
        (math.log(length), math.log(value))
        for length, value in zip(LENGTHS, times, strict=True)
        if length >= 1024
    ]
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    covariance = sum((x - mean_x) * (y - mean_y) for x, y in points)
    return covariance / sum((x - mean_x) ** 2 for x, _ in points)
