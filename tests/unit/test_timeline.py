"""The timeline says what the spans say, in text and in pixels."""

from __future__ import annotations

from pathlib import Path

import pytest

from comfyui_pipedit import timeline
from comfyui_pipedit.job import Span

SPANS = [
    Span(0, "denoise", "clip-1", 10.0, 14.0),
    Span(0, "denoise", "clip-2", 14.0, 18.0),
    Span(1, "encode", "text-1", 10.0, 10.5),
    Span(1, "decode", "frames-1", 14.0, 16.0),
    Span(1, "decode", "frames-2", 18.0, 20.0),
]
LABELS = {"clip-1": "a red circle", "clip-2": "a blue square"}


def test_rows_show_each_rank_in_proportion() -> None:
    lines = timeline.as_text(SPANS, LABELS, columns=40).splitlines()
    assert lines[1].split()[2] == "1" * 16 + "2" * 17 + "." * 7
    assert lines[2].split()[2] == "eee" + "." * 13 + "AAAAAAAAA" + "." * 7 + "BBBBBBBB"
    assert "busy   8.0 s" in lines[1] and "busy   4.5 s" in lines[2]


def test_clips_are_named_by_their_prompts() -> None:
    text = timeline.as_text(SPANS, LABELS)
    assert "1 A  a red circle" in text and "2 B  a blue square" in text


def test_clips_are_numbered_as_their_labels_are() -> None:
    text = timeline.as_text(SPANS, {"clip-2": "a blue square", "clip-1": "a red circle"}, columns=40)
    assert "1 A  a blue square" in text and "2 B  a red circle" in text
    assert text.splitlines()[1].split()[2] == "2" * 16 + "1" * 17 + "." * 7


def test_overlap_counts_only_another_clips_denoising() -> None:
    assert timeline.overlap_seconds(SPANS) == pytest.approx(2.0)
    serial = [Span(0, "denoise", "clip-1", 0, 4), Span(1, "decode", "frames-1", 3, 5),
              Span(0, "denoise", "clip-2", 5, 9)]
    assert timeline.overlap_seconds(serial) == 0


def test_overlap_counts_a_moment_once_whatever_the_number_of_ranks() -> None:
    more = [*SPANS, Span(2, "denoise", "clip-2", 14.0, 18.0), Span(3, "decode", "frames-1", 14.0, 16.0)]
    assert timeline.overlap_seconds(more) == pytest.approx(2.0)


def test_the_picture_has_the_clips_colours_where_they_worked(tmp_path: Path) -> None:
    from PIL import Image

    timeline.draw(SPANS, LABELS, tmp_path / "timeline.png")
    image = Image.open(tmp_path / "timeline.png").convert("RGB")
    scale = (timeline.WIDTH - timeline.LEFT - 20) / 10
    middle = timeline.TOP + timeline.ROW // 2
    assert image.getpixel((int(timeline.LEFT + 2 * scale), middle)) == timeline.COLOURS[0]
    assert image.getpixel((int(timeline.LEFT + 6 * scale), middle)) == timeline.COLOURS[1]
    assert image.getpixel((int(timeline.LEFT + 9.5 * scale), middle)) == (255, 255, 255)


def test_no_spans_is_an_error() -> None:
    with pytest.raises(ValueError, match="no spans"):
        timeline.as_text([], {})
