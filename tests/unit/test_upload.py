"""The way of weights to a GPU, with plain memory in place of pinned and the CPU in place of the GPU."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from comfyui_pipedit.worker import upload
from comfyui_pipedit.worker.upload import Uploader

DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "SMALL_BYTES", 100)


def uploader(**changes: int) -> Uploader:
    return Uploader(torch.device("cpu"), **{"threads": 3, "piece_bytes": 256, "depth": 4, **changes}, pinned=False)


def tensors(count: int = 40) -> list[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    sizes = [(0,), (), (3,), (7, 9), (64,), (65, 4), (5, 3, 50), (1000,)]
    return [(f"w{i}", torch.randint(0, 2, sizes[i % len(sizes)], generator=generator).to(DTYPES[i % len(DTYPES)]))
            for i in range(count)]


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("pipedit-upload")]


@pytest.mark.parametrize("depth", [1, 2, 5, 64])
@pytest.mark.parametrize("piece_bytes", [64, 256, 1 << 20])
def test_every_byte_arrives_in_order(depth: int, piece_bytes: int) -> None:
    given = tensors()
    found = list(uploader(depth=depth, piece_bytes=piece_bytes).stream(given))
    assert [name for name, _ in found] == [name for name, _ in given]
    for (_, tensor), (_, copy) in zip(given, found, strict=True):
        assert (copy.dtype, copy.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(copy.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))
    assert threads() == []


def test_it_reads_ahead_but_not_everything() -> None:
    taken = 0

    def counted() -> Iterator[tuple[str, Tensor]]:
        nonlocal taken
        for _ in range(50):
            taken += 1
            yield "w", torch.ones(256, dtype=torch.uint8)

    stream = uploader().stream(counted())
    next(stream)
    assert 1 < taken <= 6
    assert len(list(stream)) == 49


def test_whoever_stops_leaves_no_thread() -> None:
    stream = uploader().stream(tensors())
    next(stream)
    stream.close()
    assert threads() == []


def test_an_error_of_the_source_comes_through() -> None:
    def broken() -> Iterator[tuple[str, Tensor]]:
        yield from tensors(10)
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        list(uploader().stream(broken()))
    assert threads() == []
