"""Which input tokens made each hidden state: attribution inside the running forward pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from attnlens.attribution.aggregates import contribution_means, contribution_sums
from attnlens.attribution.contributions import (
    AttributionMatrices,
    HiddenTokenAttributionResult,
    attribution_result,
)
from attnlens.attribution.jacobian import (
    Attribution,
    Norm,
    check_norm,
    hidden_token_attribution,
)
from attnlens.attribution.sketches import leave_one_out
from attnlens.attribution.tangents import derivative_errors
from attnlens.capture import LayerCapture
from attnlens.errors import InputError, MemoryBoundError, UnsupportedAttentionError
from attnlens.observer import ChainObserver, Labels, SumObserver, label_members


class HiddenTokenAttribution(ChainObserver, SumObserver):
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

    Examples:
        >>> attribution = HiddenTokenAttribution(probes=1)
        >>> with Lens(model, attribution), torch.no_grad():
        ...     output = model(**batch)
        >>> len(attribution.compute().layers)
        6
    """

    calls_again = True
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
        if probes is not None and (not isinstance(probes, int) or probes < 1):
            raise InputError(f"probes must be positive, or None for exact. Got {probes!r}.")
        check_norm(norm, exact=probes is None)
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
        self._differentiable: set[str] = set()  # names of layers
        self._place = 0
        self._passes: Counter[str] = Counter()

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

    def update_chain(self, chain: Sequence[LayerCapture], inputs: Mapping[str, Any]) -> None:
        """Attribute the hidden states of a run of a stack.

        Args:
            chain: its layers in order.
            inputs: the model's arguments by name.

        Raises:
            UnsupportedAttentionError: if tokens cannot be followed along the layers.
            InputError: if labels are not as many as there are tokens.
        """
        at = [i for i, layer in enumerate(chain) if self._is_wanted(layer, len(chain))]
        if not at:
            return
        stack, mask, size = chain[0].stack, chain[0].mask, chain[0].hidden.shape[-1]
        labels = self.labels(inputs) if callable(self.labels) else self.labels
        members = label_members(labels, mask, len(self.label_names))
        attribution = self._attribute(chain[: at[-1] + 1], at)
        self._passes[stack] += 1
        if self.keep == "matrices":
            self._keep_matrices(chain, at, attribution)
        aggregated = self.sources is None and self.targets is None
        for row, place in enumerate(at if aggregated else ()):
            squares = attribution.squares[:, row]
            replicates = squares[:0] if attribution.probes == size else leave_one_out(squares)
            shares = attribution.contribution[row]
            sums = contribution_sums(shares, replicates, size, mask, members, self.radius)
            sums["passes"] = torch.ones(1, dtype=torch.float64)
            self.add((stack, chain[place].layer), sums)

    def compute(self) -> HiddenTokenAttributionResult:
        """Average over everything seen; the result is on the CPU."""
        layers, means = self.stacked(contribution_means)
        return attribution_result(layers, self.label_names, means)

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
        self._require_room(getattr(other, "matrices", ()))
        super().merge(other)
        self.matrices += other.matrices
        self._count_passes()
        return self

    def add_state(self, state: Mapping[str, Tensor]) -> None:
        """Add a state to the present one, as if what it saw had been seen here."""
        super().add_state(state)
        self._count_passes()

    def _forget_state(self) -> None:
        self.sums = {}

    def _nothing(self) -> str:
        if self.sources is not None or self.targets is not None:
            return "Contributions of chosen sources or targets are not aggregated: read `matrices`."
        return super()._nothing()

    def _count_passes(self) -> None:
        for (stack, _), sums in self.sums.items():
            self._passes[stack] = max(self._passes[stack], int(sums["passes"]))

    def _attribute(self, chain: Sequence[LayerCapture], at: list[int]) -> Attribution:
        """Attribute what leaves some layers of a chain."""
        stack, obstacle = chain[0].stack, _obstacle(chain)
        if obstacle:
            raise UnsupportedAttentionError(
                f"The layers {stack} are no chain of hidden states [B, K, M], along which tokens "
                f"could be followed: {obstacle}."
            )
        self._check_derivatives(chain)
        with _refusing(stack):
            return hidden_token_attribution(
                [layer.rerun for layer in chain],
                [*(layer.hidden for layer in chain), chain[-1].output],
                mask=chain[0].mask,
                probes=self.probes,
                sources=self.sources,
                targets=self.targets,
                at=at,
                norm=self.norm,
                seed=self.seed + self._place + self._passes[stack],
                memory_budget=self.memory_budget,
            )

    def _check_derivatives(self, chain: Sequence[LayerCapture]) -> None:
        """Refuse layers in which derivatives vanish without an error; each is looked at once."""
        for layer in chain:
            if layer.name in self._differentiable or not layer.hidden.numel():
                continue
            precision = layer.precision or layer.hidden.dtype
            with _refusing(layer.stack):
                errors = derivative_errors(layer.rerun, layer.hidden, chain[0].mask, precision)
            finite = errors[errors.isfinite()]
            if not len(finite):
                continue
            worst = float(finite.max())
            if worst > _LARGEST_ERROR[precision]:
                raise UnsupportedAttentionError(
                    f"Tokens cannot be followed through {layer.name}: its derivative is "
                    f"{worst:.0%} off a finite difference. Something in it drops derivatives "
                    f"without an error, such as a quantised module, detach() or NumPy. Attribute "
                    f"the model without it."
                )
            self._differentiable.add(layer.name)

    def _is_wanted(self, layer: LayerCapture, depth: int) -> bool:
        wanted = self.layers
        return layer.chosen and (
            wanted is None or layer.layer in wanted or layer.layer - depth in wanted
        )

    def _keep_matrices(
        self, chain: Sequence[LayerCapture], at: list[int], attribution: Attribution
    ) -> None:
        names = ("contribution", "norm", "standard_error", "sources", "targets")
        matrices = AttributionMatrices(
            chain[0].stack,
            tuple(chain[place].layer for place in at),
            mask=chain[0].mask.to("cpu", copy=True),
            reverse=attribution.reverse,
            **{name: getattr(attribution, name).cpu() for name in names},
        )
        self._require_room([matrices])
        self.matrices.append(matrices)

    def _require_room(self, more: Sequence[AttributionMatrices]) -> None:
        needed = sum(matrices.nbytes for matrices in more)
        present = sum(matrices.nbytes for matrices in self.matrices)
        if present + needed > self.max_bytes:
            raise MemoryBoundError(
                f"Keeping matrices of {needed:,} bytes on top of {present:,} crosses "
                f"max_bytes={self.max_bytes:,}. Choose fewer layers or targets, call reset() "
                f"between batches, or raise max_bytes."
            )


# Largest error of a derivative against a finite difference that rounding and curvature explain.
_LARGEST_ERROR = {
    torch.float64: 0.1,
    torch.float32: 0.1,
    torch.float16: 0.5,
    torch.bfloat16: 0.5,
}


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


def _obstacle(chain: Sequence[LayerCapture]) -> str:
    """Why tokens cannot be followed through a chain; empty if they can."""
    source = "the layer before"
    for layer in chain:
        entered, left = list(layer.hidden.shape), list(layer.output.shape)
        if len(entered) != 3:
            return f"the hidden states of {layer.name} are {entered}"
        if entered != left:
            return f"{layer.name} turns {entered} into {left}"
        if layer.link == "broken":
            return f"what enters {layer.name} is not what left {source}"
        source = layer.name
    return ""
