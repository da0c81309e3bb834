"""The judge of the demo's clips: right on drawn clips, and no property can be wrong unnoticed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from comfyui_pipedit.demo.clips import Attributes, Painter
from comfyui_pipedit.demo.judge import Verdict, judge
from comfyui_pipedit.demo.prompts import JUDGED
from comfyui_pipedit.demo.words import BACKGROUNDS, COLOURS, DIRECTIONS, SHAPES, SPEEDS

NOTHING = Verdict("none", "none", "none")


def draw(colour: str, shape: str, direction: str, speed: str = "", background: str = "black") -> torch.Tensor:
    """A drawn clip [17, 96, 96, 3] in 0..1."""
    torch.manual_seed(len(colour) + len(shape))
    names = ((colour, COLOURS), (shape, SHAPES), (direction, DIRECTIONS), (speed, SPEEDS), (background, BACKGROUNDS))
    shown = Attributes(*(torch.tensor([list(table).index(name)]) for name, table in names))
    return (Painter(torch.device("cpu")).paint(shown)[0].permute(1, 2, 3, 0) + 1) / 2


@pytest.mark.parametrize("colour", COLOURS)
def test_every_colour_is_told(colour: str) -> None:
    assert judge(draw(colour, "circle", "left", background="gray")).colour == colour


@pytest.mark.parametrize("background", BACKGROUNDS)
def test_a_colour_is_told_on_every_background(background: str) -> None:
    assert judge(draw("purple", "circle", "left", background=background)).colour == "purple"


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_every_shape_and_direction_is_told(shape: str, direction: str) -> None:
    assert judge(draw("cyan", shape, direction)) == Verdict("cyan", shape, direction)


@pytest.mark.parametrize("speed", SPEEDS)
def test_the_direction_is_told_at_every_speed(speed: str) -> None:
    assert judge(draw("cyan", "square", "up", speed)).direction == "up"


def test_a_clip_played_backwards_moves_the_other_way() -> None:
    assert judge(draw("red", "square", "up").flip(0)).direction == "down"


def test_a_mirrored_clip_moves_the_other_way() -> None:
    assert judge(draw("red", "square", "right").flip(2)).direction == "left"


def test_one_frame_of_another_colour_takes_the_colour_away() -> None:
    clip = draw("red", "circle", "right")
    clip[9] = clip[9].flip(-1)
    assert judge(clip) == replace(judge(draw("red", "circle", "right")), colour="none")


def test_a_shape_between_two_is_none() -> None:
    clip = torch.zeros(17, 96, 96, 3)
    for time in range(17):
        clip[time, 30:36, 20 + time : 40 + time] = 1.0
        clip[time, 36:50, 20 + time : 30 + time] = 1.0
    assert judge(clip) == Verdict("white", "none", "right")


def test_what_stands_still_has_no_direction() -> None:
    assert judge(draw("blue", "triangle", "up")[:1].repeat(17, 1, 1, 1)) == Verdict("blue", "triangle", "none")


def test_a_diagonal_way_has_no_direction() -> None:
    clip = torch.zeros(17, 96, 96, 3)
    for time in range(17):
        clip[time, 20 + 2 * time : 40 + 2 * time, 20 + 2 * time : 40 + 2 * time] = 1.0
    assert judge(clip) == Verdict("white", "square", "none")


def test_an_empty_clip_and_two_things_are_nothing() -> None:
    assert judge(torch.full((17, 96, 96, 3), 0.4)) == NOTHING
    two = draw("red", "square", "right")
    two[:, :20, :20] = torch.tensor([1.0, 0.0, 0.0])
    assert judge(two) == NOTHING


def test_the_judged_prompts_cover_what_can_be_asked_for() -> None:
    assert len(JUDGED) == len({prompt.seed for prompt in JUDGED}) == 20
    assert {prompt.colour for prompt in JUDGED} == set(COLOURS)
    assert {prompt.shape for prompt in JUDGED} == set(SHAPES)
    assert {prompt.direction for prompt in JUDGED} == set(DIRECTIONS)
    words = {word for prompt in JUDGED for word in prompt.text.split()}
    assert words >= {*BACKGROUNDS, "slowly", "quickly"}
    for prompt in JUDGED:
        assert {prompt.colour, prompt.shape, prompt.direction} <= set(prompt.text.split())
