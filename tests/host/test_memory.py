"""One copy of the weights in memory, whatever the number of ranks: the page cache's, or one converted copy."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_wan
import wan_files

SCRIPT = Path(__file__).with_name("memory_ranks.py")
MIB = 2**20
BIG = {"ffn_dim": 8192, "num_layers": 8}
SLACK = 8 * MIB
"""Buffers, position tables and Python objects of one rank; far less than the model."""


@pytest.fixture(scope="module", params=["float32", "float16"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """(stored dtype, folder) of a model whose transformer has 8 M values."""
    import torch

    tiny_wan.use_worker_site()
    root = tiny_wan.write_model(tmp_path_factory.mktemp("model") / "big")
    tiny_wan.transformer(**BIG).to(getattr(torch, request.param)).save_pretrained(root / "transformer")
    return request.param, root


@pytest.fixture(scope="module")
def fp8_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A single file in scaled fp8 with 17 M values."""
    tiny_wan.use_worker_site()
    state = wan_files.original_transformer(wan_files.transformer("t2v", ffn_dim=16384, num_layers=8))
    return wan_files.write(tmp_path_factory.mktemp("fp8") / "wan.safetensors", state, wan_files.scaled_fp8())


def measure(folder: Path, *ranks: int) -> list[dict[str, int]]:
    """What memory_ranks.py reports for each number of ranks."""
    command = [sys.executable, str(SCRIPT), str(folder), *map(str, ranks)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    reports = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [report["finite"] for report in reports] == list(ranks)
    return reports


def test_four_ranks_hold_one_copy(model: tuple[str, Path]) -> None:
    dtype, folder = model
    stored = sum(file.stat().st_size for file in (folder / "transformer").glob("*.safetensors"))
    assert stored > 16 * MIB
    one, four = measure(folder, 1, 4)
    held, copy = ("file", stored) if dtype == "float32" else ("buffer", 2 * stored)
    for report, ranks in ((one, 1), (four, 4)):
        assert report[held] == pytest.approx(copy, rel=0.05), "every weight is held, and once"
        assert report["anonymous"] < ranks * SLACK, "no rank has a copy of its own"
    if dtype == "float16":
        assert one["file"] <= stored * 1.05 and four["file"] <= stored * 1.05


def test_what_is_kept_in_fp8_is_in_memory_once_and_in_no_other_dtype(fp8_file: Path) -> None:
    stored = fp8_file.stat().st_size
    assert stored > 16 * MIB
    for report, ranks in zip(measure(fp8_file, 1, 4), (1, 4), strict=True):
        assert report["file"] == pytest.approx(stored, rel=0.05), "every weight is held, and once"
        assert report["buffer"] < stored / 10, "norms, biases and what is outside of the blocks"
        assert report["anonymous"] < ranks * SLACK, "no rank has a copy of its own"
