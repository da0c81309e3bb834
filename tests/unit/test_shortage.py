"""What a person is told where memory is short and nothing else is in the way."""

from __future__ import annotations

import pytest

from comfyui_pipedit.host import shortage
from comfyui_pipedit.host.estimate import Work
from comfyui_pipedit.host.shortage import Need
from comfyui_pipedit.job import Geometry, Tiling, Weights
from comfyui_pipedit.wire.messages import Memory

GIB = 2**30
GEOMETRY = Geometry(16, 8, 4, (1, 2, 2), 64, 16, 8, (0.0,) * 16, (1.0,) * 16)
LATENT, FRAMES = (1, 16, 21, 60, 104), (81, 480, 832, 3)


@pytest.mark.parametrize(("work", "advice"), [
    (Work("encode", Weights("wan", "vae", ""), GEOMETRY, FRAMES), "Use a smaller picture."),
    (Work("encode", Weights("wan", "vae", ""), GEOMETRY, FRAMES, tiling=Tiling()), "Use a smaller picture."),
    (Work("decode", Weights("wan", "vae", ""), GEOMETRY, LATENT), "Set tiling to auto or on."),
    (Work("decode", Weights("wan", "vae", ""), GEOMETRY, LATENT, tiling=Tiling()), "Use a smaller picture."),
    (Work("encode", Weights("wan", "text", "")), "Use a GPU with more memory."),
])
def test_every_kind_of_work_has_an_advice(work: Work, advice: str) -> None:
    memory = Memory(free=8 * GIB, total=8 * GIB, cached=0)
    text = shortage.text("GPU 0", work, Need(GIB, GIB, 10 * GIB), memory, 0, ())
    assert text.startswith(f"GPU 0, 8.0 GiB, is 3.0 GiB short for {work.label}: ") and text.endswith(f" {advice}")
