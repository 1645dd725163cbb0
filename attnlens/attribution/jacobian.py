"""Hidden Token Attribution: how much each input token made each hidden state.

It compares the norms of the Jacobian blocks ∂e_j/∂x_i. Instead of one backward pass per
component of every hidden state, a bundle of tangents, one per source token and probe, is pushed
along the chain of layers, and every layer yields all sources and targets at once.

The paper writes ‖·‖₂ for the norm of a block without saying which norm it means. Here it is the
Frobenius norm, or the spectral norm on request. The gradient of the sum of a hidden state's
components, sometimes used instead, is not a norm of the Jacobian (it vanishes after a LayerNorm
of constant gain) and is not offered.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from attnlens.attribution.tangents import (
    Layer,
    layer_output,
    pull_back,
    push_forward,
    seed_tangents,
    source_probes,
)
from attnlens.errors import InputError, MemoryBoundError

Norm = Literal["fro", "spectral"]


@dataclass(frozen=True)
class Attribution:
    """Hidden Token Attribution at L layers of a chain.

    Attributes:
        contribution: c_ij, the share of source i in hidden state j, [L, B, S, T] in [0, 1];
            for every real target it sums to one over the sources.
        norm: norms of the Jacobian blocks ∂e_j/∂x_i, [L, B, S, T], at least 0.
        standard_error: jackknife standard error of ``contribution``, [L, B, S, T]; zero when
            the Jacobian is exact, NaN with a single probe, which shows no spread. Errors divided
            by it follow Student's t with k - 1 degrees of freedom, nearly.
        squares: squared norms of the images of each probe, [k, L, B, S, T], whose sum over k is
            ``norm`` squared; exact Jacobians hold one, k = 1.
        sources: positions of the source tokens, [S].
        targets: positions of the target tokens, [T].
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


def squared_norms(tangents: Tensor) -> Tensor:
    """Take the squared length of every token's tangent.

    Args:
        tangents: a bundle of tangents, [..., M].

    Returns:
        Squared lengths, [...], in float32 or wider.
    """
    return torch.linalg.vector_norm(tangents, dim=-1, dtype=_wide(tangents)).square_()


def attribution_norms(tangents: Tensor, norm: Norm = "fro") -> Tensor:
    """Take the norm of every Jacobian block from tangents pushed forward.

    Args:
        tangents: pushed tangents, [S, k, B, K, M].
        norm: ``"fro"``, an estimate whose square is unbiased when k < M, or ``"spectral"``, the
            largest singular value, which needs all k = M probes.

    Returns:
        ‖∂e_j/∂x_i‖, [B, S, K], at least 0.
    """
    _check_norm(norm, probes=tangents.shape[1], hidden_size=tangents.shape[-1])
    if norm == "fro":
        return squared_norms(tangents).sum(1).sqrt_().transpose(0, 1)
    blocks = tangents.to(_wide(tangents)).permute(0, 2, 3, 1, 4)  # [S, B, K, M, M]
    # One source at a time, because the singular value decomposition copies its argument.
    return torch.stack([torch.linalg.matrix_norm(block, ord=2) for block in blocks], dim=1)


def contributions(
    norms: Tensor, source_mask: Tensor | None = None, target_mask: Tensor | None = None
) -> Tensor:
    """Normalise Jacobian norms to contributions c_ij = ‖J_ij‖ / Σ_k ‖J_kj‖.

    Args:
        norms: norms of the blocks, [..., S, T].
        source_mask: True for real source tokens, broadcastable to [..., S].
        target_mask: True for real target tokens, broadcastable to [..., T].

    Returns:
        Contributions, [..., S, T] in [0, 1]; for a real target they sum to one over the real
        sources. Padded sources and targets, and targets that depend on no source, hold zero.

    References:
        Brunner et al., "On Identifiability in Transformers", ICLR 2020, section 5.
    """
    if source_mask is not None:
        norms = norms.masked_fill(~source_mask[..., :, None], 0.0)
    if target_mask is not None:
        norms = norms.masked_fill(~target_mask[..., None, :], 0.0)
    total = norms.sum(-2, keepdim=True)
    return norms / total.masked_fill(total == 0, 1.0)


def jackknife_error(
    squares: Tensor,
    hidden_size: int,
    source_mask: Tensor | None = None,
    target_mask: Tensor | None = None,
) -> Tensor:
    """Estimate the standard error of contributions by leaving out each probe in turn.

    Probes are k of M orthogonal directions, a sample without replacement: the variance carries
    the factor 1 - k/M and vanishes at k = M.

    Args:
        squares: squared norms by probe, [k, ..., S, T].
        hidden_size: M, the number of directions that the probes were taken from.
        source_mask: True for real source tokens, broadcastable to [..., S].
        target_mask: True for real target tokens, broadcastable to [..., T].

    Returns:
        Standard errors, [..., S, T], at least 0; NaN if there is one probe and M > 1.

    References:
        Efron and Stein, "The Jackknife Estimate of Variance", Annals of Statistics 1981.
    """
    probes = len(squares)
    if probes == hidden_size:
        return torch.zeros_like(squares[0])
    if probes == 1:
        return torch.full_like(squares[0], math.nan)
    replicates = leave_one_out(squares, source_mask, target_mask)
    variance = replicates.var(0, correction=0) * (probes - 1)
    return (variance * (1 - probes / hidden_size)).sqrt_()


def leave_one_out(
    squares: Tensor, source_mask: Tensor | None = None, target_mask: Tensor | None = None
) -> Tensor:
    """Compute the contributions that remain when each probe in turn is left out.

    Args:
        squares: squared norms by probe, [k, ..., S, T].
        source_mask: True for real source tokens, broadcastable to [..., S].
        target_mask: True for real target tokens, broadcastable to [..., T].

    Returns:
        Contributions without each probe, [k, ..., S, T] in [0, 1].
    """
    rest = (squares.sum(0) - squares).clamp_min_(0)  # [k, ..., S, T]
    return contributions(rest.sqrt_(), source_mask, target_mask)


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
        layers: the chain; each maps hidden states [B, K, M] to [B, K, M] with its mask and other
            arguments bound, dropout off and no cache written, for it is called many times.
        hidden: what enters the first layer, [B, K, M]; or the inputs of all layers, as captured
            from a run, which saves computing them again.
        mask: True for real tokens, [B, K] or [B, 1, 1, K]; padded tokens are neither sources
            nor targets. ``None``: every token is real.
        probes: k, the number of probes per token, 1 … M; ``None`` or M is exact.
        sources: positions of the source tokens; contributions are then shares among these.
            ``None``: all.
        targets: positions of the target tokens. ``None``: all.
        at: indices of the layers whose outputs are attributed. ``None``: all. The result holds
            them in ascending order.
        norm: ``"fro"``, or ``"spectral"``, which needs exact probes.
        reverse: pull cotangents back from the targets instead of pushing tangents forward from
            the sources. ``None``: whichever is fewer tangents through fewer layers.
        seed: seed of the probes.
        memory_budget: bytes for tangents and temporaries. The least that is used is one tangent
            with its temporaries, or for the spectral norm all tangents of one token.

    Returns:
        Contributions, norms and standard errors, each [L, B, S, T].

    References:
        Brunner et al., "On Identifiability in Transformers", ICLR 2020, section 5.
    """
    depths = sorted(_indices("at", at, len(layers)))
    layers = layers[: depths[-1] + 1]
    inputs = _layer_inputs(layers, hidden)
    _, tokens, hidden_size = inputs[0].shape
    device, dtype = inputs[0].device, inputs[0].dtype
    real = _real_tokens(mask, inputs[0])
    source_list = _indices("sources", sources, tokens)
    target_list = _indices("targets", targets, tokens)
    source_index = torch.tensor(source_list, device=device)
    target_index = torch.tensor(target_list, device=device)
    if reverse is None:
        reverse = _reverse_is_cheaper(len(source_list), len(target_list), depths)
    seeded = target_list if reverse else source_list
    rows = source_probes(hidden_size, probes, seeded, seed=seed, dtype=dtype, device=device)
    _check_norm(norm, probes=rows.shape[1], hidden_size=hidden_size)
    chain = _Chain(layers, inputs, rows, real, norm, memory_budget)

    if reverse:
        squares = chain.pull(depths, target_index).mT[..., source_index, :]
    else:
        squares = chain.push(depths, source_index)[..., target_index]

    both_real = real[:, source_index, None] & real[:, None, target_index]  # [B, S, T]
    squares = squares.masked_fill(~both_real, 0.0)
    norms = squares.sum(0).sqrt_()
    return Attribution(
        contribution=contributions(norms),
        norm=norms,
        standard_error=(
            torch.zeros_like(norms) if chain.exact else jackknife_error(squares, hidden_size)
        ),
        squares=squares,
        sources=source_index,
        targets=target_index,
        layers=tuple(depths),
        probes=rows.shape[1],
        reverse=reverse,
    )


@dataclass(frozen=True)
class _Chain:
    """Layers at their actual inputs, and how tangents along them are measured."""

    layers: Sequence[Layer]
    inputs: Sequence[Tensor]  # one [B, K, M] per layer
    probes: Tensor  # [S, k, M], of the tokens that are seeded
    real: Tensor  # [B, K]
    norm: Norm
    memory_budget: int

    @property
    def exact(self) -> bool:
        return self.probes.shape[1] == self.probes.shape[2]

    def push(self, depths: list[int], sources: Tensor) -> Tensor:
        """Return squared norms [k, L, B, S, K]; one sweep forward passes every depth."""
        return self._sweep(push_forward, range(depths[-1] + 1), depths, sources)

    def pull(self, depths: list[int], targets: Tensor) -> Tensor:
        """Return squared norms [k, L, B, T, K]; each depth takes a sweep of its own."""
        sweeps = [self._sweep(pull_back, range(d, -1, -1), [0], targets) for d in depths]
        return torch.cat(sweeps, dim=1)

    def _sweep(
        self, step: Callable[..., Tensor], route: range, stops: list[int], positions: Tensor
    ) -> Tensor:
        """Return squared norms [k, stops, B, S, K] of what seeds become along ``route``.

        An exact result has no spread over the probes to report: they are summed, k = 1.
        """
        first = self.inputs[0]
        kept = 1 if self.exact else self.probes.shape[1]
        shape = (len(positions), kept, len(stops), *first.shape[:2])
        squares = first.new_zeros(shape, dtype=_wide(first))
        # This waits for the device, once; skipping positions that are padding in every example
        # saves a sweep for each.
        seeded = self.real[:, positions].any(0).nonzero()[:, 0]
        for some, probes in self._tiles(len(seeded)):
            index = seeded[some]
            tangents = seed_tangents(first, positions[index], self.probes[index, probes])
            spare = self.memory_budget - tangents.nbytes
            for layer in route:
                step(
                    self.layers[layer],
                    self.inputs[layer],
                    tangents,
                    memory_budget=spare,
                    out=tangents,
                )
                if layer in stops:
                    slot = slice(None) if self.exact else probes
                    squares[index, slot, stops.index(layer)] += self._measure(tangents)
        return squares.permute(1, 2, 3, 0, 4)

    def _measure(self, tangents: Tensor) -> Tensor:
        """Return squared norms [S, k, B, K], summed over the probes if exact."""
        if self.norm == "spectral":
            return attribution_norms(tangents, "spectral").square_().transpose(0, 1)[:, None]
        squares = squared_norms(tangents)
        return squares.sum(1, keepdim=True) if self.exact else squares

    def _tiles(self, seeds: int) -> Iterator[tuple[slice, slice]]:
        # Rectangles of seeds × probes whose tangents take at most half the budget.
        probes, tangent = self.probes.shape[1], self.inputs[0].nbytes
        fit = max(1, self.memory_budget // (2 * tangent))
        if self.norm == "spectral" and fit < probes:
            raise MemoryBoundError(
                f"The spectral norm needs the {probes} tangents of a token at once: give "
                f"memory_budget at least {2 * probes * tangent} bytes, or fewer examples. "
                f"Got {self.memory_budget}."
            )
        step = max(1, fit // probes)
        for seed in range(0, seeds, step):
            for probe in range(0, probes, fit):
                yield slice(seed, seed + step), slice(probe, probe + fit)


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _reverse_is_cheaper(sources: int, targets: int, depths: list[int]) -> bool:
    # Forward passes the layers up to the last depth once, reverse those below each depth.
    return targets * sum(depth + 1 for depth in depths) < sources * (depths[-1] + 1)


def _layer_inputs(layers: Sequence[Layer], hidden: Tensor | Sequence[Tensor]) -> list[Tensor]:
    inputs = [hidden] if isinstance(hidden, Tensor) else list(hidden[: len(layers)])
    shapes = [list(state.shape) for state in inputs]
    given = 1 if isinstance(hidden, Tensor) else len(layers)
    if len(inputs) < given or any(len(s) != 3 or s != shapes[0] for s in shapes):
        raise InputError(
            "hidden must be one state [B, K, M], or one of the same shape for each of the "
            f"{len(layers)} layers. Got {shapes}."
        )
    for layer in layers[len(inputs) - 1 : -1] if given == 1 else ():
        inputs.append(layer_output(layer, inputs[-1]))
    return inputs


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


def _indices(name: str, chosen: Sequence[int] | None, length: int) -> list[int]:
    indices = list(range(length)) if chosen is None else list(chosen)
    if not indices or len(set(indices)) < len(indices) or not set(indices) <= set(range(length)):
        raise InputError(
            f"{name} must hold distinct positions from 0 to {length - 1}. Got {indices}."
        )
    return indices


def _check_norm(norm: str, *, probes: int, hidden_size: int) -> None:
    if norm not in ("fro", "spectral"):
        raise InputError(f"norm must be 'fro' or 'spectral'. Got {norm!r}.")
    if norm == "spectral" and probes < hidden_size:
        raise InputError(
            f"The spectral norm needs the whole Jacobian, probes=None. Got {probes} probes for "
            f"{hidden_size} components."
        )
