"""Each variant of Wan twice, with the same small random weights: as ComfyUI's single files and as a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tiny_wan
import wan_files

SIZES: dict[str, Any] = {"num_attention_heads": 2, "attention_head_dim": 128, "text_dim": 4096, "freq_dim": 256,
                         "ffn_dim": 256}
"""ComfyUI takes heads of 128 channels and these widths for granted."""


def vae_of(variant: str) -> str:
    return "2.2" if variant == "ti2v" else "2.1"


def file_of(variant: str) -> str:
    """Name of the transformer's file."""
    return f"wan-{variant}.safetensors"


def vae_file_of(variant: str) -> str:
    return f"wan_{vae_of(variant)}_vae.safetensors"


def network(variant: str) -> Any:
    """A transformer in the sizes that ComfyUI takes for granted."""
    config = {**SIZES, **tiny_wan.VARIANTS[variant]}
    if "image_dim" in config:
        config["image_dim"] = 1280
    if "pos_embed_seq_len" in config:
        config["pos_embed_seq_len"] = 514
    return tiny_wan.transformer(**config)


def write_variant(models: Path, variant: str) -> None:
    """Both forms below a ComfyUI models folder."""
    transformer, vae = network(variant), wan_files.vae(vae_of(variant))
    folder = models / "diffusers" / f"wan-{variant}"
    transformer.save_pretrained(folder / "transformer")
    vae.save_pretrained(folder / "vae")
    (folder / "model_index.json").write_text(json.dumps({
        "_class_name": "WanPipeline", "transformer": ["diffusers", type(transformer).__name__],
        "vae": ["diffusers", "AutoencoderKLWan"]}))
    _save(models / "diffusion_models" / file_of(variant), wan_files.original_transformer(transformer))
    _save(models / "vae" / vae_file_of(variant), wan_files.original_vae(vae))


def _save(file: Path, state: dict[str, Any]) -> None:
    from safetensors.torch import save_file

    file.parent.mkdir(parents=True, exist_ok=True)
    save_file(state, file)
