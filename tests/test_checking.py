"""`attnlens.check` and `attnlens check` on real and tiny checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from sentence_transformers import SentenceTransformer
from transformers import (
    BertConfig,
    BertModel,
    DebertaV2Config,
    DebertaV2Model,
    FNetConfig,
    FNetModel,
    PreTrainedModel,
    SwinConfig,
    SwinModel,
)
from typer.testing import CliRunner

import attnlens
from attnlens.cli.commands import app
from attnlens.demo import model_folder
from tests.support import models

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 37, "vocab_size": 99}


def build(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    if name == "bert":
        return BertModel(BertConfig(**SMALL, num_attention_heads=4))
    if name == "deberta-v2":
        return DebertaV2Model(DebertaV2Config(**SMALL, num_attention_heads=4))
    if name == "fnet":
        return FNetModel(FNetConfig(**SMALL))
    return SwinModel(
        SwinConfig(image_size=32, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 4],
                   window_size=4)
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "tap", "calls"),
    [("bert", "sdpa", 2), ("deberta-v2", "softmax", 2), ("swin", "sdpa", 4)],
)
def test_the_command_on_local_checkpoints(name: str, tap: str, calls: int, tmp_path: Path) -> None:
    build(name).save_pretrained(tmp_path)
    plain = CliRunner().invoke(app, ["check", str(tmp_path)])
    assert plain.exit_code == 0, plain.output
    words = " ".join(plain.output.split())
    assert f"works: all {calls} attention calls were captured exactly" in words
    assert "outputs are bit-identical" in words
    document = json.loads(CliRunner().invoke(app, ["check", str(tmp_path), "--json"]).stdout)
    assert document["supported"] and document["identical"]
    assert {site["tap"] for site in document["sites"]} == {tap}
    assert all(site["projection_rank"] == 8 for site in document["sites"])
    assert max(site["output_error"] for site in document["sites"]) <= 1e-5


def test_the_command_on_the_packaged_encoder() -> None:
    result = CliRunner().invoke(app, ["check", str(model_folder())])
    assert result.exit_code == 0
    assert "all 6 attention calls were captured exactly" in " ".join(result.output.split())


def test_the_command_on_a_model_without_attention(tmp_path: Path) -> None:
    build("fnet").save_pretrained(tmp_path)
    result = CliRunner().invoke(app, ["check", str(tmp_path)])
    assert result.exit_code == 1
    assert "encoder.layer.0.fourier (FNetFourierTransform)" in " ".join(result.output.split())


def test_the_command_on_nothing(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["check", str(tmp_path)])
    assert result.exit_code == 2
    assert "config.json" in result.output


def test_inputs_of_ones_own() -> None:
    model, inputs = models.build("bert"), models.inputs("bert")
    found = attnlens.check(model, inputs)
    assert found.supported
    assert found.sites[0].shape[0] == inputs["input_ids"].shape[0]


def test_a_model_that_a_lens_would_change_is_found_out() -> None:
    class Drifting(BertModel):
        """Gives something else every time."""

        def forward(self, *args, **kwargs):  # type: ignore[no-untyped-def]
            output = super().forward(*args, **kwargs)
            self.times = getattr(self, "times", 0) + 1
            output.last_hidden_state += self.times
            return output

    found = attnlens.check(Drifting(BertConfig(**SMALL, num_attention_heads=4)).eval())
    assert not found.identical and not found.supported
    assert "outputs changed" in found.words


def test_a_wrapper_is_checked_on_inputs_of_the_model_inside() -> None:
    found = attnlens.check(SentenceTransformer(str(model_folder())))
    assert found.supported, found.words
    assert len(found.sites) == 6
    assert {site.masking for site in found.sites} == {"zero, mean, uniform"}


class Refusing(torch.nn.Module):
    """Raises an error of its own, always or only where hooks are."""

    def __init__(self, always: bool) -> None:
        super().__init__()
        self.always = always
        self.inner = models.build("bert")

    def forward(self, **inputs: torch.Tensor) -> torch.Tensor:
        if self.always or self.inner.pooler._forward_pre_hooks:
            raise KeyError("mine")
        return self.inner(**inputs)[0]


def test_a_model_that_raises_is_a_verdict_or_an_error_of_ours() -> None:
    inputs = models.inputs("bert")
    with pytest.raises(attnlens.AttnLensError, match=r"does not run on inputs=.*KeyError: 'mine'"):
        attnlens.check(Refusing(True), inputs)
    found = attnlens.check(Refusing(False), inputs)
    assert not found.supported
    assert "with a lens attached it raises KeyError: 'mine'" in found.words
