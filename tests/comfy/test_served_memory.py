"""Where a whole decode or encode has too little memory: an encode and `tiling` auto take tiles, off says so."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from graphs import Graph, change, node
from server import Client, ComfyServer
from test_served import LIMIT, frames, latent, run, tiny

TIGHT = Path(__file__).with_name("tight_wan.py")
TILES = {"tile_size": 64, "overlap": 16, "temporal_size": 8, "temporal_overlap": 4}
SHORT = "CPU rank 2 is out of memory: 1.5 GiB short"


@pytest.fixture(scope="module")
def tight_server(
    comfy_folder: Path, repository: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ComfyServer]:
    """ComfyUI with a pool whose Wan can neither decode nor encode a clip whole."""
    import tiny_wan

    base = tmp_path_factory.mktemp("tight")
    tiny_wan.use_worker_site()
    tiny_wan.write_model(base / "models" / "diffusers" / "tiny")
    config = base / "pipedit.yaml"
    config.write_text(json.dumps({"preload": [str(TIGHT)]}))
    environment = {"PIPEDIT_CONFIG": str(config)}
    with ComfyServer.start(comfy_folder, base, packs=[repository], environment=environment) as server:
        yield server


@pytest.fixture
def tight(tight_server: ComfyServer) -> Iterator[Client]:
    with tight_server.client() as client:
        yield client


def graph(tiling: str, seed: int) -> Graph:
    return change(tiny(seed=seed, width=96, height=96), "6", tiling=tiling, **TILES)


def test_auto_falls_back_to_tiles(tight: Client, tight_server: ComfyServer) -> None:
    """The Decode is linked to the Sampler, so the pool has tried the whole decode by itself before the node does."""
    automatic = run(tight, graph("auto", seed=1))
    tiled = run(tight, graph("on", seed=1))
    assert torch.equal(frames(tight, automatic), frames(tight, tiled))
    assert frames(tight, tiled).shape == (9, 96, 96, 3)
    line = tight_server.wait_log("decoding again, in tiles", LIMIT)
    assert SHORT in line and "Decoupled VAE Decode" in line


def test_off_is_an_error_that_keeps_the_latent_and_the_pool_works_on(tight: Client) -> None:
    outcome = tight.run(graph("off", seed=2), LIMIT)
    assert outcome.error["node_type"] == "PipeDiTVAEDecode"
    assert outcome.error["exception_type"].endswith("OutOfMemory")
    message = outcome.error["exception_message"]
    assert message.startswith(f"Decoupled VAE Decode: {SHORT}") and "The latent is in " in message
    again = run(tight, graph("on", seed=2))
    assert latent(tight, again).isfinite().all() and frames(tight, again).float().std() > 5


def test_core_vae_encode_falls_back_to_cores_tiles(tight: Client, tight_server: ComfyServer) -> None:
    made = {"1": tiny(seed=3)["1"], "9": node("EmptyImage", width=264, height=264, batch_size=5, color=0x204060)}
    tiles = {"tile_size": 256, "overlap": 64, "temporal_size": 4096, "temporal_overlap": 4}
    for kind, options in (("VAEEncode", {}), ("VAEEncodeTiled", tiles)):
        made[kind] = node(kind, pixels=["9", 0], vae=["1", 2], **options)
        made[f"{kind}-8"] = node("SaveLatent", samples=[kind, 0], filename_prefix=kind)
    outcome = run(tight, made)
    fallen, tiled = (latent(tight, outcome, f"{kind}-8") for kind in ("VAEEncode", "VAEEncodeTiled"))
    assert torch.equal(fallen, tiled) and tiled.shape == (1, 16, 2, 33, 33)
    assert SHORT in tight_server.wait_log("encoding again, in tiles", LIMIT)
