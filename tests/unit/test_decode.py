"""A decode on a rank: frames land in the shared buffer piece by piece; wrong latents and wrong leases are refused."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny_wan
import torch
from torch import Tensor

from comfyui_pipedit import loaders, models
from comfyui_pipedit.errors import InvalidJob, OutOfStep
from comfyui_pipedit.job import ModelFiles, Tiling
from comfyui_pipedit.parallel.sequence import Context
from comfyui_pipedit.wire import buffer
from comfyui_pipedit.wire.messages import DecodeOpen
from comfyui_pipedit.worker.decode import Decode
from comfyui_pipedit.worker.device import Device
from comfyui_pipedit.worker.residency import Residency

CPU = Device.parse("cpu:0")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    tiny_wan.use_worker_site()
    return loaders.inspect(tiny_wan.write_model(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture(scope="module")
def residency(files: ModelFiles) -> Residency:
    loaded = Residency(CPU, Context(0, SimpleNamespace()), lambda text: None)
    loaded.load(files.vae)
    return loaded


class Opened:
    """A decode with the frames that the host would see, and what it said about its phase."""

    def __init__(self, files: ModelFiles, residency: Residency, latent: Tensor, tiling: Tiling | None = None) -> None:
        shape = ((latent.shape[2] - 1) * 4 + 1, latent.shape[3] * 8, latent.shape[4] * 8, 3)
        latent_fd, latent_ref = buffer.share(latent, "latent")
        frames_fd, frames_ref, self.frames = buffer.allocate(shape, torch.float32, "frames")
        message = DecodeOpen(1, "clip-1", files.vae, files.geometry, latent_ref, buffer.at(frames_ref, 1), tiling)
        self.phases: list[str] = []
        try:
            vae = residency.get(files.vae)
            self.decode = Decode(message, (latent_fd, frames_fd), vae, CPU, self.phases.append)
        finally:
            os.close(latent_fd)
            os.close(frames_fd)


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def test_frames_appear_in_the_hosts_buffer_piece_by_piece(files: ModelFiles, residency: Residency) -> None:
    latent = torch.randn(1, 16, 3, 4, 5)
    opened = Opened(files, residency, latent)
    assert opened.decode.units == 3
    assert opened.decode.run(0, 1) == 1 and opened.frames[0].any() and not opened.frames[1:].any()
    assert opened.decode.run(1, 3) == 9
    expected = ((tiny_wan.vae().decode(latent).sample[0] + 1) / 2).clamp(0, 1).movedim(0, -1)
    assert torch.equal(opened.frames, expected)
    assert opened.phases == ["decode piece 1 of 3", "decode piece 2 of 3", "decode piece 3 of 3"]


def test_a_tiled_decode_fills_the_same_buffer(files: ModelFiles, residency: Residency) -> None:
    opened = Opened(files, residency, torch.randn(1, 16, 4, 10, 9), Tiling(64, 16, 8, 4))
    done = [opened.decode.run(i, i + 1) for i in range(opened.decode.units)]
    assert done == sorted(done) and done[0] == 0 and done[-1] == 13
    assert opened.frames.flatten(1).any(dim=1).all()


def test_leases_must_follow_each_other(files: ModelFiles, residency: Residency) -> None:
    opened = Opened(files, residency, torch.randn(1, 16, 2, 4, 4))
    with pytest.raises(OutOfStep, match="pieces 1 to 2 of 2 were leased and piece 0 is next"):
        opened.decode.run(1, 2)
    with pytest.raises(OutOfStep, match="pieces 0 to 3 of 2"):
        opened.decode.run(0, 3)


@pytest.mark.parametrize("shape", [(1, 4, 2, 4, 4), (2, 16, 2, 4, 4), (1, 16, 1, 2, 4, 4)])
def test_a_latent_of_another_model_is_the_jobs_fault(files: ModelFiles, residency: Residency,
                                                     shape: tuple[int, ...]) -> None:
    with pytest.raises(InvalidJob, match=r"a latent to decode is \[1, 16, T, h, w\], not"):
        Opened(files, residency, torch.randn(shape))


def test_the_file_system_holds_nothing_of_it(files: ModelFiles, residency: Residency) -> None:
    before = set(Path("/dev/shm").glob("pipedit-*"))
    Opened(files, residency, torch.randn(1, 16, 1, 4, 4)).decode.run(0, 1)
    assert set(Path("/dev/shm").glob("pipedit-*")) == before


def test_the_networks_cache_goes_with_the_last_piece(files: ModelFiles, residency: Residency,
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    """The job is closed later, and the next decode needs the memory at once."""
    ended: list[bool] = []

    def pieces(*_: object) -> Iterator[Tensor]:
        try:
            for _ in range(2):
                yield torch.zeros(1, 32, 32, 3)
        finally:
            ended.append(True)

    monkeypatch.setattr(models.family("wan"), "decode_pieces", pieces)
    opened = Opened(files, residency, torch.randn(1, 16, 2, 4, 4))
    opened.decode.run(0, 1)
    assert not ended
    opened.decode.run(1, 2)
    assert ended == [True]
