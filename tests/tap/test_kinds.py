"""Which attention is taken for an encoder's and which for a decoder's, and why."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from attnlens import HeadStatistics, Lens, check, record
from attnlens.attention.recording import Recording
from attnlens.errors import InputError
from tests.support.zoo import build

DECODERS = ("bloom", "codegen", "doge", "gpt2", "imagegpt", "jamba", "mpt", "openai-gpt")
ENCODERS = ("bert", "bert-generation", "deberta", "xlm", "xlnet")


@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_is_one_and_is_looked_at_by_default(name: str) -> None:
    example = build(name)
    for kinds in (None, "decoder"):
        recording = Recording()
        with Lens(example.model, recording, kinds=kinds), torch.no_grad():
            example.model(**example.inputs)
        assert {capture.kind for capture in recording.compute()} == {"decoder"}
    with pytest.raises(InputError, match=r"attention of kinds \['decoder'\] only"):
        Lens(example.model, kinds="encoder")


@pytest.mark.parametrize("name", ENCODERS)
def test_an_encoder_that_could_generate_is_one(name: str) -> None:
    example = build(name)
    assert {capture.kind for capture in record(example.model, **example.inputs)} == {"encoder"}


class TwoTowers(nn.Module):
    """A decoder without any flag, and an encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.writer, self.reader = build("bloom").model, build("bert").model

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        reader = self.reader(input_ids).last_hidden_state
        return reader + self.writer(input_ids).last_hidden_state


def test_a_tower_that_decodes_is_not_taken_for_the_encoder() -> None:
    model, ids = TwoTowers(), build("bert").inputs["input_ids"]
    for kinds, tower in ((None, "reader"), ("decoder", "writer")):
        statistics = HeadStatistics()
        with Lens(model, statistics, kinds=kinds), torch.no_grad():
            model(ids)
        assert {stack.split(".")[0] for stack, _ in statistics.compute().layers} == {tower}


@pytest.mark.parametrize(
    ("name", "kind", "reason"),
    [
        ("bloom", "decoder", "BloomModel is a causal language model"),
        ("llama", "decoder", "is_causal is set"),
        ("bert", "encoder", "nothing says that it is a decoder"),
        (
            "clip_text_model",
            "encoder",
            "nothing says that it is a decoder, though no token attends to a later one",
        ),
        ("t5", "cross", "it is named like cross-attention"),
    ],
)
def test_check_says_what_was_decided_and_why(name: str, kind: str, reason: str) -> None:
    example = build(name)
    verdict = check(example.model, example.inputs)
    assert (kind, reason) in {(site.kind, site.kind_reason) for site in verdict.sites}
    assert f"{kind} ({reason})" in verdict.words
