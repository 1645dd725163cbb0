"""Eigenvalues of many small matrices."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

# Below so many entries a matrix costs less than handing it to a thread.
_WORTH_THREADS = 16 * 64 * 64


def eigenvalues(matrices: Tensor) -> Tensor:
    """Compute the eigenvalues of symmetric matrices, on every thread that torch may use.

    On a CPU, PyTorch takes the matrices of a batch one after another, on a single thread.

    Args:
        matrices: `[..., E, E]` symmetric, finite.

    Returns:
        `[..., E]`, ascending.
    """
    threads = torch.get_num_threads()
    if matrices.device.type != "cpu" or threads == 1 or matrices.numel() < _WORTH_THREADS:
        return torch.linalg.eigvalsh(matrices)
    shares = matrices.detach().flatten(end_dim=-3).chunk(threads)
    with ThreadPoolExecutor(threads - 1) as pool:
        others = [pool.submit(_eigenvalues, share) for share in shares[1:]]
        found = [torch.linalg.eigvalsh(shares[0]), *(other.result() for other in others)]
    return torch.cat(found).unflatten(0, matrices.shape[:-2])


def _eigenvalues(matrices: Tensor) -> Tensor:
    with torch.no_grad():  # whether gradients are recorded is a setting of each thread
        return torch.linalg.eigvalsh(matrices)
