"""Core's LoraLoaderModelOnly against our LoRA state on the same model, in its own process:
python lora_grid.py COMFY MODEL_FILE FOLDER LORAS WORKER_SITE OUT.

FOLDER is the model of MODEL_FILE as a diffusers folder. Writes OUT/core.safetensors and OUT/ours.safetensors: the
network's output of each case by the case's name, and two merged weights of it as "NAME/weight".
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inprocess import ROOT, enter, load

if TYPE_CHECKING:
    from torch import Tensor

Chain = tuple[tuple[str, float], ...]
CASES: dict[str, Chain] = {
    "none": (),
    "zero": (("comfy.safetensors", 0.0),),
    "whole": (("comfy.safetensors", 1.0),),
    "half": (("comfy.safetensors", 0.5),),
    "negative": (("comfy.safetensors", -0.7),),
    "no-alpha": (("no_alpha.safetensors", 0.8),),
    "musubi": (("musubi.safetensors", 1.0),),
    "wan-fun": (("wan_fun.safetensors", 1.0),),
    "two": (("comfy.safetensors", 0.6), ("no_alpha.safetensors", -0.3)),
    "twice": (("musubi.safetensors", 0.4), ("musubi.safetensors", 0.4)),
}
WEIGHTS = {"blocks.1.ffn.0.weight": "blocks.1.ffn.net.0.proj.weight", "blocks.1.norm3.weight": "blocks.1.norm2.weight"}
SIGMA = 0.6


def write_loras(folder: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """The files that the cases name."""
    files = load("lora_files", ROOT / "tests" / "lora_files.py")
    files.write(folder / "comfy.safetensors", files.state("comfy", shapes, 1, rank=8, differences=True))
    files.write(folder / "no_alpha.safetensors", files.state("comfy-ab", shapes, 2, alpha=None))
    files.write(folder / "musubi.safetensors", files.state("musubi", shapes, 3))
    files.write(folder / "wan_fun.safetensors", files.state("wan-fun", shapes, 4))


def inputs() -> tuple[Tensor, Tensor]:
    """(latent, text embedding), unit normal."""
    import torch

    draw = torch.Generator().manual_seed(0)
    return torch.randn(1, 16, 2, 4, 8, generator=draw), torch.randn(1, 12, 4096, generator=draw)


def run_core(model: Any, chain: Chain) -> dict[str, Tensor]:
    """{"": velocity, original name of a weight: its merged value} of core."""
    import comfy.model_management

    import nodes

    for name, strength in chain:
        (model,) = nodes.LoraLoaderModelOnly().load_lora_model_only(model, name, strength)
    comfy.model_management.load_models_gpu([model], force_full_load=True)
    latent, text = inputs()
    inner = model.model.diffusion_model
    clean = model.model.apply_model(latent, latent.new_tensor([SIGMA]), c_crossattn=text)
    return {"": (latent - clean) / SIGMA, **{name: inner.state_dict()[name].clone() for name in WEIGHTS}}


def run_ours(network: Any, state: Any, read_lora: Any, folder: Path, chain: Chain) -> dict[str, Tensor]:
    """The same of our state, in the diffusers network."""
    state.go([(read_lora(folder / name), strength) for name, strength in chain])
    latent, text = inputs()
    velocity = network(latent, latent.new_tensor([SIGMA * 1000]), text, return_dict=False)[0]
    return {"": velocity, **{name: network.state_dict()[ours].clone() for name, ours in WEIGHTS.items()}}


def our_network(folder: Path) -> tuple[Any, Any]:
    """(network, its LoRA state) from a diffusers folder."""
    from diffusers import WanTransformer3DModel
    from safetensors.torch import load_file

    load("comfyui_pipedit", ROOT / "comfyui_pipedit" / "__init__.py")
    from comfyui_pipedit.models.lora import LoraState

    originals = load_file(folder / "transformer" / "diffusion_pytorch_model.safetensors")
    network = WanTransformer3DModel.from_config(WanTransformer3DModel.load_config(folder / "transformer"))
    network.requires_grad_(False).eval().load_state_dict(originals)
    return network, LoraState(network, lambda names: [(name, originals[name]) for name in names], shared=True)


def main() -> None:
    comfy, model_file, folder, loras, worker_site, out = map(Path, sys.argv[1:])
    enter(comfy)
    sys.path.append(str(worker_site))
    import comfy.sd
    import folder_paths
    import torch
    from safetensors.torch import save_file

    network, state = our_network(folder)
    write_loras(loras, {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()})
    folder_paths.add_model_folder_path("loras", str(loras), is_default=True)
    from comfyui_pipedit.loaders.lora import read_lora

    model = comfy.sd.load_diffusion_model(str(model_file))
    with torch.inference_mode():
        core = {name: run_core(model, chain) for name, chain in CASES.items()}
        ours = {name: run_ours(network, state, read_lora, loras, chain) for name, chain in CASES.items()}
    for name, found in (("core", core), ("ours", ours)):
        save_file({f"{case}/{key}": tensor.contiguous() for case, values in found.items()
                   for key, tensor in values.items()}, out / f"{name}.safetensors")


if __name__ == "__main__":
    main()
