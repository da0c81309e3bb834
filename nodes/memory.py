"""The pools beside ComfyUI's own models on the same GPUs: each side gives what the other lacks, and no more.

A pool that lacks memory asks (host/neighbour.py), and the thread that waits for it answers here through ComfyUI's
memory manager. The other way round, what pools hold stands in ComfyUI's list of loaded models as one model a GPU: where
core nodes lack memory, ComfyUI unloads that model like any other, and the pool gives up what nothing uses. No function
of ComfyUI is replaced, and an entry answers as every ModelPatcher does, so it works on 0.3.75 as on what came later.
"""

from __future__ import annotations

import math
import time
import weakref
from typing import Any

import comfy.model_management as management
import comfy.model_patcher
import torch

from comfyui_pipedit.host.neighbour import Held, Request
from comfyui_pipedit.host.ticket import Ticket

from .pools import EngineLike, Pools, neighbour, pools

SLICE = 0.05
PATIENCE = 60.0
"""Seconds that ComfyUI waits for a pool to give memory back; a rank in the middle of a long step takes that long."""
NOTHING = 2**20
"""Bytes up to which a loaded model counts as one that holds nothing, such as PipeDiT Model Bridge's."""


def look_in() -> None:
    """Prompt's thread, while it waits for a pool: answers what pools ask for, and tells ComfyUI what they hold."""
    neighbour.serve(give)
    announce()


# -- from ComfyUI to a pool --------------------------------------------------------------------------------------------


def give(request: Request, among: Pools = pools) -> tuple[Held, ...]:
    """Frees what a pool lacks: first what other pools of this process have idle, then ComfyUI's models, on that GPU
    alone and only if this process has a context there. What ComfyUI still holds on it."""
    device = torch_device(request.device)
    given = given_by(among.on(request.device, besides=request.who), request.device, request.missing)
    if given < request.missing and device in devices_of_comfyui():
        free(device, request.free)
    left = core_models(device)
    return tuple(Held(type(loaded.model.model).__name__, loaded.model_loaded_memory()) for loaded in left)


def free(device: torch.device, num_bytes: int) -> None:
    """Makes so many bytes of a GPU free for other processes, if ComfyUI has them to give. It unloads no model where its
    allocator's rest is enough, and moves parts of models where parts are enough."""
    if free_for_others(device) >= num_bytes:
        return
    management.soft_empty_cache()
    if free_for_others(device) < num_bytes:
        giving = core_models(device)
        keep = [loaded for loaded in management.current_loaded_models if loaded not in giving]
        management.free_memory(num_bytes, device, keep_loaded=keep)
        management.soft_empty_cache()


def free_for_others(device: torch.device) -> int:
    """Bytes of a GPU that are free for any process: without what ComfyUI's allocator holds."""
    all_free, held = management.get_free_memory(device, torch_free_too=True)
    return int(all_free - held)


def devices_of_comfyui() -> set[torch.device]:
    """ComfyUI's own device, and those that it has models on; to ask for the memory of another makes a context there."""
    return {management.get_torch_device(), *(loaded.device for loaded in living() if not is_pools(loaded))}


def core_models(device: torch.device) -> list[Any]:
    """ComfyUI's entries for the models that hold memory of a GPU."""
    return [
        loaded
        for loaded in living()
        if loaded.device == device and not is_pools(loaded) and loaded.model_loaded_memory() > NOTHING
    ]


def living() -> list[Any]:
    return [loaded for loaded in management.current_loaded_models if loaded.model is not None]


# -- from a pool to ComfyUI --------------------------------------------------------------------------------------------


class PipeDiTPool(torch.nn.Module):
    """Where ComfyUI's handle of a model has the model; logs show its name."""


class PoolWeights(comfy.model_patcher.ModelPatcher):
    """What pools hold on one GPU, as a model that ComfyUI has loaded there. Unloading it asks the pools."""

    def __init__(self, name: str, among: Pools) -> None:
        """name: "gpu:0"."""
        super().__init__(PipeDiTPool(), torch_device(name), torch.device("cpu"))
        self.name, self.among = name, among

    def loaded_size(self) -> int:
        """Bytes that the pools hold, as far as they know."""
        return sum(engine.held(self.name) for engine in self.among.on(self.name))

    def model_size(self) -> int:
        """The same: nothing is kept elsewhere."""
        return self.loaded_size()

    def current_loaded_device(self) -> torch.device:
        return self.load_device

    def partially_load(self, *_: Any, **__: Any) -> int:
        """Loads nothing: a pool loads by itself what a request needs."""
        return 0

    def partially_unload(self, device_to: Any, memory_to_free: float = 0, *_: Any, **__: Any) -> int:
        """Bytes that the pools gave; those in use stay."""
        return given_by(self.among.on(self.name), self.name, math.ceil(memory_to_free))

    def detach(self, unpatch_all: bool = True) -> Any:
        """ComfyUI takes it off its list: the pools give all that is not in use."""
        if unpatch_all:
            given_by(self.among.on(self.name), self.name, self.loaded_size())
        return self.model


entries: dict[str, PoolWeights] = {}
"""By GPU; ComfyUI's list refers to them weakly."""


def announce(among: Pools = pools) -> None:
    """Puts what pools hold into ComfyUI's list, if it is not there: after a load, and after it was taken off."""
    for name in among.gpus():
        if name not in entries:
            entries[name] = PoolWeights(name, among)
        entry = entries[name]
        if entry.loaded_size() and not any(loaded.model is entry for loaded in management.current_loaded_models):
            management.current_loaded_models.append(loaded_model(entry))


def loaded_model(entry: PoolWeights) -> Any:
    """What ComfyUI makes of a model that it loads itself."""
    made = management.LoadedModel(entry)
    made.real_model = weakref.ref(entry.model)
    made.model_finalizer = weakref.finalize(entry.model, management.cleanup_models)
    made.model_finalizer.atexit = False
    return made


def is_pools(loaded: Any) -> bool:
    return isinstance(loaded.model, PoolWeights)


def given_by(engines: list[EngineLike], device: str, num_bytes: int) -> int:
    """Bytes of a GPU that these pools gave, one after the other until it is enough."""
    given = 0
    for engine in engines:
        if given < num_bytes:
            given += outcome(engine.give_back(device, num_bytes - given))
    return given


def outcome(ticket: Ticket) -> int:
    """A ticket's number; 0 if it does not end in time, or if the prompt is cancelled. It raises nothing: ComfyUI also
    unloads between prompts, where an exception would end its worker."""
    end = time.monotonic() + PATIENCE
    while not ticket.wait(SLICE):
        if management.processing_interrupted() or time.monotonic() > end:
            return 0
    return int(ticket.result())


def torch_device(name: str) -> torch.device:
    """"gpu:1" as torch and ComfyUI call it."""
    return torch.device("cuda", int(name.removeprefix("gpu:")))
