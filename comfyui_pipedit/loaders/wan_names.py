"""What the tensors of Wan's networks are called: in ComfyUI's single files (Wan's own names) and in diffusers' classes.

A table holds one row a module; "*" stands for a block's number. Both directions are read from the same rows.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

WEIGHT_BIAS, WEIGHT, GAMMA, BARE = (".weight", ".bias"), (".weight",), (".gamma",), ("",)


@dataclass(frozen=True)
class Row:
    """A module: its original name, its name in diffusers, and what its tensors' names end with."""

    original: str
    ours: str
    endings: tuple[str, ...] = WEIGHT_BIAS

    def tensors(self) -> Iterator[tuple[str, str]]:
        """(original name, our name) of each tensor."""
        return ((self.original + ending, self.ours + ending) for ending in self.endings)


@dataclass(frozen=True)
class Names:
    """The names of one network."""

    rows: tuple[Row, ...]

    @cached_property
    def _ours(self) -> dict[str, str]:
        return {original: ours for row in self.rows for original, ours in row.tensors()}

    @cached_property
    def _originals(self) -> dict[str, str]:
        return {ours: original for original, ours in self._ours.items()}

    def ours(self, original: str) -> str | None:
        """diffusers' name of a tensor; None if the table has no such tensor."""
        return _translated(self._ours, original)

    def original(self, ours: str) -> str | None:
        """The other way."""
        return _translated(self._originals, ours)

    def expected(self, blocks: int) -> Iterator[str]:
        """Original names of all tensors of a network whose numbered modules count to `blocks`."""
        for original in self._ours:
            numbers = range(blocks) if "*" in original else range(1)
            yield from (original.replace("*", str(number)) for number in numbers)

    def __add__(self, other: Names) -> Names:
        return Names((*self.rows, *other.rows))


_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def _translated(table: dict[str, str], name: str) -> str | None:
    """The name in the other naming. A name has at most one block number, and it is the first number in it."""
    if name in table:
        return table[name]
    number = _NUMBER.search(name)
    if number is None:
        return None
    found = table.get(f"{name[:number.start()]}*{name[number.end():]}")
    return None if found is None else found.replace("*", number[0])


def _attention(original: str, ours: str, image: bool) -> Iterator[Row]:
    parts = {"q": "to_q", "k": "to_k", "v": "to_v", "o": "to_out.0"}
    if image:
        parts |= {"k_img": "add_k_proj", "v_img": "add_v_proj"}
        yield Row(f"{original}.norm_k_img", f"{ours}.norm_added_k", WEIGHT)
    yield from (Row(f"{original}.{theirs}", f"{ours}.{part}") for theirs, part in parts.items())
    yield from (Row(f"{original}.{norm}", f"{ours}.{norm}", WEIGHT) for norm in ("norm_q", "norm_k"))


def _block(name: str, image: bool) -> Iterator[Row]:
    """A transformer block. Wan's norm3, in front of the text attention, is norm2 in diffusers."""
    yield Row(f"{name}.*.modulation", f"{name}.*.scale_shift_table", BARE)
    yield from _attention(f"{name}.*.self_attn", f"{name}.*.attn1", image=False)
    yield from _attention(f"{name}.*.cross_attn", f"{name}.*.attn2", image)
    yield Row(f"{name}.*.norm3", f"{name}.*.norm2")
    yield Row(f"{name}.*.ffn.0", f"{name}.*.ffn.net.0.proj")
    yield Row(f"{name}.*.ffn.2", f"{name}.*.ffn.net.2")


_EMBEDDER = "condition_embedder"
_OUTSIDE = (
    Row("patch_embedding", "patch_embedding"),
    Row("text_embedding.0", f"{_EMBEDDER}.text_embedder.linear_1"),
    Row("text_embedding.2", f"{_EMBEDDER}.text_embedder.linear_2"),
    Row("time_embedding.0", f"{_EMBEDDER}.time_embedder.linear_1"),
    Row("time_embedding.2", f"{_EMBEDDER}.time_embedder.linear_2"),
    Row("time_projection.1", f"{_EMBEDDER}.time_proj"),
    Row("head.modulation", "scale_shift_table", BARE),
    Row("head.head", "proj_out"),
)

TRANSFORMER = Names((*_OUTSIDE, *_block("blocks", image=False)))
IMAGE_BLOCKS = Names((*_OUTSIDE, *_block("blocks", image=True)))
"""Wan 2.1 image to video: text attention has keys and values of an image as well."""

IMAGE_EMBEDDING = Names((
    Row("img_emb.proj.0", f"{_EMBEDDER}.image_embedder.norm1"),
    Row("img_emb.proj.1", f"{_EMBEDDER}.image_embedder.ff.net.0.proj"),
    Row("img_emb.proj.3", f"{_EMBEDDER}.image_embedder.ff.net.2"),
    Row("img_emb.proj.4", f"{_EMBEDDER}.image_embedder.norm2"),
))
IMAGE_POSITIONS = Names((Row("img_emb.emb_pos", f"{_EMBEDDER}.image_embedder.pos_embed", BARE),))
"""First and last frame to video: positions of the two images' tokens."""

VACE_OUTSIDE = Names((
    Row("vace_patch_embedding", "vace_patch_embedding"),
    Row("vace_blocks.0.before_proj", "vace_blocks.0.proj_in"),
))
VACE_BLOCKS = Names((*_block("vace_blocks", image=False), Row("vace_blocks.*.after_proj", "vace_blocks.*.proj_out")))


Kind = dict[str, tuple[str, tuple[str, ...]]]
"""A kind of module: original name inside of it -> (our name, endings)."""

_RESIDUAL: Kind = {"residual.0": ("norm1", GAMMA), "residual.2": ("conv1", WEIGHT_BIAS), "residual.3": ("norm2", GAMMA),
             "residual.6": ("conv2", WEIGHT_BIAS), "shortcut": ("conv_shortcut", WEIGHT_BIAS)}
_RESAMPLE: Kind = {"resample.1": ("resample.1", WEIGHT_BIAS), "time_conv": ("time_conv", WEIGHT_BIAS)}
_MIDDLE_ATTENTION: Kind = {"norm": ("norm", GAMMA), "to_qkv": ("to_qkv", WEIGHT_BIAS), "proj": ("proj", WEIGHT_BIAS)}


def vae(residual_blocks: int, stages: int, nested: bool) -> Names:
    """Names of Wan's VAE with so many residual blocks a stage (the decoder has one more).

    nested: Wan 2.2's files number modules within their stage; Wan 2.1's number them through.
    """
    rows = [Row("conv1", "quant_conv"), Row("conv2", "post_quant_conv")]
    for coder, blocks in (("encoder", residual_blocks), ("decoder", residual_blocks + 1)):
        rows += [Row(f"{coder}.conv1", f"{coder}.conv_in"), Row(f"{coder}.head.0", f"{coder}.norm_out", GAMMA),
                 Row(f"{coder}.head.2", f"{coder}.conv_out")]
        rows += _inside(f"{coder}.middle.0", f"{coder}.mid_block.resnets.0", _RESIDUAL)
        rows += _inside(f"{coder}.middle.1", f"{coder}.mid_block.attentions.0", _MIDDLE_ATTENTION)
        rows += _inside(f"{coder}.middle.2", f"{coder}.mid_block.resnets.1", _RESIDUAL)
        for original, ours, kind in _stage_modules(coder, blocks, stages, nested):
            rows += _inside(original, ours, kind)
    return Names(tuple(rows))


def _stage_modules(coder: str, blocks: int, stages: int, nested: bool) -> Iterator[tuple[str, str, Kind]]:
    """(original, ours, kind) of each stage's residual blocks and of the resampling module behind all but the last."""
    down = coder == "encoder"
    theirs, ours = ("downsamples", "down_blocks") if down else ("upsamples", "up_blocks")
    sampler = ("downsampler" if down else "upsampler") if nested else "upsamplers.0"
    for stage in range(stages):
        for place in range(blocks + (stage < stages - 1)):
            through = stage * (blocks + 1) + place
            original = f"{coder}.{theirs}.{stage}.{theirs}.{place}" if nested else f"{coder}.{theirs}.{through}"
            kind, inner = (_RESIDUAL, f"resnets.{place}") if place < blocks else (_RESAMPLE, sampler)
            flat = down and not nested
            yield original, f"{coder}.{ours}.{through}" if flat else f"{coder}.{ours}.{stage}.{inner}", kind


def _inside(original: str, ours: str, kind: Kind) -> Iterable[Row]:
    return (Row(f"{original}.{theirs}", f"{ours}.{part}", endings) for theirs, (part, endings) in kind.items())
