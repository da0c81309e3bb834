"""The workflows of workflows/api as ComfyUI's own templates build them: core nodes alone, from the same files.

Each is a graph in API format whose node "final" samples last. Texts, seeds and sizes are those of the workflow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from graphs import Graph, node

ENDING = ".safetensors"
TEXT = f"umt5_xxl_fp8_e4m3fn_scaled{ENDING}"
VAE_21, VAE_22 = f"wan_2.1_vae{ENDING}", f"wan2.2_vae{ENDING}"
TEXTS: dict[str, Any] = {"positive": ["positive", 0], "negative": ["negative", 0]}


def beginning(workflow: Graph, vae: str) -> Graph:
    """Text encoder, the workflow's two texts, VAE."""
    positive, negative = (entry["inputs"]["text"] for entry in of_kind(workflow, "CLIPTextEncode"))
    return {
        "clip": node("CLIPLoader", clip_name=TEXT, type="wan", device="default"),
        "positive": node("CLIPTextEncode", clip=["clip", 0], text=positive),
        "negative": node("CLIPTextEncode", clip=["clip", 0], text=negative),
        "vae": node("VAELoader", vae_name=vae),
    }


def of_kind(graph: Graph, kind: str) -> list[dict[str, Any]]:
    """Its nodes of a class, in their order."""
    return [entry for entry in graph.values() if entry["class_type"] == kind]


def model(name: str, shift: float, lora: str | None = None, strength: float = 1.0, prefix: str = "") -> Graph:
    """File, LoRA, shift; the node PREFIX + "model" puts the model out."""
    made = {f"{prefix}unet": node("UNETLoader", unet_name=name + ENDING, weight_dtype="default")}
    if lora is not None:
        made[f"{prefix}lora"] = node("LoraLoaderModelOnly", model=[f"{prefix}unet", 0], lora_name=lora + ENDING,
                                     strength_model=strength)
    last = f"{prefix}{'unet' if lora is None else 'lora'}"
    return {**made, f"{prefix}model": node("ModelSamplingSD3", model=[last, 0], shift=shift)}


def one_sampler(steps: int, cfg: float, links: dict[str, Any], latent: list[Any]) -> Graph:
    return {"final": node("KSampler", model=["model", 0], latent_image=latent, seed=42, steps=steps, cfg=cfg,
                          sampler_name="uni_pc", scheduler="simple", denoise=1.0, **links)}


def two_experts(kind: str, version: str, links: dict[str, Any], latent: list[Any]) -> Graph:
    """Two models with a LoRA each, two samplers of two steps."""
    common = {"steps": 4, "cfg": 1.0, "sampler_name": "euler", "scheduler": "simple", **links}
    made: Graph = {}
    for noise in ("high", "low"):
        made |= model(f"wan2.2_{kind}_{noise}_noise_14B_fp8_scaled", 5.0,
                      f"wan2.2_{kind}_lightx2v_4steps_lora_{version}_{noise}_noise", prefix=noise)
    return {**made, "first": node("KSamplerAdvanced", model=["highmodel", 0], latent_image=latent, add_noise="enable",
                                  noise_seed=42, start_at_step=0, end_at_step=2, return_with_leftover_noise="enable",
                                  **common),
            "final": node("KSamplerAdvanced", model=["lowmodel", 0], latent_image=["first", 0], add_noise="disable",
                          noise_seed=0, start_at_step=2, end_at_step=4, return_with_leftover_noise="disable", **common)}


def of_image(**more: Any) -> Graph:
    return {"image": node("LoadImage", image="example.png"),
            "made": node("WanImageToVideo", vae=["vae", 0], start_image=["image", 0], batch_size=1, **TEXTS, **more)}


MADE: dict[str, Any] = {"positive": ["made", 0], "negative": ["made", 1]}


def wan21_t2v(workflow: Graph) -> Graph:
    return {**beginning(workflow, VAE_21), **model("wan2.1_t2v_1.3B_fp16", 8.0),
            "made": node("EmptyHunyuanLatentVideo", width=832, height=480, length=33, batch_size=1),
            **one_sampler(30, 6.0, TEXTS, ["made", 0])}


def wan21_i2v(workflow: Graph) -> Graph:
    return {**beginning(workflow, VAE_21), **model("wan2.1_i2v_480p_14B_fp16", 8.0),
            "vision": node("CLIPVisionLoader", clip_name=f"clip_vision_h{ENDING}"),
            "seen": node("CLIPVisionEncode", clip_vision=["vision", 0], image=["image", 0], crop="none"),
            **of_image(clip_vision_output=["seen", 0], width=512, height=512, length=33),
            **one_sampler(20, 6.0, MADE, ["made", 2])}


def wan21_vace(workflow: Graph) -> Graph:
    size = {"width": 768, "height": 768, "length": 81, "batch_size": 1, "strength": 1.0}
    sampled = one_sampler(4, 1.0, MADE, ["made", 2])["final"]
    return {**beginning(workflow, VAE_21),
            **model("wan2.1_vace_14B_fp16", 8.0, "Wan21_CausVid_14B_T2V_lora_rank32", 0.3),
            "image": node("LoadImage", image="example.png"),
            "made": node("WanVaceToVideo", vae=["vae", 0], reference_image=["image", 0], **size, **TEXTS),
            "sampled": sampled, "final": node("TrimVideoLatent", samples=["sampled", 0], trim_amount=["made", 3])}


def wan22_t2v_14b(workflow: Graph) -> Graph:
    return {**beginning(workflow, VAE_21),
            "made": node("EmptyHunyuanLatentVideo", width=640, height=640, length=81, batch_size=1),
            **two_experts("t2v", "v1.1", TEXTS, ["made", 0])}


def wan22_i2v_14b(workflow: Graph) -> Graph:
    return {**beginning(workflow, VAE_21), **of_image(width=640, height=640, length=81),
            **two_experts("i2v", "v1", MADE, ["made", 2])}


def wan22_ti2v_5b(workflow: Graph) -> Graph:
    size = {"width": 1280, "height": 704, "length": 121, "batch_size": 1}
    return {**beginning(workflow, VAE_22), **model("wan2.2_ti2v_5B_fp16", 8.0),
            "made": node("Wan22ImageToVideoLatent", vae=["vae", 0], **size),
            **one_sampler(20, 5.0, TEXTS, ["made", 0])}


STOCK: dict[str, Callable[[Graph], Graph]] = {
    "wan21_t2v": wan21_t2v, "wan21_i2v": wan21_i2v, "wan21_vace": wan21_vace, "wan22_t2v_14b": wan22_t2v_14b,
    "wan22_t2v_14b_one_sampler": wan22_t2v_14b, "wan22_i2v_14b": wan22_i2v_14b, "wan22_ti2v_5b": wan22_ti2v_5b,
}
"""Workflow -> builder of the same out of core nodes."""
