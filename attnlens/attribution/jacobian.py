"""Hidden Token Attribution: how much each input token made each hidden state.

It compares the norms of the Jacobian blocks ∂e_j/∂x_i. Instead of one backward pass per
component of every hidden state, a bundle of tangents, one per source token and probe, is pushed
along the chain of layers, and every layer yields all sources and targets at once.

The paper writes ‖·‖₂ for the norm of a block without saying which norm it means. Here it is the
Frobenius norm, or the spectral norm on request. The gradient of the sum of a hidden state's
components, sometimes used instead, is not a norm of the Jacobian (it vanishes after a LayerNorm
of constant gain) and is not offered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from attnlens.attribution.sketches import (
    contributions,
    jackknife_error,
    seed_tangents,
    source_probes,
)
from attnlens.attribution.tangents import Layer, layer_output, pull_back, push_forward
from attnlens.errors import InputError, MemoryBoundError

Norm = Literal["fro", "spectral"]


@dataclass(frozen=True)
class Attribution:
    """Hidden Token Attribution at L layers of a chain.

    Examples that are not finite hold NaN from the layer on at which they are not.

    Attributes:
        contribution: c_ij, the share of source i in hidden state j, `[L, B, S, T]` in `[0, 1]`;
            for every real target it sums to one over the sources.
        norm: norms of the Jacobian blocks ∂e_j/∂x_i, `[L, B, S, T]`, at least 0.
        standard_error: jackknife standard error of `contribution`, `[L, B, S, T]`; zero when the
            Jacobian is exact, NaN with a single probe, which shows no spread.
        squares: squared norms of the images of each probe, `[k, L, B, S, T]`, whose sum over k is
            `norm` squared; exact Jacobians hold one, k = 1.
        sources: positions of the source tokens, `[S]`.
        targets: positions of the target tokens, `[T]`.
        layers: index into the chain of each of the L layers.
        probes: k, the number of probes per token.
        reverse: whether cotangents were pulled back instead of tangents pushed forward.
    """

    contribution: Tensor
    norm: Tensor
    standard_error: Tensor
    squares: Tensor
    sources: Tensor
    targets: Tensor
    layers: tuple[int, ...]
    probes: int
    reverse: bool


def hidden_token_attribution(
    layers: Sequence[Layer],
    hidden: Tensor | Sequence[Tensor],
    *,
    mask: Tensor | None = None,
    probes: int | None = 8,
    sources: Sequence[int] | None = None,
    targets: Sequence[int] | None = None,
    at: Sequence[int] | None = None,
    norm: Norm = "fro",
    reverse: bool | None = None,
    seed: int = 0,
    memory_budget: int = 2**28,
) -> Attribution:
    """Attribute the hidden states of a chain of layers to the tokens that entered it.

    Args:
        layers: the chain; each maps hidden states `[B, K, M]` to `[B, K, M]` with its mask and
            other arguments bound, dropout off and no cache written, for it is called many times.
        hidden: what enters the first layer, `[B, K, M]`; or the inputs of all layers, as captured
            from a run, which saves computing them again. What leaves the last may follow them.
        mask: True for real tokens, `[B, K]` or `[B, 1, 1, K]`; padded tokens are neither sources
            nor targets. None: every token is real.
        probes: k, the number of probes per token, 1 … M; None or M is exact.
        sources: positions of the source tokens; contributions are then shares among these.
            None: all.
        targets: positions of the target tokens. None: all.
        at: indices of the layers whose outputs are attributed. None: all. The result holds
            them in ascending order.
        norm: `"fro"`, or `"spectral"`, which needs exact probes.
        reverse: pull cotangents back from the targets instead of pushing tangents forward from
            the sources. None: whichever is fewer tangents through fewer layers.
        seed: seed of the probes.
        memory_budget: bytes for tangents and temporaries. The least that is used is one tangent
            with its temporaries, or for the spectral norm all tangents of one token.

    Returns:
        Contributions, norms and standard errors, each `[L, B, S, T]`. An example with NaN or Inf
        in a real token of a given state, or in a derivative, holds NaN from that layer on.

    Raises:
        InputError: if arguments are of the wrong shape or value, a layer changes the shape of its
            hidden state, or a layer draws random numbers.
        MemoryBoundError: if the budget is too small for the spectral norm.

    Examples:
        >>> mix = torch.tensor([[0.75, 0.25], [0.5, 0.5]])  # what each token takes from each
        >>> layers = [lambda state: mix @ state] * 2
        >>> attribution = hidden_token_attribution(layers, torch.ones(1, 2, 4), probes=None)
        >>> attribution.contribution[0, 0]  # source, then target
        tensor([[0.7500, 0.5000],
                [0.2500, 0.5000]])
        >>> attribution.contribution[1, 0]
        tensor([[0.6875, 0.6250],
                [0.3125, 0.3750]])

    References:
        Brunner et al., "On Identifiability in Transformers", ICLR 2020, section 5.
    """
    depths = sorted(_indices("at", range(len(layers)) if at is None else at, len(layers)))
    layers = layers[: depths[-1] + 1]
    states = _states(layers, hidden)
    _, tokens, hidden_size = states[0].shape
    device, dtype = states[0].device, states[0].dtype
    real = _real_tokens(mask, states[0])
    source_list = _indices("sources", sources, tokens)
    target_list = _indices("targets", targets, tokens)
    source_index = torch.tensor(source_list, device=device, dtype=torch.int64)
    target_index = torch.tensor(target_list, device=device, dtype=torch.int64)
    if reverse is None:
        reverse = _reverse_is_cheaper(len(source_list), len(target_list), depths)
    seeded = target_list if reverse else source_list
    rows = source_probes(hidden_size, probes, seeded, seed=seed, dtype=dtype, device=device)
    check_norm(norm, exact=rows.shape[1] == hidden_size)
    chain = _Chain(layers, states, rows, real, norm, memory_budget)

    if reverse:
        squares = chain.pull(depths, target_index).mT[..., source_index, :]
    else:
        squares = chain.push(depths, source_index)[..., target_index]

    both_real = real[:, source_index, None] & real[:, None, target_index]  # [B, S, T]
    squares = squares.masked_fill(~both_real, 0.0)
    finite = chain.finite(depths) & squares.sum(0).isfinite().flatten(-2).all(-1)  # [L, B]
    squares = squares.masked_fill(~finite[..., None, None] & both_real, torch.nan)
    norms = squares.sum(0).sqrt_()
    return Attribution(
        contribution=contributions(norms),
        norm=norms,
        standard_error=0 * norms if chain.exact else jackknife_error(squares, hidden_size),
        squares=squares,
        sources=source_index,
        targets=target_index,
        layers=tuple(depths),
        probes=rows.shape[1],
        reverse=reverse,
    )


def squared_norms(tangents: Tensor) -> Tensor:
    """Take the squared length of every token's tangent.

    Args:
        tangents: a bundle of tangents, `[..., M]`.

    Returns:
        Squared lengths, `[...]`, in float32 or wider.
    """
    length: Tensor = torch.linalg.vector_norm(tangents, dim=-1, dtype=_wide(tangents))
    return length.square_()


def attribution_norms(tangents: Tensor, norm: Norm = "fro") -> Tensor:
    """Take the norm of every Jacobian block from tangents pushed forward.

    Args:
        tangents: pushed tangents, `[S, k, B, K, M]`.
        norm: `"fro"`, an estimate whose square is unbiased when k < M, or `"spectral"`, the
            largest singular value, which needs all k = M probes.

    Returns:
        ‖∂e_j/∂x_i‖, `[B, S, K]`, at least 0; NaN for blocks that are not finite.

    Raises:
        InputError: if the norm is unknown, or spectral with fewer than M probes.

    Examples:
        >>> tangents = torch.tensor([[3.0, 0.0], [0.0, 4.0]])[None, :, None, None]
        >>> attribution_norms(tangents), attribution_norms(tangents, "spectral")
        (tensor([[[5.]]]), tensor([[[4.]]]))
    """
    check_norm(norm, exact=tangents.shape[1] == tangents.shape[-1])
    if norm == "fro":
        return squared_norms(tangents).sum(1).sqrt_().transpose(0, 1)
    blocks = tangents.to(_wide(tangents)).permute(0, 2, 3, 1, 4)  # [S, B, K, M, M]
    # One source at a time, because the singular value decomposition copies its argument.
    return torch.stack([_spectral_norm(block) for block in blocks], dim=1)


def _spectral_norm(blocks: Tensor) -> Tensor:
    finite = blocks.isfinite().all(-1).all(-1)
    largest: Tensor = torch.linalg.matrix_norm(blocks.where(finite[..., None, None], 0.0), ord=2)
    return largest.where(finite, torch.nan)


@dataclass(frozen=True)
class _Chain:
    """Layers at their actual inputs, and how tangents along them are measured."""

    layers: Sequence[Layer]
    states: Sequence[Tensor]  # one [B, K, M] per layer, and perhaps what left the last
    probes: Tensor  # [S, k, M], of the tokens that are seeded
    real: Tensor  # [B, K]
    norm: Norm
    memory_budget: int

    @property
    def exact(self) -> bool:
        return self.probes.shape[1] == self.probes.shape[2]

    def finite(self, depths: list[int]) -> Tensor:
        """Whether all states up to each depth are finite at real tokens, `[L, B]`."""
        finite = [(state.isfinite().all(-1) | ~self.real).all(-1) for state in self.states]
        so_far = torch.stack(finite).cumprod(0).bool()
        return so_far[[min(depth + 1, len(finite) - 1) for depth in depths]]

    def push(self, depths: list[int], sources: Tensor) -> Tensor:
        """Return squared norms `[k, L, B, S, K]`; one sweep forward passes every depth."""
        return self._sweep(push_forward, range(depths[-1] + 1), depths, sources)

    def pull(self, depths: list[int], targets: Tensor) -> Tensor:
        """Return squared norms `[k, L, B, T, K]`; each depth takes a sweep of its own."""
        sweeps = [self._sweep(pull_back, range(d, -1, -1), [0], targets) for d in depths]
        return torch.cat(sweeps, dim=1)

    def _sweep(
        self, step: Callable[..., Tensor], route: range, stops: list[int], positions: Tensor
    ) -> Tensor:
        """Return squared norms `[k, stops, B, S, K]` of what seeds become along a route.

        An exact result has no spread over the probes to report: they are summed, k = 1.
        """
        first = self.states[0]
        probes = 1 if self.exact else self.probes.shape[1]
        shape = (len(positions), probes, len(stops), *first.shape[:2])
        squares = first.new_zeros(shape, dtype=_wide(first))
        # This waits for the device, once; skipping positions that are padding in every example
        # saves a sweep for each.
        seeded = self.real[:, positions].any(0).nonzero()[:, 0]
        for rows, columns in self._tiles(len(seeded)):
            index = seeded[rows]
            tangents = seed_tangents(first, positions[index], self.probes[index, columns])
            spare = self.memory_budget - tangents.nbytes
            for layer in route:
                inputs = self.states[layer]
                step(self.layers[layer], inputs, tangents, memory_budget=spare, out=tangents)
                if layer in stops:
                    slot = slice(None) if self.exact else columns
                    squares[index, slot, stops.index(layer)] += self._measure(tangents)
        return squares.permute(1, 2, 3, 0, 4)

    def _measure(self, tangents: Tensor) -> Tensor:
        """Return squared norms `[S, k, B, K]`, summed over the probes if exact."""
        if self.norm == "spectral":
            return attribution_norms(tangents, "spectral").square_().transpose(0, 1)[:, None]
        squares = squared_norms(tangents)
        return squares.sum(1, keepdim=True) if self.exact else squares

    def _tiles(self, seeds: int) -> Iterator[tuple[slice, slice]]:
        # Rectangles of seeds × probes whose tangents take at most half the budget.
        probes, tangent = self.probes.shape[1], self.states[0].nbytes
        fitting = max(1, self.memory_budget // (2 * max(1, tangent)))
        if self.norm == "spectral" and fitting < probes:
            raise MemoryBoundError(
                f"The spectral norm needs the {probes} tangents of a token at once: give "
                f"memory_budget at least {2 * probes * tangent} bytes, or fewer examples. "
                f"Got {self.memory_budget}."
            )
        rows = max(1, fitting // probes)
        for row in range(0, seeds, rows):
            for column in range(0, probes, fitting):
                yield slice(row, row + rows), slice(column, column + fitting)


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _reverse_is_cheaper(sources: int, targets: int, depths: list[int]) -> bool:
    # Forward passes the layers up to the last depth once, reverse those below each depth.
    return targets * sum(depth + 1 for depth in depths) < sources * (depths[-1] + 1)


def _states(layers: Sequence[Layer], hidden: Tensor | Sequence[Tensor]) -> list[Tensor]:
    """What enters each layer; what left the last as well, if that was given."""
    states = [hidden] if isinstance(hidden, Tensor) else list(hidden[: len(layers) + 1])
    shapes = [list(state.shape) for state in states]
    needed = 1 if isinstance(hidden, Tensor) else len(layers)
    if len(states) < needed or any(len(s) != 3 or s != shapes[0] for s in shapes):
        raise InputError(
            "hidden must be one state [B, K, M], or one of the same shape for each of the "
            f"{len(layers)} layers. Got {shapes}."
        )
    for layer in layers[len(states) - 1 : -1] if needed == 1 else ():
        states.append(layer_output(layer, states[-1]))
    return states


def _real_tokens(mask: Tensor | None, hidden: Tensor) -> Tensor:
    batch, tokens, _ = hidden.shape
    if mask is None:
        return torch.ones(batch, tokens, dtype=torch.bool, device=hidden.device)
    if mask.dtype != torch.bool or mask.shape not in {(batch, tokens), (batch, 1, 1, tokens)}:
        raise InputError(
            f"mask must be boolean, [{batch}, {tokens}] or [{batch}, 1, 1, {tokens}], True for "
            f"real tokens. Got {mask.dtype} {list(mask.shape)}."
        )
    return mask.reshape(batch, tokens)


def _indices(name: str, positions: Sequence[int] | None, length: int) -> list[int]:
    if positions is None:
        return list(range(length))
    indices = list(positions)
    if not indices or len(set(indices)) < len(indices) or not set(indices) <= set(range(length)):
        raise InputError(
            f"{name} must hold distinct positions from 0 to {length - 1}. Got {indices}."
        )
    return indices


def check_norm(norm: str, exact: bool) -> None:
    """Raise an error unless a norm exists and can be taken.

    Args:
        norm: its name.
        exact: whether the whole Jacobian will be known.

    Raises:
        InputError: if not.
    """
    if norm not in ("fro", "spectral"):
        raise InputError(f"norm must be 'fro' or 'spectral'. Got {norm!r}.")
    if norm == "spectral" and not exact:
        raise InputError("norm='spectral' needs the whole Jacobian: pass probes=None.")
