"""Core's VAE nodes against our family on the same weights: python core_vae.py COMFY MODELS_DIR OUT WORKER_SITE.

Writes OUT/core.safetensors and OUT/ours.safetensors: frames, latents and velocities by name. Core's are those of its
nodes VAEDecode, VAEDecodeTiled, VAEEncode and VAEEncodeTiled, and of its Wan model.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inprocess import ROOT, enter, load
from reference import Reference

if TYPE_CHECKING:
    from torch import Tensor

LATENT = (1, 16, 5, 9, 11)


@dataclass(frozen=True, slots=True)
class Tiles:
    """VAEDecodeTiled's and VAEEncodeTiled's widgets."""

    tile: int
    overlap: int
    temporal: int
    temporal_overlap: int


TILES = {
    "space": Tiles(64, 16, 64, 8),
    "time": Tiles(512, 64, 12, 4),
    "both": Tiles(64, 16, 8, 4),
    "limited": Tiles(64, 64, 16, 12),
    "no-overlap": Tiles(64, 0, 64, 8),
    "one": Tiles(512, 64, 64, 8),
}
ENCODE_TILES = {
    "space": Tiles(64, 32, 64, 8),
    "time": Tiles(512, 64, 12, 4),
    "both": Tiles(64, 32, 8, 4),
    "limited": Tiles(64, 0, 16, 12),
    "small": Tiles(40, 24, 13, 1),
    "one": Tiles(512, 64, 64, 8),
}
"""What is cut elsewhere than between cells, ours refuses."""
LONG = (23, 83, 109)
FRAMES = {"even": (9, 48, 32), "odd": (7, 53, 38), "single": (1, 32, 32)}
VELOCITIES = {"even": (2, 4, 6), "odd": (3, 5, 7), "flat": (1, 1, 3)}


def draw(seed: int, *shape: int) -> Tensor:
    import torch

    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def inputs() -> dict[str, Any]:
    """Latent, images, a long video and (x, text) by name."""
    import torch

    images = {name: torch.rand((*size, 3), generator=torch.Generator().manual_seed(3)) for name, size in FRAMES.items()}
    evaluations = {name: (draw(4, 1, 16, *size), draw(5, 1, 12, 4096)) for name, size in VELOCITIES.items()}
    video = torch.rand((*LONG, 3), generator=torch.Generator().manual_seed(6))
    return {"latent": draw(1, *LATENT), "images": images, "video": video, "evaluations": evaluations}


def by_core(models: Path, given: dict[str, Any]) -> dict[str, Tensor]:
    import comfy.sd
    import comfy.utils
    import torch

    import nodes

    reference = Reference(models)
    vae = comfy.sd.VAE(sd=comfy.utils.load_torch_file(str(reference.vae_file)))
    samples = {"samples": given["latent"]}
    results = {"whole": nodes.VAEDecode().decode(vae, samples)[0]}
    for name, t in TILES.items():
        results[f"tiled-{name}"] = nodes.VAEDecodeTiled().decode(
            vae, samples, t.tile, t.overlap, t.temporal, t.temporal_overlap)[0]
    for name, image in given["images"].items():
        results[f"encode-{name}"] = nodes.VAEEncode().encode(vae, image)[0]["samples"]
    video = given["video"]
    results["encode-whole"] = nodes.VAEEncode().encode(vae, video)[0]["samples"]
    for name, t in ENCODE_TILES.items():
        results[f"encode-tiled-{name}"] = nodes.VAEEncodeTiled().encode(
            vae, video, t.tile, t.overlap, t.temporal, t.temporal_overlap)[0]["samples"]
    network = comfy.sd.load_diffusion_model(str(reference.model_file)).model.diffusion_model
    for name, (x, text) in given["evaluations"].items():
        results[f"velocity-{name}"] = network(x, torch.tensor([0.7]) * 1000, text)
    return results


def by_us(models: Path, given: dict[str, Any], worker_site: Path) -> dict[str, Tensor]:
    import torch

    sys.path.append(str(worker_site))
    load("comfyui_pipedit", ROOT / "comfyui_pipedit" / "__init__.py")
    from comfyui_pipedit import loaders
    from comfyui_pipedit import models as families
    from comfyui_pipedit.job import Branch, Tiling
    from comfyui_pipedit.parallel.sequence import Context
    from comfyui_pipedit.worker.device import Device
    from comfyui_pipedit.worker.residency import Residency

    files, wan = loaders.inspect(Reference(models).folder), families.family("wan")
    residency = Residency(Device.parse("cpu:0"), Context(0, None), lambda text: None)
    for weights in (files.vae, files.transformer):
        residency.load(weights)
    vae = residency.get(files.vae)
    def tilings(tiles: dict[str, Tiles]) -> dict[str, Tiling | None]:
        return {"whole": None} | {f"tiled-{name}": Tiling(t.tile, t.overlap, t.temporal, t.temporal_overlap)
                                  for name, t in tiles.items()}

    results = {name: torch.cat(list(wan.decode_pieces(vae, given["latent"], tiling, files.geometry)))
               for name, tiling in tilings(TILES).items()}
    for name, image in given["images"].items():
        results[f"encode-{name}"] = wan.vae_encode(vae, image, None, files.geometry)
    for name, tiling in tilings(ENCODE_TILES).items():
        results[f"encode-{name}"] = wan.vae_encode(vae, given["video"], tiling, files.geometry)
    for name, (x, text) in given["evaluations"].items():
        results[f"velocity-{name}"] = wan.velocity(residency.get(files.transformer), x, 0.7, Branch(text))
    return results


def main() -> None:
    comfy, models, out, worker_site = map(Path, sys.argv[1:])
    enter(comfy)
    import torch
    from safetensors.torch import save_file

    given = inputs()
    with torch.inference_mode():
        for name, results in (("core", by_core(models, given)), ("ours", by_us(models, given, worker_site))):
            save_file({key: tensor.contiguous() for key, tensor in results.items()}, out / f"{name}.safetensors")


if __name__ == "__main__":
    main()
