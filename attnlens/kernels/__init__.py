"""The four inner loops of attnlens, each as a Triton kernel and as its PyTorch twin.

The backend is chosen in this package and nowhere else: every function takes `backend="auto"`
(Triton for CUDA tensors where Triton is installed, PyTorch otherwise), `"torch"` or
`"triton"`. Nothing here is differentiable.
"""

from attnlens.kernels.backend import Backend, resolve
from attnlens.kernels.operations import effective_reduce, gram_factor, gram_svd, row_statistics
from attnlens.kernels.returned import EffectiveReduction, GramFactor, GramSVD, RowStatistics

__all__ = [
    "Backend",
    "EffectiveReduction",
    "GramFactor",
    "GramSVD",
    "RowStatistics",
    "effective_reduce",
    "gram_factor",
    "gram_svd",
    "resolve",
    "row_statistics",
]
