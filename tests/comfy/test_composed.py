"""Combined, averaged, masked and scheduled texts on Multi-GPU Sampler give what they give on core KSampler."""

from __future__ import annotations

from typing import Any

import pytest
from graphs import Graph, node
from reference import Reference
from server import Client
from test_bridge import WIDGETS, models, succeeded
from test_pool_parity import TOLERANCE, relative_error, saved

CASES: dict[str, Graph] = {
    "combined": {"told": node("ConditioningCombine", conditioning_1=["red", 0], conditioning_2=["blue", 0])},
    "averaged": {"told": node("ConditioningAverage", conditioning_to=["red", 0], conditioning_from=["blue", 0],
                              conditioning_to_strength=0.4)},
    "scheduled": {
        "early": node("ConditioningSetTimestepRange", conditioning=["red", 0], start=0.0, end=0.4),
        "late": node("ConditioningSetTimestepRange", conditioning=["blue", 0], start=0.4, end=1.0),
        "told": node("ConditioningCombine", conditioning_1=["early", 0], conditioning_2=["late", 0])},
    "masked": {
        "mask": node("SolidMask", value=0.5, width=64, height=32),
        "told": node("ConditioningSetMask", conditioning=["red", 0], mask=["mask", 0], strength=0.7,
                     set_cond_area="default")},
}


def sampled(kind: str, **inputs: Any) -> Graph:
    given = {"positive": ["told", 0], "negative": ["blue", 0], "latent_image": ["empty", 0], **WIDGETS, **inputs}
    return node(kind, **given)


@pytest.mark.parametrize("name", CASES)
def test_sampler_equals_ksampler(comfy: Client, reference: Reference, name: str) -> None:
    graph = models(reference) | CASES[name]
    graph["shifted"] = node("ModelSamplingSD3", model=["unet", 0], shift=8.0)
    graph["one"] = sampled("KSampler", model=["shifted", 0])
    graph["two"] = sampled("PipeDiTSampler", model=["loader", 0], shift=8.0)
    for prefix, source in (("core", "one"), ("pool", "two")):
        graph[prefix] = node("SaveLatent", samples=[source, 0], filename_prefix=prefix)
    outcome = succeeded(comfy, graph)
    core, pool = (saved(comfy, outcome.files(prefix)) for prefix in ("core", "pool"))
    assert core.std() > 0.1
    assert relative_error(pool, core) < TOLERANCE
