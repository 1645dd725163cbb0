"""What `attnlens identify` finds out about heads and tokens, and how it is written as JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from attnlens.capture import Capture
from attnlens.errors import CaptureError, InputError
from attnlens.files import versions
from attnlens.identifiability.of_captures import identify, simplex_witness, softmax_witness
from attnlens.recovery.token_identifiability import TokenIdentifiabilityResult


@dataclass(eq=False)
class LayerVerdict:
    """What can be told of the heads of a layer from their outputs, over all texts.

    Attributes:
        name: of the attention module.
        simplex: number of texts in which no other row-stochastic matrix gives the output, `[H]`.
        softmax: number in which no head nearby gives it, `[H]`; None where that is not counted.
        nullity: sum of `n − rank(T)` over texts, the mean over rows where masks differ, `[H]`.
        texts: number of texts.
        words: verdict on the first head for the longest text so far.
        longest: its number of tokens.
    """

    name: str
    simplex: Tensor
    softmax: Tensor | None
    nullity: Tensor
    texts: int = 0
    words: str = ""
    longest: int = 0

    def add(self, capture: Capture) -> None:
        """Take the texts of a batch into account."""
        found = identify(capture)
        tokens = found.tokens.flatten(2).amax(-1) if found.tokens.dim() > 2 else found.tokens
        self.simplex = self.simplex + found.identifiable_simplex.sum(0)
        apart = found.identifiable_softmax
        self.softmax = (
            None if apart is None or self.softmax is None else self.softmax + apart.sum(0)
        )
        nullity = found.nullity.double()
        self.nullity = self.nullity + (nullity.mean(-1) if nullity.dim() > 2 else nullity).sum(0)
        self.texts += len(tokens)
        example = int(tokens[:, 0].argmax())
        if int(tokens[example, 0]) > self.longest:
            self.longest = int(tokens[example, 0])
            self.words = found.verdict(example, 0)

    def to_dict(self) -> dict[str, Any]:
        """Return shares and means by head, ready for JSON."""
        softmax = None if self.softmax is None else (self.softmax / self.texts).tolist()
        return {
            "site": self.name,
            "identifiable_simplex": (self.simplex / self.texts).tolist(),
            "identifiable_softmax": softmax,
            "nullity": (self.nullity / self.texts).tolist(),
            "longest": self.longest,
            "verdict": self.words,
        }


@dataclass(frozen=True, eq=False)
class LayerWitnesses:
    """How far attention can move with the output unchanged, for one text.

    Attributes:
        name: of the attention module.
        total_variation: mean over rows for any row-stochastic matrix, `[H]`.
        residual: largest relative change of the output, over both kinds of witness.
        distance: `‖A' − A‖ / ‖A‖` for a head of the same width, `[H]`, NaN where none was found.
        reason: why heads were not tried; empty if they were.
    """

    name: str
    total_variation: Tensor
    residual: float
    distance: Tensor
    reason: str

    @classmethod
    def of(cls, capture: Capture) -> LayerWitnesses:
        """Construct the witnesses of a call with one text."""
        simplex = simplex_witness(capture)
        real = capture.real_rows.expand_as(simplex.total_variation)
        moved = (simplex.total_variation * real).sum(-1) / real.sum(-1)
        residual, reason = float(simplex.residual.max()), ""
        distance = torch.full_like(moved, torch.nan)
        try:
            softmax = softmax_witness(capture)
        except (CaptureError, InputError) as error:
            reason = str(error)
        else:
            distance = softmax.distance.masked_fill(~softmax.converged, torch.nan)
            residual = max([residual, *softmax.residual[softmax.converged].tolist()])
        return cls(capture.site, moved[0], residual, distance[0], reason)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON."""
        return {
            "site": self.name,
            "simplex_total_variation": self.total_variation.tolist(),
            "softmax_distance": _plain(self.distance),
            "residual": self.residual,
            "reason": self.reason,
        }


@dataclass(eq=False)
class Findings:
    """Both halves of the answer.

    Attributes:
        model: name of the model.
        texts: number of texts.
        heads: one entry per attention module, in order.
        witnesses: the same, if asked for.
        witness_tokens: tokens of the text that witnesses are for.
        tokens: one result per map.
        note: why there are none; empty if there are.
    """

    model: str
    texts: int
    heads: list[LayerVerdict] = field(default_factory=list)
    witnesses: list[LayerWitnesses] = field(default_factory=list)
    witness_tokens: int = 0
    tokens: list[TokenIdentifiabilityResult] = field(default_factory=list)
    note: str = ""

    def to_json(self) -> str:
        """Return everything as a JSON document; missing numbers are null."""
        document = {
            "model": self.model,
            "texts": self.texts,
            "heads": [layer.to_dict() for layer in self.heads],
            "witnesses": [layer.to_dict() for layer in self.witnesses],
            "witness_tokens": self.witness_tokens,
            "tokens": {
                result.map: {
                    "distance": result.distance,
                    "layers": [layer for _, layer in result.layers],
                    **{name: _plain(tensor) for name, tensor in result.tensors().items()},
                }
                for result in self.tokens
            },
            "note": self.note,
            "versions": versions(),
        }
        return json.dumps(document, indent=1, allow_nan=False, ensure_ascii=False)


def _plain(tensor: Tensor) -> Any:
    """Nested lists with None for NaN."""
    if tensor.dim() == 0:
        value = tensor.item()
        return None if value != value else value
    return [_plain(row) for row in tensor]
