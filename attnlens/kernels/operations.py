"""The public operations: check the arguments, choose the backend, run its kernel."""

from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

from attnlens.errors import InputError
from attnlens.kernels.backend import Backend, resolve
from attnlens.kernels.inputs import broadcastable, check_device, check_tensor, head_mask
from attnlens.kernels.ranks import rank_threshold
from attnlens.kernels.returned import EffectiveReduction, GramFactor, GramSVD, RowStatistics
from attnlens.kernels.torch_rows import Rows


@torch.no_grad()
def gram_factor(
    value: Tensor,
    keys: Tensor | None = None,
    *,
    threshold: Tensor | None = None,
    backend: Backend = "auto",
) -> GramFactor:
    """Whiten the values of every head: W with `W Wᵀ = (VᵀV)⁺`, and the rank.

    Sums are float64 on both backends. A head whose rank is certainly full is factorised by
    Cholesky, the others by an orthogonal or a spectral decomposition, each for itself. Triton
    never waits for the device. Heads whose values are not finite at real keys come out as NaN.

    Args:
        value: `[B, H, K, D]`; rows at masked keys may hold anything.
        keys: `[B, K]` or `[B, 1 or H, K]` bool, True = real key.
        threshold: `[B, 1 or H]` float64; σ_k counts towards the rank if σ_k > threshold · σ_1. By
            default that of :func:`~attnlens.kernels.ranks.rank_threshold`.
        backend: `"auto"`, `"torch"` or `"triton"`.

    Returns:
        Factor, rank, a bound of the condition, Gram matrix and sum of the values of every head.

    Raises:
        InputError: if a shape, a type or the backend does not fit.

    References:
        Brunner et al., "On Identifiability in Transformers", ICLR 2020, section 3.

    Examples:
        >>> factor = gram_factor(torch.randn(1, 12, 40, 8))
        >>> factor.rank.unique().tolist()
        [8]
    """
    keys = _checked_keys(value, keys)
    if threshold is None:
        threshold = rank_threshold(keys.sum(-1), value.shape[-1])
    module = _load("gram", backend, value, value.shape[-1])
    with torch.cuda.device_of(value):
        factor: GramFactor = module.gram_factor(value, keys, threshold)
    return factor


@torch.no_grad()
def gram_svd(value: Tensor, keys: Tensor | None = None, *, backend: Backend = "auto") -> GramSVD:
    """Take the singular values and right singular vectors of the values of every head.

    They are the eigenpairs of `VᵀV`, summed in float64, so that σ_k is right to about
    `1e-8 · σ_1`. Triton finds them by cyclic Jacobi rotations of disjoint pairs of columns. Heads
    whose values are not finite at real keys come out as NaN.

    Args:
        value: `[B, H, K, D]`; rows at masked keys may hold anything.
        keys: `[B, K]` or `[B, 1 or H, K]` bool, True = real key.
        backend: `"auto"`, `"torch"` or `"triton"`.

    Returns:
        Singular values `[B, H, D]`, descending, and vectors `[B, H, D, D]` in columns.

    Raises:
        InputError: if a shape, a type or the backend does not fit.

    References:
        Brent and Luk, "The Solution of Singular-Value and Symmetric Eigenvalue Problems on
        Multiprocessor Arrays", SIAM J. Sci. Stat. Comput. 6 (1985).

    Examples:
        >>> value = torch.randn(1, 2, 40, 8, dtype=torch.float64)
        >>> torch.allclose(gram_svd(value).singular_values, torch.linalg.svdvals(value))
        True
    """
    keys = _checked_keys(value, keys)
    module = _load("gram", backend, value, value.shape[-1])
    with torch.cuda.device_of(value):
        svd: GramSVD = module.gram_svd(value, keys)
    return svd


@torch.no_grad()
def row_statistics(
    query: Tensor,
    key: Tensor,
    basis: Tensor | None = None,
    *,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    causal: bool = False,
    scaling: float,
    backend: Backend = "auto",
) -> RowStatistics:
    """Summarise every row of softmax(scaling · Q Kᵀ + bias + mask) without storing the matrix.

    Computed in float32 (in float64 where the query is float64). A row that may attend to
    nothing has log-sum-exp −inf and zeros elsewhere. Keys that no row of the example attends to
    may hold anything.

    Args:
        query: `[B, H, Q, D]`.
        key: `[B, Hkv, K, D]`, Hkv dividing H.
        basis: `[B, Hkv, K, R]`, the vectors u_j of the coordinates; its own Hkv divides H.
        mask: boolean, True = may attend, broadcastable to `[B, H, Q, K]`.
        bias: added to the scaled logits, broadcastable to `[B, H, Q, K]`. Entries below −5e29
            count as masked.
        causal: key j is hidden from row i < j, beside the mask.
        scaling: factor of the logits, usually 1 / √D.
        backend: `"auto"`, `"torch"` or `"triton"`.

    Returns:
        Log-sum-exp, centred squares, entropy, maximum and size `[B, H, Q]`, and coordinates
        `[B, H, Q, R]`.

    Raises:
        InputError: if a shape, a type or the backend does not fit.

    References:
        Milakov and Gimelshein, "Online normalizer calculation for softmax", arXiv 1805.02867.

    Examples:
        >>> query, key = torch.randn(2, 1, 4, 10, 8)
        >>> tuple(row_statistics(query, key, scaling=8**-0.5).entropy.shape)
        (1, 4, 10)
    """
    check_tensor("query", query, "B H Q D", like=query)
    batch, heads, queries, dim = query.shape
    check_tensor("key", key, "B H K D", (batch, None, None, dim), like=query)
    keys = key.shape[2]
    width = dim
    if basis is not None:
        check_tensor("basis", basis, "B H K R", (batch, None, keys, None), like=query)
        width = max(dim, basis.shape[3])
    for name, tensor in (("key", key), ("basis", basis)):
        if tensor is not None and heads % tensor.shape[1]:
            raise InputError(f"{name} has {tensor.shape[1]} heads, which do not divide {heads}")
    shape = (batch, heads, queries, keys)
    mask = broadcastable("mask", mask, shape, boolean=True)
    bias = broadcastable("bias", bias, shape, boolean=False)
    for name, tensor in (("mask", mask), ("bias", bias)):
        if tensor is not None:
            check_device(name, tensor, query)
    module = _load("rows", backend, query, width)
    with torch.cuda.device_of(query):
        rows: RowStatistics = module.row_statistics(
            Rows(query, key, basis, mask, bias, causal, scaling)
        )
    return rows


@torch.no_grad()
def effective_reduce(
    coordinates: Tensor,
    basis: Tensor,
    *,
    rows: Tensor | None = None,
    labels: Tensor | None = None,
    number_of_labels: int | None = None,
    top_k: int = 0,
    maps: bool = False,
    backend: Backend = "auto",
) -> EffectiveReduction:
    """Reduce the effective attention A⊥ = C Uᵀ tile by tile, or write it out.

    Computed in float32 (in float64 where the coordinates are float64). The label sums are
    linear in A⊥ and need no tile: (1ᵀC)(Σ_{k in label} u_k).

    Args:
        coordinates: C, `[B, H, Q, R]`.
        basis: U, `[B, H, K, R]`, zero at masked keys.
        rows: boolean `[B, Q]` or `[B, 1|H, Q]`, True = count this row; the others may hold
            anything and enter as zeros.
        labels: int64 `[B, K]` in [0, number_of_labels), the label of each key.
        number_of_labels: needed with `labels`.
        top_k: how many entries of largest magnitude to return per head.
        maps: return A⊥ itself, `[B, H, Q, K]`.
        backend: `"auto"`, `"torch"` or `"triton"`.

    Returns:
        Absolute column sums `[B, H, K]` and whatever else was asked for.

    Raises:
        InputError: if a shape, a type or the backend does not fit.

    Examples:
        >>> coordinates, basis = torch.randn(1, 4, 10, 8), torch.randn(1, 4, 12, 8)
        >>> tuple(effective_reduce(coordinates, basis).absolute_column_sums.shape)
        (1, 4, 12)
    """
    check_tensor("coordinates", coordinates, "B H Q R", like=coordinates)
    batch, heads, queries, rank = coordinates.shape
    check_tensor("basis", basis, "B H K R", (batch, heads, None, rank), like=coordinates)
    keys = basis.shape[2]
    rows = head_mask("rows", rows, (batch, heads, queries))
    if not 0 <= top_k <= queries * keys:
        raise InputError(f"top_k must lie in [0, Q · K = {queries * keys}]. Got {top_k}")
    dtype = torch.float64 if coordinates.dtype == torch.float64 else torch.float32
    coordinates, basis = coordinates.to(dtype), basis.to(dtype)
    if rows is not None:
        coordinates = coordinates.masked_fill(~rows[..., None], 0.0)
    module = _load("reduce", backend, coordinates, rank)
    with torch.cuda.device_of(coordinates):
        reduction: EffectiveReduction = module.effective_reduce(
            coordinates, basis, top_k=top_k, maps=maps
        )
    if labels is None:
        return reduction
    return reduction._replace(label_sums=_label_sums(coordinates, basis, labels, number_of_labels))


def _label_sums(
    coordinates: Tensor, basis: Tensor, labels: Tensor, number_of_labels: int | None
) -> Tensor:
    batch, heads, keys, _ = basis.shape
    if number_of_labels is None or labels.dtype != torch.int64 or labels.shape != (batch, keys):
        raise InputError(
            f"labels must be int64 [B={batch}, K={keys}] and come with number_of_labels. "
            f"Got {labels.dtype} {list(labels.shape)} and {number_of_labels}"
        )
    check_device("labels", labels, basis)
    column_sums = (basis @ coordinates.sum(-2)[..., None]).squeeze(-1)  # [B, H, K]
    sums = basis.new_zeros((batch, heads, number_of_labels))
    return sums.scatter_add_(-1, labels[:, None].expand(batch, heads, keys), column_sums)


def _checked_keys(value: Tensor, keys: Tensor | None) -> Tensor:
    """Check values and their keys; return the keys `[B, H, K]`, all where there are none."""
    check_tensor("value", value, "B H K D", like=value)
    shape = (value.shape[0], value.shape[1], value.shape[2])
    keys = head_mask("keys", keys, shape)
    if keys is None:
        return torch.ones((), dtype=torch.bool, device=value.device).expand(shape)
    return keys


def _load(family: str, backend: Backend, tensor: Tensor, width: int) -> ModuleType:
    """Return the module that holds a family of kernels for the backend this call resolves to."""
    chosen = resolve(backend, tensor.device, dtype=tensor.dtype, width=width)
    return import_module(f"attnlens.kernels.{chosen}_{family}")
