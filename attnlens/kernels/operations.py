"""The public operations: check the arguments, choose the backend, run its kernel."""

from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

from attnlens.errors import InputError
from attnlens.kernels.backend import Backend, resolve
from attnlens.kernels.inputs import broadcastable, check_device, check_tensor, head_mask
from attnlens.kernels.returned import EffectiveReduction, GramFactor, GramSVD, RowStatistics


@torch.no_grad()
def gram_factor(
    value: Tensor,
    keys: Tensor | None = None,
    *,
    ones: bool = False,
    rtol: float | None = None,
    extremes: bool = True,
    backend: Backend = "auto",
) -> GramFactor:
    """Whiten the values of every head: W with W Wᵀ = (VᵀV)⁺, the rank and the extreme σ.

    Sums are float64 on both backends. A head whose rank is certainly full is factorised by
    Cholesky, the others by an eigendecomposition, each for itself. Triton estimates the extreme
    singular values of the former by power iteration, from inside: σ_max may be too small and
    σ_min too large by a fraction of a percent. Triton never waits for the device; values that
    are not finite at real keys come out as NaN, where PyTorch raises.

    Args:
        value: ``[B, H, K, D]``; rows at masked keys may hold anything.
        keys: Boolean ``[B, K]`` or ``[B, 1|H, K]``, True = real key.
        ones: Factorise ``[V, 1]`` instead of V, so that E = D + 1.
        rtol: σ_k counts towards the rank if σ_k > rtol · σ_1, by default
            max(n, E) · eps(float32) with n the number of real keys. G cannot resolve
            σ_k / σ_1 below about 1e-7.
        extremes: Also give σ_max and σ_min. On a CPU this adds half to the time.
        backend: ``"auto"``, ``"torch"`` or ``"triton"``.

    Returns:
        Factor ``[B, H, E, E]``, rank ``[B, H]`` in [0, min(n, E)], σ_max and σ_min ``[B, H]``,
        Gram matrix and tolerance.

    Raises:
        InputError: If a shape, a type or the backend does not fit.
        NonFiniteError: If a value at a real key is NaN or Inf (PyTorch only).

    References:
        Brunner et al., "On Identifiability in Transformers", ICLR 2020, section 3.
    """
    check_tensor("value", value, "B H K D", like=value)
    batch, heads, tokens, dim = value.shape
    keys = head_mask("keys", keys, (batch, heads, tokens))
    if rtol is not None and not 0 < rtol < 1:
        raise InputError(f"rtol must lie between 0 and 1. Got {rtol}")
    module = _load("gram", backend, value, dim + ones)
    with torch.cuda.device_of(value):
        return module.gram_factor(value, keys, ones=ones, rtol=rtol, extremes=extremes)


@torch.no_grad()
def gram_svd(value: Tensor, keys: Tensor | None = None, *, backend: Backend = "auto") -> GramSVD:
    """Take the singular values and right singular vectors of the values of every head.

    They are the eigenpairs of VᵀV, summed in float64, so that σ_k is right to about
    1e-8 · σ_1. Triton finds them by cyclic Jacobi rotations of disjoint pairs of columns, and
    gives NaN for values that are not finite at real keys, where PyTorch raises.

    Args:
        value: ``[B, H, K, D]``; rows at masked keys may hold anything.
        keys: Boolean ``[B, K]`` or ``[B, 1|H, K]``, True = real key.
        backend: ``"auto"``, ``"torch"`` or ``"triton"``.

    Returns:
        Singular values ``[B, H, D]``, descending, and vectors ``[B, H, D, D]`` in columns.

    Raises:
        InputError: If a shape, a type or the backend does not fit.
        NonFiniteError: If a value at a real key is NaN or Inf (PyTorch only).

    References:
        Brent and Luk, "The Solution of Singular-Value and Symmetric Eigenvalue Problems on
        Multiprocessor Arrays", SIAM J. Sci. Stat. Comput. 6 (1985).
    """
    check_tensor("value", value, "B H K D", like=value)
    batch, heads, tokens, dim = value.shape
    keys = head_mask("keys", keys, (batch, heads, tokens))
    module = _load("gram", backend, value, dim)
    with torch.cuda.device_of(value):
        return module.gram_svd(value, keys)


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
        query: ``[B, H, Q, D]``.
        key: ``[B, Hkv, K, D]``, Hkv dividing H.
        basis: ``[B, Hkv, K, R]``, the vectors u_j of the coordinates; its own Hkv divides H.
        mask: Boolean, True = may attend, broadcastable to ``[B, H, Q, K]``.
        bias: Added to the scaled logits, broadcastable to ``[B, H, Q, K]``. Entries below −5e29
            count as masked.
        causal: Key j is hidden from row i < j, beside the mask.
        scaling: Factor of the logits, usually 1 / √D.
        backend: ``"auto"``, ``"torch"`` or ``"triton"``.

    Returns:
        Log-sum-exp, Σ p², entropy and maximum ``[B, H, Q]``, and coordinates ``[B, H, Q, R]``.

    Raises:
        InputError: If a shape, a type or the backend does not fit.

    References:
        Milakov and Gimelshein, "Online normalizer calculation for softmax", arXiv 1805.02867.
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
        return module.row_statistics(
            query, key, basis, mask=mask, bias=bias, causal=causal, scaling=scaling
        )


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
        coordinates: C, ``[B, H, Q, R]``.
        basis: U, ``[B, H, K, R]``, zero at masked keys.
        rows: Boolean ``[B, Q]`` or ``[B, 1|H, Q]``, True = count this row; the others may hold
            anything and enter as zeros.
        labels: int64 ``[B, K]`` in [0, number_of_labels), the label of each key.
        number_of_labels: Needed with ``labels``.
        top_k: How many entries of largest magnitude to return per head.
        maps: Return A⊥ itself, ``[B, H, Q, K]``.
        backend: ``"auto"``, ``"torch"`` or ``"triton"``.

    Returns:
        Absolute column sums ``[B, H, K]`` and whatever else was asked for.

    Raises:
        InputError: If a shape, a type or the backend does not fit.
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


def _load(family: str, backend: Backend, tensor: Tensor, width: int) -> ModuleType:
    """Return the module that holds a family of kernels for the backend this call resolves to."""
    chosen = resolve(backend, tensor.device, dtype=tensor.dtype, width=width)
    return import_module(f"attnlens.kernels.{chosen}_{family}")
