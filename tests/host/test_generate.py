"""The command `generate`: an mp4 that is whole, a full disk that is named, tiles where memory is too small."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import toy
from torch import Tensor

from comfyui_pipedit import generate
from comfyui_pipedit.errors import InvalidJob, StorageFull
from comfyui_pipedit.host.engine import Engine
from comfyui_pipedit.job import Weights

ROOT = Path(__file__).resolve().parents[2]
TIGHT = str(Path(__file__).with_name("tight_family.py"))
COMMAND = (sys.executable, "-m", "comfyui_pipedit", "generate", "--prompt", "a red circle moving right on black "
           "background", "--devices", "cpu:1", "--steps", "1", "--size", "32x32x5", "--cfg", "1", "--out")


def command(out: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, str(out)], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


def read(path: Path) -> tuple[int, int, int]:
    """(frames, height, width) of a video."""
    import av

    with av.open(str(path)) as container:
        pictures = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    return (len(pictures), *pictures[0].shape[:2])


@pytest.fixture(scope="module")
def picture() -> Tensor:
    """Noise, which does not compress: some 30 KB of mp4."""
    return torch.rand(5, 32, 48, 3, generator=torch.Generator().manual_seed(0))


def test_a_full_disk_is_named_and_the_exit_code_says_so() -> None:
    done = command(Path("/dev/full"))
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("StorageFull: /dev/full could not be written (") and "No space left on device" in last
    assert "Free space or choose another --out" in last and "Traceback" not in done.stderr
    assert os.stat("/dev/full").st_rdev == os.makedev(1, 7), "the device itself is untouched"


def test_a_clip_is_written(tmp_path: Path) -> None:
    done = command(tmp_path / "clip.mp4")
    assert done.returncode == 0, done.stderr
    assert os.listdir(tmp_path) == ["clip.mp4"] and read(tmp_path / "clip.mp4") == (5, 32, 32)


def test_a_file_that_stood_there_survives_a_full_disk(tmp_path: Path, picture: Tensor) -> None:
    path = tmp_path / "clip.mp4"
    path.write_text("an older clip")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(StorageFull, match=r"clip\.mp4 could not be written \([\d,]+ bytes\): File too large"):
            generate.save_video(picture, path, fps=8)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_text() == "an older clip" and os.listdir(tmp_path) == ["clip.mp4"]
    generate.save_video(picture, path, fps=8)
    assert read(path) == (5, 32, 48)


@pytest.mark.parametrize("name", [".", "nowhere/clip.mp4"])
def test_a_place_that_cannot_be_a_file_is_refused_before_anything_is_computed(name: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidJob, match=r"is a folder; name a file in it|does not exist"):
        generate.check_writable(tmp_path / name)


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = Engine(toy.config(preload=(toy.TOY, TIGHT)))
    yield made
    made.close()


def test_tiles_where_a_whole_decode_has_too_little_memory(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    roomy = engine.submit(toy.job())
    generate.follow(roomy)
    expected = generate.decoded(engine, toy.FILES, roomy).result()
    files = replace(toy.FILES, vae=Weights("tight", "vae", ""))
    ticket = engine.submit(replace(toy.job(), decode=files.vae))
    generate.follow(ticket)
    assert torch.equal(generate.decoded(engine, files, ticket).result(), expected)
    assert ticket.frames is not None and ticket.frames.failed()
    assert capsys.readouterr().err == "CPU rank 2 is out of memory: 1.5 GiB short; decoding again, in tiles\n"


@pytest.mark.parametrize(("wrong", "named"), [
    (("--fps", "0"), "--fps 0 is not available here; allowed: 1 or more"),
    (("--steps", "0"), "steps 0 is not available here"),
    (("--shift", "-3"), r"shift -3.0 is not available here; allowed: 0 (the model's own) or more"),
    (("--cfg", "3", "--negative", "a dragon"), "this model does not know 'dragon'"),
    (("--devices", "cpu:99999"), "asks for 99999 CPU ranks; allowed: 1 to 64; nearest: 'cpu:64'"),
    (("--devices", "cpu:0"), "nearest: 'cpu:1'"),
    (("--size", "9999999x99999x99999"), "use a smaller size or fewer frames"),
    (("--model", ""), "--model is empty"),
])
def test_a_wrong_value_is_named_before_anything_starts(wrong: tuple[str, ...], named: str, tmp_path: Path) -> None:
    words = [*COMMAND[3:], str(tmp_path / "clip.mp4"), *wrong]
    done = subprocess.run([*COMMAND[:3], *words], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and named in done.stderr, done.stderr
