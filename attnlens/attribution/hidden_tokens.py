"""Which input tokens made each hidden state: attribution inside the running forward pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from attnlens.attribution.contributions import (
    AttributionMatrices,
    HiddenTokenAttributionResult,
    layer_means,
)
from attnlens.attribution.jacobian import (
    Attribution,
    Norm,
    contributions,
    hidden_token_attribution,
    leave_one_out,
)
from attnlens.attribution.tallies import (
    jackknife_total,
    layer_profile,
    own_histogram,
    tally_distance,
    tally_labels,
    tally_not_main,
    tally_offset,
    tally_own,
)
from attnlens.capture import LayerCapture
from attnlens.errors import InputError, MemoryBoundError, UnsupportedAttentionError
from attnlens.observer import Labels, LayerObserver, SumObserver, Sums


@dataclass(frozen=True, eq=False)
class _Step:
    """What is kept of a layer until the forward pass ends."""

    name: str
    layer: int
    chosen: bool
    hidden: Tensor
    rerun: Callable[[Tensor], Tensor]
    obstacle: str


class HiddenTokenAttribution(SumObserver, LayerObserver):
    """Contribution of every input token to every hidden state, inside the model's own forward.

    What enters the first layer of a stack are the sources. Tangents are pushed along the layers at
    their actual inputs when the forward pass ends, with no gradients and no second pass over the
    texts. Layers are called again for it, with whatever hooks they carry, so dropout must be off.

    Args:
        probes: k, the number of probes per token; None is exact and costs M of them.
        sources: positions of the source tokens; None takes all.
        targets: positions of the target tokens; None takes all.
        layers: layer indices (negative ones from the end) whose hidden states are attributed;
            None takes all.
        norm: `"fro"`, or `"spectral"`, which needs `probes=None`.
        keep: `"aggregates"`, or `"matrices"` to keep the contributions of every forward pass as
            well, in :attr:`matrices`; needed with `sources` or `targets`. Matrices stay with
            the observer: :meth:`state_dict` and :meth:`sync` leave them out.
        labels: integer label of every token, `[B, K]`, of the forward passes to come; or what
            computes it from the model's arguments by name. Tokens whose label is not in
            0 … G − 1 are left out. May be set between forward passes. None: all share label 0.
        label_names: names of the G labels.
        radius: R, the largest offset kept apart, in tokens.
        seed: seed of the probes. Pass n draws from `seed + n`, so that the noise of the sketch
            averages out; observers to be merged need seeds as far apart as they have passes.
        memory_budget: bytes for tangents and temporaries.
        max_bytes: bytes of matrices to keep.

    Raises:
        InputError: if arguments are of the wrong value or do not go together.

    References:
        Brunner et al., "On Identifiability in Transformers", ICLR 2020, section 5.
    """

    alike = ("label_names", "radius", "norm")

    def __init__(
        self,
        probes: int | None = 8,
        sources: Sequence[int] | None = None,
        targets: Sequence[int] | None = None,
        layers: Iterable[int] | None = None,
        *,
        norm: Norm = "fro",
        keep: Literal["aggregates", "matrices"] = "aggregates",
        labels: Labels = None,
        label_names: Sequence[str] = ("all",),
        radius: int = 64,
        seed: int = 0,
        memory_budget: int = 2**28,
        max_bytes: int = 2**30,
    ) -> None:
        super().__init__(layers)
        if keep not in ("aggregates", "matrices"):
            raise InputError(f'keep must be "aggregates" or "matrices". Got {keep!r}.')
        if keep == "aggregates" and (sources is not None or targets is not None):
            raise InputError(
                'Aggregates are over all tokens: pass keep="matrices" to choose sources or targets.'
            )
        if probes is not None and probes < 1:
            raise InputError(f"probes must be positive, or None for exact. Got {probes}.")
        if norm not in ("fro", "spectral") or (norm == "spectral" and probes is not None):
            raise InputError(
                f"norm must be 'fro', or 'spectral' with probes=None. Got {norm!r} and "
                f"probes={probes}."
            )
        self.probes = probes
        self.sources = sources
        self.targets = targets
        self.norm: Norm = norm
        self.keep = keep
        self.labels = labels
        self.label_names = tuple(label_names)
        self.radius = radius
        self.seed = seed
        self.memory_budget = memory_budget
        self.max_bytes = max_bytes
        self.matrices: list[AttributionMatrices] = []
        self._place = 0
        self._passes: Counter[str] = Counter()
        self._chains: list[tuple[str, Tensor, list[_Step]]] = []
        self._labels: Tensor | None = None

    @property
    def unsaved(self) -> str:
        """The matrices, where they are kept."""
        return "matrices (use keep='aggregates')" if self.keep == "matrices" else ""

    def seek(self, place: int) -> None:
        """Draw the probes of a certain pass next.

        Args:
            place: number of the pass in the whole run, from 0.
        """
        self._place = place
        self._passes = Counter()

    def begin_forward(self, inputs: Mapping[str, Any]) -> None:
        """Find the labels of the tokens to come.

        Args:
            inputs: the model's arguments by name.
        """
        self._chains = []
        self._labels = self.labels(inputs) if callable(self.labels) else self.labels

    def update_layer(self, layer: LayerCapture) -> None:
        """Keep the input of a layer until the pass ends.

        Args:
            layer: the call.
        """
        chain = next((c for c in reversed(self._chains) if c[0] == layer.stack), None)
        if layer.link == "first" or chain is None:
            chain = (layer.stack, layer.mask, [])
            self._chains.append(chain)
        steps = chain[2]
        obstacle = _obstacle(layer, steps)
        step = _Step(layer.name, layer.layer, layer.chosen, layer.hidden, layer.rerun, obstacle)
        steps.append(step)

    def end_forward(self, completed: bool) -> None:
        """Attribute the hidden states of a completed pass.

        Args:
            completed: False if the pass was interrupted; nothing is then counted.
        """
        chains, self._chains = self._chains, []
        labels, self._labels = self._labels, None
        for stack, mask, steps in chains if completed else ():
            self._attribute(stack, mask, steps, labels)

    def compute(self) -> HiddenTokenAttributionResult:
        """Average over everything seen.

        Returns:
            The result, on the CPU.

        Raises:
            AttnLensError: if nothing was aggregated.
        """
        keys, means = self.stacked(layer_means)
        profile = torch.empty_like(means["distance"])
        for stack in {stack for stack, _ in keys}:
            of_stack = [row for row, key in enumerate(keys) if key[0] == stack]
            profile[of_stack] = layer_profile(means["distance"][of_stack])
        return HiddenTokenAttributionResult(
            keys, self.label_names, distance_profile=profile, **means
        )

    def reset(self) -> None:
        """Forget everything seen."""
        super().reset()
        self.matrices = []
        self.seek(0)

    def merge(self, other: HiddenTokenAttribution) -> HiddenTokenAttribution:
        """Add what another observer has seen, and append its matrices.

        Args:
            other: left unchanged; its probes must have had other seeds, or errors are too small.

        Returns:
            This observer.
        """
        self._require_room(other.matrices)
        super().merge(other)
        self.matrices += other.matrices
        self._count_passes()
        return self

    def add_state(self, state: Mapping[str, Tensor]) -> None:
        """Add a state to the present one, as if what it saw had been seen here.

        Args:
            state: what :meth:`state_dict` returned.
        """
        super().add_state(state)
        self._count_passes()

    def _forget_state(self) -> None:
        self.sums = {}

    def _nothing(self) -> str:
        if self.sources is not None or self.targets is not None:
            return "Contributions of chosen sources or targets are not aggregated: read `matrices`."
        return (
            "HiddenTokenAttribution has seen no complete forward pass of the layers it was asked "
            "for. Run the model inside `with Lens(...)`, and check `layers`."
        )

    def _count_passes(self) -> None:
        for (stack, _), sums in self.sums.items():
            self._passes[stack] = max(self._passes[stack], int(sums["passes"]))

    def _attribute(
        self, stack: str, mask: Tensor, steps: list[_Step], labels: Tensor | None
    ) -> None:
        """Attribute the hidden states of one chain."""
        at = [place for place, step in enumerate(steps) if self._is_wanted(step, len(steps))]
        if not at:
            return
        steps = steps[: at[-1] + 1]
        obstacle = next((step.obstacle for step in steps if step.obstacle), "")
        if obstacle:
            raise UnsupportedAttentionError(
                f"The layers {stack} are no chain of hidden states [B, K, M], along which tokens "
                f"could be followed: {obstacle}."
            )
        with _refusing(stack):
            attribution = hidden_token_attribution(
                [step.rerun for step in steps],
                [step.hidden for step in steps],
                mask=mask,
                probes=self.probes,
                sources=self.sources,
                targets=self.targets,
                at=at,
                norm=self.norm,
                seed=self.seed + self._place + self._passes[stack],
                memory_budget=self.memory_budget,
            )
        self._passes[stack] += 1
        indices = tuple(steps[place].layer for place in at)
        if self.keep == "matrices":
            self._keep_matrices(stack, indices, attribution, mask)
        if self.sources is None and self.targets is None:
            hidden_size = steps[0].hidden.shape[-1]
            for row, index in enumerate(indices):
                squares = attribution.squares[:, row]
                self.add((stack, index), self._sums(squares, hidden_size, mask, labels))

    def _is_wanted(self, step: _Step, depth: int) -> bool:
        wanted = self.layers
        return step.chosen and (
            wanted is None or step.layer in wanted or step.layer - depth in wanted
        )

    def _sums(self, squares: Tensor, hidden_size: int, mask: Tensor, labels: Tensor | None) -> Sums:
        """Sums and counts of one layer over the tokens of a batch, from squares `[k, B, K, K]`."""
        groups = len(self.label_names)
        labels = torch.zeros_like(mask, dtype=torch.long) if labels is None else labels
        members = (mask, labels.to(mask.device), groups)
        contribution = contributions(squares.sum(0).sqrt())
        every = contribution[None]
        if self.probes is not None and self.probes < hidden_size:
            every = torch.cat([every, leave_one_out(squares)])  # [1 + k, B, K, K]
        tallies = {
            "own": tally_own(every, *members),
            "distance": tally_distance(every, *members),
            "offset": tally_offset(every, *members, radius=self.radius),
            "by_label": tally_labels(every, *members),
        }
        not_main = tally_not_main(contribution, *members)
        sums = {
            "passes": torch.ones(1, dtype=torch.float64),
            "tokens": not_main.count,
            "not_main": not_main.total,
            "histogram": own_histogram(contribution, *members),
            "pairs": tallies["distance"].count,
        }
        for name, tally in tallies.items():
            sums[name], sums[f"{name}_variance"] = jackknife_total(tally.total, hidden_size)
        return sums

    def _keep_matrices(
        self, stack: str, layers: tuple[int, ...], attribution: Attribution, mask: Tensor
    ) -> None:
        matrices = AttributionMatrices(
            stack,
            layers,
            contribution=attribution.contribution.cpu(),
            norm=attribution.norm.cpu(),
            standard_error=attribution.standard_error.cpu(),
            mask=mask.to("cpu", copy=True),
            sources=attribution.sources.cpu(),
            targets=attribution.targets.cpu(),
            reverse=attribution.reverse,
        )
        self._require_room([matrices])
        self.matrices.append(matrices)

    def _require_room(self, more: Sequence[AttributionMatrices]) -> None:
        needed = sum(matrices.nbytes for matrices in more)
        kept = sum(matrices.nbytes for matrices in self.matrices)
        if kept + needed > self.max_bytes:
            raise MemoryBoundError(
                f"Keeping matrices of {needed:,} bytes on top of {kept:,} crosses "
                f"max_bytes={self.max_bytes:,}. Choose fewer layers or targets, call reset() "
                f"between batches, or raise max_bytes."
            )


@contextmanager
def _refusing(stack: str) -> Iterator[None]:
    """Say in words that torch cannot differentiate a layer forwards or map it over tangents."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, NotImplementedError) as error:
        raise UnsupportedAttentionError(
            f"Tokens cannot be followed through the layers {stack}: torch has no derivative for "
            f"what they do. {str(error).splitlines()[0]}"
        ) from error


def _obstacle(layer: LayerCapture, before: Sequence[_Step]) -> str:
    """Why tokens cannot be followed into or through a layer; empty if they can."""
    entered, left = list(layer.hidden.shape), list(layer.output.shape)
    if len(entered) != 3:
        return f"the hidden states of {layer.name} are {entered}"
    if entered != left:
        return f"{layer.name} turns {entered} into {left}"
    if layer.link == "broken":
        source = before[-1].name if before else "the layer before"
        return f"what enters {layer.name} is not what left {source}"
    return ""
