"""Can attention be read off a head's output over texts, and tokens off hidden states?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from attnlens.attention.recording import Recording
from attnlens.capture import Capture
from attnlens.errors import AttnLensError, CaptureError, InputError
from attnlens.identifiability.of_captures import identify, simplex_witness, softmax_witness
from attnlens.lens import Lens
from attnlens.recipes.ingredients import Progress, reader, run_batches, silent
from attnlens.recovery import MapTraining, TokenIdentifiability, TokenIdentifiabilityResult
from attnlens.recovery.token_maps import Distance, MapKind
from attnlens.results import plain
from attnlens.texts.batching import TextModel, TokenisedTexts

Part = Literal["both", "heads", "tokens"]

MAPS: tuple[MapKind, ...] = get_args(MapKind)
BRIEF = MapTraining(learning_rate=3e-3, max_epochs=30, patience=5)
"""Minutes, where the paper's training takes hours."""


@dataclass(frozen=True, eq=False)
class LayerIdentifiability:
    """What can be told of the heads of a layer from their outputs, over all texts.

    Attributes:
        site: name of the attention module.
        identifiable_simplex: share of texts in which no other row-stochastic matrix gives the
            output, `[H]`.
        identifiable_softmax: share in which no head nearby gives it, `[H]`; None where that is
            not counted.
        nullity: mean of `n − rank(T)` over texts, and over rows where masks differ, `[H]`.
        longest: number of tokens of the longest text.
        verdict: words on the first head for that text.
    """

    site: str
    identifiable_simplex: Tensor
    identifiable_softmax: Tensor | None
    nullity: Tensor
    longest: int
    verdict: str


@dataclass(frozen=True, eq=False)
class LayerWitnesses:
    """How far attention can move with the output unchanged, for one text.

    Attributes:
        site: name of the attention module.
        simplex_total_variation: mean over rows for any row-stochastic matrix, `[H]`.
        softmax_distance: `‖A' − A‖ / ‖A‖` for a head of the same width, `[H]`, NaN where none
            was found.
        residual: largest relative change of the output, over both kinds of witness.
        reason: why heads were not tried; empty if they were.
    """

    site: str
    simplex_total_variation: Tensor
    softmax_distance: Tensor
    residual: float
    reason: str


@dataclass(frozen=True, eq=False)
class Identification:
    """What outputs tell of attention, and hidden states of tokens.

    Attributes:
        model: name of the model.
        texts: number of texts.
        heads: one entry per attention module, in order; empty if not asked for.
        witnesses: the same, if asked for.
        witness_tokens: tokens of the text that witnesses are for.
        tokens: one result per map; empty if not asked for.
        note: why there is none although asked for; else empty.
    """

    model: str
    texts: int
    heads: Sequence[LayerIdentifiability]
    witnesses: Sequence[LayerWitnesses]
    witness_tokens: int
    tokens: Sequence[TokenIdentifiabilityResult]
    note: str

    def to_dict(self) -> dict[str, Any]:
        """Return everything, ready for JSON."""
        document = {
            "model": self.model,
            "texts": self.texts,
            "heads": list(map(vars, self.heads)),
            "witnesses": list(map(vars, self.witnesses)),
            "witness_tokens": self.witness_tokens,
            "tokens": {
                result.map: {
                    "distance": result.distance,
                    "layers": [layer for _, layer in result.layers],
                    **result.tensors(),
                }
                for result in self.tokens
            },
            "note": self.note,
        }
        return plain(document)


def identify_texts(
    model: TextModel | str,
    texts: Sequence[str],
    *,
    part: Part = "both",
    witness_tokens: int | None = None,
    maps: Sequence[MapKind] = MAPS,
    distance: Distance = "cosine",
    training: MapTraining = BRIEF,
    seed: int = 0,
    layers: Iterable[int | str] | None = None,
    batch_size: int = 8,
    max_length: int | None = None,
    progress: Progress = silent,
) -> Identification:
    """Tell whether outputs determine attention, and whether hidden states determine tokens.

    Args:
        model: the model, or its name.
        texts: at least one; tokens need some dozen.
        part: `"heads"`, `"tokens"` or `"both"`.
        witness_tokens: construct other attention with the same output for so many tokens of the
            longest text; None constructs none.
        maps: maps from hidden states back to tokens.
        distance: of training and search.
        training: how maps are trained.
        seed: of the splits and the training.
        layers: indices or module names of the layers to look at; None looks at all.
        batch_size: most texts in a batch.
        max_length: most tokens of a text; by default what the model can read.
        progress: told how far it is.

    Returns:
        Both halves. With `"both"`, texts too few to identify tokens are a note, not an error.

    Raises:
        AttnLensError: if tokens alone are asked for and there are too few texts.
    """
    text_model = reader(model, progress)
    tokenised = text_model.tokenise(texts, max_length)
    collectors = [] if part == "heads" else [token_collector(text_model, distance, training, seed)]
    recording = [] if part == "tokens" else [Recording()]
    places = None if layers is None else tuple(layers)
    sites: dict[tuple[str, int, int], list[_Batch]] = {}
    with Lens(text_model.model, *collectors, *recording, layers=places):
        for _ in run_batches(text_model, tokenised, batch_size, progress):
            for calls in recording:
                for capture in calls.compute():
                    key = capture.site, capture.layer, capture.call
                    sites.setdefault(key, []).append(_of_batch(capture))
                calls.reset()
    witnesses: list[LayerWitnesses] = []
    if witness_tokens is not None and part != "tokens":
        witnesses = _constructed(text_model, tokenised, witness_tokens, places, progress)
    tokens, note = [], ""
    try:
        tokens = [rates for entry in collectors for rates in identified_tokens(entry, maps)]
    except AttnLensError as error:
        if part == "tokens":
            raise
        note = str(error)
    length = min(witness_tokens or 0, max(tokenised.lengths)) if witnesses else 0
    heads = [_of_layer(site, batches) for (site, *_), batches in sites.items()]
    return Identification(text_model.name, len(texts), heads, witnesses, length, tokens, note)


def token_collector(
    model: TextModel,
    distance: Distance = "cosine",
    training: MapTraining = BRIEF,
    seed: int = 0,
) -> TokenIdentifiability:
    """Make the observer that collects hidden states for maps of any kind.

    Args:
        model: the model.
        distance: of training and search.
        training: how maps are trained.
        seed: of the splits and the training.

    Returns:
        The observer.
    """
    words = model.model.get_input_embeddings()
    return TokenIdentifiability("mlp", distance, words=words, seed=seed, training=training)


def identified_tokens(
    collector: TokenIdentifiability, maps: Sequence[MapKind] = MAPS
) -> list[TokenIdentifiabilityResult]:
    """Train a map of each kind on what was collected, and count.

    Args:
        collector: has looked on.
        maps: the kinds.

    Returns:
        A result for each.
    """
    return [collector.using(kind).compute() for kind in maps]


class _Batch(NamedTuple):
    """What can be told of the heads of a layer in a batch of B texts."""

    simplex: Tensor  # [B, H]
    softmax: Tensor | None
    nullity: Tensor  # [B, H]
    longest: int
    verdict: str


def _of_batch(capture: Capture) -> _Batch:
    result = identify(capture)
    tokens, nullity = result.tokens, result.nullity.double()
    if tokens.dim() > 2:  # masks differ by row
        tokens, nullity = tokens.flatten(2).amax(-1), nullity.mean(-1)
    longest = int(tokens[:, 0].argmax())
    return _Batch(
        result.identifiable_simplex.double(),
        result.identifiable_softmax,
        nullity,
        int(tokens[longest, 0]),
        result.verdict(longest, 0),
    )


def _of_layer(site: str, batches: Sequence[_Batch]) -> LayerIdentifiability:
    softmax = [batch.softmax.double() for batch in batches if batch.softmax is not None]
    longest = max(batches, key=lambda batch: batch.longest)
    return LayerIdentifiability(
        site,
        torch.cat([batch.simplex for batch in batches]).mean(0),
        torch.cat(softmax).mean(0) if len(softmax) == len(batches) else None,
        torch.cat([batch.nullity for batch in batches]).mean(0),
        longest.longest,
        longest.verdict,
    )


def _constructed(
    model: TextModel,
    texts: TokenisedTexts,
    tokens: int,
    layers: Iterable[int | str] | None,
    progress: Progress,
) -> list[LayerWitnesses]:
    """Construct the witnesses of every layer for the beginning of the longest text."""
    longest = texts.lengths.index(max(texts.lengths))
    rows = {
        name: torch.tensor([column[longest][:tokens]]) for name, column in texts.columns.items()
    }
    recording = Recording()
    with Lens(model.model, recording, layers=layers), torch.no_grad():
        model.model(**rows)
    captures = recording.compute()
    witnesses = []
    for place, capture in enumerate(captures):
        progress("Constructing witnesses", place, len(captures))
        witnesses.append(_witnesses_of(capture))
    progress("Constructing witnesses", len(captures), len(captures))
    return witnesses


def _witnesses_of(capture: Capture) -> LayerWitnesses:
    """Construct the witnesses of a call with one text."""
    simplex = simplex_witness(capture)
    real = capture.real_rows.expand_as(simplex.total_variation)
    moved = (simplex.total_variation * real).sum(-1) / real.sum(-1)
    distance, residuals, reason = torch.full_like(moved, torch.nan), simplex.residual, ""
    try:
        softmax = softmax_witness(capture)
    except (CaptureError, InputError) as error:
        reason = str(error)
    else:
        distance = softmax.distance.masked_fill(~softmax.converged, torch.nan)
        residuals = torch.cat([residuals.flatten(), softmax.residual[softmax.converged]])
    return LayerWitnesses(capture.site, moved[0], distance[0], float(residuals.max()), reason)
