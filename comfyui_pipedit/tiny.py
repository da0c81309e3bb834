"""Tiny random networks of the real classes: what `verify --tiny` and the tests run on.

`python -m comfyui_pipedit.tiny FOLDER` writes a folder in diffusers' layout for every variant of Wan. It needs the
workers' packages, so `verify` runs it in a process of its own.

Weights keep activations near variance 1 (standard deviation 1 / sqrt(inputs)), so that the velocity depends visibly on
the latent, the timestep and the text.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .config import WORKER_SITE

if TYPE_CHECKING:
    from torch import nn

TEXT_WIDTH, TEXT_TOKENS, IMAGE_WIDTH = 32, 16, 24
VARIANTS: dict[str, dict[str, Any]] = {
    "t2v": {},
    "i2v-2.1": {"in_channels": 36, "image_dim": IMAGE_WIDTH},
    "flf-2.1": {"in_channels": 36, "image_dim": IMAGE_WIDTH, "pos_embed_seq_len": 10},
    "i2v-2.2": {"in_channels": 36},
    "control-2.1": {"in_channels": 48, "image_dim": IMAGE_WIDTH},
    "ti2v": {"in_channels": 48, "out_channels": 48},
    "vace": {"num_layers": 4, "vace_layers": [0, 2], "vace_in_channels": 96},
}
"""What the configs of Wan's variants have else than text to video; image keys are as wide as the network."""

VAE_22: dict[str, Any] = {
    "decoder_base_dim": 8, "z_dim": 48, "is_residual": True, "in_channels": 12, "out_channels": 12, "patch_size": 2,
    "scale_factor_spatial": 16}


def use_worker_site() -> None:
    """Puts the workers' packages where this process finds them, behind its own."""
    if str(WORKER_SITE) not in sys.path:
        sys.path.append(str(WORKER_SITE))


def randomise(module: nn.Module, seed: int = 0) -> nn.Module:
    """Random weights that keep variances near 1."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        draw = torch.randn(parameter.shape, generator=generator)
        near_one = ("norm" in name or "gamma" in name) and not name.endswith("bias")
        scale = parameter[0].numel() ** -0.5 if parameter.dim() > 1 and not near_one else 0.1
        parameter.data = scale * draw + (1.0 if near_one else 0.0)
    return module


def transformer(seed: int = 0, **changes: Any) -> Any:
    """diffusers' own network: 4 heads of 16, 2 layers; `changes` may be one of VARIANTS."""
    from diffusers import WanTransformer3DModel, WanVACETransformer3DModel

    config: dict[str, Any] = {
        "patch_size": (1, 2, 2), "num_attention_heads": 4, "attention_head_dim": 16, "in_channels": 16,
        "out_channels": 16, "text_dim": TEXT_WIDTH, "freq_dim": 64, "ffn_dim": 128, "num_layers": 2,
        "rope_max_seq_len": 64, **changes}
    if config.get("image_dim"):
        config["added_kv_proj_dim"] = config["num_attention_heads"] * config["attention_head_dim"]
    kind = WanVACETransformer3DModel if "vace_layers" in config else WanTransformer3DModel
    return randomise(kind(**config), seed).eval()


def vae(**changes: Any) -> Any:
    """Wan 2.1's VAE 4 channels wide; `changes` may be VAE_22, with the statistics of its latents."""
    from diffusers import AutoencoderKLWan

    return randomise(AutoencoderKLWan(**{"base_dim": 4, "num_res_blocks": 1, **changes})).eval()


def write_variant(root: Path, variant: str, *, experts: int = 1) -> Path:
    """The folder of a variant without a text encoder; experts: 2 for two transformers, as Wan 2.2 A14B has."""
    channels = VARIANTS[variant].get("out_channels", 16)
    networks = {name: transformer(seed, **VARIANTS[variant])
                for seed, name in enumerate(("transformer", "transformer_2")[:experts])}
    for name, network in networks.items():
        network.save_pretrained(root / name)
    statistics = {"latents_mean": [0.1] * channels, "latents_std": [2.0] * channels}
    vae(**{**(VAE_22 if channels == 48 else {}), **statistics}).save_pretrained(root / "vae")
    index: dict[str, Any] = {name: ["diffusers", type(network).__name__] for name, network in networks.items()}
    index |= {"_class_name": "WanPipeline", "vae": ["diffusers", "AutoencoderKLWan"]}
    if experts == 2:
        index["boundary_ratio"] = 0.875
    (root / "model_index.json").write_text(json.dumps(index))
    return root


def main(folder: Path) -> None:
    """Writes every variant, and text to video with two experts, each under its name."""
    for variant in VARIANTS:
        write_variant(folder / variant, variant)
    write_variant(folder / "two-experts", "t2v", experts=2)


if __name__ == "__main__":
    use_worker_site()
    main(Path(sys.argv[1]))
