"""Waiting for the pool inside ComfyUI: in slices, so that a cancel is heard, and never longer than the work takes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence

import comfy.model_management as management
import comfy.utils
from comfy_execution.utils import get_executing_context
from server import PromptServer

from comfyui_pipedit.errors import PipeDiTError
from comfyui_pipedit.host.ticket import Ticket
from comfyui_pipedit.job import Progress, Stage

from . import memory
from .pools import cancel

SLICE = 0.05
WORKING = (Stage.ENCODING, Stage.DENOISING, Stage.DECODING)


@contextlib.contextmanager
def naming(who: str) -> Iterator[None]:
    """Puts the node's name before an error's text; class and traceback stay."""
    try:
        yield
    except PipeDiTError as error:
        if not str(error).startswith(who):
            error.args = (f"{who}: {error}",)
        raise


@contextlib.contextmanager
def cancelling(tickets: Sequence[Ticket]) -> Iterator[None]:
    """Cancels what is not done when the block is left: by a cancel, by another node's error, or by its own. From there
    on ComfyUI knows what the pool holds."""
    try:
        yield
    finally:
        cancel(tickets)
        memory.announce()


def wait(tickets: Sequence[Ticket], report: Callable[[], None] | None = None) -> None:
    """Blocks the prompt's thread until all ended; for core nodes, whose calls into clip, vae, model are not async."""
    report = report or Reporter(tickets)
    with cancelling(tickets):
        for ticket in tickets:
            while not ticket.wait(SLICE):
                memory.look_in()
                report()
                management.throw_exception_if_processing_interrupted()
            ticket.result()


async def follow(tickets: Sequence[Ticket], report: Callable[[], None]) -> None:
    """Waits until all ended, or one failed, while other nodes of the graph run; calls `report` a few times a second."""
    loop, woken = asyncio.get_running_loop(), asyncio.Event()
    with cancelling(tickets):
        for ticket in tickets:
            ticket.add_done_callback(lambda _: _wake(loop, woken))
        for ticket in tickets:
            while not ticket.done():
                memory.look_in()
                report()
                management.throw_exception_if_processing_interrupted()
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(woken.wait(), SLICE)
                woken.clear()
            ticket.result()
        report()


def _wake(loop: asyncio.AbstractEventLoop, woken: asyncio.Event) -> None:
    with contextlib.suppress(RuntimeError):  # the prompt is over and its loop closed: nobody waits any more
        loop.call_soon_threadsafe(woken.set)


class Words:
    """The text under a node, fed by its tickets. Sends only what changed."""

    def __init__(self, tickets: Sequence[Ticket]) -> None:
        context = get_executing_context()
        self.node = context.node_id if context is not None else None
        self.tickets = tickets
        self.said = ""

    def __call__(self) -> None:
        self.say([ticket.progress() for ticket in self.tickets])

    def say(self, news: Sequence[Progress]) -> None:
        text = sentence(self.tickets, news)
        if text and text != self.said and self.node is not None:
            PromptServer.instance.send_progress_text(text, self.node)
        self.said = text


class Reporter(Words):
    """A node's progress bar, and the text under it."""

    def __init__(self, tickets: Sequence[Ticket]) -> None:
        super().__init__(tickets)
        self.bar = comfy.utils.ProgressBar(1, node_id=self.node)
        self.shown = (0, 0)

    def __call__(self) -> None:
        news = [ticket.progress() for ticket in self.tickets]
        self.say(news)
        amount = amount_done(news)
        if amount[1] and amount != self.shown:
            self.bar.update_absolute(*amount)
        self.shown = amount


def amount_done(news: Sequence[Progress]) -> tuple[int, int]:
    """(units done, units in all) of the tickets that have begun, as if those to come were as long."""
    begun = [progress for progress in news if progress.total and progress.stage in (*WORKING, Stage.DONE)]
    longest = max((progress.total for progress in begun), default=0)
    return sum(progress.done for progress in begun), longest * len(news)


def sentence(tickets: Sequence[Ticket], news: Sequence[Progress]) -> str:
    """What a node says under its bar: the news of the first clip that is not done, with its plan once it runs."""
    for ticket, progress in zip(tickets, news, strict=True):
        if progress.stage in (Stage.DONE, Stage.FAILED, Stage.CANCELLED):
            continue
        if progress.stage is Stage.DENOISING and ticket.plan is not None:
            return ticket.plan.sentence()
        return progress.text or f"{progress.stage.value} in the pool"
    return ""
