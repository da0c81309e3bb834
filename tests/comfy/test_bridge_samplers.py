"""Every sampler and every schedule of ComfyUI: Multi-GPU Sampler on a pool against core KSampler, on the same weights.

Samplers and schedules of ours are solved in the pool, the others by ComfyUI's own functions over the pool.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from graphs import Graph, change, node
from reference import Reference
from server import Client
from test_bridge import WIDGETS, models, refusal, succeeded
from test_pool_parity import TOLERANCE, relative_error, saved
from torch import Tensor

OURS = ("euler", "heun", "dpmpp_2m", "lcm", "uni_pc")
CORE = (
    "euler_cfg_pp", "euler_ancestral", "euler_ancestral_cfg_pp", "heunpp2", "dpm_2", "dpm_2_ancestral", "lms",
    "dpm_fast", "dpm_adaptive", "dpmpp_2s_ancestral", "dpmpp_2s_ancestral_cfg_pp", "dpmpp_sde", "dpmpp_sde_gpu",
    "dpmpp_2m_cfg_pp", "dpmpp_2m_sde", "dpmpp_2m_sde_gpu", "dpmpp_2m_sde_heun", "dpmpp_2m_sde_heun_gpu",
    "dpmpp_3m_sde", "dpmpp_3m_sde_gpu", "ddpm", "ipndm", "ipndm_v", "deis", "res_multistep", "res_multistep_cfg_pp",
    "res_multistep_ancestral", "res_multistep_ancestral_cfg_pp", "gradient_estimation", "gradient_estimation_cfg_pp",
    "er_sde", "seeds_2", "seeds_3", "sa_solver", "sa_solver_pece", "ddim", "uni_pc_bh2",
)  # fmt: skip
SCHEDULERS = ("simple", "sgm_uniform", "karras", "exponential", "ddim_uniform", "beta", "normal", "linear_quadratic",
              "kl_optimal")  # fmt: skip


def pair(reference: Reference, **widgets: Any) -> Graph:
    """Core KSampler's latent saved by node "core", Multi-GPU Sampler's by node "pool", both at shift 8."""
    given = {"positive": ["red", 0], "negative": ["blue", 0], "latent_image": ["empty", 0], **WIDGETS, **widgets}
    core = {key: value for key, value in given.items() if key != "sigmas"}
    return models(reference) | {
        "shifted": node("ModelSamplingSD3", model=["unet", 0], shift=8.0),
        "ksampler": node("KSampler", model=["shifted", 0], **core),
        "sampler": node("PipeDiTSampler", model=["loader", 0], shift=8.0, **given),
        "core": node("SaveLatent", samples=["ksampler", 0], filename_prefix="core"),
        "pool": node("SaveLatent", samples=["sampler", 0], filename_prefix="pool"),
    }


def latents(client: Client, graph: Graph) -> tuple[Tensor, Tensor]:
    """(core's, ours)."""
    outcome = succeeded(client, graph)
    core, pool = (saved(client, outcome.files(name)) for name in ("core", "pool"))
    assert core.shape == pool.shape
    return core, pool


def choices(client: Client, name: str) -> list[str]:
    found: list[str] = client.object_info("KSampler")["input"]["required"][name][0]
    return found


def test_these_are_all(comfy: Client) -> None:
    assert set(choices(comfy, "sampler_name")) == {*OURS, *CORE} and set(choices(comfy, "scheduler")) == {*SCHEDULERS}


@pytest.mark.parametrize("sampler", [*OURS, *CORE])
def test_every_sampler(reference: Reference, comfy: Client, sampler: str) -> None:
    core, pool = latents(comfy, pair(reference, sampler_name=sampler))
    assert core.isfinite().all() and relative_error(pool, core) < TOLERANCE


@pytest.mark.parametrize("sampler", ["dpmpp_2m", "uni_pc"])
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_every_schedule(reference: Reference, comfy: Client, scheduler: str, sampler: str) -> None:
    core, pool = latents(comfy, pair(reference, sampler_name=sampler, scheduler=scheduler, seed=12))
    assert core.isfinite().all() and relative_error(pool, core) < TOLERANCE


@pytest.mark.parametrize(
    ("sampler", "scheduler", "job"),
    [("dpmpp_2m", "karras", "clip-"), ("ddim", "simple", "ComfyUI's ddim"), ("dpm_2", "karras", "ComfyUI's dpm_2")],
)
def test_who_solves_is_in_the_history(
    reference: Reference, comfy: Client, sampler: str, scheduler: str, job: str
) -> None:
    outcome = succeeded(comfy, pair(reference, sampler_name=sampler, scheduler=scheduler, seed=13))
    (account,) = outcome.outputs["sampler"]["pipedit"]
    assert account["job"].startswith(job) and account["devices"] == "cpu:2"
    assert set(account["seconds"]) == {"denoise" if job == "clip-" else "evaluate"}


def test_part_of_a_latent_a_mask_and_cfg_1(reference: Reference, comfy: Client) -> None:
    """dpmpp_2m_sde from a latent that is there, with denoise 0.6; at cfg 1, without a negative; inside a mask."""
    start = {"first": node("KSampler", model=["shifted", 0], latent_image=["empty", 0], positive=["red", 0],
                           negative=["blue", 0], **{**WIDGETS, "steps": 1})}  # fmt: skip
    mask = {"mask": node("SolidMask", value=0.4, width=8, height=4),
            "masked": node("SetLatentNoiseMask", samples=["first", 0], mask=["mask", 0])}  # fmt: skip
    base = {"sampler_name": "dpmpp_2m_sde", "latent_image": ["first", 0]}
    part = pair(reference, denoise=0.6, **base) | start
    alone = change(pair(reference, cfg=1.0, **base), "sampler", negative=...) | start
    inside = pair(reference, **{**base, "latent_image": ["masked", 0]}) | start | mask
    for graph in (part, alone, inside):
        core, pool = latents(comfy, graph)
        assert core.isfinite().all() and relative_error(pool, core) < TOLERANCE


def test_a_batch_with_noise_of_the_solver(reference: Reference, comfy: Client) -> None:
    graph = change(pair(reference, sampler_name="euler_ancestral"), "empty", batch_size=2, width=72)
    core, pool = latents(comfy, graph)
    assert core.shape[0] == 2 and relative_error(pool, core) < TOLERANCE


def test_cfg_plus_plus_needs_its_negative_at_cfg_1(reference: Reference, comfy: Client) -> None:
    graph = pair(reference, sampler_name="euler_cfg_pp", cfg=1.0)
    core, pool = latents(comfy, graph)
    assert relative_error(pool, core) < TOLERANCE
    assert "negative is not connected" in refusal(comfy, change(graph, "sampler", negative=...))


@pytest.mark.parametrize(
    ("sampler", "sigmas"),
    [
        ("uni_pc", node("BasicScheduler", model=["shifted", 0], scheduler="beta", steps=5, denoise=0.8)),
        ("dpmpp_2m", node("KarrasScheduler", steps=4, sigma_max=0.9, sigma_min=0.1, rho=7.0)),
        ("dpmpp_2m", node("KarrasScheduler", steps=4, sigma_max=1.5, sigma_min=0.1, rho=7.0)),
        ("er_sde", node("KarrasScheduler", steps=4, sigma_max=0.9, sigma_min=0.1, rho=7.0)),
    ],
    ids=["table", "part", "above 1", "core"],
)
def test_sigmas_of_a_link(reference: Reference, comfy: Client, sampler: str, sigmas: Any) -> None:
    graph = pair(reference, sampler_name=sampler, seed=14, sigmas=["sigmas", 0]) | {
        "sigmas": sigmas,
        "select": node("KSamplerSelect", sampler_name=sampler),
        "custom": node(
            "SamplerCustom",
            model=["shifted", 0],
            add_noise=True,
            noise_seed=14,
            cfg=5.0,
            positive=["red", 0],
            negative=["blue", 0],
            sampler=["select", 0],
            sigmas=["sigmas", 0],
            latent_image=["empty", 0],
        ),
    }
    core, pool = latents(comfy, change(graph, "core", samples=["custom", 0]))
    assert core.isfinite().all() and relative_error(pool, core) < TOLERANCE


def test_a_cancel_while_comfyuis_sampler_runs(reference: Reference, comfy: Client) -> None:
    def graph(seed: int, steps: int) -> Graph:
        made = pair(reference, sampler_name="euler_ancestral", scheduler="sgm_uniform", seed=seed, steps=steps)
        return {name: made[name] for name in made if name not in ("core", "ksampler", "shifted", "unet")}

    before = saved(comfy, succeeded(comfy, graph(31, 3)).files("pool"))
    prompt = comfy.queue(graph(32, 5000))
    comfy.wait_event(lambda event: event["type"] == "progress" and event["data"]["prompt_id"] == prompt, timeout=60)
    comfy.interrupt()
    assert comfy.wait(prompt, timeout=30).status == "interrupted"
    again = change(graph(31, 3), "sampler", model=["again", 0])
    again["again"] = node("PipeDiTLoader", **again["loader"]["inputs"])  # another node, so nothing is cached
    assert torch.equal(before, saved(comfy, succeeded(comfy, again).files("pool")))
