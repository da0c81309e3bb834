"""Wan 2.1 text to video, on diffusers' model classes. The demo model is one of these, only smaller."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from torch import Tensor, nn

from ..errors import InvalidJob
from ..job import Branch, Geometry, Tiling
from . import umt5, wan_vae
from .family import Gather, SequencePlan, Split, WeightSource
from .skeleton import assign, on_meta

TIMESTEPS = 1000.0
"""Training timesteps: the model is told sigma * 1000."""


class Wan:
    """The family "wan"; models/family.py says what each call must do."""

    name = "wan"
    sequence_plan = SequencePlan(
        splits=(
            Split("rope", 0, dim=1, output=True),
            Split("rope", 1, dim=1, output=True),
            Split("blocks.0", "hidden_states", dim=1),
            Split("", "timestep", dim=1, num_dims=2),
        ),
        gathers=(Gather("proj_out", dim=1),),
        attention=("blocks.*.attn1",),
    )

    def load_transformer(self, source: WeightSource) -> nn.Module:
        """The DiT; its position tables are in no file and are computed here, in float32 whatever the weights are."""
        model = on_meta(lambda: WanTransformer3DModel.from_config(source.config))
        config = model.config
        model.rope = type(model.rope)(config.attention_head_dim, config.patch_size, config.rope_max_seq_len)
        assign(model, source.tensors(), f"{source.root.name}'s transformer")
        return model.to(source.device).eval()

    def prepare(self, model: nn.Module, branch: Branch, shape: tuple[int, ...], mask: Tensor | None,
                geometry: Geometry) -> Branch:
        """Text in the weights' dtype; a text-to-video network takes no extras."""
        if branch.extras:
            raise InvalidJob(f"{', '.join(branch.extras)}: this text-to-video model does not take it")
        return Branch(branch.text.to(model.patch_embedding.weight))

    def kept_part(self, model: nn.Module, latent: Tensor, noise: Tensor, sigma: float) -> Tensor:
        """The latent with the noise of `sigma`."""
        return sigma * noise + (1.0 - sigma) * latent

    def velocity(self, model: nn.Module, x: Tensor, sigma: float, branch: Branch) -> Tensor:
        """One evaluation -> float32 velocity of x's shape; sizes are padded circularly to the patch and cropped, as in
        ComfyUI."""
        length, height, width = x.shape[-3:]
        weight = model.patch_embedding.weight
        timestep = torch.tensor([sigma], dtype=torch.float32, device=weight.device) * TIMESTEPS
        padded = pad_to_patch(x, model.config.patch_size).to(weight)
        result = model(padded, timestep, branch.text, return_dict=False)[0]
        return result[:, :, :length, :height, :width].float()

    def load_vae(self, source: WeightSource) -> AutoencoderKLWan:
        return wan_vae.load_vae(source)

    def num_pieces(self, shape: tuple[int, ...], tiling: Tiling | None, geometry: Geometry) -> int:
        return wan_vae.num_pieces(shape, tiling, geometry)

    def decode_pieces(self, vae: AutoencoderKLWan, latent: Tensor, tiling: Tiling | None,
                      geometry: Geometry) -> Iterator[Tensor]:
        return wan_vae.decode_pieces(vae, latent, tiling, geometry)

    def vae_encode(self, vae: AutoencoderKLWan, frames: Tensor) -> Tensor:
        return wan_vae.vae_encode(vae, frames)

    def load_text(self, source: WeightSource) -> umt5.UMT5Text:
        return umt5.load_text(source)


def pad_to_patch(x: Tensor, patch: tuple[int, int, int]) -> Tensor:
    """x [1, C, T, h, w] with T, h, w made divisible by the patch; the values come from the other end."""
    missing = [-size % step for size, step in zip(x.shape[-3:], patch, strict=True)]
    if not any(missing):
        return x
    return nn.functional.pad(x, (0, missing[2], 0, missing[1], 0, missing[0]), mode="circular")


FAMILY = Wan()
