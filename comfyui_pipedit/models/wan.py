"""Wan 2.1 and 2.2 on diffusers' model classes: text, image and TI2V to video, VACE. The demo model is a small one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from torch import Tensor, nn

from ..job import Branch, Geometry, Tiling
from . import umt5, wan_image, wan_vace, wan_vae
from .family import Gather, SequencePlan, Split, WeightSource
from .skeleton import assign, on_meta

TIMESTEPS = 1000.0
"""Training timesteps: the model is told sigma * 1000."""

CHANNELS, IMAGES, TIMES, GUIDES, STRENGTHS = "channels", "images", "times", "guides", "strengths"
"""Extras of a prepared branch. CHANNELS: [1, k, T, h, w] behind the latent. IMAGES: [1, N, D] hidden states. TIMES:
[1, tokens] float32, the part of the timestep that a token has. GUIDES: [n, G, T, h, w], STRENGTHS: [n] on the CPU."""

VACE_PLAN = SequencePlan(
    splits=(Split("vace_blocks.0", "hidden_states", dim=1), Split("vace_blocks.0", "control_hidden_states", dim=1)),
    gathers=(),
    attention=("vace_blocks.*.attn1",),
)


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
        beside=(("vace_blocks", VACE_PLAN),),
    )

    def load_transformer(self, source: WeightSource) -> nn.Module:
        """The DiT; its position tables are in no file and are computed here, in float32 whatever the weights are."""
        model = on_meta(lambda: _skeleton(source.config))
        config = model.config
        model.rope = type(model.rope)(config.attention_head_dim, config.patch_size, config.rope_max_seq_len)
        assign(model, source.tensors(), f"{source.root.name}'s transformer")
        return model.to(source.device).eval()

    def prepare(self, model: nn.Module, branch: Branch, shape: tuple[int, ...], mask: Tensor | None,
                geometry: Geometry) -> Branch:
        """Text and extras in the weights' dtype. What a network does not read it is not given, as in ComfyUI: images on
        a text-to-video network, guides without VACE."""
        config: Any = model.config
        weight = model.patch_embedding.weight
        extras: dict[str, Tensor] = {}
        channels = wan_image.concat_channels(config, branch.extras, shape, mask, geometry)
        if channels is not None:
            extras[CHANNELS] = channels.to(weight)
        if config.image_dim is not None and wan_image.IMAGE in branch.extras:
            extras[IMAGES] = wan_image.image_states(config, branch.extras[wan_image.IMAGE]).to(weight)
        if isinstance(model, wan_vace.VaceTransformer):
            guides = wan_vace.guides(config, branch.extras, shape, geometry)
            extras |= {GUIDES: pad_to_patch(guides.to(weight), config.patch_size),
                       STRENGTHS: wan_vace.strengths(branch.extras, len(guides))}
        elif mask is not None and wan_image.is_ti2v(config):
            extras[TIMES] = token_times(mask, geometry)
        return Branch(branch.text.to(weight), extras)

    def kept_part(self, model: nn.Module, latent: Tensor, noise: Tensor, sigma: float) -> Tensor:
        """The latent with the noise of `sigma`; TI2V is told that kept frames are clean, and sees them so."""
        config: Any = model.config
        return latent if wan_image.is_ti2v(config) else sigma * noise + (1.0 - sigma) * latent

    def velocity(self, model: nn.Module, x: Tensor, sigma: float, branch: Branch) -> Tensor:
        """One evaluation -> float32 velocity of x's shape; sizes are padded circularly to the patch and cropped, as in
        ComfyUI."""
        length, height, width = x.shape[-3:]
        weight, extras = model.patch_embedding.weight, branch.extras
        times = extras.get(TIMES, torch.ones(1, device=weight.device))
        given = torch.cat((x.to(weight), extras[CHANNELS]), dim=1) if CHANNELS in extras else x.to(weight)
        more: dict[str, Any] = {}
        if GUIDES in extras:
            more = {"control_hidden_states": extras[GUIDES].split(1),
                    "control_hidden_states_scale": extras[STRENGTHS].tolist()}
        elif IMAGES in extras:
            more = {"encoder_hidden_states_image": extras[IMAGES]}
        result = model(hidden_states=pad_to_patch(given, model.config.patch_size), timestep=times * sigma * TIMESTEPS,
                       encoder_hidden_states=branch.text, return_dict=False, **more)[0]
        return result[:, :, :length, :height, :width].float()

    def load_vae(self, source: WeightSource) -> AutoencoderKLWan:
        return wan_vae.load_vae(source)

    def num_pieces(self, shape: tuple[int, ...], tiling: Tiling | None, geometry: Geometry) -> int:
        return wan_vae.num_pieces(shape, tiling, geometry)

    def decode_pieces(self, vae: AutoencoderKLWan, latent: Tensor, tiling: Tiling | None,
                      geometry: Geometry) -> Iterator[Tensor]:
        return wan_vae.decode_pieces(vae, latent, tiling, geometry)

    def vae_encode(self, vae: AutoencoderKLWan, frames: Tensor, tiling: Tiling | None, geometry: Geometry) -> Tensor:
        return wan_vae.vae_encode(vae, frames, tiling, geometry)

    def load_text(self, source: WeightSource) -> umt5.UMT5Text:
        return umt5.load_text(source)


def _skeleton(config: dict[str, Any]) -> nn.Module:
    """The network of a config.json, made ready for what its variant is told."""
    if "vace_layers" in config:
        return wan_vace.VaceTransformer.from_config(config)
    model = WanTransformer3DModel.from_config(config)
    wan_image.read_images(model)
    return model


def token_times(mask: Tensor, geometry: Geometry) -> Tensor:
    """The part of the timestep that each token has, [1, tokens] float32: the mean of the mask [1, any, T, h, w] over
    the token's latent frame."""
    frames = mask.float().mean(dim=(1, 3, 4))
    tokens = geometry.num_tokens((1, 1, 1, *mask.shape[-2:]))
    return frames.repeat_interleave(tokens, dim=1)


def pad_to_patch(x: Tensor, patch: tuple[int, int, int]) -> Tensor:
    """x [B, C, T, h, w] with T, h, w made divisible by the patch; the values come from the other end."""
    missing = [-size % step for size, step in zip(x.shape[-3:], patch, strict=True)]
    if not any(missing):
        return x
    return nn.functional.pad(x, (0, missing[2], 0, missing[1], 0, missing[0]), mode="circular")


FAMILY = Wan()
