"""The engines of this process, one for each list of devices, and the decodes that run ahead of their Decode node."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary
from yaml import YAMLError

from comfyui_pipedit.config import EngineConfig
from comfyui_pipedit.errors import PipeDiTError, PoolClosed, SetupError
from comfyui_pipedit.host.devices import resolve
from comfyui_pipedit.host.neighbour import Neighbour
from comfyui_pipedit.host.ticket import Ticket
from comfyui_pipedit.job import DecodeRequest, EncodeRequest, EvaluateRequest, Job, Span, TextRequest, Tiling, Weights

CONFIG_VARIABLE = "PIPEDIT_CONFIG"
neighbour = Neighbour()
"""What the pools of this process ask the rest of it for: memory on their GPUs (nodes/memory.py answers)."""
Request = Job | EvaluateRequest | TextRequest | DecodeRequest | EncodeRequest


class EngineLike(Protocol):
    """What the nodes need of an engine; tests put a scripted one here."""

    def submit(self, request: Request) -> Ticket: ...

    def status(self) -> dict[str, Any]: ...

    def spans(self, since: float = 0.0) -> Sequence[Span]: ...

    def free(self) -> None: ...

    def held(self, device: str) -> int: ...

    def give_back(self, device: str, num_bytes: int) -> Ticket: ...

    def close(self) -> None: ...


def read_config() -> EngineConfig:
    """The settings in the YAML file that PIPEDIT_CONFIG names, or the defaults. SetupError if it cannot be read."""
    path = os.environ.get(CONFIG_VARIABLE, "")
    try:
        return EngineConfig.from_yaml(Path(path)) if path else EngineConfig()
    except (OSError, YAMLError) as error:
        raise SetupError(f"{CONFIG_VARIABLE} names {path}, which cannot be read: {error}") from None


def new_engine(devices: str) -> EngineLike:
    """A real engine; imported here so that a ComfyUI which never runs a prompt of ours pays nothing for it."""
    from comfyui_pipedit.host.engine import Engine

    return Engine(replace(read_config(), devices=devices), neighbour=neighbour)


@dataclass(frozen=True, slots=True, eq=False)
class Ahead:
    """Decodes that the pool began by itself: one ticket an item of the batch, and how they decode."""

    tickets: tuple[Ticket, ...]
    vae: Weights
    tiling: Tiling | None


class Pools:
    """Engines by devices, made on first use and closed when the process ends."""

    def __init__(self, factory: Callable[[str], EngineLike] = new_engine) -> None:
        self.factory = factory
        self.engines: dict[tuple[str, ...], EngineLike] = {}
        self.lock = threading.Lock()
        self.ahead = WeakTensorKeyDictionary()

    def get(self, devices: str) -> EngineLike:
        """The engine of a `devices` text; "auto" and the list it stands for are the same engine."""
        if devices == "auto":
            devices = read_config().devices
        key = resolve(devices)
        with self.lock:
            if not self.engines:
                atexit.register(self.close)
            if key not in self.engines:
                self.engines[key] = self.factory(devices)
            return self.engines[key]

    def submit(self, devices: str, requests: Sequence[Request]) -> tuple[Ticket, ...]:
        """One ticket a request. An engine that ended, because its workers could not start, is replaced once."""
        try:
            return submit_all(self.get(devices), requests)
        except PoolClosed:
            self.forget(devices)
            return submit_all(self.get(devices), requests)

    def forget(self, devices: str) -> None:
        """Closes the engine of a `devices` text, if there is one; the next use makes a new one."""
        engine = self.get(devices)
        with self.lock:
            self.engines = {key: other for key, other in self.engines.items() if other is not engine}
        engine.close()

    def on(self, device: str, besides: str = "") -> list[EngineLike]:
        """The engines that have a GPU, without the one of the devices `besides`."""
        return [engine for key, engine in self.all().items() if device in key.split(",") and key != besides]

    def gpus(self) -> set[str]:
        """The GPUs of all engines, as "gpu:I"."""
        return {name for key in self.all() for name in key.split(",") if name.startswith("gpu:")}

    def all(self) -> dict[str, EngineLike]:
        """The engines there are, by a text that names their devices."""
        with self.lock:
            return {",".join(key): engine for key, engine in self.engines.items()}

    def status(self) -> dict[str, Any]:
        """Each pool's own account of itself, as JSON."""
        return {devices: engine.status() for devices, engine in self.all().items()}

    def spans(self, since: float) -> list[Span]:
        """What ranks did after `since` (seconds of the monotonic clock), by start."""
        found = (span for engine in self.all().values() for span in engine.spans(since))
        return sorted(found, key=lambda span: (span.start, span.rank))

    def free(self) -> None:
        """Unloads the weights of each pool as soon as nothing runs there."""
        for engine in self.all().values():
            engine.free()

    def close(self) -> None:
        """Ends all pools."""
        with self.lock:
            engines, self.engines = list(self.engines.values()), {}
        atexit.unregister(self.close)
        for engine in engines:
            engine.close()

    def remember(self, samples: Tensor, ahead: Ahead) -> None:
        """Ties running decodes to the very tensor that the Sampler puts out; without it they are cancelled."""
        self.ahead[samples] = ahead
        weakref.finalize(samples, cancel, ahead.tickets).atexit = False

    def take(self, samples: Tensor, vae: Weights, tiling: Tiling | None) -> tuple[Ticket, ...] | None:
        """The decodes that already run for this tensor, once; None if there are none, or if they failed or differ."""
        ahead: Ahead | None = self.ahead.pop(samples, None)
        if ahead is None:
            return None
        if (ahead.vae, ahead.tiling) == (vae, tiling) and not any(ticket.failed() for ticket in ahead.tickets):
            return ahead.tickets
        cancel(ahead.tickets)
        return None


def submit_all(engine: EngineLike, requests: Sequence[Request]) -> tuple[Ticket, ...]:
    """Tickets of all requests; if one is refused, those before it are cancelled."""
    tickets: list[Ticket] = []
    try:
        for request in requests:
            tickets.append(engine.submit(request))
    except PipeDiTError:
        cancel(tickets)
        raise
    return tuple(tickets)


def cancel(tickets: Sequence[Ticket]) -> None:
    """Cancels what has not ended."""
    for ticket in tickets:
        if not ticket.done():
            ticket.cancel()


pools = Pools()
"""Of this process: nodes put it into the models that they hand out."""
