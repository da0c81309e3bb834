"""Requests and engines on the toy family."""

from __future__ import annotations

from pathlib import Path

import torch

from comfyui_pipedit import sampling
from comfyui_pipedit.config import EngineConfig
from comfyui_pipedit.job import Branch, DecodeRequest, Geometry, Job, ModelFiles, TextRequest, Weights

HERE = Path(__file__).parent
TOY, GATES = str(HERE / "toy_family.py"), str(HERE / "gate_hook.py")
SHAPE = (1, 2, 4, 3, 5)
STEPS = 4
GEOMETRY = Geometry(channels=2, spatial=1, temporal=1, patch=(1, 1, 1), text_width=8, text_tokens=1, num_heads=8,
                    mean=(0.5, -0.25), std=(2.0, 1.5))


def weights(part: str) -> Weights:
    return Weights("toy", part, "")


FILES = ModelFiles("toy", GEOMETRY, weights("transformer"), weights("vae"), weights("text"))


def config(devices: str = "cpu:3", split: str = "2+1", **settings: object) -> EngineConfig:
    """Two denoise ranks and a decode rank; a silent rank counts as stuck after 2 s."""
    values = {"ping_interval": 0.3, "ping_deadline": 2.0, "preload": (TOY,), **settings}
    return EngineConfig(devices=devices, split=split, **values)


def job(seed: int = 7, decode: bool = True, steps: int = STEPS) -> Job:
    """A clip of 4 latent frames, guided, 4 steps of a solver with history."""
    levels = sampling.sigmas("simple", steps, shift=3.0, sampler="uni_pc")
    text = torch.linspace(-1, 1, 8).view(1, 1, 8)
    return Job(files=FILES, positive=Branch(text), negative=Branch(text * 0.5), latent=torch.zeros(SHAPE),
               noise=sampling.draw_noise(seed, SHAPE), table=sampling.solver_table("uni_pc", levels), cfg=3.0,
               seed=seed, decode=FILES.vae if decode else None)


def text_request(*texts: str) -> TextRequest:
    return TextRequest(FILES.text, texts)


def decode_request(latent: torch.Tensor) -> DecodeRequest:
    return DecodeRequest(FILES.vae, GEOMETRY, latent)
