"""A preload file for pool tests: a model family that is small arithmetic.

No weights, no diffusers; everything else (pool, leases, exchange, kept latents, decode in pieces) is the real thing.
TOY_FAILS_IN_START names a rank that fails before it joins the world.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from comfyui_pipedit import models
from comfyui_pipedit.errors import InvalidJob, OutOfMemory
from comfyui_pipedit.job import Branch, Geometry, Tiling
from comfyui_pipedit.models.family import Gather, SequencePlan, Split

models.BUILT_IN.clear()  # nothing heavy for the launcher to import

CHANNELS = 2
TEXT_WIDTH = 8


class Toy(nn.Module):
    """Mixes the channels of each token; the gather behind it is the exchange."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(CHANNELS, CHANNELS)
        with torch.no_grad():
            self.mix.weight.copy_(torch.tensor([[0.75, -0.5], [0.25, 0.5]]))
            self.mix.bias.copy_(torch.tensor([0.125, -0.25]))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.mix(tokens)


class Encoder:
    """A text is its characters' numbers."""

    def encode(self, text: str) -> Tensor:
        if "?" in text:
            raise InvalidJob("'?' is not a word of the toy model")
        codes = [ord(letter) / 128 for letter in text.ljust(TEXT_WIDTH)[:TEXT_WIDTH]]
        return torch.tensor(codes).view(1, 1, TEXT_WIDTH)

    def parameters(self) -> tuple[Tensor, ...]:
        return ()


class ToyFamily:
    """models.family.Family in its simplest form: a token a place of the latent, one exchange an evaluation."""

    name = "toy"
    sequence_plan = SequencePlan(splits=(Split("mix", 0, dim=1),), gathers=(Gather("mix", dim=1),), attention=())

    def load_transformer(self, source: Any) -> nn.Module:
        return Toy().eval()

    def load_vae(self, source: Any) -> nn.Module:
        return nn.Identity()

    def load_text(self, source: Any) -> Encoder:
        return Encoder()

    def prepare(self, model: nn.Module, branch: Branch, shape: tuple[int, ...], mask: Tensor | None,
                geometry: Geometry) -> Branch:
        if "too large" in branch.extras:
            raise OutOfMemory("'too large' has no room in the toy model")
        if branch.extras:
            raise InvalidJob(f"{', '.join(branch.extras)}: the toy model does not take it")
        return branch

    def kept_part(self, model: nn.Module, latent: Tensor, noise: Tensor, sigma: float) -> Tensor:
        return sigma * noise + (1.0 - sigma) * latent

    def velocity(self, model: nn.Module, x: Tensor, sigma: float, branch: Branch) -> Tensor:
        mixed = model(x.flatten(2).transpose(1, 2)).transpose(1, 2).reshape(x.shape)
        return mixed + branch.text.mean() * sigma + mixed.mean() * 0.1

    def num_pieces(self, shape: tuple[int, ...], tiling: Tiling | None, geometry: Geometry) -> int:
        return shape[2]

    def decode_pieces(self, vae: nn.Module, latent: Tensor, tiling: Tiling | None,
                      geometry: Geometry) -> Iterator[Tensor]:
        for frame in latent[0].unbind(1):
            yield vae(frame.mean(0)).sigmoid()[None, :, :, None].expand(1, -1, -1, 3)

    def vae_encode(self, vae: nn.Module, frames: Tensor, tiling: Tiling | None, geometry: Geometry) -> Tensor:
        return frames.mean(-1)[None, None]


def configure(runtime: Any) -> None:
    """Called in every rank before it joins the world."""
    if os.environ.get("TOY_FAILS_IN_START") == str(runtime.rank):
        raise RuntimeError("the toy rank fails in start, as it was told to")


models.register("toy", ToyFamily())
