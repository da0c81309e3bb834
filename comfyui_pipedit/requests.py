"""From words a person types to requests of the engine: what the CLI and `verify` share."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from . import sampling
from .config import DEMO_FOLDER
from .errors import InvalidJob
from .host.engine import Engine
from .host.room import check_room
from .job import Branch, Job, ModelFiles, TextRequest
from .loaders import inspect
from .plan import Plan


def find_model(name: str) -> ModelFiles:
    """"demo", a diffusers folder or a checkpoint with all parts. LoadError names what is missing."""
    if not name:
        raise InvalidJob("--model is empty; name 'demo', a folder or a file")
    return replace(inspect(DEMO_FOLDER), name="demo") if name == "demo" else inspect(Path(name))


@dataclass(frozen=True, slots=True)
class Clip:
    """Size in pixels and frames."""

    width: int = 96
    height: int = 96
    frames: int = 17

    @classmethod
    def parse(cls, text: str) -> Clip:
        """"832x480x81" -> Clip. InvalidJob for other texts."""
        parts = text.lower().split("x")
        if len(parts) != 3 or not all(part.isdigit() and int(part) > 0 for part in parts):
            raise InvalidJob(f"size {text!r} is not WIDTHxHEIGHTxFRAMES, like 96x96x17")
        return cls(*map(int, parts))

    def latent_shape(self, files: ModelFiles) -> tuple[int, int, int, int, int]:
        """[1, C, T, h, w]; sizes are rounded down to what the VAE can give, as ComfyUI's empty latents are."""
        geometry = files.geometry
        return (1, geometry.channels, (self.frames - 1) // geometry.temporal + 1,
                max(1, self.height // geometry.spatial), max(1, self.width // geometry.spatial))


@dataclass(frozen=True, slots=True)
class Settings:
    """A sampler node's widgets. shift 0 = the model's own."""

    seed: int = 0
    steps: int = 20
    cfg: float = 5.0
    sampler: str = "euler"
    scheduler: str = "simple"
    denoise: float = 1.0
    shift: float = 0.0


def encode_texts(engine: Engine, files: ModelFiles, texts: tuple[str, ...]) -> list[Tensor]:
    """Embeddings float32 [1, L, D] of texts, by the model's own encoder in the pool."""
    if files.text is None:
        raise InvalidJob(f"{files.name} has no text_encoder folder; it cannot be used from the command line")
    ticket = engine.submit(TextRequest(files.text, texts))
    ticket.wait()
    return ticket.result()


def solver(files: ModelFiles, settings: Settings) -> sampling.SolverTable:
    """The table of a clip's solver. InvalidJob for a setting that is not available."""
    if settings.shift < 0:
        raise InvalidJob(f"shift {settings.shift} is not available here; allowed: 0 (the model's own) or more")
    shift = settings.shift or files.shift
    sampling.check_settings(settings.sampler, settings.scheduler, settings.steps, shift=shift, denoise=settings.denoise,
                            cfg=settings.cfg)
    levels = sampling.sigmas(settings.scheduler, settings.steps, shift=shift, denoise=settings.denoise,
                             sampler=settings.sampler)
    return sampling.solver_table(settings.sampler, levels)


def make_job(files: ModelFiles, texts: list[Tensor], shape: tuple[int, ...], settings: Settings, *,
             decode: bool = False, plan: Plan | None = None, label: str = "") -> Job:
    """A clip from an empty latent. texts: the positive's embedding and, for guidance, the negative's."""
    table = solver(files, settings)
    check_room(shape, files.geometry, decode=decode)
    return Job(
        files=files, positive=Branch(texts[0]), negative=Branch(texts[1]) if len(texts) > 1 else None,
        latent=torch.zeros(shape),
        noise=sampling.draw_noise(settings.seed, shape),
        noises=tuple(sampling.draw_noises(settings.seed, shape, table.num_noises)),
        table=table, cfg=settings.cfg, seed=settings.seed, decode=files.vae if decode else None, plan=plan, label=label)
