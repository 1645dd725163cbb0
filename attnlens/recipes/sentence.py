"""Which tokens of a sentence made each of its hidden states."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnlens.attribution.hidden_tokens import HiddenTokenAttribution
from attnlens.attribution.tallies import own_contribution, tally_not_main
from attnlens.errors import AttnLensWarning, InputError
from attnlens.lens import Lens
from attnlens.recipes.ingredients import Progress, reader, silent
from attnlens.results import plain
from attnlens.texts.batching import TextModel


@dataclass(frozen=True, eq=False)
class SentenceAttribution:
    """Contributions of the tokens of one sentence to its hidden states.

    Attributes:
        model: name of the model.
        tokens: the n tokens.
        probes: probes per token, or None where exact.
        contribution: `[L, n, n]`, source then target, in `[0, 1]`.
        standard_error: `[L, n, n]`.
    """

    model: str
    tokens: tuple[str, ...]
    probes: int | None
    contribution: Tensor
    standard_error: Tensor

    @property
    def own(self) -> Tensor:
        """Contribution of every token to itself, `[L, n]`."""
        return own_contribution(self.contribution)

    @property
    def not_main(self) -> Tensor:
        """Share of tokens that are not their own main contributor, `[L]`; NaN if any is."""
        mask = torch.ones(1, len(self.tokens), dtype=torch.bool)
        return tally_not_main(self.contribution[:, None], mask).mean()[:, 0, 0]

    def layer(self, index: int) -> int:
        """Count a layer from the first.

        Args:
            index: the layer; negative ones count from the end.

        Returns:
            Its index, in `[0, L)`.

        Raises:
            InputError: if there is no such layer.
        """
        layers = len(self.contribution)
        if not -layers <= index < layers:
            raise InputError(f"Layers lie between {-layers} and {layers - 1}. Got {index}.")
        return index % layers

    def to_dict(self, layers: Sequence[int] = (-1,)) -> dict[str, Any]:
        """Return the contributions at some layers and a summary of all, ready for JSON.

        Args:
            layers: the layers; negative ones count from the end.

        Returns:
            The document; `contribution` has, for each of the layers, a row for each target.
        """
        places = list(map(self.layer, layers))
        document = {
            "model": self.model,
            "tokens": self.tokens,
            "probes": self.probes,
            "own_contribution": self.own.mean(-1),
            "not_main_contributor": self.not_main,
            "layers": places,
            "contribution": self.contribution[places].mT,
            "standard_error": None if self.probes is None else self.standard_error[places].mT,
        }
        return plain(document)


def attribute_sentence(
    model: TextModel | str, sentence: str, probes: int | None = 8, progress: Progress = silent
) -> SentenceAttribution:
    """Attribute the hidden states of a sentence to its tokens.

    Args:
        model: the model, or its name.
        sentence: the sentence; cut where the model cannot read on.
        probes: probes per token, or None for exact.
        progress: told how far it is.

    Returns:
        The contributions at every layer.
    """
    text_model = reader(model, progress)
    tokenised = text_model.tokenise([sentence])
    if tokenised.truncated:
        warnings.warn(
            f"The sentence was cut after {text_model.longest} tokens, the most that "
            f"{text_model.name} can read.",
            AttnLensWarning,
            stacklevel=2,
        )
    (batch,) = text_model.batches(tokenised, 1)
    observer = HiddenTokenAttribution(probes, keep="matrices")
    with Lens(text_model.model, observer), torch.no_grad():
        text_model.model(**batch)
    (matrices,) = observer.matrices
    tokens = text_model.tokenizer.convert_ids_to_tokens(batch["input_ids"][0].tolist())
    return SentenceAttribution(
        text_model.name,
        tuple(tokens),
        probes,
        matrices.contribution[:, 0],
        matrices.standard_error[:, 0],
    )
