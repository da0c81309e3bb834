"""Nodes that tests put around core's Wan nodes: seeded inputs, and what a node gave as a file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import comfy.clip_vision
import comfy.ldm.wan.vae2_2
import folder_paths
import torch
from comfy_api.latest import ComfyExtension, io
from safetensors.torch import save_file
from typing_extensions import override

WHOLE_VAE = comfy.ldm.wan.vae2_2.WanVAE


class SmallVAE(WHOLE_VAE):  # type: ignore[misc, valid-type]
    """Core builds Wan 2.2's VAE in its released size, whatever the file says."""

    def __init__(self, dim: int = 160, **options: Any) -> None:
        super().__init__(dim=4, dec_dim=8, **options)


comfy.ldm.wan.vae2_2.WanVAE = SmallVAE


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class WanInputs(io.ComfyNode):
    """A text of a few rows, frames, a mask a frame and the hidden states of an image, from a seed."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        numbers = [io.Int.Input(name) for name in ("seed", "frames", "height", "width")]
        return io.Schema(node_id="WanInputs", category="probe", inputs=numbers, outputs=[
            io.Conditioning.Output(), io.Image.Output(), io.Mask.Output(), io.ClipVisionOutput.Output()])

    @classmethod
    def execute(cls, seed: int, frames: int, height: int, width: int) -> io.NodeOutput:
        vision = comfy.clip_vision.Output()
        vision.penultimate_hidden_states = draw(seed, 1, 257, 1280)
        image = torch.rand(frames, height, width, 3, generator=torch.Generator().manual_seed(seed))
        mask = (image[..., 0] > 0.5).float()
        return io.NodeOutput([[draw(seed, 1, 12, 4096), {"pooled_output": None}]], image, mask, vision)


def tensors(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of all tensors and numbers inside of a node's value."""
    if isinstance(value, torch.Tensor):
        yield name, value.float().contiguous().clone()
    elif isinstance(value, (int, float)):
        yield name, torch.tensor([float(value)])
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from tensors(f"{name}.{i}", item)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from tensors(f"{name}.{key}", item)
    elif isinstance(value, comfy.clip_vision.Output):
        yield f"{name}.states", value.penultimate_hidden_states.contiguous().clone()


class WanSave(io.ComfyNode):
    """All tensors of its inputs in a file."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        kinds = {"positive": io.Conditioning, "negative": io.Conditioning, "latent": io.Latent, "image": io.Image}
        return io.Schema(node_id="WanSave", category="probe", is_output_node=True, inputs=[
            io.String.Input("name"), *(kind.Input(name, optional=True) for name, kind in kinds.items())])

    @classmethod
    def execute(cls, name: str, **values: Any) -> io.NodeOutput:
        path = Path(folder_paths.get_output_directory()) / f"{name}.safetensors"
        save_file(dict(found for key, value in values.items() for found in tensors(key, value)), path)
        return io.NodeOutput(ui={"wan": [{"filename": path.name, "subfolder": "", "type": "output"}]})


class WanProbes(ComfyExtension):
    """The pack."""

    @override
    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [WanInputs, WanSave]


async def comfy_entrypoint() -> WanProbes:
    return WanProbes()
