"""`verify --families wan --tiny`: every variant of a family with tiny random weights, so that no model is needed.

What a variant is told besides text is drawn at random: images, masks, guides. Wan's names of them are models/wan.py's.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from .config import PACKAGE_ROOT
from .errors import SetupError, not_one_of
from .job import Branch, Job, ModelFiles
from .loaders import inspect
from .plan import Plan
from .requests import Settings, make_job
from .tiny import IMAGE_WIDTH, TEXT_TOKENS, TEXT_WIDTH, VARIANTS

FAMILIES = ("wan",)
SIZES = ((3, 8, 8), (1, 9, 14))
"""Latent frames, rows, columns: 48 tokens, and 35 with a row that is padded."""


@dataclass(frozen=True, slots=True)
class Case:
    """A clip of one variant and size."""

    name: str
    files: ModelFiles
    job: Job

    def by(self, plan: Plan) -> Job:
        """The clip as this plan makes it, its decode included."""
        return replace(self.job, plan=plan)


@contextmanager
def tiny_models() -> Iterator[dict[str, ModelFiles]]:
    """Name of a variant -> its tiny model, in a folder that lasts as long as the context. SetupError if none can be
    written."""
    with TemporaryDirectory(prefix="pipedit-tiny-") as folder:
        environment = os.environ | {"PYTHONPATH": str(PACKAGE_ROOT.parent)}
        command = [sys.executable, "-m", f"{PACKAGE_ROOT.name}.tiny", folder]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if ended.returncode:
            raise SetupError(f"tiny models could not be written; the last lines: {ended.stderr[-600:]}")
        yield {path.name: replace(inspect(path), name=path.name) for path in sorted(Path(folder).iterdir())}


def check_families(text: str) -> None:
    """InvalidJob for a family that has no tiny models."""
    for name in text.split(","):
        if name not in FAMILIES:
            raise not_one_of("--families", name, FAMILIES)


def cases(models: dict[str, ModelFiles], steps: int) -> Iterator[Case]:
    """Each variant at each size; text to video in fp8 too."""
    held_in_fp8 = replace(models["t2v"], transformer=replace(models["t2v"].transformer, dtype="fp8_e4m3fn"))
    for name, files in {**models, "t2v in fp8": held_in_fp8}.items():
        for size in SIZES:
            yield Case(name, files, clip(name, files, size, steps))


def clip(name: str, files: ModelFiles, size: tuple[int, int, int], steps: int) -> Job:
    """A guided clip of random noise, text and extras."""
    shape = (1, files.geometry.channels, *size)
    branches = [Branch(draw(seed, 1, TEXT_TOKENS, TEXT_WIDTH), extras(name, size)) for seed in (1, 2)]
    job = make_job(files, [branch.text for branch in branches], shape, Settings(seed=1, steps=steps, cfg=3.0),
                   decode=True, label=name)
    mask = (draw(6, 1, 1, *size) > 0).float() if name == "ti2v" else None
    latent = draw(9, *shape) if mask is not None else job.latent
    return replace(job, positive=branches[0], negative=branches[1], latent=latent, mask=mask,
                   switch_step=1 if files.transformer_low else None)


def extras(name: str, size: tuple[int, int, int]) -> dict[str, Tensor]:
    """What a variant is told besides text."""
    config = VARIANTS.get(name, {})
    told: dict[str, Tensor] = {}
    if "image_dim" in config:
        told["clip_vision_output"] = draw(3, 1, 257, IMAGE_WIDTH)
    if config.get("in_channels") and "out_channels" not in config:
        image_channels = {36: 16, 48: 32}[config["in_channels"]]
        told |= {"concat_latent_image": draw(4, 1, image_channels, *size), "concat_mask": draw(5, 1, 4, *size)}
    if "vace_layers" in config:
        told |= {"vace_frames": draw(7, 2, 32, *size), "vace_mask": draw(8, 2, 64, *size),
                 "vace_strength": torch.tensor([0.5, 1.3])}
    return told


def draw(seed: int, *shape: int) -> Tensor:
    """Unit normal numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
