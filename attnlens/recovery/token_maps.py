"""Maps from hidden states back to the tokens they came from, and the rate at which they succeed.

A map ĝ_l takes the hidden state e_i that left layer l to a guess of the token's input embedding
x_i. The token is identified if, of all x_j of its sequence, x_i is nearest to ĝ_l(e_i). Maps of all
layers are computed together: parameters have a leading dimension L.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import gelu, normalize

MapKind = Literal["naive", "linear", "mlp"]
Distance = Literal["cosine", "l2"]
Parameters = tuple[Tensor, ...]

_TINY = 1e-30
_SHORT = 1e-8  # as in torch.nn.functional.cosine_similarity


class Maps(NamedTuple):
    """Maps of all layers to one target, and how they came about; NaN where that does not apply.

    Attributes:
        parameters: `(weight [L, M, M'], bias [L, M'])`, or two such pairs; none for `"naive"`.
        loss: on the validation split, `[L]`.
        epochs: of training until that loss, `[L]`.
        ridge: ridge term of a map in closed form, `[L]`.
    """

    parameters: Parameters
    loss: Tensor
    epochs: Tensor
    ridge: Tensor


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

    Examples:
        >>> [list(part.shape) for part in glorot_parameters("mlp", (4, 3), layers=2, width=8)]
        [[2, 4, 8], [2, 8], [2, 8, 3], [2, 3]]

    References:
        Glorot and Bengio, "Understanding the difficulty of training deep feedforward neural
        networks", AISTATS 2010.
    """
    inputs, outputs = sizes
    steps = {"naive": [], "linear": [(inputs, outputs)], "mlp": [(inputs, width), (width, outputs)]}
    parameters: list[Tensor] = []
    for shape in steps[kind]:
        weight = torch.nn.init.xavier_uniform_(torch.empty(shape), generator=generator)
        parameters += [weight.repeat(layers, 1, 1), torch.zeros(layers, shape[1])]
    return tuple(parameters)


def apply_map(parameters: Parameters, hidden: Tensor) -> Tensor:
    """Guess input embeddings from hidden states.

    Args:
        parameters: of :func:`glorot_parameters`; none for the identity.
        hidden: `[L, N, M]`.

    Returns:
        `[L, N, M']`.

    Examples:
        >>> double = (2 * torch.eye(2)[None], torch.tensor([[0.0, 1.0]]))
        >>> apply_map(double, torch.ones(1, 1, 2)).tolist()
        [[[2.0, 3.0]]]
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
        `[L]`, in `[0, 2]` for the cosine, at least 0 for l2.

    Examples:
        >>> guess, target = torch.tensor([[[3.0, 4.0]]]), torch.tensor([[3.0, 0.0]])
        >>> map_loss(guess, target, "cosine"), map_loss(guess, target, "l2")
        (tensor([0.4000]), tensor([8.]))
    """
    if distance == "l2":
        return (guess - target).square().mean((-2, -1))
    # Targets normalised once for all layers save a tenth of a training step.
    unit = normalize(target, dim=-1, eps=_SHORT)
    length: Tensor = torch.linalg.vector_norm(guess, dim=-1)
    cosine: Tensor = torch.linalg.vecdot(guess, unit) / length.clamp_min(_SHORT)
    return 1 - cosine.mean(-1)


def identified(
    guess: Tensor, target: Tensor, mask: Tensor, distance: Distance = "cosine", offset: int = 0
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

    Examples:
        >>> target, mask = torch.eye(3)[None], torch.ones(1, 3, dtype=torch.bool)
        >>> identified(target.roll(1, 1)[None], target, mask).tolist()
        [[[False, False, False]]]
        >>> identified(target.roll(1, 1)[None], target, mask, offset=-1).tolist()
        [[[False, True, True]]]

    References:
        Brunner et al., "On Identifiability in Transformers", ICLR 2020, section 4.
    """
    if not mask.shape[1]:
        return mask.expand(len(guess), -1, -1)
    candidates = normalize(target, dim=-1, eps=_TINY) if distance == "cosine" else target
    closeness = guess @ candidates.mT
    if distance == "l2":
        closeness = 2 * closeness - target.square().sum(-1)[:, None]
    nearest = closeness.masked_fill(~mask[:, None], -torch.inf).argmax(-1)  # [L, S, K]
    choice = torch.take_along_dim(target[None], nearest[..., None], 2)  # [L, S, K, M]
    right = (choice == target.roll(-offset, 1)).all(-1) & guess.isfinite().all(-1)
    return right & has_neighbour(mask, offset)


def has_neighbour(mask: Tensor, offset: int) -> Tensor:
    """Tell which tokens have a token at an offset.

    Args:
        mask: `[S, K]` bool, the tokens of each sequence.
        offset: signed distance.

    Returns:
        `[S, K]` bool.

    Examples:
        >>> has_neighbour(torch.tensor([[True, True, False]]), 1).tolist()
        [[True, False, False]]
    """
    place = torch.arange(mask.shape[1], device=mask.device) + offset
    inside = (place >= 0) & (place < mask.shape[1])
    return mask & mask.roll(-offset, 1) & inside


def recovery_rate(
    batches: Iterable[tuple[Tensor, Tensor, Tensor]], distance: Distance = "cosine", offset: int = 0
) -> Tensor:
    """Count how many tokens are identified.

    Args:
        batches: guesses `[L, S, K, M]`, targets `[S, K, M]` and masks `[S, K]`, of as many batches
            of sequences as there are; see :func:`identified`.
        distance: `"cosine"` or `"l2"`.
        offset: of the neighbour to recover.

    Returns:
        Rate among tokens with such a neighbour, `[L]` float64 in `[0, 1]`; NaN if there is none.

    Examples:
        >>> target, mask = torch.eye(3)[None], torch.ones(1, 3, dtype=torch.bool)
        >>> guess = torch.stack([target, target.roll(1, 1)])  # of two layers
        >>> recovery_rate([(guess, target, mask)]).tolist()
        [1.0, 0.0]
        >>> recovery_rate([(guess, target, mask)], offset=-1).tolist()
        [0.0, 1.0]

    References:
        Brunner et al., "On Identifiability in Transformers", ICLR 2020, section 4.
    """
    hits = tokens = torch.zeros((), dtype=torch.float64)
    for guess, target, mask in batches:
        hits = hits + identified(guess, target, mask, distance, offset).sum((-2, -1)).double()
        tokens = tokens + has_neighbour(mask, offset).sum()
    return hits / tokens


def rescaled(hidden: Tensor, factor: float, generator: torch.Generator) -> Tensor:
    """Multiply every hidden state by a random positive number; its direction stays.

    Args:
        hidden: `[..., M]`.
        factor: numbers are log-uniform between `1 / factor` and `factor`.
        generator: source of the numbers.

    Returns:
        `[..., M]`.

    Examples:
        >>> rescaled(torch.ones(2), 1.0, torch.Generator()).tolist()
        [1.0, 1.0]
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

    Examples:
        >>> hidden = torch.tensor([3.0, 4.0])
        >>> turned = rotated(hidden, 90.0, torch.Generator())
        >>> round(turned.norm().item(), 4), abs(round((turned @ hidden).item(), 4))
        (5.0, 0.0)
    """
    norm = hidden.norm(dim=-1, keepdim=True)
    axis = hidden / norm.clamp_min(_TINY)
    noise = torch.randn(hidden.shape, generator=generator).to(hidden)
    noise = noise - (noise * axis).sum(-1, keepdim=True) * axis
    radians, across = math.radians(angle), noise / noise.norm(dim=-1, keepdim=True)
    turned: Tensor = norm * (math.cos(radians) * axis + math.sin(radians) * across)
    return turned
