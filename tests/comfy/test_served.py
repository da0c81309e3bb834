"""The whole way in real ComfyUI: a graph goes in over POST /prompt, the pool's processes make the clip."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import PIL.Image
import pytest
import safetensors.torch
import torch
from graphs import Graph, clip_graph
from server import Client, ComfyServer, Outcome

LIMIT = 120.0
MODEL = "diffusers/tiny"
TEXT = "a red circle moving right"


@pytest.fixture(scope="module")
def pool_server(
    comfy_folder: Path, repository: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ComfyServer]:
    base = tmp_path_factory.mktemp("pool")
    (base / "models" / "diffusers").mkdir(parents=True)
    sys.path.append(str(repository / "tests"))
    import tiny_wan

    tiny_wan.use_worker_site()
    tiny_wan.write_model(base / "models" / "diffusers" / "tiny")
    with ComfyServer.start(comfy_folder, base, packs=[repository]) as server:
        yield server


@pytest.fixture
def served(pool_server: ComfyServer) -> Iterator[Client]:
    with pool_server.client() as client:
        yield client


def tiny(**changes: Any) -> Graph:
    return clip_graph(**{"model": MODEL, "text": TEXT, **changes})


def run(client: Client, graph: Graph) -> Outcome:
    outcome = client.run(graph, LIMIT)
    assert outcome.status == "success", f"{outcome.error.get('node_type')}: {outcome.error.get('exception_message')}"
    return outcome


def latent(client: Client, outcome: Outcome, name: str = "8") -> torch.Tensor:
    (file,) = outcome.files(name)
    return safetensors.torch.load(client.view(**file))["latent_tensor"]


def frames(client: Client, outcome: Outcome, name: str = "7") -> torch.Tensor:
    """[F, H, W, 3] of 8-bit frames that PreviewImage saved."""
    images = [PIL.Image.open(io.BytesIO(client.view(**file))).convert("RGB") for file in outcome.files(name)]
    return torch.stack(
        [
            torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(image.height, image.width, 3)
            for image in images
        ]
    )


def test_a_clip(served: Client) -> None:
    outcome = run(served, tiny(seed=1))
    assert latent(served, outcome).shape == (1, 16, 3, 8, 8)
    clip = frames(served, outcome)
    assert clip.shape == (9, 64, 64, 3) and clip.float().std() > 5, "not one grey picture"
