"""Tensors in mapped buffers: really shared, right in every dtype, and an error with numbers where there is no room."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from comfyui_pipedit.errors import OutOfStep, StorageFull
from comfyui_pipedit.wire import buffer
from comfyui_pipedit.wire.buffer import ENTRY_SIZE, KeptLatent, PhaseBoard
from comfyui_pipedit.wire.messages import TensorRef

ROOT = Path(__file__).resolve().parents[2]
SHAPE = (1, 2, 3, 4, 5)


@pytest.fixture
def kept() -> Iterator[KeptLatent]:
    made = KeptLatent.create(SHAPE, 3)
    yield made
    made.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int64, torch.bool])
def test_a_tensor_comes_back_bit_by_bit(dtype: torch.dtype) -> None:
    tensor = (torch.randn(3, 5, 7) * 50).to(dtype).transpose(0, 2)  # not contiguous
    fd, ref = buffer.share(tensor, "test")
    assert torch.equal(buffer.attach(fd, ref), tensor)
    os.close(fd)


def test_no_elements_and_no_dimensions() -> None:
    for tensor in (torch.empty(0, 3), torch.tensor(1.5)):
        fd, ref = buffer.share(tensor, "test")
        assert torch.equal(buffer.attach(fd, ref), tensor)
        os.close(fd)


def test_all_who_map_it_see_the_same_and_after_the_descriptor_is_closed() -> None:
    fd, ref, ours = buffer.allocate((4, 4), torch.float32, "test")
    theirs = buffer.attach(fd, ref)
    os.close(fd)
    assert ours.count_nonzero() == 0
    theirs[1, 2] = 7.0
    assert ours[1, 2] == 7.0


def test_another_process_sees_it_and_writes_to_it() -> None:
    fd, ref, ours = buffer.allocate((8,), torch.float32, "test")
    ours.copy_(torch.arange(8.0))
    script = (f"import sys; sys.path.insert(0, {str(ROOT)!r}); from comfyui_pipedit.wire import buffer, messages; "
              f"buffer.attach({fd}, messages.{ref!r}).mul_(2)")
    subprocess.run([sys.executable, "-c", script], pass_fds=[fd], check=True, timeout=60)
    os.close(fd)
    assert torch.equal(ours, torch.arange(8.0) * 2)


def test_two_tensors_in_one_buffer() -> None:
    fd = buffer.create(64, "test")
    first = buffer.attach(fd, TensorRef(0, (4,), "float32"))
    second = buffer.attach(fd, buffer.at(TensorRef(5, (2, 3), "int64", 16), 0))
    first.fill_(1)
    second.fill_(2)
    assert first.sum() == 4 and second.sum() == 12
    os.close(fd)


def test_a_ref_that_is_larger_than_its_buffer() -> None:
    fd = buffer.create(16, "test")
    with pytest.raises(OutOfStep, match=r"16 bytes cannot hold a float32 tensor \[5\] at 0"):
        buffer.attach(fd, TensorRef(0, (5,), "float32"))
    os.close(fd)


def test_more_than_the_machine_has() -> None:
    with pytest.raises(StorageFull, match=r"'kept latent': 1,073,741,824\.0 MiB are needed and [\d.,]+ MiB of memory"):
        KeptLatent.create((1, 2**24, 2**20), 8)


def test_a_limit_on_file_sizes_is_an_error_and_leaves_no_descriptor() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(StorageFull, match=r"0\.1 MiB are needed and the system said: File too large"):
            KeptLatent.create((100, 100), 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(os.listdir("/proc/self/fd")) == before


def test_without_memfds_a_nameless_file_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    before = set(os.listdir("/dev/shm"))
    fd, ref = buffer.share(torch.arange(10), "test")
    assert set(os.listdir("/dev/shm")) <= before, "nothing has a name that could be left behind"
    assert torch.equal(buffer.attach(fd, ref), torch.arange(10))
    os.close(fd)


def state(step: int, count: int = 3) -> list[torch.Tensor]:
    return [torch.full(SHAPE, float(10 * step + i)) for i in range(count)]


def assert_kept(kept: KeptLatent, step: int, count: int) -> None:
    found = kept.read()
    assert found is not None and found[0] == step and len(found[1]) == count
    assert all(torch.equal(a, b) for a, b in zip(found[1], state(step, count), strict=True))


def test_nothing_is_kept_at_first(kept: KeptLatent) -> None:
    assert kept.read() is None and kept.newest() is None


def test_the_newest_step_is_read_by_whoever_has_it(kept: KeptLatent) -> None:
    other = KeptLatent.attach(kept.fd, kept.ref)
    for step, count in ((1, 2), (2, 3), (3, 3), (4, 1)):
        kept.write(step, state(step, count))
        assert_kept(other, step, count)


def test_a_copy_does_not_change_later(kept: KeptLatent) -> None:
    kept.write(1, state(1))
    found = kept.read()
    for step in (2, 3):
        kept.write(step, state(step))
    assert found is not None and torch.equal(found[1][0], state(1)[0])


def test_another_writer_goes_on(kept: KeptLatent) -> None:
    kept.write(1, state(1))
    kept.write(2, state(2))
    KeptLatent.attach(kept.fd, kept.ref).write(3, state(3))
    assert_kept(kept, 3, 3)
    kept.write(4, state(4))
    assert_kept(kept, 4, 3)


class Killed(Exception):
    """The end of a writer in the middle of a write."""


@pytest.mark.parametrize("written", [1, 2, 5])
def test_a_writer_that_is_killed_half_way_leaves_the_step_before(
        kept: KeptLatent, written: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in range(1, written + 1):
        kept.write(step, state(step))
    copy = torch.Tensor.copy_
    copies = iter(range(3))

    def dying(self: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        if next(copies) == 2:
            raise Killed
        return copy(self, source)

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "copy_", dying)
        with pytest.raises(Killed):
            kept.write(written + 1, state(written + 1))
    assert_kept(kept, written, 3)
    kept.write(written + 1, state(written + 1))
    assert_kept(kept, written + 1, 3)


def test_the_hand_off_needs_no_copy(kept: KeptLatent) -> None:
    for step in (1, 2, 3):
        kept.write(step, state(step, 1))
        found = kept.newest()
        assert found is not None and found[0] == step
        assert torch.equal(buffer.attach(kept.fd, found[1]), state(step, 1)[0])


def test_phases_of_ranks_stay_apart() -> None:
    board = PhaseBoard.create(40)
    other = PhaseBoard(board.fd)
    for rank in range(40):
        board.write(rank, f"step {rank} of 40")
    board.write(7, "x" * (ENTRY_SIZE + 50))
    board.write(8, "")
    assert [other.read(rank) for rank in (6, 7, 8, 9)] == ["step 6 of 40", "x" * ENTRY_SIZE, "", "step 9 of 40"]
    board.write(7, "idle")
    board.close()
    assert other.read(7) == "idle"


def test_a_phase_is_cut_between_letters_or_reads_with_a_mark() -> None:
    board = PhaseBoard.create(1)
    board.write(0, "ü" * ENTRY_SIZE)
    assert board.read(0).startswith("ü" * 60)
    board.close()
