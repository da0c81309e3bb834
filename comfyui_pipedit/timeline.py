"""Which rank did what, when: spans as a text table and as a PNG.

A row is a rank, a colour is a clip. The ranks recorded the spans themselves, on the clock that all processes of a host
share, so what stands above each other happened at the same time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .job import Span

if TYPE_CHECKING:
    from PIL import ImageDraw, ImageFont

    Pen = ImageDraw.ImageDraw
    Font = ImageFont.FreeTypeFont | ImageFont.ImageFont

COLOURS = ((66, 133, 244), (234, 128, 40), (52, 168, 83), (171, 71, 188), (0, 172, 193), (216, 67, 94), (141, 110, 99))
PLAIN = (150, 150, 150)
MARKS = {"encode": "e", "load": "l"}
DECODE_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
WIDTH, ROW, LEFT, TOP = 1200, 46, 90, 40


def is_decode(span: Span) -> bool:
    """Whether a span is VAE work, which is drawn hatched and written with a letter."""
    return span.name.startswith("decode")


def is_denoise(span: Span) -> bool:
    """Whether a span is work of the transformer."""
    return span.name.startswith("denoise")


def bounds(spans: Sequence[Span]) -> tuple[float, float]:
    """Start and end of the whole in seconds. ValueError without spans."""
    if not spans:
        raise ValueError("no spans: the pool recorded no work")
    return min(span.start for span in spans), max(span.end for span in spans)


def clip_of(span: Span) -> str:
    """The clip that a span belongs to: the engine calls a clip's own decode "frames-N" where the clip is "clip-N"."""
    return span.job.replace("frames-", "clip-")


def clips_in(spans: Iterable[Span], labels: Collection[str] = ()) -> list[str]:
    """The clips that were denoised or decoded: in the order of `labels`, and others behind by when they started."""
    order = sorted((span for span in spans if is_denoise(span) or is_decode(span)), key=lambda span: span.start)
    started = dict.fromkeys(clip_of(span) for span in order)
    return [*(clip for clip in labels if clip in started), *(clip for clip in started if clip not in labels)]


def merged(spans: Iterable[Span]) -> list[tuple[float, float]]:
    """The union of the spans' intervals, in order of time."""
    union: list[tuple[float, float]] = []
    for start, end in sorted((span.start, span.end) for span in spans):
        if union and start <= union[-1][1]:
            union[-1] = (union[-1][0], max(end, union[-1][1]))
        else:
            union.append((start, end))
    return union


def common(left: Iterable[tuple[float, float]], right: Sequence[tuple[float, float]]) -> float:
    """Seconds that lie in both unions of intervals."""
    return sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in left for b in right)


def overlap_seconds(spans: Sequence[Span]) -> float:
    """Seconds in which one clip was decoded while another was denoised."""
    decodes = {job: merged(s for s in spans if is_decode(s) and clip_of(s) == job) for job in clips_in(spans)}
    others = {job: merged(s for s in spans if is_denoise(s) and clip_of(s) != job) for job in decodes}
    return sum(common(decodes[job], others[job]) for job in decodes)


def overlaps(spans: Sequence[Span]) -> bool:
    """Whether a clip was decoded while another one was denoised."""
    return overlap_seconds(spans) > 0


def busy_seconds(spans: Iterable[Span], rank: int) -> float:
    """Seconds in which a rank had work."""
    return sum(end - start for start, end in merged(span for span in spans if span.rank == rank))


def mark(span: Span, clips: Sequence[str]) -> str:
    """One character: a digit where a clip is denoised, its letter where it is decoded, e and l for encode and load."""
    if clip_of(span) not in clips:
        return MARKS.get(span.name.split()[0], "*")
    number = clips.index(clip_of(span))
    return DECODE_LETTERS[number % 26] if is_decode(span) else str((number + 1) % 10)


def row_of_text(spans: Iterable[Span], clips: Sequence[str], begin: float, scale: float, columns: int) -> str:
    """A rank's spans as `columns` characters; a span shorter than a column still shows."""
    cells = ["."] * columns
    for span in sorted(spans, key=lambda span: span.end - span.start, reverse=True):
        first = min(int((span.start - begin) * scale), columns - 1)
        last = min(int((span.end - begin) * scale), columns - 1)
        cells[first : last + 1] = [mark(span, clips)] * (last - first + 1)
    return "".join(cells)


def as_text(spans: Sequence[Span], labels: Mapping[str, str], columns: int = 100) -> str:
    """The table: a line a rank with its busy time, the clips' names (`labels`: clip -> prompt), and the overlap."""
    begin, end = bounds(spans)
    clips = clips_in(spans, labels)
    scale = columns / max(end - begin, 1e-9)
    lines = [f"{'':8}0 s{'':{columns - 9}}{end - begin:5.1f} s"]
    for rank in sorted({span.rank for span in spans}):
        own = [span for span in spans if span.rank == rank]
        text = row_of_text(own, clips, begin, scale, columns)
        lines.append(f"rank {rank:<2} {text}  busy {busy_seconds(own, rank):5.1f} s")
    lines.append("1 2 3 = denoising that clip, A B C = decoding it, e = encoding text, l = loading, . = idle")
    lines += [f"{i + 1} {DECODE_LETTERS[i % 26]}  {labels.get(clip, clip)}" for i, clip in enumerate(clips)]
    lines.append(f"decoded beside the denoising of another clip: {overlap_seconds(spans):.2f} s of {end - begin:.2f} s")
    return "\n".join(lines) + "\n"


def draw(spans: Sequence[Span], labels: Mapping[str, str], path: Path) -> None:
    """The same as a PNG: solid = denoise, striped = decode, grey = encode and load."""
    from PIL import Image, ImageDraw, ImageFont

    begin, end = bounds(spans)
    clips, ranks = clips_in(spans, labels), sorted({span.rank for span in spans})
    height = TOP + ROW * len(ranks) + 24 * (len(clips) + 1) + 40
    image = Image.new("RGB", (WIDTH, height), "white")
    pen, font = ImageDraw.Draw(image), ImageFont.load_default(size=15)
    scale = (WIDTH - LEFT - 20) / max(end - begin, 1e-9)
    _draw_axis(pen, font, end - begin, scale, TOP + ROW * len(ranks))
    for place, rank in enumerate(ranks):
        pen.text((12, TOP + place * ROW + 12), f"rank {rank}", fill="black", font=font)
    for span in spans:
        top = TOP + ranks.index(span.rank) * ROW + 4
        box = (LEFT + (span.start - begin) * scale, top, LEFT + (span.end - begin) * scale, top + ROW - 8)
        _draw_span(pen, span, clips, box)
    _draw_legend(pen, font, clips, labels, TOP + ROW * len(ranks) + 34)
    image.save(path)


def _draw_axis(pen: Pen, font: Font, seconds: float, scale: float, bottom: int) -> None:
    step = next((s for s in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60) if seconds / s <= 12), 120)
    for tick in range(int(seconds / step) + 1):
        x = LEFT + tick * step * scale
        pen.line((x, TOP - 4, x, bottom), fill=(220, 220, 220))
        pen.text((x + 2, 12), f"{tick * step:g} s", fill=(90, 90, 90), font=font)


def _draw_span(pen: Pen, span: Span, clips: Sequence[str], box: tuple[float, float, float, float]) -> None:
    colour = COLOURS[clips.index(clip_of(span)) % len(COLOURS)] if clip_of(span) in clips else PLAIN
    left, top, right, bottom = box
    right = max(right, left + 1)
    light = tuple(255 - (255 - part) // 3 for part in colour)
    striped = is_decode(span)
    pen.rectangle((left, top, right, bottom), fill=light if striped else colour, outline=colour)
    if striped:
        for y in range(int(top) + 3, int(bottom), 5):
            pen.line((left, y, right, y), fill=colour, width=2)


def _draw_legend(pen: Pen, font: Font, clips: Sequence[str], labels: Mapping[str, str], top: int) -> None:
    for place, clip in enumerate(clips):
        y = top + 24 * place
        pen.rectangle((LEFT, y, LEFT + 26, y + 16), fill=COLOURS[place % len(COLOURS)])
        pen.text((LEFT + 36, y), labels.get(clip, clip), fill="black", font=font)
    note = "solid = denoise, striped = decode, grey = text encoding and loading; one row a rank"
    pen.text((LEFT, top + 24 * len(clips)), note, fill=(90, 90, 90), font=font)
