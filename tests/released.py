"""What the released Wan files take of GPUs, computed from their headers alone: run as a script it prints the tables of
docs/three-edits.md. Networks are built on the meta device and written as files with a header and no bytes."""

from __future__ import annotations

import json
import math
import os
import struct
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tiny_wan
import wan_files

if TYPE_CHECKING:
    from torch import Tensor, nn

    from comfyui_pipedit.job import ModelFiles, Weights

GIB = 2.0**30
BASE: dict[str, Any] = {"patch_size": (1, 2, 2), "text_dim": 4096, "freq_dim": 256, "attention_head_dim": 128}
SMALL = {**BASE, "num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30, "in_channels": 16, "out_channels": 16}
LARGE = {**SMALL, "num_attention_heads": 40, "ffn_dim": 13824, "num_layers": 40}
FIVE = {**SMALL, "num_attention_heads": 24, "ffn_dim": 14336, "in_channels": 48, "out_channels": 48}
IMAGE = {"in_channels": 36, "image_dim": 1280, "added_kv_proj_dim": 5120}
VACE = {"vace_layers": list(range(0, 40, 5)), "vace_in_channels": 96}
TRANSFORMERS: dict[str, tuple[dict[str, Any], str]] = {
    "wan2.1_t2v_1.3B_fp16": (SMALL, "fp16"),
    "wan2.1_i2v_480p_14B_fp16": ({**LARGE, **IMAGE}, "fp16"),
    "wan2.1_vace_14B_fp16": ({**LARGE, **VACE}, "fp16"),
    "wan2.2_ti2v_5B_fp16": (FIVE, "fp16"),
    "wan2.2_t2v_high_noise_14B_fp16": (LARGE, "fp16"),
    "wan2.2_t2v_high_noise_14B_fp8_scaled": (LARGE, "fp8"),
    "wan2.2_i2v_high_noise_14B_fp8_scaled": ({**LARGE, "in_channels": 36}, "fp8"),
}
VAE_22 = {"base_dim": 160, "decoder_base_dim": 256, "z_dim": 48, "is_residual": True, "in_channels": 12,
          "out_channels": 12, "patch_size": 2, "scale_factor_spatial": 16}
VAES: dict[str, dict[str, Any]] = {"wan_2.1_vae": {}, "wan2.2_vae": VAE_22}
TEXT = "umt5_xxl_fp8_e4m3fn_scaled"
EVERYWHERE = ("text_embedding", "time_embedding", "time_projection", "head.head")
"""Linear layers outside of the blocks that the released fp8 files hold in fp8 as well."""

RESERVED = 1.5
"""GiB of a GPU that a context, NCCL's buffers and kernels' workspaces take."""

TILE = (512, 64, 64, 8)


@dataclass(frozen=True)
class Machine:
    """denoise: ranks that denoise. shared: whether the last of them has the VAE and the text encoder too."""

    name: str
    card: float
    denoise: int
    shared: bool


MACHINES = (Machine("2 x 24 GB", 23.5, 2, True), Machine("4 x 24 GB", 23.5, 3, False),
            Machine("8 x 80 GB", 79.0, 7, False))


@dataclass(frozen=True)
class Clip:
    """A row. experts: networks of that size that take part. image: whether frames are encoded first."""

    what: str
    transformer: str
    size: tuple[int, int, int]
    vae: str = "wan_2.1_vae"
    experts: int = 1
    image: bool = False
    dtype: str = "default"


CLIPS = (
    Clip("Wan 2.1 T2V 1.3B", "wan2.1_t2v_1.3B_fp16", (832, 480, 33)),
    Clip("Wan 2.1 I2V 14B, fp16", "wan2.1_i2v_480p_14B_fp16", (832, 480, 81), image=True),
    Clip("the same, weight_dtype fp8_e4m3fn", "wan2.1_i2v_480p_14B_fp16", (832, 480, 81), image=True,
         dtype="fp8_e4m3fn"),
    Clip("VACE 14B, weight_dtype fp8_e4m3fn", "wan2.1_vace_14B_fp16", (832, 480, 81), image=True, dtype="fp8_e4m3fn"),
    Clip("Wan 2.2 TI2V 5B", "wan2.2_ti2v_5B_fp16", (1280, 704, 121), vae="wan2.2_vae", image=True),
    Clip("Wan 2.2 T2V A14B, fp8_scaled", "wan2.2_t2v_high_noise_14B_fp8_scaled", (640, 640, 81), experts=2),
    Clip("the same", "wan2.2_t2v_high_noise_14B_fp8_scaled", (832, 480, 81), experts=2),
    Clip("the same", "wan2.2_t2v_high_noise_14B_fp8_scaled", (1280, 720, 81), experts=2),
    Clip("Wan 2.2 T2V A14B, fp16", "wan2.2_t2v_high_noise_14B_fp16", (832, 480, 81), experts=2),
    Clip("the same", "wan2.2_t2v_high_noise_14B_fp16", (1280, 720, 81), experts=2),
    Clip("Wan 2.2 I2V A14B, fp8_scaled", "wan2.2_i2v_high_noise_14B_fp8_scaled", (832, 480, 81), experts=2, image=True),
    Clip("the same", "wan2.2_i2v_high_noise_14B_fp8_scaled", (1280, 720, 81), experts=2, image=True),
)


# -- files ------------------------------------------------------------------------------------------------------------


def write_hollow(file: Path, state: Mapping[str, Tensor], kind: str) -> Path:
    """A file with its whole header and no bytes on the disk. kind: fp16, or fp8 with scales beside the matrices."""
    sizes = {"F8_E4M3": 1, "F16": 2, "F32": 4, "U8": 1}
    entries: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, tensor in state.items():
        quantised = kind == "fp8" and tensor.dim() == 2 and name.endswith("weight") and (
            wan_files.LINEAR.fullmatch(name) or name.startswith(EVERYWHERE))
        entries[name] = ("F8_E4M3" if quantised else "F16", tuple(tensor.shape))
        if quantised:
            entries[name.removesuffix("weight") + "scale_weight"] = ("F32", ())
    if kind == "fp8":
        entries |= {"scaled_fp8": ("F8_E4M3", (2,))}
    if "shared.weight" in state:
        entries |= {"spiece_model": ("U8", (4096,))}
    header: dict[str, Any] = {}
    end = 0
    for name, (dtype, shape) in entries.items():
        begin, end = end, end + math.prod(shape) * sizes[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text)
    os.truncate(file, 8 + len(text) + end)
    return file


def network(config: dict[str, Any]) -> nn.Module:
    import torch
    from diffusers import WanTransformer3DModel, WanVACETransformer3DModel

    with torch.device("meta"):
        made: nn.Module = (WanVACETransformer3DModel if "vace_layers" in config else WanTransformer3DModel)(**config)
    return made


def vae(config: dict[str, Any]) -> nn.Module:
    import torch
    from diffusers import AutoencoderKLWan

    with torch.device("meta"):
        made: nn.Module = AutoencoderKLWan(**config)
    return made


def text_encoder() -> nn.Module:
    import torch
    from transformers import UMT5Config, UMT5EncoderModel

    with torch.device("meta"):
        made: nn.Module = UMT5EncoderModel(UMT5Config(vocab_size=256384, d_model=4096, d_kv=64, d_ff=10240,
                                                      num_layers=24, num_heads=64))
    return made


def write(folder: Path) -> dict[str, Path]:
    """All files by name, with their released sizes and nothing on the disk."""
    words = {name: tensor for name, tensor in text_encoder().state_dict().items() if "embed_tokens" not in name}
    states = {name: (wan_files.original_transformer(network(config)), kind)
              for name, (config, kind) in TRANSFORMERS.items()}
    states |= {name: (wan_files.original_vae(vae(config)), "fp16") for name, config in VAES.items()}
    states |= {TEXT: (words, "fp8")}
    return {name: write_hollow(folder / f"{name}.safetensors", state, kind) for name, (state, kind) in states.items()}


# -- tables -----------------------------------------------------------------------------------------------------------


def weight_rows(files: Mapping[str, Path]) -> Iterator[str]:
    """File, its size, what a GPU holds of it."""
    from comfyui_pipedit import inspect_file

    for name, path in files.items():
        (part,) = inspect_file.report(path).parts
        held = f"{part.held['default'] / GIB:.2f}"
        if "fp8_e4m3fn" in part.held and "fp8" not in name:
            held += f"; {part.held['fp8_e4m3fn'] / GIB:.2f} in fp8_e4m3fn"
        yield f"| `{name}` | {path.stat().st_size / GIB:.2f} | {held} |"


def clip_rows(files: Mapping[str, Path]) -> Iterator[str]:
    """A clip, and on each machine whether it fits and what the fullest GPU then holds."""
    for clip in CLIPS:
        width, height, length = clip.size
        cells = [verdict(model(files, clip), clip, machine) for machine in MACHINES]
        yield f"| {clip.what} | {width}x{height}x{length} | {' | '.join(cells)} |"


def model(files: Mapping[str, Path], clip: Clip) -> ModelFiles:
    from dataclasses import replace

    from comfyui_pipedit import loaders

    found = loaders.combine(files[clip.transformer], files[clip.vae], files[TEXT], clip.what)
    return replace(found, transformer=replace(found.transformer, dtype=clip.dtype))


def verdict(found: ModelFiles, clip: Clip, machine: Machine) -> str:
    """Resident: a rank keeps all its networks. In turns: one at a time. GiB of the fullest GPU, without RESERVED."""
    denoise, other = needs(found, clip, machine.denoise)
    ranks = [denoise + other] if machine.shared else [denoise, other]
    room = machine.card - RESERVED
    resident = max(sum(held for held, _ in works) + max(active for _, active in works) for works in ranks)
    turns = max(held + active for works in ranks for held, active in works)
    for word, size in (("resident", resident), ("in turns", turns)):
        if size <= room:
            return f"{word}, {size:.1f}"
    return f"no, {turns:.1f}"


def needs(found: ModelFiles, clip: Clip, ranks: int) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """(weights, activations) in GiB of each network of a rank that denoises, and of the one that does the rest."""
    from comfyui_pipedit.host.estimate import Work
    from comfyui_pipedit.job import Tiling

    width, height, length = clip.size
    geometry = found.geometry
    shape = (1, geometry.channels, (length - 1) // geometry.temporal + 1, height // geometry.spatial,
             width // geometry.spatial)
    assert found.vae is not None and found.text is not None
    step = _pair(found.transformer, Work("denoise", found.transformer, geometry, shape, ranks))
    decode = _pair(found.vae, Work("decode", found.vae, geometry, shape, tiling=Tiling(*TILE)))
    text = _pair(found.text, Work("encode", found.text))
    if clip.image:
        encode = _pair(found.vae, Work("encode", found.vae, geometry, (length, height, width, 3)))
        decode = (decode[0], max(decode[1], encode[1]))
    return [step, *[(step[0], 0.0)] * (clip.experts - 1)], [decode, text]


def _pair(weights: Weights, work: Any) -> tuple[float, float]:
    from comfyui_pipedit.host import estimate

    return estimate.weight_bytes(weights) / GIB, estimate.activation_bytes(work) / GIB


def tables() -> list[str]:
    """All rows."""
    with tempfile.TemporaryDirectory() as folder:
        files = write(Path(folder))
        return [*weight_rows(files), *clip_rows(files)]


if __name__ == "__main__":
    sys.path.insert(0, str(tiny_wan.ROOT))
    tiny_wan.use_worker_site()
    print("\n".join(tables()))
