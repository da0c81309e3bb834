"""Each rank takes the device that its name says (B44: ranks that all land on the first GPU)."""

from __future__ import annotations

import pytest
import torch

from comfyui_pipedit.errors import InvalidJob, SetupError
from comfyui_pipedit.worker.device import Device


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A machine of three GPUs; the devices that were made current."""
    made: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", made.append)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"Card {index}")
    return made


def test_each_gpu_is_made_current_by_its_own_number(chosen: list[int]) -> None:
    devices = [Device.parse(f"gpu:{index}") for index in (2, 0, 1)]
    for device in devices:
        device.bind()
    assert chosen == [2, 0, 1]
    assert [device.torch for device in devices] == [torch.device("cuda", index) for index in (2, 0, 1)]
    assert [device.label for device in devices] == ["GPU 2 (Card 2)", "GPU 0 (Card 0)", "GPU 1 (Card 1)"]
    assert {device.backend for device in devices} == {"nccl"}


def test_a_gpu_that_is_not_there_is_named_before_anything_is_bound(chosen: list[int]) -> None:
    with pytest.raises(SetupError, match=r"GPU 3 was asked for and this machine shows 3 GPUs \(0 to 2\)"):
        Device.parse("gpu:3").bind()
    assert chosen == []


def test_a_cpu_rank_takes_one_thread_and_no_gpu(chosen: list[int]) -> None:
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        Device.parse("cpu:1").bind()
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(threads)
    assert chosen == [] and Device.parse("cpu:1").label == "CPU rank 1" and Device.parse("cpu:1").backend == "gloo"


@pytest.mark.parametrize("name", ["cuda:0", "gpu", "gpu:-1", "gpu:1,2", ""])
def test_a_name_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(InvalidJob, match="is neither 'cpu:I' nor 'gpu:I'"):
        Device.parse(name)
