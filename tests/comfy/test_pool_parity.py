"""Multi-GPU Sampler on a pool against core KSampler in one ComfyUI, on the same weights in their two file forms."""

from __future__ import annotations

from typing import Any

import pytest
import safetensors.torch
from graphs import LOADER, Graph, node
from reference import Reference
from server import Client
from torch import Tensor

TOLERANCE = 1e-4
DEVICES = "cpu:2"
NOISE = {"seed": 7, "steps": 1, "cfg": 1.0, "sampler_name": "euler", "scheduler": "simple", "denoise": 1.0}
CASES: dict[str, dict[str, Any]] = {
    "euler-simple": {"sampler_name": "euler", "scheduler": "simple", "steps": 4, "cfg": 5.0},
    "euler-beta-cfg1": {"sampler_name": "euler", "scheduler": "beta", "steps": 4, "cfg": 1.0},
    "uni_pc-simple-20": {"sampler_name": "uni_pc", "scheduler": "simple", "steps": 20, "cfg": 5.0},
    "uni_pc-normal-30": {"sampler_name": "uni_pc", "scheduler": "normal", "steps": 30, "cfg": 1.0},
    "uni_pc-simple-2": {"sampler_name": "uni_pc", "scheduler": "simple", "steps": 2, "cfg": 5.0},
    "heun-sgm_uniform": {"sampler_name": "heun", "scheduler": "sgm_uniform", "steps": 4, "cfg": 5.0},
    "dpmpp_2m-linear_quadratic": {"sampler_name": "dpmpp_2m", "scheduler": "linear_quadratic", "steps": 4, "cfg": 5.0},
    "lcm-simple": {"sampler_name": "lcm", "scheduler": "simple", "steps": 4, "cfg": 1.0},
    "uni_pc-denoise": {"sampler_name": "uni_pc", "scheduler": "simple", "steps": 4, "cfg": 5.0, "denoise": 0.6},
    "odd-size": {"sampler_name": "euler", "scheduler": "normal", "steps": 4, "cfg": 5.0, "shift": 3.0, "width": 72},
    "batch": {"sampler_name": "uni_pc", "scheduler": "simple", "steps": 4, "cfg": 5.0, "batch_size": 2},
}


def both_graph(
    reference: Reference, width: int = 64, batch_size: int = 1, shift: float = 8.0, denoise: float = 1.0, **widgets: Any
) -> Graph:
    """Core KSampler's latent saved by node "core", ours by node "pool"; with denoise < 1 both go on from core's."""
    settings = {"seed": 11, "denoise": denoise, **widgets}
    latent = ["first", 0] if denoise < 1.0 else ["empty", 0]
    folder = f"diffusers/{reference.folder_name}"
    texts = {"positive": ["red", 0], "negative": ["blue", 0]}
    return {
        "unet": node("UNETLoader", unet_name=reference.model_name, weight_dtype="default"),
        "shifted": node("ModelSamplingSD3", model=["unet", 0], shift=shift),
        "loader": node("PipeDiTLoader", **{**LOADER, "unet_name": folder, "devices": DEVICES}),
        "red": node("ProbeConditioning", seed=1, rows=12),
        "blue": node("ProbeConditioning", seed=2, rows=1),
        "empty": node("EmptyHunyuanLatentVideo", width=width, height=32, length=9, batch_size=batch_size),
        "first": node("KSampler", model=["shifted", 0], latent_image=["empty", 0], **texts, **NOISE),
        "ksampler": node("KSampler", model=["shifted", 0], latent_image=latent, **texts, **settings),
        "sampler": node("PipeDiTSampler", model=["loader", 0], latent_image=latent, shift=shift, **texts, **settings),
        "core": node("SaveLatent", samples=["ksampler", 0], filename_prefix="core"),
        "pool": node("SaveLatent", samples=["sampler", 0], filename_prefix="pool"),
    }


def saved(client: Client, files: list[dict[str, Any]]) -> Tensor:
    """The one latent among a node's files."""
    (file,) = files
    return safetensors.torch.load(client.view(**file))["latent_tensor"]


def relative_error(ours: Tensor, core: Tensor) -> float:
    """max|a - b| / max|b|."""
    return float((ours - core).abs().max() / core.abs().max())


@pytest.mark.parametrize("name", CASES)
def test_sampler_equals_ksampler(reference: Reference, comfy: Client, name: str) -> None:
    outcome = comfy.run(both_graph(reference, **CASES[name]), timeout=120)
    assert outcome.status == "success", outcome.error.get("exception_message")
    core, ours = (saved(comfy, outcome.files(node_id)) for node_id in ("core", "pool"))
    assert ours.shape == core.shape
    assert relative_error(ours, core) < TOLERANCE
