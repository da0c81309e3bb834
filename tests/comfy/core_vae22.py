"""Core's Wan 2.2 VAE against our family on one small file: python core_vae22.py COMFY FILE OUT WORKER_SITE.

Core's VAE class takes the released sizes only, so its network is built here with the file's. Writes
OUT/core.safetensors and OUT/ours.safetensors: frames and latents by name.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inprocess import ROOT, enter, load

if TYPE_CHECKING:
    from torch import Tensor

LATENT = (1, 48, 4, 3, 5)
FRAMES = {"even": (9, 64, 32), "odd": (7, 53, 38), "single": (1, 32, 48)}


def inputs() -> dict[str, Tensor]:
    """A latent, and frames [F, H, W, 3] by name."""
    import torch

    draw = torch.Generator().manual_seed(1)
    frames = {name: torch.rand((*size, 3), generator=draw) for name, size in FRAMES.items()}
    return {"latent": torch.randn(LATENT, generator=draw), **frames}


def by_core(file: Path, given: dict[str, Tensor]) -> dict[str, Tensor]:
    import comfy.ldm.wan.vae2_2
    from safetensors.torch import load_file

    state = load_file(file)
    network = comfy.ldm.wan.vae2_2.WanVAE(
        dim=state["encoder.conv1.weight"].shape[0], dec_dim=state["decoder.head.0.gamma"].shape[0],
        z_dim=state["conv2.weight"].shape[0], temperal_downsample=[False, True, True])
    network.load_state_dict(state, strict=True)
    results = {"decoded": ((network.decode(given["latent"]) + 1) / 2).clamp(0, 1)[0].movedim(0, -1)}
    for name in FRAMES:
        frames, (length, height, width, _) = given[name], given[name].shape
        frames = frames[:(length - 1) // 4 * 4 + 1]
        top, left = height % 16 // 2, width % 16 // 2
        frames = frames[:, top:top + height // 16 * 16, left:left + width // 16 * 16]
        results[f"encoded-{name}"] = network.encode(frames.movedim(-1, 0)[None] * 2 - 1)
    return results


def by_us(file: Path, given: dict[str, Tensor], worker_site: Path) -> dict[str, Tensor]:
    import torch

    sys.path.append(str(worker_site))
    load("comfyui_pipedit", ROOT / "comfyui_pipedit" / "__init__.py")
    from comfyui_pipedit import models as families
    from comfyui_pipedit.job import Weights
    from comfyui_pipedit.parallel.sequence import Context
    from comfyui_pipedit.worker.device import Device
    from comfyui_pipedit.worker.residency import Residency

    wan: Any = families.family("wan")
    residency, weights = Residency(Device.parse("cpu:0"), Context(0, None), lambda text: None), Weights(
        "wan", "vae", str(file))
    residency.load(weights)
    vae = residency.get(weights)
    results = {"decoded": torch.cat(list(wan.decode_pieces(vae, given["latent"], None, None)))}
    return {**results, **{f"encoded-{name}": wan.vae_encode(vae, given[name], None, None) for name in FRAMES}}


def main() -> None:
    comfy, file, out, worker_site = map(Path, sys.argv[1:])
    enter(comfy)
    import torch
    from safetensors.torch import save_file

    given = inputs()
    with torch.inference_mode():
        for name, results in (("core", by_core(file, given)), ("ours", by_us(file, given, worker_site))):
            save_file({key: tensor.contiguous() for key, tensor in results.items()}, out / f"{name}.safetensors")


if __name__ == "__main__":
    main()
