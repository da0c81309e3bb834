"""What a clip takes it gives back: no descriptor of a mapped buffer is left, whether it ended well or not."""

from __future__ import annotations

import gc
import os

import torch
import toy
from gates import MakeGate

from comfyui_pipedit.errors import Cancelled
from comfyui_pipedit.host.engine import KEPT_LATENTS, Engine
from comfyui_pipedit.host.ticket import Ticket
from comfyui_pipedit.wire.buffer import KeptLatent

SECONDS = 30.0


def buffers() -> list[str]:
    """The mapped buffers that this process holds open, but for garbage of the tests before."""
    gc.collect()
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:  # the descriptor of this very listing
            continue
    return sorted(link for link in found if "pipedit:" in link)


def run(engine: Engine, seed: int) -> None:
    ticket = engine.submit(toy.job(seed))
    assert ticket.frames is not None and ticket.frames.wait(SECONDS)
    ticket.frames.result()


def test_finished_clips_leave_nothing(engine: Engine) -> None:
    run(engine, 1)
    before = buffers()
    for seed in range(2, 6):
        run(engine, seed)
    assert buffers() == before


def test_a_cancelled_clip_leaves_what_it_kept_and_its_next_try_takes_that(engine: Engine, gate: MakeGate) -> None:
    run(engine, 1)
    before = buffers()
    hold = gate(0, "^step 2 of 4$")
    ticket = engine.submit(toy.job(6))
    hold.wait()
    ticket.cancel()
    hold.open()
    assert ticket.wait(SECONDS) and ticket.failed()
    run(engine, 7)
    assert len(buffers()) == len(before) + 1
    run(engine, 6)
    assert buffers() == before


def test_only_the_latest_kept_latents_stay_and_none_after_the_engine() -> None:
    before = buffers()
    engine = Engine(toy.config())
    for key in [*map(str, range(KEPT_LATENTS + 2)), "9", "9"]:
        ended = Ticket("clip", lambda job: None)
        ended.fail(Cancelled("clip was cancelled"))
        kept = KeptLatent.create(toy.SHAPE, 1)
        kept.write(1, [torch.zeros(toy.SHAPE)])
        engine._put_away(key, kept, ended)
    assert len(buffers()) == len(before) + KEPT_LATENTS
    engine.close()
    assert buffers() == before
