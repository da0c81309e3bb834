"""No room for a buffer of the host ends that request with the numbers, and the pool works on once there is room."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("full_script.py")


@pytest.fixture(scope="module")
def report() -> dict[str, object]:
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize(("request_", "name"), [("clip", "kept latent"), ("decode", "latent"), ("encode", "frames")])
def test_a_buffer_without_room_is_named(report: dict[str, dict[str, str]], request_: str, name: str) -> None:
    text = report["errors"][request_]
    assert text.startswith(f"StorageFull: no room for the buffer '{name}': ")
    assert "File too large" in text and "raise the limit on file sizes" in text


def test_the_pool_works_on(report: dict[str, object]) -> None:
    assert report["text"] == "", "a request that needs no buffer of the host runs meanwhile"
    assert report["again"] == {"clip": "", "decode": "", "encode": ""}
    assert report["same clip"] and report["same ranks"]
