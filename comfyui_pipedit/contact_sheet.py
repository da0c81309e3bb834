"""Clips with their prompts: a sheet of rows of frames (PNG), or all clips side by side and moving (GIF)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy
    from PIL import Image

GAP, CAPTION, MARGIN = 6, 24, 12
BACKGROUND = (250, 250, 250)
FONT_SIZE = 15


@dataclass(frozen=True, slots=True, eq=False)
class Clip:
    """What a row shows. frames: uint8 [F, H, W, 3]."""

    caption: str
    frames: numpy.ndarray


def evenly(count: int, wanted: int) -> list[int]:
    """At most `wanted` of `count` indices, evenly spread, the first and the last among them."""
    if count <= wanted:
        return list(range(count))
    return [round(i * (count - 1) / (wanted - 1)) for i in range(wanted)]


def draw(clips: Sequence[Clip], path: Path, columns: int = 6, height: int = 128) -> None:
    """A PNG with a row a clip: its caption above `columns` of its frames, each `height` pixels high."""
    from PIL import Image

    strips = [_strip(clip, columns, height) for clip in clips]
    width = max(strip.width for strip in strips)
    sheet = Image.new("RGB", (width, sum(strip.height for strip in strips)), BACKGROUND)
    top = 0
    for strip in strips:
        sheet.paste(strip, (0, top))
        top += strip.height
    sheet.save(path, optimize=True)


def animate(
    clips: Sequence[Clip], path: Path, frames_per_second: float = 8.0, columns: int = 2, height: int = 192
) -> None:
    """A GIF that loops all clips side by side, in `columns`, under captions; the shortest clip sets the length."""
    count = min(len(clip.frames) for clip in clips)
    pictures = [_grid([_captioned(clip, [index], height) for clip in clips], columns) for index in range(count)]
    milliseconds = round(1000 / frames_per_second)
    pictures[0].save(path, save_all=True, append_images=pictures[1:], duration=milliseconds, loop=0)


def _strip(clip: Clip, columns: int, height: int) -> Image.Image:
    return _captioned(clip, evenly(len(clip.frames), columns), height)


def _captioned(clip: Clip, indices: Sequence[int], height: int) -> Image.Image:
    """The chosen frames in a row under the caption, wide enough for both."""
    from PIL import Image, ImageDraw, ImageFont

    pictures = [_scaled(clip.frames[index], height) for index in indices]
    font = ImageFont.load_default(size=FONT_SIZE)
    row = sum(picture.width + GAP for picture in pictures) - GAP
    width = 2 * MARGIN + max(row, int(font.getlength(clip.caption)))
    canvas = Image.new("RGB", (width, CAPTION + height + MARGIN), BACKGROUND)
    ImageDraw.Draw(canvas).text((MARGIN, 3), clip.caption, fill="black", font=font)
    left = MARGIN
    for picture in pictures:
        canvas.paste(picture, (left, CAPTION))
        left += picture.width + GAP
    return canvas


def _scaled(frame: numpy.ndarray, height: int) -> Image.Image:
    from PIL import Image

    picture = Image.fromarray(frame)
    return picture.resize((max(1, picture.width * height // picture.height), height), Image.Resampling.LANCZOS)


def _grid(cells: Sequence[Image.Image], columns: int) -> Image.Image:
    """Cells of unlike sizes in a grid of equal ones."""
    from PIL import Image

    width, height = max(cell.width for cell in cells), max(cell.height for cell in cells)
    rows = -(-len(cells) // columns)
    canvas = Image.new("RGB", (columns * width, rows * height), BACKGROUND)
    for place, cell in enumerate(cells):
        canvas.paste(cell, (place % columns * width, place // columns * height))
    return canvas
