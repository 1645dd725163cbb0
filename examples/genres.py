"""Passages to classify by genre: read from files, or made up. For the examples beside it."""

from __future__ import annotations

import json
import random
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

WORDS = 60  # a passage has at least so many words

PLACES = ("the harbour", "Lindau", "the upper valley", "the old mill", "Tarn", "the east bank")
PEOPLE = ("Ines", "our neighbour", "a boy in red", "Mr Okafor", "the twins", "somebody's aunt")
NUMBERS = ("two", "three", "five", "nine", "twelve", "forty")
COMMON = (
    "{who} asked about {place} again.",
    "It took {n} minutes, not more.",
    "Nobody in {place} was surprised.",
    "That is what {who} said, at least.",
    "There were {n} of them in the end.",
)
BUILT_IN = {
    "recipe": (
        "Stir in {n} spoons of flour and let it rest.",
        "Keep the pan warm while {who} chops the onions.",
        "Season it the way they do in {place}.",
        "Simmer for {n} minutes with the lid on.",
    ),
    "weather": (
        "Showers reach {place} before noon.",
        "Gusts of {n} knots are likely near {place}.",
        "Frost lingers for {n} hours after sunrise.",
        "{who} should carry a coat this evening.",
    ),
    "match": (
        "{who} scored after {n} minutes.",
        "The away side from {place} defended deep.",
        "A late corner found {who} unmarked.",
        "They lead the table by {n} points.",
    ),
    "minutes": (
        "{who} moved that the meeting be adjourned.",
        "The budget for {place} was carried with {n} votes.",
        "Item {n} was deferred to the next session.",
        "{who} thanked the committee from {place}.",
    ),
}


class Passage(NamedTuple):
    """A text to classify."""

    text: str
    genre: str


def read_passages(path: Path) -> list[Passage]:
    """Join consecutive texts of one genre into passages."""
    with path.open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    passages = []
    for genre, group in groupby(rows, key=lambda row: row["genre"]):
        words: list[str] = []
        for row in group:
            words += row["text"].split()
            if len(words) >= WORDS:
                passages.append(Passage(" ".join(words), genre))
                words = []
    return passages


def write_passages(count: int, seed: int) -> list[Passage]:
    """Make up passages in which most sentences say nothing about the genre."""
    dice = random.Random(seed)
    passages = []
    for index in range(count):
        genre = list(BUILT_IN)[index % len(BUILT_IN)]
        told = [dice.choice(BUILT_IN[genre])] + [dice.choice(COMMON) for _ in range(7)]
        dice.shuffle(told)
        slots = [
            {"who": dice.choice(PEOPLE), "place": dice.choice(PLACES), "n": dice.choice(NUMBERS)}
            for _ in told
        ]
        sentences = [s.format(**slot) for s, slot in zip(told, slots, strict=True)]
        passages.append(Passage(" ".join(sentences), genre))
    return passages
