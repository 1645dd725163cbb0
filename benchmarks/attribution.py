"""Hidden Token Attribution against one backward pass per component."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModel, AutoTokenizer

from attnlens import HiddenTokenAttribution, Lens
from attnlens.attribution.contributions import AttributionMatrices
from attnlens.demo import model_folder
from benchmarks.registry import Check, Comparison, Step, case, seconds

SENTENCE = (
    "The harbour office said it did not expect the new ferry timetable to suit its older "
    "passengers, she wrote on Friday."
)
PROBES = 8
# Peak memory in a process of its own. Two of BERT-base's twelve layers: others would take their
# turn in the same memory.
PROGRAM = """
import resource
import torch
from attnlens import HiddenTokenAttribution, Lens
from benchmarks.models import bert, tokens

model, inputs = bert(2), tokens(1, 128)
with torch.no_grad():
    model(**inputs)
with open("/proc/self/statm") as pages:  # as it is now; the peak so far may be higher
    before = int(pages.read().split()[1]) * resource.getpagesize() // 1024
observer = HiddenTokenAttribution(probes=8)
with Lens(model, observer), torch.no_grad():
    model(**inputs)
assert len(observer.compute().layers) == 2
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@case("attribution")
def steps() -> Iterator[Step]:
    """Attribution at all layers of MiniLM for a 25-token sentence, against backward passes."""
    folder = model_folder()
    model = AutoModel.from_pretrained(folder).eval().requires_grad_(False)
    batch = dict(AutoTokenizer.from_pretrained(folder)(SENTENCE, return_tensors="pt"))
    tokens = batch["input_ids"].shape[1]

    start = time.perf_counter()
    exact = attribute(model, batch, None)
    exact_seconds = time.perf_counter() - start
    target = tokens // 2
    reference, per_target = backward_passes(model, batch, target)
    backward_seconds = per_target * tokens

    difference = (exact.norm[:, 0, :, target] - reference).norm(dim=-1)
    error = (difference / reference.norm(dim=-1)).max().item()
    yield Check("exact norms of one target against backward passes, worst layer", error, 1e-5)
    sketch = attribute(model, batch, PROBES)
    error = (sketch.contribution / exact.contribution - 1).abs().mean().item()
    yield Check(f"k = {PROBES}: mean error of an entry, all layers", error, 0.07)
    error = (own_means(sketch) / own_means(exact) - 1).abs().max().item()
    yield Check(f"k = {PROBES}: layer means of own contribution, worst layer", error, 0.02)

    setting = f"{len(reference)} layers, {tokens} tokens, M = {model.config.hidden_size}"
    baseline = "one backward pass per component, all components of one token in full"
    (sketched,) = seconds(lambda: attribute(model, batch, PROBES), repeats=3)
    subject = "forward included"
    yield Comparison(setting, f"k = {PROBES}, {subject}", sketched, baseline, backward_seconds)
    yield Comparison(setting, f"exact, {subject}", exact_seconds, baseline, backward_seconds)
    yield Check("extra memory, BERT-base shape, 128 tokens, k = 8, over 2 GiB", memory(), 1.0)


def attribute(model: Any, batch: dict[str, Tensor], probes: int | None) -> AttributionMatrices:
    """Run the model inside a lens."""
    observer = HiddenTokenAttribution(probes, keep="matrices")
    with Lens(model, observer), torch.no_grad():
        model(**batch)
    return observer.matrices[0]


def own_means(matrices: AttributionMatrices) -> Tensor:
    """Mean own contribution of every layer, `[L]`."""
    return matrices.contribution[:, 0].diagonal(dim1=-2, dim2=-1).mean(-1)


def backward_passes(model: Any, batch: dict[str, Tensor], target: int) -> tuple[Tensor, float]:
    """`‖∂e_j/∂x_i‖` of one target at every layer, `[L, n]`, and how long its passes took."""
    embedded: list[Tensor] = []

    def keep(module: Any, args: Any, output: Tensor) -> Tensor:
        embedded.append(output.requires_grad_())
        return output

    handle = model.embeddings.register_forward_hook(keep)
    states = model(**batch, output_hidden_states=True).hidden_states[1:]
    handle.remove()
    start = time.perf_counter()
    norms = []
    for state in states:
        square = torch.zeros(state.shape[1])
        for component in state[0, target]:
            (row,) = torch.autograd.grad(component, embedded[0], retain_graph=True)
            square += row[0].square().sum(-1)
        norms.append(square.sqrt())
    return torch.stack(norms), time.perf_counter() - start


def memory() -> float:
    """Peak memory of a run beyond that of the bare forward, in units of 2 GiB."""
    command = [sys.executable, "-c", PROGRAM]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return int(output.splitlines()[-1]) / 2**21
