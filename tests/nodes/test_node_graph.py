"""When the pool may decode by itself: read from the prompt alone."""

from __future__ import annotations

from typing import Any

import pytest

from nodes.graph import direct_decode, link

WIDGETS = {"tiling": "auto", "tile_size": 512, "overlap": 64, "temporal_size": 64, "temporal_overlap": 8}


def prompt(**decode: Any) -> dict[str, dict[str, Any]]:
    return {
        "1": {"class_type": "PipeDiTLoader", "inputs": {}},
        "5": {"class_type": "PipeDiTSampler", "inputs": {"model": ["1", 0]}},
        "6": {"class_type": "PipeDiTVAEDecode", "inputs": {"samples": ["5", 0], "vae": ["1", 2], **WIDGETS, **decode}},
        "7": {"class_type": "PreviewImage", "inputs": {"images": ["6", 0]}},
    }


def test_a_direct_decode_is_found_with_its_widgets() -> None:
    assert direct_decode(prompt(), "5") == WIDGETS


@pytest.mark.parametrize(
    "decode",
    [
        {"samples": ["9", 0]},
        {"vae": ["9", 2]},
        {"vae": ["1", 1]},
        {"tile_size": ["9", 0]},
        {"plan": ["9", 0]},
        {"overlap": None},
    ],
)
def test_any_other_link_is_not_direct(decode: dict[str, Any]) -> None:
    assert direct_decode(prompt(**decode), "5") is None


def test_frames_that_nobody_uses_are_not_decoded() -> None:
    graph = prompt()
    del graph["7"]
    assert direct_decode(graph, "5") is None


def test_the_model_must_come_from_a_loader() -> None:
    graph = prompt()
    graph["1"]["class_type"] = "PipeDiTLoRA"
    assert direct_decode(graph, "5") is None
    assert direct_decode(prompt(), "no such node") is None


@pytest.mark.parametrize("value", [3, "1", None, ["1"], [1, "0"], {"__value__": [1, 0]}])
def test_constants_are_no_links(value: Any) -> None:
    assert link(value) is None
