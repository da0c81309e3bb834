"""The files that the workflows name, under ComfyUI's official names, with tiny random weights that core and the pool
both load. Core needs heads of 128 channels, texts of width 4096, and tiny_pack for three of the networks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lora_files
import tiny_wan
import wan_files
import wan_models

if TYPE_CHECKING:
    from torch import nn

TINY_PACK = Path(__file__).resolve().parent / "tiny_pack"
NOISES = ("high_noise", "low_noise")
TRANSFORMERS: Mapping[str, str] = {
    "wan2.1_t2v_1.3B_fp16": "t2v",
    "wan2.1_i2v_480p_14B_fp16": "i2v-2.1",
    "wan2.1_vace_14B_fp16": "vace",
    "wan2.2_ti2v_5B_fp16": "ti2v",
    **{f"wan2.2_t2v_{noise}_14B_fp8_scaled": "t2v" for noise in NOISES},
    **{f"wan2.2_i2v_{noise}_14B_fp8_scaled": "i2v-2.2" for noise in NOISES},
}
"""Name -> which of tiny_wan.VARIANTS the file is."""

VAES = {"wan_2.1_vae": "2.1", "wan2.2_vae": "2.2"}
LORAS = ("Wan21_CausVid_14B_T2V_lora_rank32", *(f"wan2.2_{kind}_{noise}" for noise in NOISES for kind in (
    "t2v_lightx2v_4steps_lora_v1.1", "i2v_lightx2v_4steps_lora_v1")))
TEXT, VISION = "umt5_xxl_fp8_e4m3fn_scaled", "clip_vision_h"


def write(models: Path) -> None:
    """All of them below a ComfyUI models folder: the text encoder in fp8 with scales as its name says, the others in
    float32, as core adds a LoRA to fp8 weights by rounding them again."""
    for number, (name, variant) in enumerate(TRANSFORMERS.items()):
        network = tiny_wan.randomise(wan_models.network(variant), number)
        _save(models / "diffusion_models", name, wan_files.original_transformer(network))
    for name, kind in VAES.items():
        _save(models / "vae", name, wan_files.original_vae(wan_files.vae(kind)))
    shapes = {name: tuple(tensor.shape) for name, tensor in wan_models.network("t2v").state_dict().items()}
    for number, name in enumerate(LORAS):
        lora_files.write(models / "loras" / f"{name}.safetensors", lora_files.state("comfy", shapes, number))
    _save(models / "text_encoders", TEXT, wan_files.text_tensors(text_encoder(), wan_files.pieces()), scaled)
    _save(models / "clip_vision", VISION, vision())


def _save(folder: Path, name: str, state: wan_files.State, layout: wan_files.Layout | None = None) -> None:
    wan_files.write(folder / f"{name}.safetensors", state, layout or wan_files.plain("float32"), head_dim=128)


def scaled(state: wan_files.State) -> tuple[wan_files.State, dict[str, str]]:
    """fp8 with scales; core's text encoder takes an empty marker only."""
    import torch

    made, metadata = wan_files.scaled_fp8()(state)
    return {**made, "scaled_fp8": torch.zeros(0, dtype=torch.float8_e4m3fn)}, metadata


def write_image(file: Path) -> None:
    """A picture for Load Image."""
    import PIL.Image

    file.parent.mkdir(parents=True, exist_ok=True)
    gradient = PIL.Image.linear_gradient("L")
    PIL.Image.merge("RGB", (gradient, gradient.rotate(90), gradient)).save(file)


def config(name: str) -> dict[str, Any]:
    """One of tiny_pack's."""
    found: dict[str, Any] = json.loads((TINY_PACK / f"{name}.json").read_text(encoding="utf-8"))
    return found


def text_encoder() -> nn.Module:
    from transformers import UMT5Config, UMT5EncoderModel

    sizes = {key: value for key, value in config("umt5").items() if key.startswith(("d_m", "d_ff", "d_kv", "num", "v"))}
    return tiny_wan.randomise(UMT5EncoderModel(UMT5Config(**sizes))).eval()


def vision() -> dict[str, Any]:
    """Core's names; a norm of layer 30 is what it knows the size by."""
    from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

    network = tiny_wan.randomise(CLIPVisionModelWithProjection(CLIPVisionConfig(**config("clip_vision"))))
    state = {name: tensor.contiguous() for name, tensor in network.state_dict().items() if "position_ids" not in name}
    norm = "vision_model.encoder.layers.{}.layer_norm1.weight"
    return {**state, norm.format(30): state[norm.format(0)].clone()}
