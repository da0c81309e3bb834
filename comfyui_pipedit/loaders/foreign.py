"""Files that are not ours to load: what they look like, by cheap signs in names and extensions, and the way out."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from ..errors import LoadError

HANDLED = (".safetensors", ".sft")
PICKLES = (".ckpt", ".pt", ".pt2", ".pth", ".bin", ".pkl")

SIGNS = (
    (r"lora_(A|B|down|up)\b|\.lora_|\.diff(_b)?$|\.hada_w|\.lokr_w", "a LoRA: use a LoRA node for it"),
    (r"(^|\.)blocks\.\d+\.attn[12]\.to_q\.", "a Wan transformer with diffusers' names: put its whole folder, with its "
     "model_index.json, into models/diffusers"),
    (r"(^|\.)decoder\.up_blocks\.\d+\.resnets\.", "a VAE with diffusers' names: put the model's whole folder into "
     "models/diffusers"),
    (r"(^|\.)txt_in\.individual_token_refiner\.", "HunyuanVideo"),
    (r"(^|\.)double_stream_modulation_img\.", "Flux 2"),
    (r"(^|\.)distilled_guidance_layer\.", "Chroma"),
    (r"(^|\.)double_blocks\.\d+\.img_attn\.", "Flux"),
    (r"(^|\.)joint_blocks\.\d+\.context_block\.", "Stable Diffusion 3"),
    (r"(^|\.)t5_yproj\.", "Mochi"),
    (r"(^|\.)transformer_blocks\.\d+\.img_mod\.", "Qwen-Image"),
    (r"(^|\.)adaln_single\.emb\.timestep_embedder\.", "LTX-Video or PixArt"),
    (r"(^|\.)blocks\.block0\.blocks\.0\.block\.attn\.", "Cosmos"),
    (r"(^|\.)cap_embedder\.1\.", "Lumina 2 or Z-Image"),
    (r"(^|\.)patch_embed\.proj\..*|(^|\.)transformer_blocks\.\d+\.norm1\.linear\.", "CogVideoX or a relative of it"),
    (r"(^|\.)input_blocks\.\d+\.\d+\.", "Stable Diffusion 1, 2 or XL"),
    (r"(^|\.)token_embedding\.weight$", "a umt5 text encoder with Wan's own names: take umt5_xxl_fp8_e4m3fn_scaled or "
     "umt5_xxl_fp16, which hold their tokenizer as well"),
    (r"(^|\.)text_model\.encoder\.layers\.", "a CLIP text encoder"),
    (r"(^|\.)vision_model\.encoder\.layers\.", "a CLIP vision model: load it with core's CLIPVisionLoader"),
    (r"(^|\.)model\.layers\.\d+\.self_attn\.", "a language model used as a text encoder"),
    (r"^decoder\.\d+\.(conv\.\d+\.)?weight$|(^|\.)taesd", "a small preview VAE (TAE)"),
    (r"(^|\.)decoder\.up\.\d+\.block\.", "a VAE of an image model"),
)
"""(sign in a tensor's name, what the file looks like); the first that is found is said."""


def refuse_extension(path: Path) -> None:
    """LoadError for a file whose kind is not handled, by its extension."""
    suffix = path.suffix.lower()
    if suffix in HANDLED:
        return
    if suffix == ".gguf":
        raise LoadError(f"{path.name} is a GGUF file, which is not handled; take the fp8_scaled .safetensors file of "
                        "this model, which has about the size of Q8_0")
    if suffix in PICKLES:
        raise LoadError(f"{path.name} may hold Python code ({suffix}) and is not opened; take the .safetensors file of "
                        "this model")
    raise LoadError(f"{path.name} is no .safetensors file; nothing else is handled")


def likeness(names: Iterable[str]) -> str | None:
    """What a file with these tensors looks like; None if there is no sign."""
    listed = list(names)
    return next((model for sign, model in SIGNS if any(re.search(sign, name) for name in listed)), None)


def refuse_unknown(path: Path, names: Iterable[str]) -> LoadError:
    """The error for a file in which no network of ours was found."""
    looks = likeness(names)
    return LoadError(f"{path.name} is not a Wan file" + (f"; it looks like {looks}" if looks else ""))
