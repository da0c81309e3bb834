"""The nodes as they are frozen since 0.1.0: ids, inputs, order, types, defaults. Append here, change nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from server import Client

TILES = {"min": 64, "max": 4096, "step": 32}
FROZEN: dict[str, dict[str, Any]] = {
    "PipeDiTLoader": {
        "display_name": "PipeDiT Loader",
        "outputs": [("model", "PIPEDIT_MODEL"), ("clip", "CLIP"), ("vae", "VAE")],
        "required": [
            ("unet_name", "COMBO", {"default": "demo"}),
            ("unet_name_low", "COMBO", {"default": "none"}),
            (
                "weight_dtype",
                "COMBO",
                {
                    "default": "default",
                    "options": ["default", "fp8_e4m3fn", "fp8_e4m3fn_fast", "fp8_e5m2", "bf16", "fp16", "fp32"],
                },
            ),
            ("clip_name1", "COMBO", {"default": "auto"}),
            ("clip_name2", "COMBO", {"default": "none"}),
            ("vae_name", "COMBO", {"default": "auto"}),
            ("devices", "STRING", {"default": "auto"}),
        ],
        "optional": [],
    },
    "PipeDiTLoRA": {
        "display_name": "PipeDiT LoRA",
        "outputs": [("model", "PIPEDIT_MODEL")],
        "required": [
            ("model", "PIPEDIT_MODEL", {}),
            ("lora_name", "COMBO", {}),
            ("strength_model", "FLOAT", {"default": 1.0, "min": -100.0, "max": 100.0, "step": 0.01}),
            ("expert", "COMBO", {"default": "both", "options": ["both", "high", "low"]}),
        ],
        "optional": [],
    },
    "PipeDiTSampler": {
        "display_name": "Multi-GPU Sampler",
        "outputs": [("LATENT", "LATENT")],
        "required": [
            ("model", "PIPEDIT_MODEL", {}),
            ("positive", "CONDITIONING", {}),
            ("latent_image", "LATENT", {}),
            ("seed", "INT", {"default": 0, "min": 0, "max": 2**64 - 1, "control_after_generate": True}),
            ("steps", "INT", {"default": 20, "min": 1}),
            ("cfg", "FLOAT", {"default": 5.0, "min": 0.0, "max": 100.0, "step": 0.1}),
            ("sampler_name", "COMBO", {"default": "euler"}),
            ("scheduler", "COMBO", {"default": "simple"}),
            ("denoise", "FLOAT", {"default": 1.0, "min": 0.0, "max": 1.0}),
        ],
        "optional": [
            ("negative", "CONDITIONING", {"lazy": True}),
            ("sigmas", "SIGMAS", {}),
            ("plan", "PIPEDIT_PLAN", {}),
            ("shift", "FLOAT", {"default": 0.0}),
            ("switch_step", "INT", {"default": -1}),
        ],
    },
    "PipeDiTSamplerAdvanced": {
        "display_name": "Multi-GPU Sampler (Advanced)",
        "outputs": [("LATENT", "LATENT")],
        "required": [
            ("model", "PIPEDIT_MODEL", {}),
            ("positive", "CONDITIONING", {}),
            ("latent_image", "LATENT", {}),
            ("add_noise", "COMBO", {"default": "enable", "options": ["enable", "disable"]}),
            ("noise_seed", "INT", {"default": 0, "min": 0, "max": 2**64 - 1, "control_after_generate": True}),
            ("steps", "INT", {"default": 20, "min": 1}),
            ("cfg", "FLOAT", {"default": 5.0, "min": 0.0, "max": 100.0, "step": 0.1}),
            ("sampler_name", "COMBO", {"default": "euler"}),
            ("scheduler", "COMBO", {"default": "simple"}),
            ("start_at_step", "INT", {"default": 0, "min": 0, "max": 10000}),
            ("end_at_step", "INT", {"default": 10000, "min": 0, "max": 10000}),
            ("return_with_leftover_noise", "COMBO", {"default": "disable", "options": ["disable", "enable"]}),
        ],
        "optional": [
            ("negative", "CONDITIONING", {"lazy": True}),
            ("sigmas", "SIGMAS", {}),
            ("plan", "PIPEDIT_PLAN", {}),
            ("shift", "FLOAT", {"default": 0.0}),
        ],
    },
    "PipeDiTModelBridge": {
        "display_name": "PipeDiT Model Bridge",
        "outputs": [("MODEL", "MODEL")],
        "required": [("model", "PIPEDIT_MODEL", {})],
        "optional": [],
    },
    "PipeDiTVAEDecode": {
        "display_name": "Decoupled VAE Decode",
        "outputs": [("IMAGE", "IMAGE")],
        "required": [
            ("samples", "LATENT", {}),
            ("vae", "VAE", {}),
            ("tiling", "COMBO", {"default": "auto", "options": ["auto", "off", "on"]}),
            ("tile_size", "INT", {"default": 512, **TILES}),
            ("overlap", "INT", {"default": 64, **TILES, "min": 0}),
            ("temporal_size", "INT", {"default": 64, "min": 8}),
            ("temporal_overlap", "INT", {"default": 8, "min": 4}),
        ],
        "optional": [("plan", "PIPEDIT_PLAN", {})],
    },
}


@pytest.mark.parametrize("name", sorted(FROZEN))
def test_node_is_as_frozen(name: str, comfy: Client) -> None:
    info, frozen = comfy.object_info(name), FROZEN[name]
    assert info["display_name"] == frozen["display_name"]
    assert list(zip(info["output_name"], info["output"], strict=True)) == frozen["outputs"]
    for group in ("required", "optional"):
        assert info["input_order"].get(group, [])[: len(frozen[group])] == [entry[0] for entry in frozen[group]]
        for input_name, kind, options in frozen[group]:
            found_kind, found = info["input"][group][input_name]
            assert found_kind == kind and {key: found.get(key) for key in options} == options, input_name
    assert len(info["input_order"].get("required", [])) == len(frozen["required"]), "no new required input, ever"


@pytest.mark.parametrize("node", ["PipeDiTSampler", "PipeDiTSamplerAdvanced"])
@pytest.mark.parametrize("name", ["sampler_name", "scheduler"])
def test_lists_are_comfyuis_own(node: str, name: str, comfy: Client) -> None:
    sampler, ksampler = comfy.object_info(node), comfy.object_info("KSampler")
    assert sampler["input"]["required"][name][1]["options"] == ksampler["input"]["required"][name][0]


@pytest.mark.parametrize("name", ["PipeDiTPlan"])
def test_nodes_of_later_versions_are_not_registered(name: str, comfy: Client) -> None:
    with pytest.raises(KeyError):
        comfy.object_info(name)


@pytest.mark.parametrize("name", sorted(FROZEN))
def test_everything_has_a_tooltip_and_help(name: str, comfy: Client) -> None:
    info = comfy.object_info(name)
    inputs = info["input"].get("required", {}) | info["input"].get("optional", {})
    assert (
        info["description"]
        and all(options["tooltip"] for _, options in inputs.values())
        and all(info["output_tooltips"])
    )


@pytest.mark.parametrize("name", sorted(FROZEN))
def test_help_page_is_served_where_the_editor_looks(name: str, comfy: Client, repository: Path) -> None:
    page = comfy.request(f"/extensions/pack-{repository.name}/docs/{name}.md").decode()
    assert page.startswith(f"# {FROZEN[name]['display_name']}\n")
    assert not [entry[0] for group in ("required", "optional") for entry in FROZEN[name][group] if entry[0] not in page]


def test_translations_name_every_input(comfy: Client) -> None:
    defs = comfy.get("/i18n")["zh"]["nodeDefs"]
    for name in FROZEN:
        assert set(defs[name]["inputs"]) == {
            entry[0] for group in ("required", "optional") for entry in FROZEN[name][group]
        }
