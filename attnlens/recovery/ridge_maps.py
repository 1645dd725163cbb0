"""Linear maps for the l2 distance in closed form, from sums over tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from attnlens.errors import InputError
from attnlens.recovery.token_maps import Maps, Parameters

RIDGES = tuple(10.0**power for power in range(-10, 1))
"""Ridge terms tried, relative to the mean variance of a coordinate of the hidden states."""

_TINY = 1e-30


class NormalEquations(NamedTuple):
    """What the least-squares map from hidden states to targets follows from; sums over tokens.

    Equations of disjoint tokens add up entry by entry. Hidden states have a one appended.

    Attributes:
        gram: `Σ ẽ ẽᵀ`, `[L, M + 1, M + 1]` float64; its last entry counts tokens.
        cross: `Σ ẽ xᵀ`, `[L, M + 1, M']` float64.
        square: `Σ ‖x‖²`, `[L]` float64.
    """

    gram: Tensor
    cross: Tensor
    square: Tensor

    @property
    def tokens(self) -> Tensor:
        """Number of tokens, `[L]`."""
        return self.gram[:, -1, -1]


def normal_equations(hidden: Tensor, target: Tensor) -> NormalEquations:
    """Sum products of hidden states and targets.

    Args:
        hidden: `[L, N, M]`.
        target: `[N, M']`.

    Returns:
        The sums.

    Examples:
        >>> normal_equations(torch.tensor([[[1.0], [3.0]]]), torch.tensor([[2.0], [6.0]])).gram
        tensor([[[10.,  4.],
                 [ 4.,  2.]]], dtype=torch.float64)
    """
    augmented = torch.nn.functional.pad(hidden.double(), (0, 1), value=1.0)
    target = target.double()
    square = target.square().sum().repeat(len(hidden))
    return NormalEquations(augmented.mT @ augmented, augmented.mT @ target, square)


def added_equations(parts: Iterable[NormalEquations]) -> NormalEquations:
    """Add the equations of disjoint tokens.

    Args:
        parts: at least one.

    Returns:
        Their sums.
    """
    return NormalEquations(*(torch.stack(entries).sum(0) for entries in zip(*parts, strict=True)))


def ridge_maps(equations: NormalEquations, ridges: Iterable[float]) -> Iterator[Parameters]:
    """Solve for linear maps that minimise squared error plus a ridge term on the weights.

    Args:
        equations: sums over the training tokens.
        ridges: terms relative to the mean variance of a coordinate of the hidden states.

    Yields:
        `(weight [L, M, M'], bias [L, M'])`, float64, for each ridge term.

    Raises:
        InputError: if there are no tokens.

    Examples:
        >>> hidden, target = torch.tensor([[[1.0], [3.0]]]), torch.tensor([[2.0], [6.0]])
        >>> [(weight, bias)] = ridge_maps(normal_equations(hidden, target), [0.0])
        >>> weight.item(), bias.item()
        (2.0, 0.0)
    """
    if not bool((equations.tokens > 0).all()):
        raise InputError("There are no tokens to find maps from. Run more text through the model.")
    count = equations.tokens[:, None]
    mean, target_mean = equations.gram[:, -1, :-1] / count, equations.cross[:, -1] / count
    gram = equations.gram[:, :-1, :-1] / count[..., None] - mean[..., None] * mean[:, None]
    cross = equations.cross[:, :-1] / count[..., None] - mean[..., None] * target_mean[:, None]
    variances, axes = torch.linalg.eigh(gram)
    variances, along_axes = variances.clamp_min(0.0), axes.mT @ cross
    for ridge in ridges:
        damping = (ridge * variances.mean(-1, keepdim=True)).clamp_min(_TINY)
        weight = (axes / (variances + damping)[:, None]) @ along_axes
        yield weight, target_mean - (mean[:, None] @ weight).squeeze(1)


def mean_squared_error(equations: NormalEquations, parameters: Parameters) -> Tensor:
    """Evaluate linear maps on the tokens of normal equations.

    Args:
        equations: sums over the tokens.
        parameters: `(weight [L, M, M'], bias [L, M'])`.

    Returns:
        Mean squared difference of a coordinate, `[L]`.

    Examples:
        >>> equations = normal_equations(torch.tensor([[[1.0], [3.0]]]), torch.zeros(2, 1))
        >>> identity = torch.ones(1, 1, 1).double(), torch.zeros(1, 1).double()
        >>> mean_squared_error(equations, identity).item()
        5.0
    """
    weight, bias = parameters
    whole = torch.cat([weight, bias[:, None]], 1)  # [L, M + 1, M']
    explained = (whole * (equations.gram @ whole - 2 * equations.cross)).sum((-2, -1))
    return (equations.square + explained) / (equations.tokens * whole.shape[-1])


def best_ridge_maps(
    train: NormalEquations, validation: NormalEquations, ridges: Iterable[float] = RIDGES
) -> Maps:
    """Choose for every layer the ridge term with the smallest error on the validation tokens.

    Args:
        train: sums over the training tokens.
        validation: sums over the validation tokens.
        ridges: candidates, see :func:`ridge_maps`; at least one.

    Returns:
        The maps, solved from the training tokens alone, in float64.

    Raises:
        InputError: if a split has no tokens.

    Examples:
        >>> hidden = torch.tensor([[[1.0], [3.0], [4.0]]])
        >>> equations = normal_equations(hidden, 2 * hidden[0])
        >>> best_ridge_maps(equations, equations, [1.0, 0.0]).ridge.item()
        0.0
    """
    if not bool((validation.tokens > 0).all()):
        raise InputError("The validation split has no tokens. Run more text through the model.")
    ridges = tuple(ridges)
    best: Maps | None = None
    for ridge, parameters in zip(ridges, ridge_maps(train, ridges), strict=True):
        loss = mean_squared_error(validation, parameters)
        term, missing = (torch.full_like(loss, number) for number in (ridge, torch.nan))
        maps = Maps(parameters, loss, missing, term)
        best = maps if best is None else tree_map(partial(_where, loss < best.loss), maps, best)
    assert best is not None
    return best


def _where(layers: Tensor, new: Tensor, old: Tensor) -> Tensor:
    return torch.where(layers.view(-1, *[1] * (new.dim() - 1)), new, old)
