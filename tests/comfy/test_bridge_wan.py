"""Image to video, VACE, TI2V and masks through PipeDiT Model Bridge and ComfyUI's samplers, against core's model."""

from __future__ import annotations

from typing import Any

import pytest
from graphs import Graph, node
from server import Client
from test_wan_nodes import CASES, SHIFT, TOLERANCE, graph, run, wan, wan_server, worst  # noqa: F401


def over_the_bridge(variant: str, build: Any, sampler: str) -> Graph:
    """The graph of a variant with KSampler on the bridge in place of Multi-GPU Sampler."""
    made = graph(variant, build, True)
    made["core-sampler"]["inputs"]["sampler_name"] = sampler
    links = {name: value for name, value in made["pool-sampler"]["inputs"].items() if name not in ("model", "shift")}
    made["bridge"] = node("PipeDiTModelBridge", model=["loader", 0])
    made["pool-shifted"] = node("ModelSamplingSD3", model=["bridge", 0], shift=SHIFT)
    made["pool-sampler"] = node("KSampler", model=["pool-shifted", 0], **{**links, "sampler_name": sampler})
    return made


@pytest.mark.parametrize("name", [name for name, (_, _, sample) in CASES.items() if sample])
def test_what_a_conditioning_carries_crosses_the_bridge(wan: Client, name: str) -> None:  # noqa: F811
    variant, build, _ = CASES[name]
    found = run(wan, over_the_bridge(variant, build, "euler"))
    assert worst(found["pool-clip"], found["core-clip"]) < TOLERANCE
    assert found["core-clip"]["latent.samples"].std() > 0.1


@pytest.mark.parametrize("name", ["image-2.1", "ti2v", "mask"])
def test_comfyuis_sampler_in_multi_gpu_sampler(wan: Client, name: str) -> None:  # noqa: F811
    variant, build, _ = CASES[name]
    made = graph(variant, build, True)
    for side in ("core", "pool"):
        made[f"{side}-sampler"]["inputs"]["sampler_name"] = "ddim"
    found = run(wan, made)
    assert worst(found["pool-clip"], found["core-clip"]) < TOLERANCE
