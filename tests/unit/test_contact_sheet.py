"""Sheets show the right frames in the right rows; the animation has every frame once."""

from __future__ import annotations

from pathlib import Path

import numpy
from PIL import Image

from comfyui_pipedit import contact_sheet
from comfyui_pipedit.contact_sheet import CAPTION, GAP, MARGIN, Clip


def plain_clip(caption: str, colour: tuple[int, int, int], frames: int) -> Clip:
    """A clip whose red channel counts its frames."""
    pixels = numpy.empty((frames, 32, 48, 3), dtype=numpy.uint8)
    pixels[:] = colour
    pixels[..., 0] = numpy.arange(frames)[:, None, None] * 10
    return Clip(caption, pixels)


def test_evenly_takes_first_and_last() -> None:
    assert contact_sheet.evenly(17, 5) == [0, 4, 8, 12, 16]
    assert contact_sheet.evenly(3, 6) == [0, 1, 2]


def test_each_row_has_its_clips_frames(tmp_path: Path) -> None:
    clips = [plain_clip("green", (0, 200, 0), 17), plain_clip("blue", (0, 0, 200), 17)]
    contact_sheet.draw(clips, tmp_path / "sheet.png", columns=5, height=32)
    image = Image.open(tmp_path / "sheet.png")
    row = CAPTION + 32 + MARGIN
    for line, rest in enumerate([(200, 0), (0, 200)]):
        for column, frame in enumerate([0, 4, 8, 12, 16]):
            place = (MARGIN + column * (48 + GAP) + 24, line * row + CAPTION + 16)
            assert image.getpixel(place) == (frame * 10, *rest)


def test_the_animation_has_every_frame_of_the_shortest_clip(tmp_path: Path) -> None:
    clips = [plain_clip("a", (0, 200, 0), 5), plain_clip("b", (0, 0, 200), 7)]
    contact_sheet.animate(clips, tmp_path / "clips.gif", frames_per_second=10)
    with Image.open(tmp_path / "clips.gif") as image:
        assert (image.n_frames, image.info["duration"]) == (5, 100)  # type: ignore[attr-defined]
