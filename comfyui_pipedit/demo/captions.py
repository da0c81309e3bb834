"""Captions of drawn clips, in varied words, and their token ids.

A caption may leave out the background, the speed or the direction; the clip then has any. So a short prompt works too.
"""
from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from .words import BACKGROUNDS, COLOURS, DIRECTIONS, EOS, MAX_TOKENS, PAD, SHAPES, SPEEDS, SYNONYMS, vocabulary

# (weight, template); an empty speed leaves a double space, which splitting removes.
TEMPLATES = (
    (50, "{article} {colour} {shape} moving {direction} {speed} on {background} background"),
    (8, "{article} {colour} {shape} moving {direction} {speed}"),
    (7, "{colour} {shape} moving {direction} {speed} on {background} background"),
    (7, "on {background} background {article} {colour} {shape} moving {direction} {speed}"),
    (6, "{article} {colour} {shape} moving {speed} {direction} on {article_b} {background} background"),
    (5, "{article} {colour} {shape} moves {direction} {speed} on {article_b} {background} background"),
    (4, "the {colour} {shape} is moving {speed} to the {direction} on the {background} background"),
    (4, "{article} video of {article} {colour} {shape} moving {direction} {speed} on {background} background"),
    (3, "{colour} {shape} {direction} {speed} {background} background"),
    (2, "{colour} {shape} moving {direction}"),
    (2, "{article} {colour} {shape} on {background} background"),
    (2, "{article} {colour} {shape}"),
)


@dataclass(frozen=True, slots=True)
class Subject:
    """What one clip shows, as words."""

    colour: str
    shape: str
    direction: str
    speed: str
    background: str


def subject(colour: int, shape: int, direction: int, speed: int, background: int) -> Subject:
    """The words for the indices with which `clips.Attributes` names what is drawn."""
    return Subject(
        tuple(COLOURS)[colour], SHAPES[shape], tuple(DIRECTIONS)[direction], tuple(SPEEDS)[speed],
        tuple(BACKGROUNDS)[background],
    )


def caption(shown: Subject, chance: random.Random) -> str:
    """One of the many ways to say what `shown` is; mostly the plain one."""
    weights, templates = zip(*TEMPLATES, strict=True)
    template = chance.choices(templates, weights)[0]
    article = "an" if shown.colour == "orange" else "a"
    words = {
        "colour": shown.colour, "shape": shown.shape, "article": article, "article_b": "a",
        **{name: _reworded(getattr(shown, name), chance) for name in ("direction", "speed", "background")},
    }
    return " ".join(template.format(**words).split())


def _reworded(word: str, chance: random.Random) -> str:
    return SYNONYMS[word] if word in SYNONYMS and chance.random() < 0.12 else word


def token_ids(text: str) -> list[int]:
    """Ids of a caption's words and the end token, padded to MAX_TOKENS. Raises KeyError on an unknown word."""
    ids = {word: index for index, word in enumerate(vocabulary())}
    row = [ids[word] for word in text.split()] + [ids[EOS]]
    return row + [ids[PAD]] * (MAX_TOKENS - len(row))


def caption_ids(shown: list[Subject], variants: int, seed: int) -> torch.Tensor:
    """Token ids of `variants` captions for each subject: int64 [clips, variants, MAX_TOKENS]."""
    chance = random.Random(seed)
    return torch.tensor([[token_ids(caption(one, chance)) for _ in range(variants)] for one in shown])
