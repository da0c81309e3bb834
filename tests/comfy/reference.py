"""The same random Wan twice: as ComfyUI's single files and as a diffusers folder, small enough for two CPU cores.

As a script: python reference.py COMFY_DIR MODELS_DIR WORKER_SITE. Tests use the fixture `reference`.

The weights keep activations at variance 1 from end to end, so that the velocity is of order 1 and depends on the
latent, the timestep and the text: with the usual standard deviation of 0.02 a wrong solver or cfg would hardly be seen.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inprocess import enter, run

if TYPE_CHECKING:
    from torch import Tensor, nn

MODEL_FILE, VAE_FILE, FOLDER = "reference_wan.safetensors", "reference_wan_vae.safetensors", "reference_wan"
DIM, HEADS, LAYERS, FFN_DIM, TEXT_DIM, FREQ_DIM = 256, 2, 2, 512, 4096, 256
VAE: dict[str, Any] = {"z_dim": 16, "dim_mult": [1, 2, 4, 4], "num_res_blocks": 2, "attn_scales": [], "dropout": 0.0,
                       "temperal_downsample": [False, True, True]}
VAE_DIM = 8


@dataclass(frozen=True, slots=True)
class Reference:
    """Where the two forms lie below a ComfyUI models folder, and the names that loaders list them under."""

    models: Path
    model_name: str = MODEL_FILE
    vae_name: str = VAE_FILE
    folder_name: str = FOLDER

    @property
    def model_file(self) -> Path:
        return self.models / "diffusion_models" / self.model_name

    @property
    def vae_file(self) -> Path:
        return self.models / "vae" / self.vae_name

    @property
    def folder(self) -> Path:
        return self.models / "diffusers" / self.folder_name


def write_reference(comfy: Path, models: Path, worker_site: Path) -> Reference:
    """Write both forms below `models`, in a process of its own."""
    run("reference.py", comfy, models, worker_site)
    return Reference(models)


def randomise(module: nn.Module, gain: float) -> None:
    """Weights of standard deviation gain / sqrt(inputs), small biases, norms near 1; the same for a given module."""
    import torch

    generator = torch.Generator().manual_seed(0)
    for name, parameter in module.named_parameters():
        draw = torch.randn(parameter.shape, generator=generator)
        if "modulation" in name:
            parameter.data = 0.3 * draw
        elif "norm" in name or "gamma" in name:
            parameter.data = 0.1 * draw + (0.0 if name.endswith("bias") else 1.0)
        elif parameter.dim() > 1:
            parameter.data = gain * draw / parameter[0].numel() ** 0.5
        else:
            parameter.data = 0.1 * draw


def make_transformer() -> dict[str, Tensor]:
    """State dict of ComfyUI's Wan transformer."""
    import comfy.ldm.wan.model
    import comfy.ops
    import torch

    model = comfy.ldm.wan.model.WanModel(
        model_type="t2v", dim=DIM, ffn_dim=FFN_DIM, num_heads=HEADS, num_layers=LAYERS, in_dim=16, out_dim=16,
        text_dim=TEXT_DIM, freq_dim=FREQ_DIM, eps=1e-6, operations=comfy.ops.disable_weight_init, device="cpu",
        dtype=torch.float32,
    )
    randomise(model, gain=1.0)
    return {name: tensor.contiguous() for name, tensor in model.state_dict().items()}


def make_vae() -> dict[str, Tensor]:
    """State dict of ComfyUI's Wan VAE."""
    import comfy.ldm.wan.vae

    model = comfy.ldm.wan.vae.WanVAE(dim=VAE_DIM, **VAE)
    randomise(model, gain=1.0)
    return {name: tensor.contiguous() for name, tensor in model.state_dict().items()}


def write_single_files(reference: Reference, transformer: dict[str, Tensor], vae: dict[str, Tensor]) -> None:
    """The two files as ComfyUI's loaders want them."""
    from safetensors.torch import save_file

    for file, state in ((reference.model_file, transformer), (reference.vae_file, vae)):
        file.parent.mkdir(parents=True, exist_ok=True)
        save_file(state, file)


def write_folder(reference: Reference, transformer: dict[str, Tensor], vae: dict[str, Tensor]) -> None:
    """The diffusers folder: model_index.json, transformer/, vae/, scheduler/; converted by diffusers' own functions."""
    import json

    from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanTransformer3DModel
    from diffusers.loaders import single_file_utils as convert

    dit = WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=HEADS, attention_head_dim=DIM // HEADS, in_channels=16,
        out_channels=16, text_dim=TEXT_DIM, freq_dim=FREQ_DIM, ffn_dim=FFN_DIM, num_layers=LAYERS, eps=1e-6,
    )
    dit.load_state_dict(convert.convert_wan_transformer_to_diffusers(dict(transformer)))
    dit.save_pretrained(reference.folder / "transformer")
    coder = AutoencoderKLWan(base_dim=VAE_DIM, **VAE)
    coder.load_state_dict(convert.convert_wan_vae_to_diffusers(dict(vae)))
    coder.save_pretrained(reference.folder / "vae")
    UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, num_train_timesteps=1000, flow_shift=3.0
    ).save_pretrained(reference.folder / "scheduler")
    index = {"_class_name": "WanPipeline", "transformer": ["diffusers", "WanTransformer3DModel"],
             "vae": ["diffusers", "AutoencoderKLWan"], "scheduler": ["diffusers", "UniPCMultistepScheduler"]}
    (reference.folder / "model_index.json").write_text(json.dumps(index, indent=2))


def main() -> None:
    comfy, models, worker_site = map(Path, sys.argv[1:])
    enter(comfy)
    sys.path.append(str(worker_site))
    transformer, vae = make_transformer(), make_vae()
    write_single_files(Reference(models), transformer, vae)
    write_folder(Reference(models), transformer, vae)


if __name__ == "__main__":
    main()
