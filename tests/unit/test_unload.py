"""What a rank unloads is gone at once: whoever waits for the memory measures it right afterwards."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from comfyui_pipedit import models
from comfyui_pipedit.job import Weights
from comfyui_pipedit.models.family import SequencePlan
from comfyui_pipedit.parallel.sequence import Context
from comfyui_pipedit.worker.device import Device
from comfyui_pipedit.worker.residency import Residency

WEIGHTS = Weights("knotted", "transformer", "")


class Knotted:
    """A family whose network refers to itself, as one with hooks does."""

    name = "knotted"
    sequence_plan = SequencePlan(splits=(), gathers=(), attention=())

    def load_transformer(self, source: Any) -> nn.Module:
        network = nn.Linear(4, 8)
        network.register_forward_pre_hook(lambda module, args, network=network: None)
        return network

    load_vae = load_text = load_transformer


@pytest.fixture
def residency(monkeypatch: pytest.MonkeyPatch) -> Iterator[Residency]:
    monkeypatch.setitem(models._families, "knotted", Knotted())  # type: ignore[arg-type]
    gc.disable()
    yield Residency(Device.parse("cpu:0"), Context(0, SimpleNamespace()), lambda text: None)  # type: ignore[arg-type]
    gc.enable()


def test_a_network_that_refers_to_itself_goes_with_its_unload(residency: Residency) -> None:
    assert residency.load(WEIGHTS) == residency.num_bytes == 4 * (4 * 8 + 8)
    network = weakref.ref(residency.get(WEIGHTS))
    residency.unload((WEIGHTS,))
    assert network() is None and residency.num_bytes == 0
