"""Claims and giving back over the real wire: ranks in processes of their own, whose memory is numbers in a file."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import toy
from gates import MakeGate, until

from comfyui_pipedit.errors import OutOfMemory
from comfyui_pipedit.host.engine import Engine
from comfyui_pipedit.host.neighbour import Held, Neighbour, Request
from comfyui_pipedit.host.ticket import Ticket

COUNTED = str(Path(__file__).with_name("counted_memory.py"))
GIB = 2**30
SECONDS = 30.0
SetMemory = Callable[..., None]
TOY = 24
"""Bytes of the toy's transformer."""
PLENTY = {"free": 20, "total": 24, "cached": 0, "peak": 4, "held": 5}


@pytest.fixture
def set_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SetMemory:
    """set_memory(free=3): what every rank has from now on, in GiB."""
    file = tmp_path / "memory.json"

    def write(**changes: float) -> None:
        file.with_suffix(".new").write_text(
            json.dumps({key: int(value * GIB) for key, value in {**PLENTY, **changes}.items()}))
        file.with_suffix(".new").replace(file)

    write()
    monkeypatch.setenv("PIPEDIT_TEST_MEMORY", str(file))
    return write


@pytest.fixture
def neighbour() -> Neighbour:
    return Neighbour()


@pytest.fixture
def engine(set_memory: SetMemory, neighbour: Neighbour, gate_folder: Path) -> Iterator[Engine]:
    """Two ranks that denoise, one that decodes; a clip has run, so that ranks know that it takes 4 GiB."""
    made = Engine(toy.config(preload=(toy.TOY, toy.GATES, COUNTED)), neighbour=neighbour)
    result(made.submit(toy.job(decode=False)))
    yield made
    made.close()


def result(ticket: Ticket) -> object:
    assert ticket.wait(SECONDS)
    return ticket.result()


def emptied(engine: Engine) -> None:
    """The ranks' allocators give back what they hold, so that the next clip claims its memory again."""
    result(engine.give_back("cpu:0", 1))
    result(engine.give_back("cpu:1", 1))


def test_what_was_measured_is_claimed_and_refused_before_the_first_step(engine: Engine, neighbour: Neighbour,
                                                                        set_memory: SetMemory) -> None:
    set_memory(free=3)
    emptied(engine)
    generation, ticket = engine.pool.generation, engine.submit(toy.job(seed=3, decode=False))
    until(lambda: _served(neighbour, ()) or ticket.done(), "the end of the clip")
    with pytest.raises(OutOfMemory, match=r"^GPU 0 \(of numbers\), 24.0 GiB, is 1.0 GiB short for 5x3x4: .* No step"):
        ticket.result()
    assert engine.pool.generation == generation and engine.spans()[-1].job != ticket.id
    set_memory(free=4.1)
    result(engine.submit(toy.job(seed=3, decode=False)))


def _served(neighbour: Neighbour, left: tuple[Held, ...]) -> bool:
    neighbour.serve(lambda request: left)
    return False


def test_a_clip_waits_until_the_neighbour_has_given(engine: Engine, neighbour: Neighbour,
                                                    set_memory: SetMemory) -> None:
    set_memory(free=3)
    emptied(engine)
    ticket, asked = engine.submit(toy.job(seed=3, decode=False)), list[Request]()

    def give(request: Request) -> tuple[Held, ...]:
        asked.append(request)
        set_memory(free=4.1)
        return ()

    until(lambda: bool(asked) or bool(neighbour.serve(give)), "the pool asks")
    result(ticket)
    assert (asked[0].free, asked[0].missing, asked[0].who) == (int(4 * GIB) + TOY, GIB + TOY, "cpu:0,cpu:1,cpu:2")


def test_the_next_clip_of_the_same_kind_asks_nobody(engine: Engine, neighbour: Neighbour,
                                                    set_memory: SetMemory) -> None:
    set_memory(free=0)
    result(engine.submit(toy.job(seed=3, decode=False)))
    neighbour.serve(lambda request: pytest.fail(f"asked for {request}"))


def test_an_idle_pool_gives_back_and_knows_what_it_holds(engine: Engine) -> None:
    held = sum(engine.status()["resident"]["0"].values())
    assert engine.held("cpu:0") == held + 5 * GIB and engine.held("cpu:2") == 0
    assert result(engine.give_back("cpu:0", GIB)) == 0, "the file's numbers stay as they are"
    assert engine.held("cpu:0") == 0 and "1" in engine.status()["resident"]


def test_a_closed_engine_gives_nothing(engine: Engine) -> None:
    engine.close()
    assert result(engine.give_back("cpu:0", GIB)) == 0


def test_what_is_asked_to_be_free_while_something_runs_is_freed_after_it(engine: Engine, gate: MakeGate) -> None:
    hold = gate(0, "^step 2 of 4$")
    ticket = engine.submit(toy.job(seed=3, decode=False))
    hold.wait()
    engine.free()
    taken = threading.Event()
    engine._post(taken.set)
    assert taken.wait(SECONDS) and engine.status()["resident"]
    hold.open()
    result(ticket)
    until(lambda: not engine.status()["resident"], "the weights are unloaded")


def test_an_idle_timeout_unloads_and_the_next_clip_loads_again(set_memory: SetMemory, gate_folder: Path) -> None:
    made = Engine(toy.config(preload=(toy.TOY, toy.GATES), idle_timeout=0.05))
    try:
        for seed in (1, 2):
            result(made.submit(toy.job(seed=seed, decode=False)))
            until(lambda: not made.status()["resident"], "the weights are unloaded")
    finally:
        made.close()
