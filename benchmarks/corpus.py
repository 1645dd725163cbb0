"""A corpus through a small sentence encoder: memory that does not grow, and time per sentence."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

from benchmarks.registry import Check, Comparison, Step, case

WINDOW = 25
WAYS = {"HeadStatistics": 2000, "HeadStatistics and HTA, k = 2": 300}
# Each way runs in a process of its own, so that the peak memory is its own. The sentences come
# from a generator that notes the peak so far when a tenth of them have been looked at.
PROGRAM = """
import json, random, sys, threading, time
import torch
import attnlens
from transformers import AutoModel, AutoTokenizer
from attnlens.demo import model_folder, paragraphs

way, count, chunk = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
words = " ".join(paragraphs()).split()
draw = random.Random(0)
sentences = [" ".join(draw.choices(words, k=2 + place % 13)) for place in range(count)]
model = AutoModel.from_pretrained(model_folder()).eval()
tokenizer = AutoTokenizer.from_pretrained(model_folder())
peak, running = 0, True

def resident():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))

def watch():
    global peak
    while running:
        peak = max(peak, resident())
        time.sleep(0.005)

def noted():
    global early
    for place, sentence in enumerate(sentences):
        if place == count // 10:
            early = peak
        yield sentence

def bare():
    order = sorted(sentences, key=len)
    with torch.no_grad():
        for start in range(0, count, 32):
            some = order[start : start + 32]
            batch = tokenizer(
                some, padding=True, truncation=True, max_length=16, return_tensors="pt"
            )
            model(**batch)

observers = ["head-statistics"] + ["attribution:probes=2"] * ("HTA" in way)
watcher = threading.Thread(target=watch)
watcher.start()
try:
    start = time.perf_counter()
    if way == "bare":
        early = 0
        bare()
    else:
        # Cut, so that the longest are as long in every chunk: memory grows with length.
        attnlens.scan(model, tokenizer, noted(), observers, chunk=chunk, max_length=16)
    seconds = time.perf_counter() - start
finally:
    running = False
    watcher.join()
print(json.dumps({"early": early, "peak": peak, "seconds": 1000 * seconds / count}))
"""


@case("corpus")
def steps() -> Iterator[Step]:
    """Sentences through MiniLM: peak memory after the first tenth and in all, time per 1,000."""
    bare = _measure("bare", 1000)
    for way, count in WAYS.items():
        figures = _measure(way, count)
        growth = figures["peak"] / figures["early"] - 1
        yield Check(f"{way}: growth of the peak after the first tenth", max(growth, 0.0), 0.1)
        yield Comparison(
            f"1,000 sentences of up to 16 tokens, {count:,} in all",
            f"scan with {way}",
            figures["seconds"],
            "bare forward",
            bare["seconds"],
            ratio_is="cost",
        )


def _measure(way: str, count: int) -> dict[str, float]:
    command = [sys.executable, "-c", PROGRAM, way, str(count), str(WINDOW)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    figures: dict[str, float] = json.loads(output.splitlines()[-1])
    return figures
