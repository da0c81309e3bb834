"""Decode overlaps denoising (DeDiVAE), shown by spans that ranks recorded; a serial policy fails the same predicate.

`overlaps` is the predicate of tests/comfy/test_served.py::test_four_branches_overlap_in_the_pool as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import toy
from gates import MakeGate, until

from comfyui_pipedit.host.engine import Engine
from comfyui_pipedit.host.policies import Candidate, Policy, fcfs
from comfyui_pipedit.job import Span
from comfyui_pipedit.timeline import clips_in, is_decode, is_denoise, overlaps

SECONDS = 30.0


def serial(candidates: Sequence[Candidate]) -> Sequence[Candidate]:
    """One task at a time, a clip's decode before the next clip."""
    return fcfs(candidates)[:1]


class Watched:
    """A policy, and the tasks that it was shown and gave nothing."""

    def __init__(self, policy: Policy) -> None:
        self.policy, self.left_out = policy, set[str]()

    def __call__(self, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        chosen = self.policy(candidates)
        self.left_out |= {candidate.task for candidate in candidates} - {candidate.task for candidate in chosen}
        return chosen


Make = Callable[[Policy], tuple[Engine, Watched]]


@pytest.fixture
def make(gate_folder: Path) -> Iterator[Make]:
    """make(policy): an engine on 2 + 1 toy ranks with gates, and its policy."""
    engines: list[Engine] = []

    def made(policy: Policy) -> tuple[Engine, Watched]:
        watched = Watched(policy)
        engines.append(Engine(toy.config(preload=(toy.TOY, toy.GATES)), watched))
        return engines[-1], watched

    yield made
    for engine in engines:
        engine.close()


def spans_of_two_clips(engine: Engine, policy: Watched, gate: MakeGate) -> list[Span]:
    """Two clips with their decodes; the first decode is held until the second clip is denoised, or was refused it."""
    hold = gate(2, "^decode piece 2 of 4$")
    tickets = [engine.submit(toy.job(1))]
    hold.wait()
    tickets.append(engine.submit(toy.job(2)))
    until(lambda: tickets[1].done() or tickets[1].id in policy.left_out, "the second clip has had its chance", SECONDS)
    hold.open()
    for ticket in tickets:
        assert ticket.frames is not None and ticket.frames.wait(SECONDS)
        ticket.frames.result()
    spans = engine.spans()
    assert sorted(clips_in(spans)) == sorted(ticket.id for ticket in tickets)
    return spans


def test_a_decode_overlaps_the_next_clip(make: Make, gate: MakeGate) -> None:
    engine, policy = make(fcfs)
    spans = spans_of_two_clips(engine, policy, gate)
    assert policy.left_out == set()
    assert overlaps(spans)
    held = max((span for span in spans if is_decode(span)), key=lambda span: span.end - span.start)
    inside = [span for span in spans if is_denoise(span) and held.start < span.start and span.end < held.end]
    assert {span.rank for span in inside} == {0, 1}, "both denoise ranks worked while the decode was under way"


def test_a_serial_scheduler_in_its_place_fails_the_overlap_test(make: Make, gate: MakeGate) -> None:
    engine, policy = make(serial)
    spans = spans_of_two_clips(engine, policy, gate)
    assert policy.left_out, "the second clip waited for the first"
    assert not overlaps(spans)
