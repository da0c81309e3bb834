"""What the demo model can be asked for: its colours, shapes, directions, speeds, backgrounds, and every word it knows.

The one place for the vocabulary. `clips.py` draws what the indices below mean, `captions.py` says it in words.
"""
from __future__ import annotations

COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 190, 70),
    "blue": (50, 90, 230),
    "yellow": (240, 210, 40),
    "purple": (150, 60, 200),
    "orange": (245, 140, 30),
    "white": (245, 245, 245),
    "cyan": (40, 200, 210),
}
SHAPES = ("circle", "square", "triangle")
DIRECTIONS = {"right": (1.0, 0.0), "left": (-1.0, 0.0), "up": (0.0, -1.0), "down": (0.0, 1.0)}
SPEEDS = {"slowly": 0.35, "": 0.6, "quickly": 0.95}
BACKGROUNDS = {"black": (12, 12, 16), "gray": (110, 110, 115), "navy": (20, 28, 70)}

SYNONYMS = {"gray": "grey", "slowly": "slow", "quickly": "fast", "up": "upward", "down": "downward"}
FILLERS = ("a", "an", "the", "is", "moving", "moves", "to", "on", "background", "video", "of")

PAD, EOS, UNK = "<pad>", "</s>", "<unk>"
MAX_TOKENS = 16


def vocabulary() -> tuple[str, ...]:
    """Every token in the order of its id; the three special ones come first."""
    asked = (*COLOURS, *SHAPES, *DIRECTIONS, *(word for word in SPEEDS if word), *BACKGROUNDS)
    return (PAD, EOS, UNK, *FILLERS, *asked, *SYNONYMS.values())
