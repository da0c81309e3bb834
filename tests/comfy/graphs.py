"""Graphs in API format, built for tests."""

from __future__ import annotations

from typing import Any

Graph = dict[str, dict[str, Any]]
LOADER = {
    "unet_name": "demo",
    "unet_name_low": "none",
    "weight_dtype": "default",
    "clip_name1": "auto",
    "clip_name2": "none",
    "vae_name": "auto",
    "devices": "cpu:3",
}
SAMPLER = {"seed": 7, "steps": 4, "cfg": 5.0, "sampler_name": "euler", "scheduler": "simple", "denoise": 1.0}
DECODE = {"tiling": "auto", "tile_size": 512, "overlap": 64, "temporal_size": 64, "temporal_overlap": 8}


def node(kind: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": kind, "inputs": inputs}


def clip_graph(
    text: str = "a red circle moving right",
    negative: str | None = "",
    model: str = "demo",
    width: int = 64,
    height: int = 64,
    length: int = 9,
    batch: int = 1,
    loader: dict[str, Any] | None = None,
    **sampler: Any,
) -> Graph:
    """Loader (1), texts (2, 3), empty latent (4), Sampler (5), Decode (6), PreviewImage (7), SaveLatent (8)."""
    graph = {
        "1": node("PipeDiTLoader", **{**LOADER, "unet_name": model, **(loader or {})}),
        "2": node("CLIPTextEncode", clip=["1", 1], text=text),
        "4": node("EmptyHunyuanLatentVideo", width=width, height=height, length=length, batch_size=batch),
        "5": node("PipeDiTSampler", model=["1", 0], positive=["2", 0], latent_image=["4", 0], **{**SAMPLER, **sampler}),
        "6": node("PipeDiTVAEDecode", samples=["5", 0], vae=["1", 2], **DECODE),
        "7": node("PreviewImage", images=["6", 0]),
        "8": node("SaveLatent", samples=["5", 0], filename_prefix="test"),
    }
    if negative is not None:
        graph["3"] = node("CLIPTextEncode", clip=["1", 1], text=negative)
        graph["5"]["inputs"]["negative"] = ["3", 0]
    return graph


def change(graph: Graph, name: str, **inputs: Any) -> Graph:
    """The graph with other inputs of one node; a value of ... removes the input."""
    merged = {**graph[name]["inputs"], **inputs}
    return {**graph, name: {**graph[name], "inputs": {key: value for key, value in merged.items() if value is not ...}}}


def without(graph: Graph, *names: str) -> Graph:
    return {key: value for key, value in graph.items() if key not in names}
