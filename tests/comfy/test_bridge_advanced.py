"""Multi-GPU Sampler (Advanced) on a pool against core KSamplerAdvanced, on the same weights in one graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from graphs import Graph, node
from reference import Reference
from server import Client
from test_bridge import WIDGETS, models, refusal, succeeded
from test_pool_parity import TOLERANCE, relative_error, saved

STEPS = 6
BASE = {
    "add_noise": "enable", "noise_seed": 9, "steps": STEPS, "cfg": 4.0, "sampler_name": "euler", "scheduler": "simple",
    "start_at_step": 0, "end_at_step": 10_000, "return_with_leftover_noise": "disable",
}  # fmt: skip
TEXTS = {"positive": ["red", 0], "negative": ["blue", 0]}


def base(reference: Reference) -> Graph:
    """ "first" is a latent that is not empty."""
    return models(reference) | {
        "shifted": node("ModelSamplingSD3", model=["unet", 0], shift=5.0),
        "first": node(
            "KSampler", model=["shifted", 0], latent_image=["empty", 0], **TEXTS, **{**WIDGETS, "steps": 1}
        ),
    }


def stages(kind: str, *settings: dict[str, Any], start: str = "empty", **extra: Any) -> Graph:
    """Samplers one after the other, "KIND-1" and so on, each saved by "KIND-1-saved"."""
    model = ["shifted", 0] if kind == "KSamplerAdvanced" else ["loader", 0]
    graph, latent = {}, [start, 0]
    for number, changes in enumerate(settings, 1):
        name = f"{kind}-{number}"
        graph[name] = node(kind, model=model, latent_image=latent, **TEXTS, **{**BASE, **extra, **changes})
        graph[f"{name}-saved"] = node("SaveLatent", samples=[name, 0], filename_prefix=name)
        latent = [name, 0]
    return graph


def both(*settings: dict[str, Any], start: str = "empty", **extra: Any) -> Graph:
    core = stages("KSamplerAdvanced", *settings, start=start, **extra)
    return core | stages("PipeDiTSamplerAdvanced", *settings, start=start, shift=5.0, **extra)


def errors(client: Client, graph: Graph, number: int) -> list[float]:
    """Ours against core's after each stage."""
    outcome = succeeded(client, graph)
    found = []
    for stage in range(1, number + 1):
        core, ours = (saved(client, outcome.files(f"{kind}-{stage}-saved"))
                      for kind in ("KSamplerAdvanced", "PipeDiTSamplerAdvanced"))  # fmt: skip
        assert core.isfinite().all() and core.shape == ours.shape
        found.append(relative_error(ours, core))
    return found


HIGH = {"end_at_step": 3, "return_with_leftover_noise": "enable"}
LOW = {"add_noise": "disable", "start_at_step": 3, "noise_seed": 0}


@pytest.mark.parametrize(
    "sampler", ["euler", "uni_pc", "dpmpp_2m", "heun", "lcm", "dpmpp_2m_sde", "euler_ancestral", "ddim"]
)
def test_two_in_a_row(reference: Reference, comfy: Client, sampler: str) -> None:
    """Three steps that leave noise, and three that go on from it: each as core's, as is what comes out."""
    found = errors(comfy, base(reference) | both(HIGH, LOW, sampler_name=sampler), 2)
    assert max(found) < TOLERANCE


def test_two_in_a_row_are_the_whole_run(reference: Reference, comfy: Client) -> None:
    graph = base(reference) | stages("PipeDiTSamplerAdvanced", HIGH, LOW, shift=5.0)
    outcome = succeeded(comfy, graph | stages("KSamplerAdvanced", {}))
    whole, ours = (saved(comfy, outcome.files(f"{name}-saved"))
                   for name in ("KSamplerAdvanced-1", "PipeDiTSamplerAdvanced-2"))  # fmt: skip
    assert relative_error(ours, whole) < TOLERANCE


PARTS: dict[str, dict[str, Any]] = {
    "the last steps, with new noise": {"start_at_step": 2},
    "the last steps, without": {"start_at_step": 2, "add_noise": "disable"},
    "the first, down to no noise": {"end_at_step": 3},
    "the first, leaving noise": HIGH,
    "the middle": {"start_at_step": 2, "end_at_step": 4, "return_with_leftover_noise": "enable"},
    "the middle, down to no noise": {"start_at_step": 2, "end_at_step": 4},
    "exactly all": {"end_at_step": STEPS},
    "nothing: start is the end": {"start_at_step": STEPS},
    "nothing: start behind the end": {"start_at_step": 4, "end_at_step": 3},
    "nothing: no end": {"end_at_step": 0},
    "cfg 1": {"cfg": 1.0, "start_at_step": 1},
}


@pytest.mark.parametrize("sampler", ["uni_pc", "dpmpp_2m", "res_multistep"])
@pytest.mark.parametrize("name", PARTS)
def test_parts_of_a_run(reference: Reference, comfy: Client, name: str, sampler: str) -> None:
    graph = base(reference) | both(PARTS[name], start="first", sampler_name=sampler)
    assert errors(comfy, graph, 1)[0] < TOLERANCE


def test_sigmas_of_a_link_are_cut_too(reference: Reference, comfy: Client) -> None:
    graph = base(reference) | stages("KSamplerAdvanced", {"start_at_step": 2, "scheduler": "beta"})
    sigmas = node("BasicScheduler", model=["shifted", 0], scheduler="beta", steps=STEPS, denoise=1.0)
    own = stages("PipeDiTSamplerAdvanced", {"start_at_step": 2, "steps": 1, "sigmas": ["sigmas", 0]})
    assert errors(comfy, graph | own | {"sigmas": sigmas}, 1)[0] < TOLERANCE


def test_one_step_of_uni_pc_is_refused(reference: Reference, comfy: Client) -> None:
    """ComfyUI's gives its input back unsolved."""
    graph = base(reference) | stages("PipeDiTSamplerAdvanced", {"start_at_step": 5, "sampler_name": "uni_pc"})
    text = refusal(comfy, graph)
    assert text.startswith("Multi-GPU Sampler (Advanced): uni_pc needs 2 steps, not 1")


def test_the_same_seed_gives_the_same_bits(reference: Reference, comfy: Client) -> None:
    found = []
    for number in range(2):
        graph = base(reference) | stages("PipeDiTSamplerAdvanced", {**HIGH, "sampler_name": "dpmpp_sde"})
        graph["loader"]["inputs"]["vae_name"] = "auto" if number else "none"  # another loader, so nothing is cached
        found.append(saved(comfy, succeeded(comfy, graph).files("PipeDiTSamplerAdvanced-1-saved")))
    assert torch.equal(*found)
