"""Models outside of ComfyUI's folder, in a place with a space and an umlaut, and another HOME (trial case B42).

Clips of lengths and sizes that do not fit the model's steps (B8, B9).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny_wan
from graphs import LOADER, change, clip_graph, node
from server import Client, ComfyServer
from test_served import frames as frames_of
from test_served import run


@pytest.fixture(scope="module")
def elsewhere(
    comfy_folder: Path, repository: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ComfyServer]:
    """ComfyUI whose only models lie where extra_model_paths.yaml points."""
    base = tmp_path_factory.mktemp("plain")
    models = tmp_path_factory.mktemp("far away") / "Modelle für Wan"
    tiny_wan.use_worker_site()
    tiny_wan.write_model(models / "diffusers" / "winzig")
    paths = base / "extra.yaml"
    paths.write_text(f"far:\n  base_path: {models}\n  diffusers: diffusers\n", encoding="utf-8")
    home = tmp_path_factory.mktemp("home")
    with ComfyServer.start(
        comfy_folder, base, packs=[repository], arguments=["--extra-model-paths-config", str(paths)],
        environment={"HOME": str(home), "XDG_CACHE_HOME": str(home / "cache")},
    ) as server:
        yield server


@pytest.fixture
def client(elsewhere: ComfyServer) -> Iterator[Client]:
    with elsewhere.client() as made:
        yield made


def test_a_model_in_a_place_with_a_space_and_an_umlaut(client: Client) -> None:
    names = client.object_info("PipeDiTLoader")["input"]["required"]["unet_name"][1]["options"]
    assert "diffusers/winzig" in names
    run(client, clip_graph(model="diffusers/winzig", text="a red circle", steps=1, cfg=1.0))


@pytest.mark.parametrize(
    ("length", "frames"), [(1, 1), (2, 1), (4, 1), (5, 5), (16, 13), (17, 17), (18, 17)]
)
def test_a_clip_has_as_many_frames_as_core_gives_it(client: Client, length: int, frames: int) -> None:
    """Core's empty latent rounds a length down to 4k + 1, and as many frames come out."""
    graph = clip_graph(model="diffusers/winzig", text="a red circle", steps=1, cfg=1.0, length=length, seed=length)
    assert frames_of(client, run(client, graph)).shape == (frames, 64, 64, 3)


@pytest.mark.parametrize(("width", "height"), [(72, 56), (80, 40)])
def test_a_size_that_the_patch_does_not_divide(client: Client, width: int, height: int) -> None:
    """Latents of 9 x 7 and 10 x 5 cells under a patch of 2 are padded and cropped as core does."""
    graph = clip_graph(model="diffusers/winzig", text="a red circle", steps=1, cfg=1.0, width=width, height=height)
    graph = change(graph, "1", **{**LOADER, "unet_name": "diffusers/winzig", "devices": "cpu:2"})
    graph["4"] = node("EmptyHunyuanLatentVideo", width=width, height=height, length=5, batch_size=1)
    assert frames_of(client, run(client, graph)).shape == (5, height, width, 3)
