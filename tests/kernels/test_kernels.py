"""Every kernel against its twin and a float64 loop: odd sizes, masks, types, hostile inputs.

Without a GPU the Triton kernels run in Triton's interpreter, with one they are compiled.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from attnlens import kernels
from attnlens.errors import InputError
from attnlens.kernels import tiles
from tests.support.interpreter import DEVICE

BACKENDS = ["torch", "triton"]
EPS32 = float(np.finfo(np.float32).eps)


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    """Fill uninitialised tensors with NaN (integers with a huge value), so gaps show."""

    def poison(allocate):
        def poisoned(*args, **kwargs):
            tensor = allocate(*args, **kwargs)
            bad = float("nan") if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max
            return tensor.fill_(bad)

        return poisoned

    monkeypatch.setattr(torch, "empty", poison(torch.empty))
    monkeypatch.setattr(torch.Tensor, "new_empty", poison(torch.Tensor.new_empty))


def normal(*shape, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(DEVICE, dtype)


def close(actual, expected, rtol=1e-5, atol=1e-6):
    expected = torch.as_tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(actual.double().cpu(), expected.cpu(), rtol=rtol, atol=atol)


# Gram matrices ---------------------------------------------------------------------------------


def check_factor(factor, value, keys, *, rtol=None, bar=1e-9):
    """Compare a factor with the SVD of the real rows of every head."""
    batch, heads, tokens, dim = value.shape
    keys = torch.ones(batch, heads, tokens).bool() if keys is None else keys.cpu()
    for b in range(batch):
        for h in range(heads):
            rows = value[b, h].double().cpu()[keys[b, h]].numpy()
            u, sigma, vt = np.linalg.svd(rows, full_matrices=False)
            cut = max(len(rows), dim) * EPS32 if rtol is None else rtol
            rank = int((sigma > cut * sigma.max(initial=0.0)).sum())
            u, sigma, vt = u[:, :rank], sigma[:rank], vt[:rank]

            whitening = factor.whitening[b, h].cpu().numpy()
            basis = rows @ whitening
            assert factor.rank[b, h] == rank
            # a short head is whitened by its pseudo-inverse, whose columns are its keys
            used = np.abs(whitening).max(0) > 0
            assert used.sum() == rank
            gram = basis[:, used].T @ basis[:, used]
            assert np.abs(gram - np.eye(rank)).max(initial=0) < bar
            assert np.abs(basis @ basis.T - u @ u.T).max(initial=0) < bar
            inverse = (vt.T / sigma**2) @ vt
            assert np.abs(whitening @ whitening.T - inverse).max() <= bar * np.abs(inverse).max()
            close(factor.gram[b, h], rows.T @ rows, rtol=1e-12, atol=1e-12)
            close(factor.total[b, h], rows.sum(0), rtol=1e-12, atol=1e-12)
            bound = factor.bound[b, h].item()
            if np.isfinite(bound):
                assert rank == min(len(rows), dim)
                assert bound * (1 + 1e-9) >= (sigma[0] / sigma[-1]) ** 2 if rank else bound == 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("tokens", "dim"),
    [(1, 24), (1, 128), (63, 24), (65, 25), (63, 60), (65, 61), (63, 64), (128, 64), (65, 16),
     (200, 128)],
)  # fmt: skip
def test_factor_matches_the_svd(backend, tokens, dim):
    value = normal(1, 1, tokens, dim)
    check_factor(kernels.gram_factor(value, backend=backend), value, None)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_factor_takes_low_precision_values_as_exact_numbers(backend, dtype):
    value = normal(1, 2, 40, 24, dtype=dtype).transpose(1, 2).contiguous().transpose(1, 2)
    check_factor(kernels.gram_factor(value, backend=backend), value, None)


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_head_is_factorised_for_itself(backend):
    """Full rank, short, empty, all zero, repeated rows, a dependent column: one call."""
    value = normal(3, 2, 33, 12)
    keys = torch.ones(3, 2, 33, dtype=torch.bool, device=DEVICE)
    keys[0, 1, 7:] = False
    keys[1, 0] = False
    value[1, 1] = 0.0
    value[2, 0, 5:] = value[2, 0, :1]
    value[2, 1, :, 3] = value[2, 1, :, 4] - 2 * value[2, 1, :, 5]
    poisoned = value.masked_fill(~keys[..., None], float("nan"))
    factor = kernels.gram_factor(poisoned, keys, backend=backend)
    assert factor.rank.flatten().tolist() == [12, 7, 0, 0, 5, 11]
    check_factor(factor, poisoned, keys)
    alone = kernels.gram_factor(value[:1, :1], backend=backend)
    # A product in a batch of its own may be added in another order.
    error = (alone.whitening - factor.whitening[:1, :1]).abs().max()
    assert error <= 1e-12 * factor.whitening[0, 0].abs().max()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_key_mask_may_be_shared_by_heads(backend):
    value = normal(2, 2, 9, 5)
    keys = torch.arange(9, device=DEVICE) < torch.tensor([[8], [6]], device=DEVICE)
    expanded = keys[:, None].expand(2, 2, 9)
    per_head = kernels.gram_factor(value, expanded, backend=backend)
    for shared in (keys, keys[:, None]):
        factor = kernels.gram_factor(value, shared, backend=backend)
        assert torch.equal(factor.whitening, per_head.whitening)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("ratio", [0.9, 1.1])
@pytest.mark.parametrize("rtol", [None, 1e-3])
def test_rank_is_decided_by_singular_values(backend, ratio, rtol):
    """The smallest singular value just below and just above the tolerance."""
    cut = 40 * EPS32 if rtol is None else rtol
    left, _ = np.linalg.qr(normal(40, 6).double().cpu().numpy())
    right, _ = np.linalg.qr(normal(6, 6, seed=1).double().cpu().numpy())
    sigma = np.array([1.0, 1.0, 0.9, 0.5, 0.1, ratio * cut])
    value = torch.from_numpy(left * sigma @ right)[None, None].float().to(DEVICE)
    threshold = None if rtol is None else torch.full((1, 1), rtol, dtype=torch.float64)
    factor = kernels.gram_factor(value, threshold=threshold, backend=backend)
    assert factor.rank.item() == (6 if ratio > 1 else 5)
    check_factor(factor, value, None, rtol=rtol, bar=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_does_not_move_the_rank(backend):
    """The threshold goes with the number of real keys, not with the length of the batch."""
    left, _ = np.linalg.qr(normal(30, 6).double().cpu().numpy())
    value = torch.from_numpy(left * np.geomspace(1, 40 * EPS32, 6))[None, None].float().to(DEVICE)
    alone = kernels.gram_factor(value, backend=backend)
    padded = torch.nn.functional.pad(value, (0, 0, 0, 482), value=float("nan"))
    keys = torch.arange(512, device=DEVICE)[None] < 30
    among = kernels.gram_factor(padded, keys, backend=backend)
    assert alone.rank.item() == among.rank.item() == 6
    check_factor(among, padded, keys[:, None], bar=1e-6)


def test_float64_values_get_a_second_pass():
    left, _ = np.linalg.qr(normal(50, 8).double().cpu().numpy())
    value = torch.from_numpy(left * np.logspace(0, -4, 8))[None, None].to(DEVICE)
    basis = value @ kernels.gram_factor(value).whitening
    close(basis.mT @ basis, torch.eye(8)[None, None], rtol=0, atol=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_values_that_are_not_finite_spoil_their_own_head_only(backend, bad):
    value = normal(1, 3, 9, 5)
    value[0, 1, 3, 2] = bad
    factor = kernels.gram_factor(value, backend=backend)
    check_factor(kernels.gram_factor(value[:, ::2], backend=backend), value[:, ::2], None)
    assert factor.whitening[0, ::2].isfinite().all() and factor.whitening[0, 1].isnan().all()
    assert factor.bound[0, 1].isnan() and not factor.total[0, 1].isfinite().all()
    svd = kernels.gram_svd(value, backend=backend)
    assert svd.singular_values[0, ::2].isfinite().all()
    assert svd.singular_values[0, 1].isnan().all() and svd.right_vectors[0, 1].isnan().all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("tokens", "dim", "dtype"),
    [
        (1, 24, torch.float32),
        (63, 24, torch.float16),
        (65, 15, torch.bfloat16),
        (5, 60, torch.float32),
    ],
)
def test_gram_svd_matches_the_svd(backend, tokens, dim, dtype):
    value = normal(1, 1, tokens + 1, dim, dtype=dtype)
    value[:, :, -1] = float("nan")
    keys = torch.arange(tokens + 1, device=DEVICE)[None] < tokens
    singular_values, vectors = kernels.gram_svd(value, keys, backend=backend)
    rows = value[0, 0, :tokens].double().cpu()
    sigma = torch.zeros(dim, dtype=torch.float64)
    sigma[: min(tokens, dim)] = torch.linalg.svdvals(rows)
    close(singular_values[0, 0], sigma, rtol=1e-7, atol=1e-6 * sigma.max().item())
    vectors = vectors[0, 0].cpu()
    close(vectors.mT @ vectors, torch.eye(dim), rtol=0, atol=1e-10)
    close(vectors * sigma.square() @ vectors.mT, rows.mT @ rows, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gram_svd_of_the_widest_head(backend):
    """Its values span three coordinates: one sweep, as Triton's interpreter is slow."""
    value = normal(1, 1, 4, 128)
    value[..., 3:] = 0.0
    singular_values, vectors = kernels.gram_svd(value, backend=backend)
    rows = value[0, 0].double().cpu()
    close(singular_values[0, 0, :3], torch.linalg.svdvals(rows)[:3], rtol=1e-9)
    assert singular_values[0, 0, 3:].abs().max() < 1e-6
    close(vectors[0, 0].mT @ vectors[0, 0], torch.eye(128), rtol=0, atol=1e-10)
    close(rows @ vectors[0, 0, :, 3:].cpu(), torch.zeros(4, 125), rtol=0, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gram_svd_of_an_empty_head(backend):
    keys = torch.zeros(1, 5, dtype=torch.bool, device=DEVICE)
    singular_values, vectors = kernels.gram_svd(normal(1, 1, 5, 7), keys, backend=backend)
    assert not singular_values.any()
    close(vectors[0, 0].mT @ vectors[0, 0], torch.eye(7), rtol=0, atol=1e-12)


# Attention rows --------------------------------------------------------------------------------


def reference_rows(query, key, basis, *, mask=None, bias=None, causal=False, scaling):
    """Each row by itself, in float64, from the keys it may attend to."""
    query, key, basis = (tensor.double().cpu() for tensor in (query, key, basis))
    batch, heads, queries, _ = query.shape
    shape = (batch, heads, queries, key.shape[2])
    mask = torch.ones(shape).bool() if mask is None else mask.cpu().expand(shape)
    bias = torch.zeros(shape).double() if bias is None else bias.double().cpu().expand(shape)
    statistics = torch.zeros(5, batch, heads, queries, dtype=torch.float64)
    statistics[0] = -torch.inf
    coordinates = torch.zeros(batch, heads, queries, basis.shape[-1], dtype=torch.float64)
    for b, h, q in np.ndindex(batch, heads, queries):
        seen = mask[b, h, q] & bias[b, h, q].gt(-torch.inf)
        if causal:
            seen = seen & (torch.arange(key.shape[2]) <= q)
        if not seen.any():
            continue
        keys = key[b, h * key.shape[1] // heads][seen]
        logits = scaling * (keys @ query[b, h, q]) + bias[b, h, q][seen]
        p = torch.softmax(logits, 0)
        statistics[0, b, h, q] = torch.logsumexp(logits, 0)
        statistics[1, b, h, q] = (p - 1 / len(p)).square().sum()
        statistics[2, b, h, q] = torch.special.entr(p).sum()
        statistics[3, b, h, q] = p.max()
        statistics[4, b, h, q] = len(p)
        coordinates[b, h, q] = p @ basis[b, h * basis.shape[1] // heads][seen]
    return (*statistics, coordinates)


def check_rows(query, key, basis, backend, **kwargs):
    statistics = kernels.row_statistics(query, key, basis, backend=backend, **kwargs)
    expected = reference_rows(query, key, basis, **kwargs)
    for name, actual, wanted in zip(statistics._fields, statistics, expected, strict=True):
        assert actual.dtype == torch.float32, name
        finite = wanted[wanted.isfinite()]
        close(actual, wanted, atol=1e-6 * max(1.0, finite.abs().max().item()) if len(finite) else 0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("queries", "keys", "dim", "rank"),
    [(1, 1, 24, 1), (63, 65, 24, 20), (65, 63, 60, 60), (5, 130, 64, 64), (70, 33, 128, 127)],
)
def test_rows_match_the_loop(backend, dtype, queries, keys, dim, rank):
    query, key = normal(1, 2, queries, dim, dtype=dtype), normal(1, 2, keys, dim, dtype=dtype)
    basis = normal(1, 2, keys, rank, seed=2)
    check_rows(query, key, basis, backend, scaling=2 * dim**-0.5)


def row_masks(name, queries, keys):
    """A mask, a bias and causal, by name."""
    generator = torch.Generator().manual_seed(3)
    positions = torch.arange(keys, device=DEVICE)
    padding = (positions < torch.tensor([[keys - 9], [4]], device=DEVICE))[:, None, None]
    rows = torch.arange(queries, device=DEVICE)[:, None]
    random = (torch.rand(2, 4, queries, keys, generator=generator) < 0.3).to(DEVICE)
    random[:, :, 2] = False
    random[1, 3] = False
    relative = 0.1 * (positions - rows).abs()
    return {
        "padding": {"mask": padding},
        "dense padding": {"mask": padding.expand(2, 1, queries, keys).contiguous()},
        "expanded padding": {"mask": padding.expand(2, 4, queries, keys)},
        "window": {"mask": (positions - rows).abs() <= 3},
        "random per head": {"mask": random},
        "nothing": {"mask": torch.zeros(2, 1, 1, keys, dtype=torch.bool, device=DEVICE)},
        "causal": {"causal": True},
        "causal and padding on the left": {"causal": True, "mask": positions > 4},
        "bias": {"bias": -relative},
        "bias per head": {"bias": normal(4, 1, keys), "mask": padding, "causal": True},
        "infinite bias": {"bias": torch.zeros_like(random, dtype=torch.float32).masked_fill(
            ~random, -torch.inf
        )},
    }[name]  # fmt: skip


MASKS = [
    "padding",
    "dense padding",
    "expanded padding",
    "window",
    "random per head",
    "nothing",
    "causal",
    "causal and padding on the left",
    "bias",
    "bias per head",
    "infinite bias",
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mask", MASKS)
def test_rows_under_masks(backend, mask, monkeypatch):
    """Grouped heads, strided inputs, tiles that end anywhere; unseen keys hold NaN."""
    monkeypatch.setattr(tiles, "TILE_ELEMENTS", 150)
    query = normal(2, 37, 4, 20).transpose(1, 2)
    key, basis = normal(2, 41, 2, 20, seed=1).transpose(1, 2), normal(2, 1, 41, 6, seed=2)
    options = row_masks(mask, 37, 41)
    if "mask" in options:
        unseen = ~options["mask"].expand(2, 4, 37, 41).any(1).any(1)[:, None, :, None]
        key, basis = key.masked_fill(unseen, torch.nan), basis.masked_fill(unseen, torch.nan)
    check_rows(query, key, basis, backend, scaling=0.4, **options)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_keep_their_accuracy_with_large_logits(backend):
    """A common offset of the logits, and rows so peaked that their entropy is tiny."""
    query, key = 6 * normal(1, 1, 20, 24), 6 * normal(1, 1, 30, 24, seed=1)
    statistics = kernels.row_statistics(query, key, scaling=0.05, backend=backend)
    expected = reference_rows(query, key, key, scaling=0.05)
    assert statistics.coordinates is None
    assert expected[2].min() < 0.02 and expected[0].max() > 10
    close(statistics.entropy, expected[2], atol=2e-7)
    close(statistics.centred, expected[1], atol=0)


def test_rows_in_float64():
    query, key, basis = (normal(2, 2, 17, 8, seed=s, dtype=torch.float64) for s in range(3))
    statistics = kernels.row_statistics(query, key, basis, scaling=0.3)
    expected = reference_rows(query, key, basis, scaling=0.3)
    for actual, wanted in zip(statistics, expected, strict=True):
        assert actual.dtype == torch.float64
        close(actual, wanted, rtol=1e-12, atol=1e-13)


class LargestTensor(TorchDispatchMode):
    """Records the number of elements of the largest tensor that any operation returns."""

    largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor) and tensor._base is None:
                self.largest = max(self.largest, tensor.numel())
        return result


def test_torch_twins_allocate_nothing_quadratic(monkeypatch):
    monkeypatch.setattr(tiles, "TILE_ELEMENTS", 4096)
    query, key, basis = (normal(1, 3, 512, 8, seed=seed) for seed in range(3))
    mask = (torch.arange(512, device=DEVICE) % 7 > 0)[None, None, None]
    with LargestTensor() as record:
        kernels.row_statistics(query, key, basis, mask=mask, scaling=0.3, backend="torch")
        kernels.row_statistics(query, key, basis, causal=True, scaling=0.3, backend="torch")
        kernels.effective_reduce(query, basis, top_k=3, backend="torch")
    assert 0 < record.largest <= 3 * 512 * 8  # linear in the tokens: a tile or a tensor like q


class Products(TorchDispatchMode):
    """Counts the products of queries and keys."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten.baddbmm.out
        return function(*args, **kwargs or {})


def test_blocks_that_no_row_sees_are_left_out(monkeypatch):
    """A window of 8 costs three blocks a tile at most, whatever the length; causal half of all."""
    monkeypatch.setattr(tiles, "TILE_ELEMENTS", 1024)  # 16 rows by 16 keys by 4 heads
    query, key = normal(1, 2, 256, 8), normal(1, 2, 256, 8, seed=1)
    positions = torch.arange(256, device=DEVICE)
    window = (positions - positions[:, None]).abs() <= 4
    for options, products in (
        ({"mask": window[None, None]}, 16 + 2 * 15),
        ({"causal": True}, 16 * 17 // 2),
        ({}, 16 * 16),
    ):
        with Products() as record:
            kernels.row_statistics(query, key, scaling=0.3, backend="torch", **options)
        assert record.count == products


# Effective attention ---------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("queries", "keys", "rank"), [(1, 1, 1), (63, 65, 24), (65, 130, 60), (20, 33, 128)]
)
def test_reductions_match_the_map(backend, dtype, queries, keys, rank, monkeypatch):
    monkeypatch.setattr(tiles, "TILE_ELEMENTS", 700)
    coordinates = normal(2, 2, queries, rank, dtype=dtype)
    basis = normal(2, 2, keys, rank, seed=1, dtype=dtype)
    rows = torch.ones(2, 2, queries, dtype=torch.bool, device=DEVICE)
    rows[0, 1, ::3] = False
    labels = torch.randint(3, (2, keys), generator=torch.Generator().manual_seed(4)).to(DEVICE)
    top_k = min(5, queries * keys)

    expected = coordinates.double() @ basis.double().mT
    expected = expected.masked_fill(~rows[..., None], 0.0)
    coordinates = coordinates.masked_fill(~rows[..., None], torch.nan)
    reduction = kernels.effective_reduce(
        coordinates,
        basis,
        rows=rows,
        labels=labels,
        number_of_labels=4,
        top_k=top_k,
        maps=True,
        backend=backend,
    )
    bar = 1e-5 * expected.abs().max().item()
    close(reduction.maps, expected, atol=bar)
    close(reduction.absolute_column_sums, expected.abs().sum(-2), atol=bar)
    onehot = torch.nn.functional.one_hot(labels, 4).double()[:, None]
    close(reduction.label_sums, (expected.sum(-2, keepdim=True) @ onehot)[:, :, 0], atol=9 * bar)
    places = expected.abs().flatten(2).topk(top_k).indices
    close(reduction.top_values, expected.flatten(2).gather(-1, places), atol=bar)
    found = reduction.top_queries * keys + reduction.top_keys
    assert torch.equal(found.sort().values, places.sort().values)


@pytest.mark.parametrize("backend", BACKENDS)
def test_reductions_give_only_what_was_asked_for(backend):
    reduction = kernels.effective_reduce(normal(1, 1, 3, 4), normal(1, 1, 5, 4), backend=backend)
    assert reduction.absolute_column_sums.shape == (1, 1, 5)
    assert all(part is None for part in reduction[1:])


@pytest.mark.parametrize("backend", BACKENDS)
def test_top_entries_may_be_all_of_them(backend):
    coordinates, basis = normal(1, 1, 1, 4), normal(1, 1, 70, 4, seed=1)
    reduction = kernels.effective_reduce(coordinates, basis, top_k=70, backend=backend)
    everything = (coordinates @ basis.mT).flatten(2)
    found = reduction.top_queries * 70 + reduction.top_keys
    assert torch.equal(found.sort().values[0, 0].cpu(), torch.arange(70))
    close(reduction.top_values, everything.gather(-1, found))


# Backends and arguments ------------------------------------------------------------------------


def test_auto_takes_triton_on_cuda_only():
    assert kernels.resolve("auto", torch.device("cpu")) == "torch"
    assert kernels.resolve("auto", torch.device("cuda")) == "triton"
    assert kernels.resolve("torch", torch.device("cuda")) == "torch"
    assert kernels.resolve("auto", torch.device("cuda"), dtype=torch.float64) == "torch"
    assert kernels.resolve("auto", torch.device("cuda"), width=129) == "torch"


@pytest.mark.parametrize(
    ("backend", "options", "message"),
    [
        ("cuda", {}, "'auto', 'torch' or 'triton'. Got 'cuda'"),
        ("triton", {"dtype": torch.float64}, "do not take float64; use backend='torch'"),
        ("triton", {"width": 129}, "at most 128 columns per head, here 129"),
    ],
)
def test_a_backend_that_cannot_be_used(backend, options, message):
    with pytest.raises(InputError, match=message):
        kernels.resolve(backend, torch.device(DEVICE), **options)


def run_python(code, **environment):
    environment = {
        name: setting for name, setting in os.environ.items() if name != "TRITON_INTERPRET"
    } | environment
    root = Path(kernels.__file__).parents[2]
    return subprocess.run(
        [sys.executable, "-c", code], cwd=root, env=environment, text=True, capture_output=True
    )


def test_without_triton_pytorch_is_used():
    code = """
import sys
sys.modules["triton"] = None  # every import of it fails
import torch
from attnlens import kernels
from attnlens.errors import InputError
value = torch.ones(1, 1, 3, 2)
assert kernels.gram_factor(value).rank == 1
assert kernels.resolve("auto", torch.device("cuda")) == "torch"
try:
    kernels.gram_factor(value, backend="triton")
except InputError as error:
    print(error)
"""
    finished = run_python(code)
    assert finished.returncode == 0, finished.stderr
    assert "Triton cannot be imported (pip install triton); use backend='torch'" in finished.stdout


def test_triton_is_not_imported_before_it_is_needed():
    code = """
import sys, torch
from attnlens import kernels
before = "triton" in sys.modules  # transformers may import it
kernels.gram_factor(torch.ones(1, 1, 3, 2))
assert ("triton" in sys.modules) == before
assert not [name for name in sys.modules if name.startswith("attnlens.kernels.triton")]
try:
    kernels.gram_factor(torch.ones(1, 1, 3, 2), backend="triton")
except ValueError as error:
    print(error)
"""
    finished = run_python(code)
    assert finished.returncode == 0, finished.stderr
    assert "it needs CUDA tensors, these are on cpu" in finished.stdout


@pytest.mark.slow
def test_every_kernel_compiles_for_hopper(tmp_path):
    """No GPU is needed to compile; layouts that the compiler refuses show here."""
    code = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from attnlens.kernels import triton_gram, triton_reduce, triton_rows

def compiles(kernel, pointers, constants, warps):
    kinds = {name: "constexpr" for name in constants}
    kinds |= {name: f"*{kind}" for name, kind in pointers.items()}
    kinds |= {"scaling": "fp32"}
    signature = {p.name: kinds.get(p.name, "i32") for p in kernel.params}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    print(kernel.__name__)

doubles = dict.fromkeys(
    "gram_out matrix_out vector_out bound_out threshold".split(),
    "fp64",
)
inputs = {"value": "bf16", "keys": "u8", "rank_out": "i64"}
tile = dict(DIM=32, BLOCK=32, BLOCK_TOKENS=16, SWEEPS=24)  # compiles four times as fast as 64
for spectrum in (False, True):
    compiles(triton_gram.gram_kernel, inputs | doubles, tile | {"SPECTRUM": spectrum}, 4)
floats = dict.fromkeys("basis bias statistics coordinates column_sums maps magnitudes".split(),
                       "fp32")
for dtype, causal in (("fp32", True), ("bf16", False)):
    compiles(triton_rows.row_statistics_kernel,
             floats | {"query": dtype, "key": dtype, "mask": "u8"},
             dict(DIM=64, RANK=64, HAS_MASK=True, HAS_BIAS=causal, CAUSAL=causal,
                  NATIVE=dtype == "bf16", BLOCK_D=64, BLOCK_R=64,
                  BLOCK_Q=triton_rows.BLOCK_Q, BLOCK_K=triton_rows.BLOCK_K), 8)
compiles(triton_reduce.effective_reduce_kernel, floats | {"places": "i64"},
         dict(RANK=64, TOP=10, MAPS=True, BLOCK_R=64, BLOCK_Q=triton_reduce.BLOCK_Q,
              BLOCK_K=triton_reduce.BLOCK_K, BLOCK_TOP=16), 8)
"""
    finished = run_python(code, TRITON_CACHE_DIR=str(tmp_path))
    assert finished.returncode == 0, finished.stderr[-2000:]
    assert len(finished.stdout.split()) == 5


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: kernels.gram_factor(torch.ones(2, 3, 4)), "B, H, K, D"),
        (lambda: kernels.gram_factor(torch.ones(1, 1, 4, 2).int()), "floating-point"),
        (lambda: kernels.gram_factor(torch.ones(1, 1, 0, 2)), "empty"),
        (lambda: kernels.gram_factor(torch.ones(1, 1, 4, 2), torch.ones(1, 3).bool()), "keys"),
        (lambda: kernels.gram_factor(torch.ones(1, 1, 4, 2), torch.ones(1, 4)), "float32"),
        (lambda: kernels.gram_svd(torch.ones(4, 2)), "value must be"),
        (lambda: rows_call(key=torch.ones(1, 3, 5, 4)), "3 heads, which do not divide 2"),
        (lambda: rows_call(key=torch.ones(1, 2, 5, 3)), "D=4"),
        (lambda: rows_call(basis=torch.ones(1, 2, 6, 3)), "K=5"),
        (lambda: rows_call(mask=torch.ones(5)), "mask must be boolean"),
        (lambda: rows_call(mask=torch.ones(3, 4).bool()), r"broadcast to \[1, 2, 3, 5\]"),
        (lambda: rows_call(bias=torch.ones(5).bool()), "bias must be floating point"),
        (lambda: rows_call(bias=torch.ones(5, device="meta")), "bias is on meta"),
        (lambda: reduce_call(rows=torch.ones(1, 4).bool()), "rows must be boolean"),
        (lambda: reduce_call(top_k=16), r"\[0, Q · K = 15\]. Got 16"),
        (lambda: reduce_call(labels=torch.zeros(1, 5).long()), "number_of_labels"),
        (lambda: reduce_call(labels=torch.zeros(1, 4).long(), number_of_labels=1), "K=5"),
    ],
)
def test_arguments_that_do_not_fit(call, message):
    with pytest.raises(InputError, match=message):
        call()


def rows_call(key=None, basis=None, **kwargs):
    key = torch.ones(1, 2, 5, 4) if key is None else key
    return kernels.row_statistics(torch.ones(1, 2, 3, 4), key, basis, scaling=1.0, **kwargs)


def reduce_call(**kwargs):
    return kernels.effective_reduce(torch.ones(1, 1, 3, 2), torch.ones(1, 1, 5, 2), **kwargs)


def test_a_lens_computes_the_same_with_either_backend():
    from attnlens import HeadStatistics, Lens
    from tests.support import models

    model, inputs = models.build("bert"), models.inputs("bert")
    results = {}
    for backend in BACKENDS:
        statistics = HeadStatistics()
        with Lens(model.to(DEVICE), statistics, backend=backend), torch.no_grad():
            model(**{name: tensor.to(DEVICE) for name, tensor in inputs.items()})
        results[backend] = statistics.compute()
    for name, expected in results["torch"].tensors().items():
        found = results["triton"].tensors()[name]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5, equal_nan=True, msg=name)
