"""The twenty prompts and seeds by which the demo model is judged, written down before it was trained.

They cover every colour, shape, direction, speed and background. Three leave the background open and three use another
word order. `judge.py` scores the clips, `sheets.py` makes them.
"""
from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class JudgedPrompt:
    """A prompt, the seed of its noise, and what the clip must show."""

    text: str
    seed: int
    colour: str
    shape: str
    direction: str


JUDGED = (
    JudgedPrompt("a red circle moving right on black background", 101, "red", "circle", "right"),
    JudgedPrompt("a blue square moving up on gray background", 102, "blue", "square", "up"),
    JudgedPrompt("a yellow triangle moving left quickly on navy background", 103, "yellow", "triangle", "left"),
    JudgedPrompt("a green circle moving down slowly on black background", 104, "green", "circle", "down"),
    JudgedPrompt("a white square moving right on navy background", 105, "white", "square", "right"),
    JudgedPrompt("a purple triangle moving down on gray background", 106, "purple", "triangle", "down"),
    JudgedPrompt("a cyan circle moving left on black background", 107, "cyan", "circle", "left"),
    JudgedPrompt("an orange square moving up quickly on navy background", 108, "orange", "square", "up"),
    JudgedPrompt("a red triangle moving up slowly on gray background", 109, "red", "triangle", "up"),
    JudgedPrompt("a green square moving left quickly on gray background", 110, "green", "square", "left"),
    JudgedPrompt("a blue triangle moving right on black background", 111, "blue", "triangle", "right"),
    JudgedPrompt("a yellow circle moving down quickly on gray background", 112, "yellow", "circle", "down"),
    JudgedPrompt("a purple circle moving up on black background", 113, "purple", "circle", "up"),
    JudgedPrompt("a white triangle moving left slowly on black background", 114, "white", "triangle", "left"),
    JudgedPrompt("red circle moving right quickly on navy background", 115, "red", "circle", "right"),
    JudgedPrompt("orange triangle moving down slowly on black background", 116, "orange", "triangle", "down"),
    JudgedPrompt("on gray background a cyan square moving right slowly", 117, "cyan", "square", "right"),
    JudgedPrompt("a white circle moving up", 118, "white", "circle", "up"),
    JudgedPrompt("a purple square moving left", 119, "purple", "square", "left"),
    JudgedPrompt("a cyan triangle moving down quickly", 120, "cyan", "triangle", "down"),
)
