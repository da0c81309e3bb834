"""Wan's variants as ComfyUI builds them, only small, and the clips that core and our worker make with each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

BASE: dict[str, Any] = {"dim": 256, "ffn_dim": 512, "num_heads": 2, "num_layers": 2, "in_dim": 16, "out_dim": 16,
                        "model_type": "t2v"}
CONFIGS: dict[str, dict[str, Any]] = {
    "t2v": BASE,
    "i2v-2.1": {**BASE, "model_type": "i2v", "in_dim": 36},
    "flf-2.1": {**BASE, "model_type": "i2v", "in_dim": 36, "flf_pos_embed_token_number": 514},
    "control-2.1": {**BASE, "model_type": "i2v", "in_dim": 48},
    "i2v-2.2": {**BASE, "in_dim": 36},
    "control-2.2": {**BASE, "in_dim": 52},
    "ti2v": {**BASE, "in_dim": 48, "out_dim": 48},
    "vace": {**BASE, "model_type": "vace", "num_layers": 4, "vace_layers": 2, "vace_in_dim": 96},
}
"""Arguments of ComfyUI's WanModel; it tells them apart by shapes alone, so heads have 128 channels."""

EVEN, ODD, FLAT, LONG = (2, 4, 6), (2, 5, 7), (1, 3, 4), (5, 4, 5)
"""Latent frames, height, width."""


@dataclass(frozen=True, slots=True)
class Case:
    """A clip. Tuples are shapes of tensors that its CONDITIONING or LATENT carries; empty = not there.

    size: latent frames, height, width. text: rows. images: of CLIP vision. index: concat_mask_index. guides: strength
    of each VACE guide. binary: whether the noise mask is 0 or 1, and 0 in the first frame. ignored: the network reads
    nothing but the text.
    """

    what: str
    variant: str
    size: tuple[int, int, int] = EVEN
    batch: int = 1
    text: int = 12
    images: int = 0
    concat: tuple[int, ...] = ()
    concat_mask: tuple[int, ...] = ()
    index: int = 0
    guides: tuple[float, ...] = ()
    mask: tuple[int, ...] = ()
    binary: bool = False
    ignored: bool = False
    sampler: str = "euler"
    steps: int = 2
    cfg: float = 5.0

    @property
    def name(self) -> str:
        return f"{self.variant}-{self.what}"

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.batch, CONFIGS[self.variant]["out_dim"], *self.size)


def of_image(what: str, variant: str, size: tuple[int, int, int] = EVEN, channels: int = 16, mask: int = 1,
             **more: Any) -> Case:
    """An image-to-video clip whose image and mask are as large as the clip."""
    return Case(what, variant, size, **{"concat": (1, channels, *size),
                                        "concat_mask": (1, mask, *size) if mask else (), **more})


def image_cases() -> list[Case]:
    clip = {"even": EVEN, "odd": ODD, "flat": FLAT, "long": LONG}
    cases = [of_image(name, "i2v-2.1", size, images=1) for name, size in clip.items()]
    cases += [of_image(name, "i2v-2.2", size) for name, size in clip.items()]
    cases += [of_image(f"text-{rows}", "i2v-2.1", images=1, text=rows) for rows in (1, 512, 600)]
    return [
        *cases,
        of_image("no-vision", "i2v-2.1"),
        Case("no-image", "i2v-2.1", images=1),
        Case("text-alone", "i2v-2.1", ignored=True),
        Case("text-alone", "i2v-2.2", ODD, ignored=True),
        Case("mask-without-image", "i2v-2.2", concat_mask=(1, 1, *EVEN), ignored=True),
        of_image("no-mask", "i2v-2.2", mask=0),
        Case("noise-mask-as-mask", "i2v-2.2", concat=(1, 16, *EVEN), mask=(1, 1, *EVEN), binary=True),
        of_image("wide-image", "i2v-2.1", images=1, concat=(1, 16, 2, 8, 17), concat_mask=(1, 1, 2, 9, 5)),
        of_image("tall-image", "i2v-2.2", ODD, concat=(1, 16, 2, 13, 6), concat_mask=(1, 4, 2, 13, 6)),
        of_image("short-mask", "i2v-2.2", LONG, concat_mask=(1, 1, 2, 4, 5)),
        of_image("four-masks", "i2v-2.1", LONG, mask=4, images=1),
        of_image("two-channels-of-mask", "i2v-2.2", concat_mask=(1, 2, *EVEN)),
        of_image("too-many-channels", "i2v-2.1", channels=32, images=1),
        of_image("batch", "i2v-2.1", batch=2, images=1),
        of_image("batch-of-images", "i2v-2.2", batch=3, concat=(2, 16, *EVEN), concat_mask=(5, 1, *EVEN)),
        of_image("ends", "flf-2.1", mask=4, images=2),
        of_image("one-end", "flf-2.1", mask=4, images=1, text=20),
        of_image("ends-on-one", "i2v-2.1", mask=4, images=2),
        of_image("control", "control-2.1", ODD, channels=32, mask=0, images=1),
        of_image("control", "control-2.2", ODD, channels=32, mask=4, index=16),
        of_image("ignored", "t2v", images=1, ignored=True),
    ]


def mask_cases() -> list[Case]:
    shapes = {"rows": (8, 12), "frames": (3, 8, 12), "flat": (1, 1, 4, 6), "whole": (1, 1, 3, 8, 12),
              "channels": (1, 16, *ODD), "some-channels": (1, 5, *ODD)}
    cases = [Case(f"mask-{name}", "t2v", ODD, mask=shape) for name, shape in shapes.items()]
    cases += [Case(f"mask-{sampler}", "t2v", EVEN, mask=(1, 1, *EVEN), binary=True, sampler=sampler, steps=3)
              for sampler in ("uni_pc", "heun", "dpmpp_2m", "lcm")]
    return [*cases, Case("mask-batch", "t2v", EVEN, batch=3, mask=(2, 1, *EVEN), binary=True),
            Case("mask", "vace", EVEN, mask=(1, 1, *EVEN), guides=(1.0,))]


def ti2v_cases() -> list[Case]:
    sizes = {"even": EVEN, "odd": ODD, "flat": FLAT, "long": LONG}
    cases = [Case(f"start-{name}", "ti2v", size, mask=(1, 1, *size), binary=size[0] > 1)
             for name, size in sizes.items()]
    return [*cases, Case("text-alone", "ti2v", ODD, ignored=True),
            Case("batch", "ti2v", batch=2, mask=(2, 1, *EVEN), binary=True),
            Case("soft", "ti2v", LONG, mask=(3, 8, 9), sampler="uni_pc", steps=3)]


def vace_cases() -> list[Case]:
    return [Case("one", "vace", guides=(1.0,)), Case("weak", "vace", (5, 4, 6), guides=(0.3,)),
            Case("two", "vace", guides=(0.5, 1.7)), Case("flat", "vace", (1, 4, 4), guides=(1.0, 1.0, 0.8)),
            Case("text-alone", "vace", ignored=True), Case("batch", "vace", batch=2, guides=(1.2,))]


def all_cases() -> list[Case]:
    return [*image_cases(), *mask_cases(), *ti2v_cases(), *vace_cases()]
