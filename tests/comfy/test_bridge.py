"""PipeDiT Model Bridge in real ComfyUI: core's own samplers on a model in the pool give what they give on core's model.

Both run in one graph, on the same weights in their two file forms; relative error as everywhere, max|a - b| / max|b|.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from graphs import LOADER, Graph, change, node
from reference import Reference
from safetensors.torch import save_file
from server import Client, Outcome
from test_pool_parity import DEVICES, TOLERANCE, relative_error, saved

WIDGETS = {"seed": 11, "steps": 4, "cfg": 5.0, "sampler_name": "euler", "scheduler": "simple", "denoise": 1.0}


def models(reference: Reference, width: int = 64, batch: int = 1) -> Graph:
    """ "unet" is core's model, "bridge" ours; texts "red" and "blue", and an "empty" latent."""
    return {
        "unet": node("UNETLoader", unet_name=reference.model_name, weight_dtype="default"),
        "loader": node(
            "PipeDiTLoader",
            **{**LOADER, "unet_name": f"diffusers/{reference.folder_name}", "devices": DEVICES},
        ),
        "bridge": node("PipeDiTModelBridge", model=["loader", 0]),
        "red": node("ProbeConditioning", seed=1, rows=12),
        "blue": node("ProbeConditioning", seed=2, rows=1),
        "empty": node("EmptyHunyuanLatentVideo", width=width, height=32, length=9, batch_size=batch),
    }


def twice(graph: Graph, build: Any) -> Graph:
    """The graph with what `build(model link, prefix)` makes of either model, its latent "PREFIX-latent" saved."""
    for prefix, model in (("core", ["unet", 0]), ("pool", ["bridge", 0])):
        graph |= {f"{prefix}-{name}": made for name, made in build(model, f"{prefix}-").items()}
        graph[prefix] = node("SaveLatent", samples=[f"{prefix}-latent", 0], filename_prefix=prefix)
    return graph


def ksampler(model: list[Any], prefix: str, **widgets: Any) -> Graph:
    shifted = node("ModelSamplingSD3", model=model, shift=8.0)
    given = {"positive": ["red", 0], "negative": ["blue", 0], "latent_image": ["empty", 0], **WIDGETS, **widgets}
    return {"shifted": shifted, "latent": node("KSampler", model=[f"{prefix}shifted", 0], **given)}


def succeeded(client: Client, graph: Graph) -> Outcome:
    outcome = client.run(graph, timeout=120)
    assert outcome.status == "success", outcome.error.get("exception_message")
    return outcome


def error_of(client: Client, outcome: Outcome) -> float:
    core, pool = (saved(client, outcome.files(name)) for name in ("core", "pool"))
    assert core.isfinite().all() and core.shape == pool.shape
    return relative_error(pool, core)


def test_ksampler(reference: Reference, comfy: Client) -> None:
    assert error_of(comfy, succeeded(comfy, twice(models(reference), ksampler))) < TOLERANCE


def custom(guider: str, sampler: str, scheduler: str = "normal") -> Any:
    """Builds SamplerCustomAdvanced."""

    def build(model: list[Any], prefix: str) -> Graph:
        texts = {"positive": ["red", 0], "negative": ["blue", 0], "cfg": 5.0}
        told = texts if guider == "CFGGuider" else {"conditioning": ["red", 0]}
        return {
            "guider": node(guider, model=model, **told),
            "sigmas": node("BasicScheduler", model=model, scheduler=scheduler, steps=4, denoise=1.0),
            "sampler": node("KSamplerSelect", sampler_name=sampler),
            "noise": node("RandomNoise", noise_seed=5),
            "latent": node(
                "SamplerCustomAdvanced",
                noise=[f"{prefix}noise", 0],
                guider=[f"{prefix}guider", 0],
                sampler=[f"{prefix}sampler", 0],
                sigmas=[f"{prefix}sigmas", 0],
                latent_image=["empty", 0],
            ),
        }

    return build


@pytest.mark.parametrize(
    ("guider", "sampler"), [("CFGGuider", "euler"), ("BasicGuider", "dpmpp_2m"), ("CFGGuider", "dpmpp_2m_sde")]
)
def test_sampler_custom_advanced(reference: Reference, comfy: Client, guider: str, sampler: str) -> None:
    """At the shift that either model has by itself: core's Wan is 8, the folder's scheduler says 3."""
    graph = twice(models(reference), custom(guider, sampler))
    graph["shift"] = node("ModelSamplingSD3", model=["unet", 0], shift=3.0)
    for name in ("core-guider", "core-sigmas"):
        graph = change(graph, name, model=["shift", 0])
    assert error_of(comfy, succeeded(comfy, graph)) < TOLERANCE


def test_ksampler_advanced(reference: Reference, comfy: Client) -> None:
    def build(model: list[Any], prefix: str) -> Graph:
        given = {"positive": ["red", 0], "negative": ["blue", 0], "latent_image": ["empty", 0], "cfg": 3.0}
        part = {"steps": 6, "start_at_step": 1, "end_at_step": 4, "return_with_leftover_noise": "enable"}
        chosen = {"add_noise": "enable", "noise_seed": 4, "sampler_name": "uni_pc_bh2", "scheduler": "beta"}
        return {
            "shifted": node("ModelSamplingSD3", model=model, shift=5.0),
            "latent": node("KSamplerAdvanced", model=[f"{prefix}shifted", 0], **given, **part, **chosen),
        }

    assert error_of(comfy, succeeded(comfy, twice(models(reference), build))) < TOLERANCE


def test_two_guidances(reference: Reference, comfy: Client) -> None:
    """DualCFGGuider: three branches of one latent."""

    def build(model: list[Any], prefix: str) -> Graph:
        made = custom("BasicGuider", "euler")(model, prefix)
        scales = {"cfg_conds": 4.0, "cfg_cond2_negative": 2.0, "style": "regular"}
        texts = {"cond1": ["red", 0], "cond2": ["green", 0], "negative": ["blue", 0]}
        guider = node("DualCFGGuider", model=[f"{prefix}shifted", 0], **texts, **scales)
        return made | {"guider": guider, "shifted": node("ModelSamplingSD3", model=model, shift=8.0)}

    graph = models(reference) | {"green": node("ProbeConditioning", seed=3, rows=7)}
    graph = change(twice(graph, build), "pool-sigmas", model=["core-shifted", 0])
    assert error_of(comfy, succeeded(comfy, change(graph, "core-sigmas", model=["core-shifted", 0]))) < TOLERANCE


def test_timesteps_of_another_scale(reference: Reference, comfy: Client) -> None:
    """ModelSamplingAuraFlow tells the network sigma itself, not a thousand times it."""

    def build(model: list[Any], prefix: str) -> Graph:
        return {**ksampler(model, prefix), "shifted": node("ModelSamplingAuraFlow", model=model, shift=1.73)}

    assert error_of(comfy, succeeded(comfy, twice(models(reference), build))) < TOLERANCE


def test_a_step_that_is_skipped(reference: Reference, comfy: Client) -> None:
    """LazyCache wraps the guided estimate, and leaves out calls of the model."""

    def build(model: list[Any], prefix: str) -> Graph:
        cache = node("LazyCache", model=model, reuse_threshold=0.9, start_percent=0.0, end_percent=1.0, verbose=False)
        return {"cached": cache, **ksampler([f"{prefix}cached", 0], prefix, steps=8)}

    outcome = succeeded(comfy, twice(models(reference), build))
    plain = succeeded(comfy, twice(models(reference), lambda model, prefix: ksampler(model, prefix, steps=8)))
    assert error_of(comfy, outcome) < TOLERANCE
    assert relative_error(saved(comfy, outcome.files("pool")), saved(comfy, plain.files("pool"))) > 100 * TOLERANCE


def test_after_comfyui_unloaded_its_models(reference: Reference, comfy: Client) -> None:
    """The bridge has nothing to unload, and works on: with what the cache still holds, and made anew."""
    first = succeeded(comfy, twice(models(reference), ksampler))
    comfy.request("/free", {"unload_models": True})
    second = succeeded(comfy, twice(models(reference), lambda model, prefix: ksampler(model, prefix, seed=12)))
    comfy.request("/free", {"unload_models": True, "free_memory": True})
    third = succeeded(comfy, twice(models(reference), ksampler))
    assert error_of(comfy, second) < TOLERANCE
    assert torch.equal(saved(comfy, first.files("pool")), saved(comfy, third.files("pool")))


def test_a_batch_of_an_odd_size(reference: Reference, comfy: Client) -> None:
    graph = twice(models(reference, width=72, batch=2), ksampler)
    assert error_of(comfy, succeeded(comfy, graph)) < TOLERANCE


def test_sampler_custom(reference: Reference, comfy: Client) -> None:
    def build(model: list[Any], prefix: str) -> Graph:
        return {
            "sigmas": node("KarrasScheduler", steps=4, sigma_max=1.0, sigma_min=0.1, rho=7.0),
            "sampler": node("SamplerEulerAncestral", eta=0.8, s_noise=1.0),
            "latent": node(
                "SamplerCustom",
                model=model,
                add_noise=True,
                noise_seed=3,
                cfg=4.0,
                positive=["red", 0],
                negative=["blue", 0],
                sampler=[f"{prefix}sampler", 0],
                sigmas=[f"{prefix}sigmas", 0],
                latent_image=["empty", 0],
            ),
        }

    assert error_of(comfy, succeeded(comfy, twice(models(reference), build))) < TOLERANCE


def test_patches_of_outputs_work(reference: Reference, comfy: Client) -> None:
    """CFGZeroStar and CFGNorm after each call, RescaleCFG in place of guidance; each changes the result."""
    plain = succeeded(comfy, twice(models(reference), ksampler))
    base = saved(comfy, plain.files("core"))
    for patch, values in (("CFGZeroStar", {}), ("CFGNorm", {"strength": 0.7}), ("RescaleCFG", {"multiplier": 0.7})):

        def build(model: list[Any], prefix: str, patch: str = patch, values: dict[str, Any] = values) -> Graph:
            made = ksampler([f"{prefix}patched", 0], prefix)
            return {"patched": node(patch, model=model, **values), **made}

        outcome = succeeded(comfy, twice(models(reference), build))
        assert error_of(comfy, outcome) < TOLERANCE, patch
        assert relative_error(saved(comfy, outcome.files("pool")), base) > 50 * TOLERANCE, patch


def test_conditionings_that_the_sampler_itself_cuts(reference: Reference, comfy: Client) -> None:
    """Two texts at once, one of them for a part of the steps and one for a part of the picture."""
    graph = models(reference, width=128)
    graph |= {
        "late": node("ConditioningSetTimestepRange", conditioning=["blue", 0], start=0.3, end=1.0),
        "left": node("ConditioningSetArea", conditioning=["late", 0], width=64, height=64, x=64, y=0, strength=0.7),
        "both": node("ConditioningCombine", conditioning_1=["red", 0], conditioning_2=["left", 0]),
    }

    def build(model: list[Any], prefix: str) -> Graph:
        return ksampler(model, prefix, positive=["both", 0])

    assert error_of(comfy, succeeded(comfy, twice(graph, build))) < TOLERANCE


def test_a_masked_latent(reference: Reference, comfy: Client) -> None:
    graph = models(reference)
    graph |= {
        "first": node("KSampler", model=["unet", 0], latent_image=["empty", 0], positive=["red", 0],
                      negative=["blue", 0], **{**WIDGETS, "steps": 1}),
        "half": node("SolidMask", value=1.0, width=4, height=4),
        "mask": node("MaskComposite", destination=["none", 0], source=["half", 0], x=0, y=0, operation="add"),
        "none": node("SolidMask", value=0.0, width=8, height=4),
        "masked": node("SetLatentNoiseMask", samples=["first", 0], mask=["mask", 0]),
    }

    def build(model: list[Any], prefix: str) -> Graph:
        return ksampler(model, prefix, latent_image=["masked", 0])

    assert error_of(comfy, succeeded(comfy, twice(graph, build))) < TOLERANCE


def refusal(client: Client, graph: Graph) -> str:
    outcome = client.run(graph, timeout=120)
    assert outcome.status == "error"
    return str(outcome.error["exception_message"])


ROPE = {"scale_x": 2.0, "shift_x": 0.0, "scale_y": 1.0, "shift_y": 0.0, "scale_t": 1.0, "shift_t": 0.0}


@pytest.mark.parametrize(
    ("patch", "text"),
    [
        (node("ScaleROPE", **ROPE), "rope_options"),
        (node("PerturbedAttentionGuidance", scale=3.0), "patches_replace"),
        (node("EasyCache", reuse_threshold=0.2, start_percent=0.1, end_percent=0.9, verbose=False), "a wrapper of the"),
        (node("TorchCompileModel", backend="inductor"), "diffusion_model, for example to compile it"),
    ],
)
def test_patches_of_the_network_are_refused(reference: Reference, comfy: Client, patch: Any, text: str) -> None:
    graph = models(reference) | {"patched": patch}
    graph |= {f"pool-{name}": made for name, made in ksampler(["patched", 0], "pool-").items()}
    graph = change(graph, "patched", model=["bridge", 0]) | {"save": node("PreviewAny", source=["pool-latent", 0])}
    found = refusal(comfy, graph)
    assert text in found and "PipeDiT Model Bridge" in found and "take the node" in found


def test_a_lora_of_the_pool_is_seen_through_the_bridge(reference: Reference, comfy: Client) -> None:
    loras = reference.models / "loras"
    loras.mkdir(exist_ok=True)
    generator, name = torch.Generator().manual_seed(8), "diffusion_model.blocks.0.ffn.0"
    halves = {f"{name}.lora_up.weight": (512, 4), f"{name}.lora_down.weight": (4, 256)}
    save_file({key: 0.2 * torch.randn(shape, generator=generator) for key, shape in halves.items()},
              loras / "change.safetensors")  # fmt: skip
    chosen = {"lora_name": "change.safetensors", "strength_model": 0.8}
    graph = models(reference)
    graph["core-lora"] = node("LoraLoaderModelOnly", model=["unet", 0], **chosen)
    graph["pool-lora"] = node("PipeDiTLoRA", model=["loader", 0], expert="both", **chosen)
    graph = twice(change(graph, "bridge", model=["pool-lora", 0]), ksampler)
    plain = saved(comfy, succeeded(comfy, graph).files("core"))
    outcome = succeeded(comfy, change(graph, "core-shifted", model=["core-lora", 0]))
    assert error_of(comfy, outcome) < TOLERANCE
    assert relative_error(saved(comfy, outcome.files("pool")), plain) > 100 * TOLERANCE


def test_a_core_lora_is_refused(reference: Reference, comfy: Client) -> None:
    loras = reference.models / "loras"
    loras.mkdir(exist_ok=True)
    save_file({"x.lora_up.weight": torch.zeros(2, 2)}, loras / "any.safetensors")
    graph = models(reference)
    graph["lora"] = node("LoraLoaderModelOnly", model=["bridge", 0], lora_name="any.safetensors", strength_model=1.0)
    found = refusal(comfy, graph | {"save": node("PreviewAny", source=["lora", 0])})
    assert "use PipeDiT LoRA before the bridge" in found


def test_a_text_of_another_encoder_is_named(reference: Reference, comfy: Client) -> None:
    graph = models(reference)
    graph |= {f"pool-{name}": made for name, made in ksampler(["bridge", 0], "pool-").items()}
    graph["control"] = node("ProbeConditioning", seed=1, rows=12, extra="reference_control")
    graph = change(graph, "pool-latent", positive=["control", 0])
    assert "reference_control" in refusal(comfy, graph | {"save": node("PreviewAny", source=["pool-latent", 0])})


def test_a_cancel_in_mid_run_leaves_the_pool_usable(reference: Reference, comfy: Client) -> None:
    def long(seed: int, steps: int) -> Graph:
        made = ksampler(["bridge", 0], "pool-", seed=seed, steps=steps)
        return models(reference) | {f"pool-{name}": part for name, part in made.items()} | {
            "pool": node("SaveLatent", samples=["pool-latent", 0], filename_prefix="pool")
        }

    before = saved(comfy, succeeded(comfy, long(21, 3)).files("pool"))
    prompt = comfy.queue(long(22, 5000))
    comfy.wait_event(
        lambda event: event["type"] == "progress"
        and event["data"]["prompt_id"] == prompt
        and event["data"]["value"] >= 2,
        timeout=60,
    )
    comfy.interrupt()
    assert comfy.wait(prompt, timeout=30).status == "interrupted"
    (pool,) = [status for devices, status in comfy.get("/pipedit/status").items() if devices == "cpu:0,cpu:1"]
    pids = pool["pids"]
    graph = long(21, 3)
    graph["bridge-again"] = node("PipeDiTModelBridge", model=["loader", 0])
    after = saved(comfy, succeeded(comfy, change(graph, "pool-shifted", model=["bridge-again", 0])).files("pool"))
    assert torch.equal(before, after)
    (pool,) = [status for devices, status in comfy.get("/pipedit/status").items() if devices == "cpu:0,cpu:1"]
    assert pool["pids"] == pids and pool["tasks"] == []
