"""The door of the pool: submit a request from any thread, hold its ticket. One thread of its own drives everything.

The pool starts with the first request and outlives prompts; `close` ends it, and so does the end of this process.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from typing import Any

from ..config import EngineConfig
from ..errors import JobError, PipeDiTError, PoolClosed, PoolError, Unplannable
from ..job import DecodeRequest, EncodeRequest, EvaluateRequest, Job, ModelFiles, Span, TextRequest
from ..plan import Plan, shrink, split_groups
from ..wire.buffer import KeptLatent
from . import locks
from .content import job_key
from .devices import hardware, resolve
from .neighbour import Neighbour
from .policies import Policy, fcfs
from .pool import Pool
from .room import check_room
from .scheduler import Scheduler
from .tasks import ClipTask, DecodeTask, EvaluateTask, Task, TextTask, VaeEncodeTask
from .texts import Texts
from .ticket import Ticket

Request = Job | EvaluateRequest | TextRequest | DecodeRequest | EncodeRequest
KEPT_LATENTS = 8
POLL_SECONDS = 0.5

log = logging.getLogger("pipedit")


class Engine:
    """One pool and its queue. Thread-safe. SetupError or InvalidJob at once for devices that are not there."""

    def __init__(self, config: EngineConfig | None = None, policy: Policy = fcfs,
                 neighbour: Neighbour | None = None) -> None:
        """neighbour: where to ask for memory that others in this process hold on the pool's GPUs."""
        self.config = config or EngineConfig()
        self.devices = resolve(self.config.devices)
        self.groups = split_groups(self.config.split, len(self.devices))
        self.pool = Pool(self.config, self.devices)
        self.scheduler = Scheduler(self.pool, self.config, self._finished, policy, neighbour)
        self._kept: OrderedDict[str, KeptLatent] = OrderedDict()
        self._texts = Texts()
        self._commands: deque[Callable[[], None]] = deque()
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._locked: dict[str, str] = {}
        self._free_asked = False
        self._idle_since = time.monotonic()

    # -- any thread -------------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> Ticket:
        """Puts a request into the line and returns at once.

        The ticket's result is, for a Job the final latent float32 [1, C, T, h, w] in VAE space (and with `decode` set,
        `ticket.frames` is the ticket of the frames); for a DecodeRequest frames float32 [F, H, W, 3] in 0..1; for a
        TextRequest a list of embeddings; for an EncodeRequest a latent; for an EvaluateRequest a list of velocities.
        Raises Unplannable, StorageFull, PoolClosed, or DeviceTaken if another program's pool has a GPU.
        """
        closed = PoolClosed("the engine was closed; start ComfyUI again, or make a new Engine")
        if self._closed:
            raise closed
        if isinstance(request, TextRequest) and (known := self._texts.find(request)) is not None:
            return self._known(known)
        task = self._task(request, next(self._numbers))
        try:
            with self._lock:  # the thread takes it before its last look at what was posted
                if self._closed:
                    raise closed
                self._start()
                self._post(lambda: self.scheduler.add(task))
        except PoolError as error:
            task.ticket.fail(error)
            raise
        return task.ticket

    def plan(self, files: ModelFiles, latent_shape: tuple[int, ...], chunks: int = 1) -> Plan:
        """The plan that a clip of this shape gets: the split's groups, cut where a clip is too small for them."""
        geometry = files.geometry
        plan = Plan(*self.groups, chunks=chunks)
        return shrink(plan, geometry.num_tokens(latent_shape), geometry.num_heads)

    def describe_plan(self, files: ModelFiles, latent_shape: tuple[int, ...]) -> str:
        """The plan as a sentence with the devices' names."""
        return f"{self.plan(files, latent_shape).sentence()}; devices: {', '.join(self.devices)}"

    def status(self) -> dict[str, Any]:
        """What the pool does now, ready for JSON."""
        tasks = list(self.scheduler.tasks.values())
        return {
            "state": self.pool.state,
            "devices": list(self.devices),
            "generation": self.pool.generation,
            "pids": list(self.pool.pids()),
            "phases": {str(rank): self.pool.phase(rank) for rank in range(len(self.devices))},
            "resident": self.scheduler.residence.summary(),
            "peaks": self.scheduler.claims.peaks(),
            "tasks": [{"id": task.id, "kind": task.kind, "state": task.state, "done": task.done, "units": task.units,
                       "ranks": list(task.ranks)} for task in tasks],
        }

    def spans(self, since: float = 0.0) -> list[Span]:
        """What ranks did, in the order it was reported, from `since` (seconds of the monotonic clock) on."""
        return [span for span in tuple(self.scheduler.spans) if span.end >= since]

    def free(self) -> None:
        """Unloads all weights as soon as nothing runs, and forgets the texts that were encoded."""
        self._texts.forget()
        if self._thread is not None:
            self._post(self._ask_to_free)

    def held(self, device: str) -> int:
        """Bytes that the pool holds on one of its GPUs, as far as is known."""
        return self.scheduler.claims.held(self.devices.index(device))

    def give_back(self, device: str, num_bytes: int) -> Ticket:
        """Frees so much of a GPU, if what nothing uses now is enough; the ticket's result is how many bytes it was."""
        ticket = self._ticket(f"give-back-{next(self._numbers)}")
        with self._lock:
            if self._thread is not None and not self._closed:
                self._post(lambda: self.scheduler.give_back(device, num_bytes, ticket.succeed))
                return ticket
        ticket.succeed(0)
        return ticket

    def close(self) -> None:
        """Ends all tickets and all processes; idempotent."""
        with self._lock:
            self._closed = True
            thread = self._thread
        self.pool.wake()
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout=20)
        self.pool.close()
        self._give_up_gpus()
        with self._lock:
            kept, self._kept = list(self._kept.values()), OrderedDict()
        _close_all(kept)

    # -- making tasks -----------------------------------------------------------------------------------------------

    def _task(self, request: Request, ordinal: int) -> Task:
        if isinstance(request, Job):
            return self._clip(request, ordinal)
        if isinstance(request, EvaluateRequest):
            return self._evaluation(request, ordinal)
        ticket = self._ticket(f"{_kind(request)}-{ordinal}")
        rank = self._decode_rank(ordinal)
        if isinstance(request, DecodeRequest):
            return DecodeTask(ticket, ordinal, request, rank)
        if isinstance(request, TextRequest):
            ticket.add_done_callback(lambda ended: self._keep_texts(request, ended))
            return TextTask(ticket, ordinal, request, rank)
        return VaeEncodeTask(ticket, ordinal, request, rank)

    def _clip(self, job: Job, ordinal: int) -> ClipTask:
        check_room(tuple(job.latent.shape), job.files.geometry, decode=job.decode is not None)
        plan = self._checked_plan(job.plan, job.files, tuple(job.latent.shape))
        frames = self._ticket(f"frames-{ordinal}") if job.decode is not None else None
        ticket = Ticket(f"clip-{ordinal}", self._cancel_later, frames)
        ticket.plan = plan
        key = job_key(job)
        kept = self._take_kept(key) or KeptLatent.create(tuple(job.latent.shape), job.table.num_state_tensors)
        ticket.add_done_callback(lambda ended: self._put_away(key, kept, ended))
        return ClipTask(ticket, ordinal, job, plan, kept)

    def _known(self, result: Any) -> Ticket:
        """The ticket of a request whose result is there: no rank hears of it."""
        ticket = self._ticket(f"known-{next(self._numbers)}")
        ticket.succeed(result)
        return ticket

    def _keep_texts(self, request: TextRequest, ended: Ticket) -> None:
        if not ended.failed():
            self._texts.keep(request, ended.result())

    def _evaluation(self, request: EvaluateRequest, ordinal: int) -> EvaluateTask:
        ticket = self._ticket(f"evaluation-{ordinal}")
        ticket.plan = self._checked_plan(request.plan, request.files, tuple(request.x.shape))
        return EvaluateTask(ticket, ordinal, request, ticket.plan)

    def _checked_plan(self, given: Plan | None, files: ModelFiles, shape: tuple[int, ...]) -> Plan:
        """The plan of a request for a latent's shape. Unplannable if the one that is given does not fit the pool."""
        plan = given or self.plan(files, shape)
        plan.check(files.geometry.num_tokens(shape), files.geometry.num_heads)
        if max(plan.ranks) >= len(self.devices):
            raise Unplannable(f"the plan names rank {max(plan.ranks)} and the pool has ranks 0 to "
                              f"{len(self.devices) - 1}")
        return plan

    def _take_kept(self, key: str) -> KeptLatent | None:
        """What an earlier try at this content left; the new try goes on from it."""
        with self._lock:
            return self._kept.pop(key, None)

    def _put_away(self, key: str, kept: KeptLatent, ended: Ticket) -> None:
        """Saves an unfinished clip's latent for the next try at the same content; closes what nobody will need."""
        if not ended.failed() or kept.read() is None:
            return kept.close()
        with self._lock:
            over = [self._kept.pop(key, None)]
            self._kept[key] = kept
            while len(self._kept) > KEPT_LATENTS:
                over.append(self._kept.popitem(last=False)[1])
        return _close_all(over)

    def _ticket(self, name: str) -> Ticket:
        return Ticket(name, self._cancel_later)

    def _cancel_later(self, job: str) -> None:
        self._post(lambda: self.scheduler.cancel(job))

    def _decode_rank(self, ordinal: int) -> int:
        ranks = self.groups[1].ranks
        return ranks[ordinal % len(ranks)]

    # -- the engine's thread ----------------------------------------------------------------------------------------

    def _start(self) -> None:
        if self._thread is None:
            self._take_gpus()
            self._thread = threading.Thread(target=self._run, name="pipedit-engine", daemon=True)
            self._thread.start()

    def _take_gpus(self) -> None:
        """Locks the GPUs for this process until the pool is closed. DeviceTaken if another process has one."""
        gpus = hardware(self.devices)
        locks.of_this_process.take(gpus)
        self._locked = gpus

    def _give_up_gpus(self) -> None:
        with self._lock:
            locked, self._locked = self._locked, {}
        locks.of_this_process.release(locked)

    def _post(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        self.pool.wake()

    def _run(self) -> None:
        reason: PipeDiTError = PoolClosed("the engine failed, see ComfyUI's log above for the reason; queue again")
        try:
            self.pool.start()
            while not self._closed:
                self._turn()
            reason = PoolClosed("the engine was closed")
        except PipeDiTError as error:
            log.error("the pool is down: %s", error)
            reason = error
        finally:
            with self._lock:
                self._closed = True
            self._run_commands()
            self.scheduler.fail_all(reason)
            self.pool.close()
            self._give_up_gpus()

    def _turn(self) -> None:
        for event in self.pool.poll(POLL_SECONDS):
            self.scheduler.handle(event)
        self._run_commands()
        self.scheduler.advance()
        self.scheduler.check_deadlines()
        self._free_when_idle()

    def _run_commands(self) -> None:
        while self._commands:
            self._commands.popleft()()

    def _free_when_idle(self) -> None:
        now = time.monotonic()
        if not self.scheduler.idle:
            self._idle_since = now
            return
        over = self.config.idle_timeout and now - self._idle_since > self.config.idle_timeout
        if (over or self._free_asked) and self.pool.state == "ready":
            self._idle_since, self._free_asked = now, False
            self.scheduler.residence.unload()

    def _ask_to_free(self) -> None:
        self._free_asked = True

    def _finished(self, task: Task, result: Any) -> None:
        if isinstance(task, ClipTask) and task.job.decode is not None and task.ticket.frames is not None:
            self._decode_next(task, result, task.ticket.frames)
        task.ticket.succeed(result)

    def _decode_next(self, task: ClipTask, latent: Any, ticket: Ticket) -> None:
        """The decode of a finished clip takes the clip's place in the line."""
        job = task.job
        assert job.decode is not None
        request = DecodeRequest(job.decode, job.files.geometry, latent, job.tiling, job.label)
        try:
            rank = task.plan.decode.ranks[task.ordinal % task.plan.decode.size]
            self.scheduler.add(DecodeTask(ticket, task.ordinal, request, rank))
        except JobError as error:
            ticket.fail(error)


def _close_all(kept: Iterable[KeptLatent | None]) -> None:
    for latent in kept:
        if latent is not None:
            latent.close()


def _kind(request: Request) -> str:
    return {DecodeRequest: "decode", TextRequest: "text", EncodeRequest: "encode"}[type(request)]
