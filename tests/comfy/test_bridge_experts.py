"""Two experts: one Loader with both, and two Loaders with two samplers, against core's two KSamplerAdvanced."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from graphs import LOADER, Graph, node
from reference import Reference
from safetensors.torch import load_file, save_file
from server import Client
from test_bridge import succeeded
from test_bridge_advanced import BASE, TEXTS
from test_pool_parity import TOLERANCE, relative_error, saved

LOW = "reference_wan_low.safetensors"
STEPS, SWITCH, SHIFT = 5, 2, 8.0
HIGH_PART = {"steps": STEPS, "end_at_step": SWITCH, "return_with_leftover_noise": "enable"}
LOW_PART = {"steps": STEPS, "start_at_step": SWITCH, "add_noise": "disable"}


@pytest.fixture(scope="module")
def low(reference: Reference) -> str:
    """Another network of the same sizes, as a single file."""
    generator = torch.Generator().manual_seed(5)
    state = load_file(reference.model_file)
    other = {name: 1 + 0.3 * torch.randn(tensor.shape, generator=generator) for name, tensor in state.items()}
    save_file({name: tensor * other[name] for name, tensor in state.items()}, reference.model_file.with_name(LOW))
    return LOW


def core(reference: Reference, low: str, switch: int = SWITCH, **widgets: Any) -> Graph:
    """Core's two, saved by "core"; and texts and an empty latent."""
    both = {**BASE, **TEXTS, **widgets}
    return {
        "red": node("ProbeConditioning", seed=1, rows=12),
        "blue": node("ProbeConditioning", seed=2, rows=1),
        "empty": node("EmptyHunyuanLatentVideo", width=64, height=32, length=9, batch_size=1),
        "high": node("UNETLoader", unet_name=reference.model_name, weight_dtype="default"),
        "low": node("UNETLoader", unet_name=low, weight_dtype="default"),
        "high-shift": node("ModelSamplingSD3", model=["high", 0], shift=SHIFT),
        "low-shift": node("ModelSamplingSD3", model=["low", 0], shift=SHIFT),
        "core-1": node("KSamplerAdvanced", model=["high-shift", 0], latent_image=["empty", 0],
                       **{**both, **HIGH_PART, "end_at_step": switch}),
        "core-2": node("KSamplerAdvanced", model=["low-shift", 0], latent_image=["core-1", 0],
                       **{**both, **LOW_PART, "start_at_step": switch}),
        "core": node("SaveLatent", samples=["core-2", 0], filename_prefix="core"),
    }  # fmt: skip


def loader(high: str, low: str = "none") -> dict[str, Any]:
    return node("PipeDiTLoader", **{**LOADER, "unet_name": high, "unet_name_low": low, "devices": "cpu:2"})


def one_sampler(reference: Reference, low: str, switch_step: int, sampler: str) -> Graph:
    widgets = {"seed": BASE["noise_seed"], "steps": STEPS, "cfg": BASE["cfg"], "sampler_name": sampler,
               "scheduler": "simple", "denoise": 1.0, "switch_step": switch_step, "shift": SHIFT}  # fmt: skip
    return {
        "loader": loader(reference.model_name, low),
        "pool-1": node("PipeDiTSampler", model=["loader", 0], latent_image=["empty", 0], **TEXTS, **widgets),
        "pool": node("SaveLatent", samples=["pool-1", 0], filename_prefix="pool"),
    }


def error_of(client: Client, graph: Graph) -> float:
    outcome = succeeded(client, graph)
    core_latent, pool_latent = (saved(client, outcome.files(name)) for name in ("core", "pool"))
    assert core_latent.isfinite().all()
    return relative_error(pool_latent, core_latent)


@pytest.mark.parametrize("sampler", ["euler", "heun", "dpm_2", "ddim"])
def test_one_sampler_that_switches(reference: Reference, comfy: Client, low: str, sampler: str) -> None:
    """By our tables and by ComfyUI's own samplers: all the steps before the switch are the first expert's."""
    both = core(reference, low, sampler_name=sampler) | one_sampler(reference, low, SWITCH, sampler)
    assert error_of(comfy, both) < TOLERANCE


@pytest.mark.parametrize("sampler", ["euler", "ddim"])
def test_the_models_own_boundary(reference: Reference, comfy: Client, low: str, sampler: str) -> None:
    """0.875: at shift 8 and 5 steps the levels are 1, 0.97, 0.92, 0.84, 0.67."""
    both = core(reference, low, switch=3, sampler_name=sampler) | one_sampler(reference, low, -1, sampler)
    assert error_of(comfy, both) < TOLERANCE


@pytest.mark.parametrize("sampler", ["uni_pc", "dpmpp_2m", "euler_ancestral"])
def test_two_loaders_and_two_samplers(reference: Reference, comfy: Client, low: str, sampler: str) -> None:
    both = {**BASE, **TEXTS, "sampler_name": sampler, "shift": SHIFT}
    pool = {
        "loader-1": loader(reference.model_name),
        "loader-2": loader(low),
        "pool-1": node("PipeDiTSamplerAdvanced", model=["loader-1", 0], latent_image=["empty", 0],
                       **{**both, **HIGH_PART}),
        "pool-2": node("PipeDiTSamplerAdvanced", model=["loader-2", 0], latent_image=["pool-1", 0],
                       **{**both, **LOW_PART}),
        "pool": node("SaveLatent", samples=["pool-2", 0], filename_prefix="pool"),
    }  # fmt: skip
    assert error_of(comfy, core(reference, low, sampler_name=sampler) | pool) < TOLERANCE


def test_the_bridge_switches_at_the_boundary(reference: Reference, comfy: Client, low: str) -> None:
    graph = core(reference, low, switch=3) | {
        "loader": loader(reference.model_name, low),
        "bridge": node("PipeDiTModelBridge", model=["loader", 0]),
        "shifted": node("ModelSamplingSD3", model=["bridge", 0], shift=SHIFT),
        "pool-1": node("KSampler", model=["shifted", 0], latent_image=["empty", 0], **TEXTS, seed=BASE["noise_seed"],
                       steps=STEPS, cfg=BASE["cfg"], sampler_name="euler", scheduler="simple", denoise=1.0),
        "pool": node("SaveLatent", samples=["pool-1", 0], filename_prefix="pool"),
    }  # fmt: skip
    assert error_of(comfy, graph) < TOLERANCE


def test_the_wrong_expert_is_seen(reference: Reference, comfy: Client, low: str) -> None:
    both = core(reference, low) | one_sampler(reference, low, SWITCH + 1, "euler")
    assert error_of(comfy, both) > 100 * TOLERANCE
