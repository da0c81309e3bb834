"""Wan VACE: videos and masks that guide a clip, each through a column of blocks beside the network's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from diffusers import WanVACETransformer3DModel
from torch import Tensor

from ..errors import InvalidJob
from ..job import Geometry
from .geometry import normalised

FRAMES, MASKS, STRENGTHS = "vace_frames", "vace_mask", "vace_strength"
"""Names of a job.Branch's extras, ComfyUI's own, for n guides. FRAMES: [n, 2 * C, T, h, w] in VAE space, what stays
beside what changes. MASKS: [n, M, T, h, w], 1 where something changes. STRENGTHS: [n]."""


class VaceTransformer(WanVACETransformer3DModel):
    """diffusers' network for any number of guides. A guide's hint is added as soon as it is known, as ComfyUI does it,
    so that one hint is alive at a time and not one of every layer."""

    def forward(self, hidden_states: Tensor, timestep: Tensor, encoder_hidden_states: Tensor,
                control_hidden_states: Sequence[Tensor], control_hidden_states_scale: Sequence[float] | Tensor,
                return_dict: bool = False) -> tuple[Tensor]:
        """A latent [1, C, T, h, w] that the patch divides -> (its velocity,).

        control_hidden_states: guides [1, G, T, h, w]; control_hidden_states_scale: a strength each.
        """
        rotary = self.rope(hidden_states)
        tokens = start = self.patch_embedding(hidden_states).flatten(2).transpose(1, 2)
        guides = [self.vace_patch_embedding(guide).flatten(2).transpose(1, 2) for guide in control_hidden_states]
        time, shifts, context, _ = self.condition_embedder(timestep, encoder_hidden_states)
        shifts = shifts.unflatten(1, (6, -1))
        beside = dict(zip(self.config.vace_layers, self.vace_blocks, strict=True))
        for layer, block in enumerate(self.blocks):
            tokens = block(tokens, context, shifts, rotary)
            if layer in beside:
                for i, strength in enumerate(control_hidden_states_scale):
                    hint, guides[i] = beside[layer](start, context, guides[i], shifts, rotary)
                    tokens = tokens + hint * strength
        return (self._unpatched(tokens, time, hidden_states.shape),)

    def _unpatched(self, tokens: Tensor, time: Tensor, shape: tuple[int, ...]) -> Tensor:
        """The head's output as a latent."""
        shift, scale = (self.scale_shift_table + time.unsqueeze(1)).chunk(2, dim=1)
        tokens = self.proj_out((self.norm_out(tokens.float()) * (1 + scale) + shift).type_as(tokens))
        patch = self.config.patch_size
        grid = [size // step for size, step in zip(shape[-3:], patch, strict=True)]
        cells = tokens.unflatten(1, grid).unflatten(4, (*patch, -1)).permute(0, 7, 1, 4, 2, 5, 3, 6)
        return cells.flatten(6, 7).flatten(4, 5).flatten(2, 3)


def guides(config: Any, extras: Mapping[str, Tensor], shape: tuple[int, ...], geometry: Geometry) -> Tensor:
    """What the network reads beside a clip of `shape`: [n, G, T, h, w] in model space.

    Without FRAMES one empty guide, without MASKS all ones, as in ComfyUI. InvalidJob naming sizes that do not fit.
    """
    channels = 2 * geometry.channels
    frames = extras.get(FRAMES)
    frames = torch.zeros(1, channels, *shape[2:]) if frames is None else frames
    masks = extras.get(MASKS)
    if masks is None:
        masks = frames.new_ones(len(frames), config.vace_in_channels - channels, *frames.shape[2:])
    expected = {FRAMES: (len(frames), channels, *shape[2:]),
                MASKS: (len(frames), config.vace_in_channels - channels, *shape[2:])}
    for name, tensor in ((FRAMES, frames), (MASKS, masks)):
        if tensor.shape != expected[name]:
            raise InvalidJob(f"{name} is {list(tensor.shape)} and the clip's latent {list(shape)}: this network takes "
                             f"{list(expected[name])}; use the latent of the same WanVaceToVideo")
    return torch.cat((normalised(frames, geometry), masks.to(frames)), dim=1)


def strengths(extras: Mapping[str, Tensor], count: int) -> Tensor:
    """One strength a guide, on the CPU. InvalidJob for fewer than there are guides."""
    given = extras.get(STRENGTHS, torch.ones(count))
    if len(given) < count:
        raise InvalidJob(f"{STRENGTHS} has {len(given)} values for {count} guides")
    return given[:count].cpu()
