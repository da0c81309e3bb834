r"""What ComfyUI reads in a prompt beside words: weights, as in "(red:1.3)", and escapes, as in "\(".

    (words)      1.1 times the weight around them, once for each pair of parentheses
    (words:0.8)  that weight
    \( and \)    the parentheses themselves
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import InvalidJob

EMPHASIS = 1.1
OPEN, CLOSE = "\0\1", "\0\2"
"""Stand for escaped parentheses while others are read."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Words, and how much they count: 1 is as they are."""

    text: str
    weight: float


def segments(prompt: str) -> list[Segment]:
    """A prompt in pieces of one weight, without escapes; each is tokenized by itself, as in ComfyUI.

    InvalidJob for "embedding:NAME", which no model of the pool has.
    """
    if "embedding:" in prompt:
        raise InvalidJob("the prompt names an embedding, and models of the pool have none; leave 'embedding:...' out")
    hidden = prompt.replace(r"\(", OPEN).replace(r"\)", CLOSE)
    return [Segment(piece.text.replace(OPEN, "(").replace(CLOSE, ")"), piece.weight)
            for piece in _weighted(hidden, 1.0)]


def plain(prompt: str) -> str:
    """The words of a prompt alone."""
    return "".join(segment.text for segment in segments(prompt))


def _weighted(text: str, around: float) -> list[Segment]:
    found: list[Segment] = []
    for piece in _pieces(text):
        if len(piece) >= 2 and piece[0] == "(" and piece[-1] == ")":
            words, weight = _own_weight(piece[1:-1], around * EMPHASIS)
            found += _weighted(words, weight)
        else:
            found.append(Segment(piece, around))
    return found


def _own_weight(words: str, otherwise: float) -> tuple[str, float]:
    """("red", 1.3) of "red:1.3"; all of it with the other weight where no number follows a colon."""
    place = words.rfind(":")
    try:
        return (words[:place], float(words[place + 1:])) if place > 0 else (words, otherwise)
    except ValueError:
        return words, otherwise


def _pieces(text: str) -> list[str]:
    """Outermost parentheses with what is in them, and what is between. A parenthesis without its other half is text."""
    pieces, begin, depth = [], 0, 0
    for place, letter in enumerate(text):
        if letter == "(":
            if depth == 0:
                pieces.append(text[begin:place])
                begin = place
            depth += 1
        elif letter == ")":
            depth -= 1
            if depth == 0:
                pieces.append(text[begin:place + 1])
                begin = place + 1
    return [piece for piece in (*pieces, text[begin:]) if piece]
