"""Does attnlens work on this model? One forward pass, every claim checked, an answer in words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from attnlens.attention.recording import Recording
from attnlens.capture import Capture
from attnlens.errors import UnsupportedAttentionError
from attnlens.lens import Lens
from attnlens.results import Result
from attnlens.saving import storable
from attnlens.tap.hooks import Hook
from attnlens.tap.passing import output_tensors
from attnlens.tap.sites import Catalogue, pretrained_inside
from attnlens.tap.trial import example_inputs

# Largest |A·V − O| relative to the largest |O| that counts as the same, by storage type.
TOLERANCE = {
    torch.float64: 1e-10,
    torch.float32: 1e-5,
    torch.float16: 5e-3,
    torch.bfloat16: 4e-2,
}


TRACED = ("direct sdpa", "softmax")


@storable("part")
@dataclass(frozen=True)
class SiteVerdict:
    """What was found at one attention call.

    Attributes:
        site: qualified name of the attention module.
        layer: layer index in its stack.
        kind: encoder or decoder self-attention, or cross-attention.
        kind_reason: what tells the kind, in words.
        tap: how A is known: the attention implementation of transformers' interface, or
            `"direct sdpa"` or `"softmax"` where the module runs its own attention.
        shape: `(B, H, Q, K, D)`.
        windows: windows or blocks of one example folded into B.
        mask: `"none"`, `"padding"`, `"interval"` (causal, sliding) or `"rows"`; `"+ bias"` where
            a position bias is added.
        context_error: largest `|A·V − O|` relative to the largest `|O|`.
        projection: name of W_O, or None.
        projection_reason: why there is none.
        projection_rank: smallest rank of a head's H, or None.
        output_error: largest `|Σ_h A_h V_h H_h + b − output of W_O|` relative to the largest
            output, or None where W_O is unknown or is no module of its own.
        exact: whether the errors are within the tolerance of the storage type.
    """

    site: str
    layer: int
    kind: str
    kind_reason: str
    tap: str
    shape: tuple[int, ...]
    windows: int
    mask: str
    context_error: float
    projection: str | None
    projection_reason: str
    projection_rank: int | None
    output_error: float | None
    exact: bool

    @property
    def traced(self) -> bool:
        """Whether the module runs its own attention, outside transformers' interface."""
        return self.tap in TRACED


@storable()
@dataclass(frozen=True, repr=False)
class Verdict(Result):
    """Whether attnlens works on a model.

    Attributes:
        model: class of the model.
        supported: whether attention was seen, exact everywhere, with unchanged outputs.
        identical: whether outputs were bit-identical with a lens attached.
        sites: what was found at each attention call.
        reason: why the model is not supported; empty where it is.
    """

    model: str
    supported: bool
    identical: bool
    sites: tuple[SiteVerdict, ...]
    reason: str

    @property
    def words(self) -> str:
        """The verdict in one or two sentences."""
        if not self.supported:
            return f"{self.model} is not supported: {self.reason}"
        known = sum(site.projection is not None for site in self.sites)
        projection = (
            "the output projection is known everywhere"
            if known == len(self.sites)
            else f"the output projection is known for {known} of them, and the values stand in "
            f"for T elsewhere"
        )
        kinds = dict.fromkeys(f"{site.kind} ({site.kind_reason})" for site in self.sites)
        return (
            f"{self.model} works: all {len(self.sites)} attention calls were captured exactly, "
            f"outputs are bit-identical, and {projection}. Kinds of attention: {', '.join(kinds)}."
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON."""
        return {**super().to_dict(), "words": self.words}

    def to_pandas(self) -> Any:
        """Return a table with a row for each attention call; needs pandas.

        Returns:
            The `pandas.DataFrame`, with a column for each field of a :class:`SiteVerdict`.
        """
        import pandas

        return pandas.DataFrame([vars(site) for site in self.sites])


def check(model: nn.Module, inputs: Mapping[str, Any] | None = None) -> Verdict:
    """Run a model once with and once without a lens and compare everything a lens relies on.

    Args:
        model: a `PreTrainedModel`, or any module with one inside.
        inputs: keyword inputs of the model; made up from its configuration by default.

    Returns:
        The verdict. An unsupported model is a verdict too, not an error.

    Examples:
        >>> verdict = check(model, batch)
        >>> verdict.supported, len(verdict.sites)
        (True, 6)
    """
    name = type(model).__name__
    if inputs is None:
        inputs = example_inputs(pretrained_inside(model))
    recording = Recording()
    with torch.no_grad():
        plain = _seeded(model, inputs)
        try:
            with Lens(model, recording, kinds=("encoder", "decoder", "cross")):
                looked = _seeded(model, inputs)
        except UnsupportedAttentionError as error:
            return Verdict(name, False, True, (), str(error))
        identical = len(plain) == len(looked) and all(map(_same, plain, looked))
        captures = recording.compute()
        outputs = _projection_outputs(model, inputs, captures)
        catalogue = Catalogue(model)
        sites = tuple(_site(capture, catalogue, outputs) for capture in captures)
    inexact = [site for site in sites if not site.exact]
    reason = ""
    if not identical:
        reason = "outputs changed with a lens attached"
    elif inexact:
        first = inexact[0]
        reason = f"{first.site} is off: |A·V − O| is {first.context_error:.1e} of |O|"
    return Verdict(name, not reason, identical, sites, reason)


def _seeded(model: nn.Module, inputs: Mapping[str, Any]) -> list[Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return output_tensors(model(**inputs))


def _projection_outputs(
    model: nn.Module, inputs: Mapping[str, Any], captures: Iterable[Capture]
) -> dict[str, list[Tensor]]:
    """Run a model again, and keep what each W_O returns, by name and call by call."""
    projections = (capture.output_projection for capture in captures)
    outputs: dict[str, list[Tensor]] = {p.name: [] for p in projections if p is not None}

    def keeper(name: str) -> Hook:
        return Hook(lambda module, args, output: outputs[name].extend(output_tensors(output)[:1]))

    with ExitStack() as stack:
        for name, module in model.named_modules():
            if name in outputs:
                stack.callback(keeper(name).attach(module.register_forward_hook))
        _seeded(model, inputs)
    return outputs


def _same(left: Tensor, right: Tensor) -> bool:
    return torch.equal(left, right) or (
        left.is_floating_point() and torch.equal(left.nan_to_num(), right.nan_to_num())
    )


def _site(
    capture: Capture, catalogue: Catalogue, outputs: Mapping[str, list[Tensor]]
) -> SiteVerdict:
    attention = capture.attention().double()
    value = capture.value.double()
    error = _relative(attention @ value, capture.context.double())
    output_error = _output_error(capture, outputs)
    tolerance = TOLERANCE[capture.context.dtype]
    exact = capture.dropout > 0 or (error <= tolerance and (output_error or 0.0) <= tolerance)
    return SiteVerdict(
        site=capture.site,
        layer=capture.layer,
        kind=capture.kind,
        kind_reason=_kind_reason(capture, catalogue),
        tap=capture.implementation,
        shape=capture.shape,
        windows=capture.windows,
        mask=_mask_kind(capture),
        context_error=error,
        projection=None if capture.output_projection is None else capture.output_projection.name,
        projection_reason=capture.projection_reason,
        projection_rank=_rank(capture),
        output_error=output_error,
        exact=exact,
    )


def _kind_reason(capture: Capture, catalogue: Catalogue) -> str:
    """What tells the kind of an attention call, and that its mask looks otherwise, if it does."""
    reason = catalogue.kind(capture.site)[1]
    future = capture.attention()[:, :, :-1].triu(1)
    if capture.kind == "encoder" and future.numel() and not future.any():
        return f"{reason}, though no token attends to a later one"
    return reason


def _output_error(capture: Capture, outputs: Mapping[str, list[Tensor]]) -> float | None:
    """Compare `Σ_h A_h V_h H_h + b` with what W_O returned, token rows in any order."""
    output = capture.output_projection
    if output is None or not outputs.get(output.name):
        return None
    rows = torch.einsum("bhqd,hdm->bqm", capture.context.double(), output.weight.double())
    if output.bias is not None:
        rows = rows + output.bias.double()
    rows = rows.flatten(0, 1)
    errors = []
    for returned in outputs[output.name]:
        if returned.shape[-1] != rows.shape[-1]:
            returned = returned.movedim(1, -1)
        other = returned.double().reshape(-1, rows.shape[-1])
        nearest = torch.cdist(rows, other).amin(-1).amax()
        errors.append(float(nearest / other.norm(dim=-1).amax().clamp(min=1e-12)))
    return min(errors)


def _relative(left: Tensor, right: Tensor) -> float:
    return float((left - right).abs().amax() / right.abs().amax().clamp(min=1e-12))


def _mask_kind(capture: Capture) -> str:
    support = capture.support
    if support.shared:
        kind = "none" if bool(support.keys.all()) else "padding"
    elif support.rows is not None:
        kind = "rows"
    else:
        kind = "interval"
    return kind if capture.bias is None else f"{kind} + bias"


def _rank(capture: Capture) -> int | None:
    return None if capture.reach is None else int(capture.reach.rank.amin())
