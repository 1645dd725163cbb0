"""Maps from hidden states back to the tokens they came from, and the rate at which they succeed.

A map ĝ_l takes the hidden state e_i that left layer l to a guess of the token's input embedding
x_i. The token is identified if, of all x_j of its sequence, x_i is nearest to ĝ_l(e_i). Maps of all
layers are computed together: parameters have a leading dimension L.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import gelu

MapKind = Literal["naive", "linear", "mlp"]
Distance = Literal["cosine", "l2"]
Parameters = tuple[Tensor, ...]

_TINY = 1e-30
_SHORT = 1e-8  # as in torch.nn.functional.cosine_similarity

RIDGES = tuple(10.0**power for power in range(-10, 1))
"""Ridge terms tried, relative to the mean variance of a coordinate of the hidden states."""


def glorot_parameters(
    kind: MapKind,
    sizes: tuple[int, int],
    *,
    layers: int,
    width: int = 1000,
    generator: torch.Generator | None = None,
) -> Parameters:
    """Draw the parameters of a map, the same for every layer, with biases of zero.

    Args:
        kind: `"linear"`, or `"mlp"` with one hidden layer.
        sizes: dimensions of a hidden state and of a target.
        layers: number of layers L.
        width: units of the hidden layer.
        generator: source of the draw.

    Returns:
        `(weight [L, M, M'], bias [L, M'])`, or two such pairs; none for `"naive"`.

    References:
        Glorot and Bengio, "Understanding the difficulty of training deep feedforward neural
        networks", AISTATS 2010.
    """
    inputs, outputs = sizes
    steps = {"naive": [], "linear": [(inputs, outputs)], "mlp": [(inputs, width), (width, outputs)]}
    parameters: list[Tensor] = []
    for rows, columns in steps[kind]:
        bound = math.sqrt(6 / (rows + columns))
        weight = (2 * torch.rand(rows, columns, generator=generator) - 1) * bound
        parameters += [weight.repeat(layers, 1, 1), torch.zeros(layers, columns)]
    return tuple(parameters)


def apply_map(parameters: Parameters, hidden: Tensor) -> Tensor:
    """Guess input embeddings from hidden states.

    Args:
        parameters: of :func:`glorot_parameters`; none for the identity.
        hidden: `[L, N, M]`.

    Returns:
        `[L, N, M']`.
    """
    guess = hidden
    for place in range(0, len(parameters), 2):
        guess = gelu(guess) if place else guess
        guess = torch.baddbmm(parameters[place + 1][:, None], guess, parameters[place])
    return guess


def map_loss(guess: Tensor, target: Tensor, distance: Distance) -> Tensor:
    """Average the distance between guesses and targets over tokens.

    Args:
        guess: `[L, N, M]`.
        target: `[N, M]`.
        distance: `"cosine"` for one minus the cosine, `"l2"` for the mean squared difference of a
            coordinate.

    Returns:
        `[L]`.
    """
    if distance == "cosine":
        unit = target / target.norm(dim=-1, keepdim=True).clamp_min(_SHORT)
        length = torch.linalg.vector_norm(guess, dim=-1).clamp_min(_SHORT)
        return 1 - (torch.linalg.vecdot(guess, unit) / length).mean(-1)
    return (guess - target).square().mean((-2, -1))


def identified(
    guess: Tensor, target: Tensor, mask: Tensor, distance: Distance, offset: int = 0
) -> Tensor:
    """Tell for which tokens the nearest target of the sequence is the right one.

    Targets that equal the right one are right too: without a position in them, the embeddings of
    two occurrences of a word cannot be told apart.

    Args:
        guess: `[L, S, K, M]`, S sequences.
        target: `[S, K, M]`.
        mask: `[S, K]` bool, the tokens of each sequence.
        distance: `"cosine"` or `"l2"`.
        offset: the right target of token i is that of token `i + offset`, which must exist.

    Returns:
        `[L, S, K]` bool; False where there is no token, no target or no finite guess.
    """
    candidates = target
    if distance == "cosine":
        candidates = target / target.norm(dim=-1, keepdim=True).clamp_min(_TINY)
    closeness = guess @ candidates.mT
    if distance == "l2":
        closeness = 2 * closeness - target.square().sum(-1)[:, None]
    nearest = closeness.masked_fill(~mask[:, None], -torch.inf).argmax(-1)  # [L, S, K]
    found = torch.take_along_dim(target[None], nearest[..., None], 2)  # [L, S, K, M]
    right = (found == target.roll(-offset, 1)).all(-1) & guess.isfinite().all(-1)
    return right & has_neighbour(mask, offset)


def has_neighbour(mask: Tensor, offset: int) -> Tensor:
    """Tell which tokens have a token at an offset.

    Args:
        mask: `[S, K]` bool, the tokens of each sequence.
        offset: signed distance.

    Returns:
        `[S, K]` bool.
    """
    place = torch.arange(mask.shape[1], device=mask.device) + offset
    inside = (place >= 0) & (place < mask.shape[1])
    return mask & mask.roll(-offset, 1) & inside


def rescaled(hidden: Tensor, factor: float, generator: torch.Generator) -> Tensor:
    """Multiply every hidden state by a random positive number; its direction stays.

    Args:
        hidden: `[..., M]`.
        factor: numbers are log-uniform between `1 / factor` and `factor`.
        generator: source of the numbers.

    Returns:
        `[..., M]`.
    """
    exponent = 2 * torch.rand(hidden.shape[:-1], generator=generator) - 1
    return hidden * (factor**exponent).to(hidden)[..., None]


def rotated(hidden: Tensor, angle: float, generator: torch.Generator) -> Tensor:
    """Turn every hidden state by an angle in a random direction; its norm stays.

    Args:
        hidden: `[..., M]`, M ≥ 2.
        angle: in degrees.
        generator: source of the directions.

    Returns:
        `[..., M]`.
    """
    norm = hidden.norm(dim=-1, keepdim=True)
    axis = hidden / norm.clamp_min(_TINY)
    noise = torch.randn(hidden.shape, generator=generator).to(hidden)
    noise = noise - (noise * axis).sum(-1, keepdim=True) * axis
    noise = noise / noise.norm(dim=-1, keepdim=True)
    radians = math.radians(angle)
    return norm * (math.cos(radians) * axis + math.sin(radians) * noise)


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
    """
    augmented = torch.nn.functional.pad(hidden.double(), (0, 1), value=1.0)
    target = target.double()
    square = target.square().sum().repeat(len(hidden))
    return NormalEquations(augmented.mT @ augmented, augmented.mT @ target, square)


def ridge_maps(equations: NormalEquations, ridges: Iterable[float]) -> Iterator[Parameters]:
    """Solve for linear maps that minimise squared error plus a ridge term on the weights.

    Args:
        equations: sums over the training tokens.
        ridges: terms relative to the mean variance of a coordinate of the hidden states.

    Yields:
        `(weight [L, M, M'], bias [L, M'])`, float64, for each ridge term.
    """
    count = equations.tokens[:, None]
    mean, target_mean = equations.gram[:, -1, :-1] / count, equations.cross[:, -1] / count
    gram = equations.gram[:, :-1, :-1] / count[..., None] - mean[..., None] * mean[:, None]
    cross = equations.cross[:, :-1] / count[..., None] - mean[..., None] * target_mean[:, None]
    variances, axes = torch.linalg.eigh(gram)
    variances, rotated_cross = variances.clamp_min(0.0), axes.mT @ cross
    for ridge in ridges:
        damping = (ridge * variances.mean(-1, keepdim=True)).clamp_min(_TINY)
        weight = (axes / (variances + damping)[:, None]) @ rotated_cross
        yield weight, target_mean - (mean[:, None] @ weight).squeeze(1)


def mean_squared_error(equations: NormalEquations, parameters: Parameters) -> Tensor:
    """Evaluate linear maps on the tokens of normal equations.

    Args:
        equations: sums over the tokens.
        parameters: `(weight [L, M, M'], bias [L, M'])`.

    Returns:
        Mean squared difference of a coordinate, `[L]`.
    """
    weight, bias = parameters
    whole = torch.cat([weight, bias[:, None]], 1)  # [L, M + 1, M']
    explained = (whole * (equations.gram @ whole - 2 * equations.cross)).sum((-2, -1))
    return (equations.square + explained) / (equations.tokens * whole.shape[-1])


class RidgeMaps(NamedTuple):
    """Linear maps with the ridge term that suits each layer best.

    Attributes:
        parameters: `(weight [L, M, M'], bias [L, M'])`, float64.
        ridge: ridge term of each layer, `[L]`.
        loss: mean squared error on the validation tokens, `[L]`.
    """

    parameters: Parameters
    ridge: Tensor
    loss: Tensor


def best_ridge_maps(
    train: NormalEquations, validation: NormalEquations, ridges: Iterable[float] = RIDGES
) -> RidgeMaps:
    """Choose for every layer the ridge term with the smallest error on the validation tokens.

    Args:
        train: sums over the training tokens.
        validation: sums over the validation tokens.
        ridges: candidates, see :func:`ridge_maps`.

    Returns:
        The maps, solved from the training tokens alone.
    """
    ridges = tuple(ridges)
    best: RidgeMaps | None = None
    for ridge, parameters in zip(ridges, ridge_maps(train, ridges), strict=True):
        loss = mean_squared_error(validation, parameters)
        term = torch.full_like(loss, ridge)
        if best is None:
            best = RidgeMaps(parameters, term, loss)
            continue
        better = loss < best.loss
        kept = tuple(
            torch.where(better.view(-1, *[1] * (new.ndim - 1)), new, old)
            for new, old in zip(parameters, best.parameters, strict=True)
        )
        best = RidgeMaps(
            kept, torch.where(better, term, best.ridge), torch.minimum(loss, best.loss)
        )
    assert best is not None
    return best


def neighbour_rows(lengths: Tensor, offset: int) -> tuple[Tensor, Tensor]:
    """Pair the tokens of packed sequences with their neighbours at an offset.

    Args:
        lengths: number of tokens of each sequence, `[S]`; sequences follow each other.
        offset: signed distance.

    Returns:
        Indices of tokens that have such a neighbour, and of the neighbours.
    """
    owner = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)
    rows = torch.arange(len(owner), device=lengths.device)
    rows = rows[(rows + offset >= 0) & (rows + offset < len(owner))]
    rows = rows[owner[rows] == owner[rows + offset]]
    return rows, rows + offset
