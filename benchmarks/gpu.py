"""The check for a machine with a GPU: kernels against their twins, then what a lens costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from attnlens import HeadStatistics, Lens
from attnlens.kernels import effective_reduce, gram_factor, gram_svd, row_statistics
from benchmarks.models import Inputs, bert, modernbert, tokens
from benchmarks.registry import Check, Comparison, Step, case, seconds

BATCH, HEADS = 4, 12
SETTLING = 0.05  # seconds: nothing but the device is busy, and the whole must end in six minutes


@case("gpu", by_name=True)
def steps() -> Iterator[Step]:
    """Triton kernels against PyTorch in float64, then HeadStatistics against the forward pass."""
    if not torch.cuda.is_available():
        raise SystemExit("The case `gpu` needs a CUDA device, and there is none here.")
    for dtype in (torch.float32, torch.bfloat16):
        for length, width in ((63, 60), (512, 64), (1024, 128)):
            yield from _kernels(length, width, dtype)
    for name, model, length in (
        ("BERT-base", bert(12), 512),
        ("ModernBERT-base", modernbert(22), 1024),
    ):
        for dtype in (torch.float32, torch.bfloat16):
            shaped = model.to("cuda", dtype)
            inputs = {k: v.cuda() for k, v in tokens(BATCH, length, padded=True).items()}
            yield from _costs(f"{name}, {dtype}, {BATCH} × {length}", shaped, inputs)


def _kernels(length: int, width: int, dtype: torch.dtype) -> Iterator[Step]:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(BATCH, HEADS, length, width, generator=generator).to("cuda", dtype)
        for _ in range(3)
    )
    keys = torch.ones(BATCH, length, dtype=torch.bool, device="cuda")
    keys[1:, length // 2 :] = False
    mask = keys[:, None, None]
    setting = f"n = {length}, D = {width}, {dtype}"
    exact = [tensor.double().cpu() for tensor in (query, key, value)]

    factor = gram_factor(value, keys, backend="triton")
    basis = torch.where(mask.mT, value.double(), 0.0) @ factor.whitening
    overlap = basis.mT @ basis
    wanted = torch.diag_embed((overlap.diagonal(dim1=-2, dim2=-1) > 0.5).double())
    yield Check(f"gram_factor, {setting}: ‖UᵀU − I‖", float((overlap - wanted).abs().max()), 1e-5)
    twin = gram_factor(exact[2], keys.cpu(), backend="torch")
    yield Check(f"gram_factor, {setting}: rank", float((factor.rank.cpu() != twin.rank).sum()), 0.0)

    sigma = gram_svd(value, keys, backend="triton").singular_values.cpu()
    reference = gram_svd(exact[2], keys.cpu(), backend="torch").singular_values
    yield Check(f"gram_svd, {setting}", _relative(sigma, reference), 1e-4)

    arguments: dict[str, Any] = {"scaling": width**-0.5}
    rows = row_statistics(query, key, value, mask=mask, backend="triton", **arguments)
    twin_rows = row_statistics(*exact, mask=mask.cpu(), backend="torch", **arguments)
    bar = 1e-4 if dtype == torch.float32 else 2e-2
    for name in ("logsumexp", "square_sum", "entropy", "maximum", "coordinates"):
        error = _relative(getattr(rows, name).cpu(), getattr(twin_rows, name))
        yield Check(f"row_statistics.{name}, {setting}", error, bar)

    reduced = effective_reduce(rows.coordinates, basis.float(), maps=True, backend="triton")
    dense = rows.coordinates.double() @ basis.mT
    yield Check(f"effective_reduce.maps, {setting}", _relative(reduced.maps, dense), 1e-4)

    for name, run in _timed(query, key, value, keys, mask, width).items():
        ways = partial(run, "triton"), partial(run, "torch")
        triton, torch_way = seconds(*ways, settling=SETTLING)
        yield Comparison(setting, f"{name}, Triton", triton, "PyTorch", torch_way)


def _timed(
    query: Tensor, key: Tensor, value: Tensor, keys: Tensor, mask: Tensor, width: int
) -> dict[str, Callable[[Any], Any]]:
    return {
        "gram_factor": lambda backend: gram_factor(value, keys, extremes=False, backend=backend),
        "gram_svd": lambda backend: gram_svd(value, keys, backend=backend),
        "row_statistics": lambda backend: row_statistics(
            query, key, value, mask=mask, scaling=width**-0.5, backend=backend
        ),
    }


def _costs(setting: str, model: PreTrainedModel, inputs: Inputs) -> Iterator[Step]:
    def forward() -> Any:
        with torch.no_grad():
            return model(**inputs).last_hidden_state

    def looked(observer: HeadStatistics) -> Callable[[], Any]:
        def run() -> Any:
            with Lens(model, observer):
                return forward()

        return run

    plain, seen = forward(), looked(HeadStatistics())()
    yield Check(f"{setting}: outputs with a lens", float((plain - seen).abs().max()), 0.0)
    torch.cuda.reset_peak_memory_stats()
    null_space, complete = HeadStatistics(fields="null_space"), HeadStatistics()
    ways = forward, looked(null_space), looked(complete)
    bare, fields, every = seconds(*ways, settling=SETTLING)
    for subject, value in (("null-space fields", fields), ("every field", every)):
        yield Comparison(setting, subject, value, "bare forward", bare, ratio_is="cost")


def _relative(found: Tensor, expected: Tensor) -> float:
    difference = (found.double() - expected.to(found.device).double()).abs()
    return float(difference.max() / expected.abs().max())
