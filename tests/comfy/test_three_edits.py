"""Each workflow of workflows/api against the same graph of core nodes, in real ComfyUI, on the same files under their
official names: the latents are equal. Only sizes and steps beyond 6 are cut; the rest runs as it is shipped."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import official_files
import pytest
import safetensors.torch
import tiny_wan
from graphs import Graph, change, node
from server import Client, ComfyServer, Outcome
from stock import STOCK
from torch import Tensor

WORKFLOWS = Path(__file__).resolve().parents[2] / "workflows" / "api"
LIMIT, TOLERANCE = 180.0, 1e-4
SMALL, MOST_STEPS = {"width": 64, "height": 96, "length": 9}, 6
OURS = {"PipeDiTLoader", "PipeDiTLoRA", "PipeDiTSampler", "PipeDiTSamplerAdvanced", "PipeDiTVAEDecode"}
SWAPPED = {"UNETLoader", "CLIPLoader", "VAELoader", "LoraLoaderModelOnly", "ModelSamplingSD3", "KSampler",
           "KSamplerAdvanced"}
AFTER_THE_LATENT = {"CreateVideo", "SaveVideo"}


@pytest.fixture(scope="module")
def wan_server(comfy_folder: Path, repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComfyServer]:
    """ComfyUI with tiny weights under the official names, and an image."""
    base = tmp_path_factory.mktemp("official")
    tiny_wan.use_worker_site()
    official_files.write(base / "models")
    official_files.write_image(base / "input" / "example.png")
    with ComfyServer.start(comfy_folder, base, packs=[repository, official_files.TINY_PACK]) as server:
        yield server


@pytest.fixture
def wan(wan_server: ComfyServer) -> Iterator[Client]:
    with wan_server.client() as client:
        yield client


def workflow(name: str) -> Graph:
    found: Graph = json.loads((WORKFLOWS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def small(graph: Graph) -> Graph:
    """The graph with every size and number of steps cut."""
    for name, entry in graph.items():
        given = entry["inputs"]
        cut = {**SMALL, "steps": min(given.get("steps", 0), MOST_STEPS)}
        graph = change(graph, name, **{key: value for key, value in cut.items() if key in given})
    return graph


def sampled(graph: Graph) -> list[Any]:
    """The link that carries the finished latent into the decode."""
    (decode,) = (entry for entry in graph.values() if entry["class_type"] == "PipeDiTVAEDecode")
    link: list[Any] = decode["inputs"]["samples"]
    return link


def run(client: Client, graph: Graph, latent: list[Any]) -> tuple[Outcome, Tensor]:
    """How it ended, and the latent behind a link."""
    saved = {**small(graph), "saved": node("SaveLatent", samples=latent, filename_prefix="latent")}
    outcome = client.run(saved, LIMIT)
    assert outcome.status == "success", f"{outcome.error.get('node_type')}: {outcome.error.get('exception_message')}"
    content = client.view(**outcome.files("saved")[0])
    return outcome, safetensors.torch.load(content)["latent_tensor"]


def worst(ours: Tensor, core: Tensor) -> float:
    """max|a - b| / max|b|."""
    assert ours.shape == core.shape
    return float((ours - core).abs().max() / core.abs().max())


def kinds(graph: Graph) -> Counter[str]:
    """How many nodes of each class."""
    return Counter(entry["class_type"] for entry in graph.values())


def test_every_wan_workflow_has_its_stock_graph() -> None:
    assert sorted(STOCK) == sorted(path.stem for path in WORKFLOWS.glob("wan*.json"))


@pytest.mark.parametrize("name", STOCK)
def test_nothing_but_the_swapped_nodes_differs(name: str) -> None:
    ours, core = kinds(workflow(name)), kinds(STOCK[name](workflow(name)))
    kept = {kind: count for kind, count in ours.items() if kind not in OURS | AFTER_THE_LATENT}
    assert kept == {kind: count for kind, count in core.items() if kind not in SWAPPED}
    assert kept.keys().isdisjoint(SWAPPED) and core.keys().isdisjoint(OURS)


@pytest.mark.parametrize("name", STOCK)
def test_a_workflow_gives_what_core_nodes_give(wan: Client, name: str) -> None:
    ours = workflow(name)
    outcome, latent = run(wan, ours, sampled(ours))
    _, core = run(wan, STOCK[name](ours), ["final", 0])
    assert core.std() > 0.1
    assert worst(latent, core) < TOLERANCE
    (video,) = (key for key, entry in ours.items() if entry["class_type"] == "SaveVideo")
    assert outcome.files(video)[0]["filename"].endswith(".mp4")


@pytest.mark.parametrize(("name", "kind", "wrong"), [
    ("wan22_t2v_14b", "PipeDiTSamplerAdvanced", {"shift": 8.0}),
    ("wan22_t2v_14b", "PipeDiTLoRA", {"strength_model": 0.8}),
    ("wan22_t2v_14b_one_sampler", "PipeDiTSampler", {"switch_step": 1}),
    ("wan22_t2v_14b_one_sampler", "PipeDiTLoRA", {"expert": "high"}),
])
def test_a_wrong_value_is_seen(wan: Client, name: str, kind: str, wrong: dict[str, Any]) -> None:
    ours = workflow(name)
    other = change(ours, [key for key, entry in ours.items() if entry["class_type"] == kind][-1], **wrong)
    assert worst(run(wan, other, sampled(ours))[1], run(wan, ours, sampled(ours))[1]) > 100 * TOLERANCE
