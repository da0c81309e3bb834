"""The random files of the benches are what ComfyUI's are: read by the same loaders, in both forms, and a LoRA fits."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_wan
import torch

tiny_wan.use_worker_site()

from comfyui_pipedit import loaders, models  # noqa: E402
from comfyui_pipedit.bench import files  # noqa: E402
from comfyui_pipedit.job import Branch  # noqa: E402
from comfyui_pipedit.loaders.lora import fit, read_lora  # noqa: E402
from comfyui_pipedit.parallel.sequence import Context  # noqa: E402
from comfyui_pipedit.worker.device import Device  # noqa: E402
from comfyui_pipedit.worker.residency import Residency  # noqa: E402

CONFIG = {**files.A14B, "num_attention_heads": 1, "text_dim": 32, "ffn_dim": 64, "num_layers": 2}
CPU = torch.device("cpu")


def velocity(path: Path) -> torch.Tensor:
    found = loaders.combine(path, None, None, "bench")
    weights = found.transformer
    residency = Residency(Device.parse("cpu:0"), Context(0, None), lambda text: None)
    residency.load(weights)
    draw = torch.Generator().manual_seed(0)
    x, text = (torch.randn(shape, generator=draw) for shape in ((1, 16, 2, 4, 6), (1, 8, 32)))
    network, wan = residency.get(weights), models.family("wan")
    with torch.inference_mode():
        told = wan.prepare(network, Branch(text), tuple(x.shape), None, found.geometry)
        return wan.velocity(network, x, 0.6, told)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("bench")
    for name, fp8 in (("bf16", False), ("fp8", True)):
        files.write_transformer(made / f"{name}.safetensors", CONFIG, fp8=fp8, seed=1, device=CPU)
    files.write_lora(made / "lora.safetensors", CONFIG, rank=4, seed=2, device=CPU)
    return made


def test_fp8_with_scales_holds_the_same_weights(folder: Path) -> None:
    exact, scaled = velocity(folder / "bf16.safetensors"), velocity(folder / "fp8.safetensors")
    assert 0.2 < exact.std() < 5
    assert 1e-3 < (scaled - exact).norm() / exact.norm() < 0.1


def test_the_lora_fits_every_linear_layer_of_the_blocks(folder: Path) -> None:
    weights = loaders.combine(folder / "fp8.safetensors", None, None, "bench").transformer
    shapes = {name: entry.shape for name, entry in loaders.open_weights(weights).entries.items()}
    report = fit(read_lora(folder / "lora.safetensors"), shapes)
    assert report.complete and len(report.matched) == 10 * CONFIG["num_layers"]
