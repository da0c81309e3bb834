"""Core's Wan against ours on fp8 single files: python core_fp8.py COMFY MODEL_FILE OUT WORKER_SITE.

MODEL_FILE: a float32 transformer by Wan's own names; files in each layout are written beside OUT's results. Writes
OUT/core.safetensors and OUT/ours.safetensors: a velocity by layout, and "exact" for the float32 file.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inprocess import HERE, ROOT, enter, load

if TYPE_CHECKING:
    from torch import Tensor

LAYOUTS = ("scaled_fp8", "metadata")
"""Those that ComfyUI 0.3.75 knows; comfy_quant is younger. Under scaled_fp8 it holds every linear layer in fp8, and its
bias: so every one has a scale here, and biases are values that fp8 has. (We keep biases as they are stored.)"""


def by_core(file: Path, x: Tensor, text: Tensor) -> Tensor:
    import comfy.sd
    import torch

    network = comfy.sd.load_diffusion_model(str(file)).model.diffusion_model
    return network(x, torch.tensor([0.7]) * 1000, text)


def by_us(file: Path, x: Tensor, text: Tensor) -> Tensor:
    from comfyui_pipedit import loaders
    from comfyui_pipedit import models as families
    from comfyui_pipedit.job import Branch
    from comfyui_pipedit.parallel.sequence import Context
    from comfyui_pipedit.worker.device import Device
    from comfyui_pipedit.worker.residency import Residency

    wan: Any = families.family("wan")
    files = loaders.inspect(file)
    residency = Residency(Device.parse("cpu:0"), Context(0, None), lambda phase: None)
    residency.load(files.transformer)
    network = residency.get(files.transformer)
    return wan.velocity(network, x, 0.7, wan.prepare(network, Branch(text), tuple(x.shape), None, files.geometry))


def main() -> None:
    comfy, model, out, worker_site = map(Path, sys.argv[1:])
    enter(comfy)
    sys.path.append(str(worker_site))
    import torch
    from safetensors.torch import load_file, save_file

    load("comfyui_pipedit", ROOT / "comfyui_pipedit" / "__init__.py")
    load("tiny_wan", HERE.parent / "tiny_wan.py")
    wan_files: Any = load("wan_files", HERE.parent / "wan_files.py")
    state = {name: tensor.to(torch.float8_e4m3fn).float() if name.endswith("bias") else tensor
             for name, tensor in load_file(model).items()}
    all_linears = wan_files.scaled_fp8(linear=re.compile(r".*\.weight"))
    layouts = {"scaled_fp8": all_linears, "metadata": wan_files.in_metadata()}
    files = {name: wan_files.write(out / f"{name}.safetensors", state, layouts[name], head_dim=128) for name in LAYOUTS}
    draw = torch.Generator().manual_seed(1)
    x, text = torch.randn(1, 16, 3, 6, 8, generator=draw), torch.randn(1, 12, 4096, generator=draw)
    with torch.inference_mode():
        for side, evaluate in (("core", by_core), ("ours", by_us)):
            results = {name: evaluate(file, x, text) for name, file in {**files, "exact": model}.items()}
            save_file({name: result.contiguous() for name, result in results.items()}, out / f"{side}.safetensors")


if __name__ == "__main__":
    main()
