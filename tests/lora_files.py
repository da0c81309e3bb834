"""Small random LoRA files for Wan in every naming style, for unit tests and for the parity test with ComfyUI."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

MODULES = {
    **{f"blocks.{block}.{original}": f"blocks.{block}.{ours}" for block in (0, 1) for original, ours in (
        ("self_attn.q", "attn1.to_q"), ("self_attn.k", "attn1.to_k"), ("self_attn.v", "attn1.to_v"),
        ("self_attn.o", "attn1.to_out.0"), ("cross_attn.q", "attn2.to_q"), ("cross_attn.k", "attn2.to_k"),
        ("cross_attn.v", "attn2.to_v"), ("cross_attn.o", "attn2.to_out.0"), ("ffn.0", "ffn.net.0.proj"),
        ("ffn.2", "ffn.net.2"))},
    "time_embedding.0": "condition_embedder.time_embedder.linear_1",
    "time_projection.1": "condition_embedder.time_proj",
    "text_embedding.2": "condition_embedder.text_embedder.linear_2",
    "patch_embedding": "patch_embedding", "head.head": "proj_out",
}
"""Original name -> diffusers' name of the modules that get low-rank changes; all of a model with two blocks."""

DIFFERENCES = {"blocks.1.norm3": "blocks.1.norm2", "blocks.0.self_attn.norm_q": "blocks.0.attn1.norm_q"}
"""Norms that get a whole difference."""


@dataclass(frozen=True)
class Style:
    """How a writer names things. original: whether modules have the original names."""

    down: str
    up: str
    original: bool = True
    prefix: str = ""
    underscores: bool = False

    def name(self, original: str) -> str:
        """What this writer calls a module."""
        stem = original if self.original else {**MODULES, **DIFFERENCES}[original]
        return self.prefix + (stem.replace(".", "_") if self.underscores else stem)


KOHYA, PEFT, DEFAULT = ("lora_down.weight", "lora_up.weight"), ("lora_A.weight", "lora_B.weight"), (
    "lora_A.default.weight", "lora_B.default.weight")
STYLES: dict[str, Style] = {
    "comfy": Style(*KOHYA, prefix="diffusion_model."),
    "comfy-ab": Style(*PEFT, prefix="diffusion_model."),
    "bare": Style(*KOHYA),
    "bare-ab": Style(*DEFAULT),
    "musubi": Style(*KOHYA, prefix="lora_unet_", underscores=True),
    "wan-fun": Style(*KOHYA, prefix="lora_unet__", underscores=True),
    "diffusers": Style(*PEFT, original=False, prefix="transformer."),
    "peft": Style(*DEFAULT, original=False, prefix="base_model.model."),
    "onetrainer": Style(*KOHYA, original=False, prefix="lora_transformer_", underscores=True),
}


def low_rank(shapes: Mapping[str, tuple[int, ...]], seed: int, rank: int = 4) -> dict[str, tuple[Tensor, Tensor]]:
    """Original name -> (down, up) for the modules that the model has. shapes: of its parameters, diffusers' names."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    made = {}
    for original, ours in MODULES.items():
        if f"{ours}.weight" in shapes:
            outputs, *inputs = shapes[f"{ours}.weight"]
            down = torch.randn((rank, *inputs), generator=generator) / torch.Size(inputs).numel() ** 0.5
            up = torch.randn((outputs, rank, *[1] * (len(inputs) - 1)), generator=generator) * 0.5 / rank ** 0.5
            made[original] = (down, up)
    return made


def state(style: str, shapes: Mapping[str, tuple[int, ...]], seed: int = 0, rank: int = 4,
          alpha: float | None = 3.0, differences: bool = False) -> dict[str, Tensor]:
    """The tensors of a file; the same change in every style. differences: also of norms and of biases."""
    import torch

    naming = STYLES[style]
    tensors: dict[str, Tensor] = {}
    for original, (down, up) in low_rank(shapes, seed, rank).items():
        name = naming.name(original)
        tensors |= {f"{name}.{naming.down}": down, f"{name}.{naming.up}": up}
        if alpha is not None:
            tensors[f"{name}.alpha"] = torch.tensor(alpha)
    if differences:
        generator = torch.Generator().manual_seed(seed + 1)
        for original, ours in DIFFERENCES.items():
            draw = torch.randn(shapes[f"{ours}.weight"], generator=generator)
            tensors[f"{naming.name(original)}.diff"] = 0.2 * draw
        for original in ("blocks.0.ffn.0", "blocks.1.cross_attn.v", "head.head"):
            draw = torch.randn(shapes[f"{MODULES[original]}.bias"], generator=generator)
            tensors[f"{naming.name(original)}.diff_b"] = 0.2 * draw
    return tensors


def write(path: Path, tensors: Mapping[str, Tensor], rename: Callable[[str], str] = str) -> Path:
    """A file with these tensors; `rename` damages names."""
    from safetensors.torch import save_file

    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({rename(name): tensor.contiguous() for name, tensor in tensors.items()}, path)
    return path
