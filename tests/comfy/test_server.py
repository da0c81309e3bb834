"""The bed itself: a graph of core nodes runs in real ComfyUI and its latent comes back bit by bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch
from server import Client, ComfyServer, Rejected

EMPTY = {"class_type": "EmptyHunyuanLatentVideo", "inputs": {"width": 64, "height": 32, "length": 5, "batch_size": 1}}
SAVE = {"class_type": "SaveLatent", "inputs": {"samples": ["1", 0], "filename_prefix": "bed"}}


def test_core_graph_runs(comfy: Client) -> None:
    outcome = comfy.run({"1": EMPTY, "2": SAVE}, timeout=60)
    assert outcome.status == "success"
    (file,) = outcome.files("2")
    latent = safetensors.torch.load(comfy.view(**file))["latent_tensor"]
    assert latent.shape == (1, 16, 2, 4, 8) and not torch.count_nonzero(latent)


def test_probe_nodes_are_there(comfy: Client) -> None:
    assert comfy.object_info("ProbeConditioning")["output"] == ["CONDITIONING"]


def test_bad_graph_is_rejected_with_its_node(comfy: Client) -> None:
    with pytest.raises(Rejected) as caught:
        comfy.queue({"1": {**EMPTY, "inputs": {**EMPTY["inputs"], "width": -8}}, "2": SAVE})
    assert list(caught.value.node_errors) == ["1"]


def test_server_ends_when_whoever_started_it_is_gone(comfy_folder: Path, tmp_path: Path) -> None:
    server = ComfyServer.start(comfy_folder, tmp_path, packs=[])
    assert server.process.stdin is not None
    server.process.stdin.close()  # what the kernel does for a process that was killed
    try:
        assert server.ended.wait(20)
    finally:
        server.stop()
