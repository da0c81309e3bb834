"""The demo graph as it is shipped: four prompts become four videos that show what was asked, decode beside denoise."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path
from typing import Any

import av
import PIL.Image
import pytest
import torch
from server import Client

from comfyui_pipedit.demo.judge import judge
from comfyui_pipedit.demo.prompts import JUDGED

GRAPH = Path(__file__).resolve().parents[2] / "workflows" / "api" / "demo.json"
LIMIT = 180.0


@pytest.fixture(scope="module")
def graph() -> dict[str, dict[str, Any]]:
    """The API twin, with a node beside each SaveVideo that saves the frames without loss."""
    found: dict[str, dict[str, Any]] = json.loads(GRAPH.read_text(encoding="utf-8"))
    decodes = [name for name, node in found.items() if node["class_type"] == "PipeDiTVAEDecode"]
    assert len(decodes) == 4
    look = {f"9{name}": {"class_type": "PreviewImage", "inputs": {"images": [name, 0]}} for name in decodes}
    return found | look


def test_four_prompts_become_four_videos(graph: dict[str, dict[str, Any]], comfy: Client) -> None:
    since = time.monotonic()
    outcome = comfy.run(graph, LIMIT)
    assert outcome.status == "success", outcome.error.get("exception_message")
    spans = comfy.get(f"/pipedit/spans?since={since}")
    assert meet(spans, "decode", "denoise"), "no clip was decoded while another was denoised"
    for save in (name for name, node in graph.items() if node["class_type"] == "SaveVideo"):
        (file,) = outcome.files(save)
        assert video_shape(comfy.view(**file)) == (17, 96, 96, 3)
    asked = {prompt.seed: prompt for prompt in JUDGED}
    for name, node in graph.items():
        if node["class_type"] == "PreviewImage":
            prompt = asked[graph[graph[node["inputs"]["images"][0]]["inputs"]["samples"][0]]["inputs"]["seed"]]
            seen = judge(frames(comfy, outcome.files(name)))
            assert (seen.colour, seen.shape, seen.direction) == (prompt.colour, prompt.shape, prompt.direction)


def test_its_prompts_are_among_the_judged(graph: dict[str, dict[str, Any]]) -> None:
    samplers = [node["inputs"] for node in graph.values() if node["class_type"] == "PipeDiTSampler"]
    found = {(graph[inputs["positive"][0]]["inputs"]["text"], inputs["seed"]) for inputs in samplers}
    assert len(found) == 4 and found <= {(prompt.text, prompt.seed) for prompt in JUDGED}


def meet(spans: list[dict[str, Any]], first: str, second: str) -> bool:
    """Whether a span of one kind and one of the other kind, of different clips, are at the same time."""
    kinds = [[span for span in spans if span["name"].startswith(kind)] for kind in (first, second)]
    return any(
        max(one["start"], other["start"]) < min(one["end"], other["end"])
        and one["job"].rsplit("-", 1)[1] != other["job"].rsplit("-", 1)[1]
        for one in kinds[0]
        for other in kinds[1]
    )


def video_shape(content: bytes) -> tuple[int, ...]:
    with av.open(io.BytesIO(content)) as container:
        pictures = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    return (len(pictures), *pictures[0].shape)


def frames(client: Client, files: list[dict[str, Any]]) -> torch.Tensor:
    """[F, H, W, 3] in 0..1."""
    pictures = [PIL.Image.open(io.BytesIO(client.view(**file))).convert("RGB") for file in files]
    values = [torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8) for picture in pictures]
    return torch.stack([value.view(pictures[0].height, pictures[0].width, 3) for value in values]) / 255
