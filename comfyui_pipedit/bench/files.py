"""Files of released sizes with random weights: Wan 14B in bf16 and in fp8 with scales, and LoRAs of their size.

Written tensor by tensor, so that a file of 28 GB takes no memory but its page cache. One second of a GPU for 28 GB.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..loaders import wan_names

KINDS = {torch.bfloat16: "BF16", torch.float32: "F32", torch.float8_e4m3fn: "F8_E4M3"}
LINEAR = re.compile(r"blocks\.\d+\.(self_attn|cross_attn)\.[qkvo]\.weight|blocks\.\d+\.ffn\.[02]\.weight")
A14B: dict[str, Any] = {
    "patch_size": (1, 2, 2), "num_attention_heads": 40, "attention_head_dim": 128, "in_channels": 16,
    "out_channels": 16, "text_dim": 4096, "freq_dim": 256, "ffn_dim": 13824, "num_layers": 40}


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Original name -> shape of every tensor of a transformer. Needs diffusers."""
    from diffusers import WanTransformer3DModel

    with torch.device("meta"):
        network = WanTransformer3DModel(**config)
    table = wan_names.IMAGE_BLOCKS + wan_names.IMAGE_EMBEDDING
    found = {table.original(name): tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    return {str(name): shape for name, shape in found.items()}


def write_transformer(file: Path, config: dict[str, Any], *, fp8: bool, seed: int, device: torch.device) -> Path:
    """A single file in ComfyUI's naming; fp8: the blocks' linear layers in float8_e4m3fn with `scale_weight`."""
    table: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for name, shape in shapes(config).items():
        held = torch.float8_e4m3fn if fp8 and LINEAR.fullmatch(name) else torch.bfloat16
        table[name] = (held, shape)
        if held == torch.float8_e4m3fn:
            table[name.removesuffix("weight") + "scale_weight"] = (torch.float32, ())
    if fp8:
        table["scaled_fp8"] = (torch.float8_e4m3fn, (2,))
    generator = torch.Generator(device).manual_seed(seed)
    return write(file, table, lambda name: values(name, *table[name], generator))


def values(name: str, held: torch.dtype, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Random values that keep activations near variance 1."""
    if name.endswith("scale_weight"):
        return torch.tensor(1 / 64)
    draw = torch.randn(shape, generator=generator, device=generator.device)
    if "norm" in name and name.endswith("weight"):
        return 1 + 0.1 * draw
    scale = math.prod(shape[1:]) ** -0.5 if len(shape) > 1 else 0.1
    return draw * scale * (64 if held == torch.float8_e4m3fn else 1)


def write_lora(file: Path, config: dict[str, Any], *, rank: int, seed: int, device: torch.device) -> Path:
    """A LoRA of all linear layers of the blocks, in ComfyUI's naming, bf16."""
    table: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for name, (outputs, inputs) in ((name, shape) for name, shape in shapes(config).items() if LINEAR.fullmatch(name)):
        stem = "diffusion_model." + name.removesuffix(".weight")
        table[f"{stem}.lora_down.weight"] = (torch.bfloat16, (rank, inputs))
        table[f"{stem}.lora_up.weight"] = (torch.bfloat16, (outputs, rank))
    generator = torch.Generator(device).manual_seed(seed)
    return write(file, table, lambda name: 0.3 * values(name, *table[name], generator))


def write(file: Path, table: dict[str, tuple[torch.dtype, tuple[int, ...]]], make: Any) -> Path:
    """A safetensors file whose tensors are made and written one after the other."""
    header: dict[str, Any] = {}
    end = 0
    for name, (held, shape) in table.items():
        begin, end = end, end + math.prod(shape) * held.itemsize
        header[name] = {"dtype": KINDS[held], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for chunk in _bytes(table, make):
            out.write(chunk)
    return file


def _bytes(table: dict[str, tuple[torch.dtype, tuple[int, ...]]], make: Any) -> Iterator[memoryview]:
    for name, (held, _) in table.items():
        tensor = make(name).to(held).cpu().contiguous()
        yield memoryview(tensor.reshape(-1).view(torch.uint8).numpy())
