"""Pools and ComfyUI's memory manager on a GPU of numbers, in a process of their own: python core_memory.py COMFY.

ComfyUI's own load_models_gpu, free_memory and list of loaded models; how much is free is scripted, in GiB, and core
models are numbers too. Prints a line of JSON for each case.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
import threading
from pathlib import Path
from typing import Any

from inprocess import ROOT, enter, load

GIB = 2**30
TOTAL = 24


class Card:
    """gpu:0: ComfyUI's models and its allocator's rest, and what pools hold. asked: for which devices' free memory."""

    def __init__(self, comfy: Any) -> None:
        self.comfy, self.cached, self.emptied, self.asked = comfy, 0.0, 0, set[str]()
        self.engines: list[ScriptedEngine] = []

    def install(self) -> None:
        self.comfy.current_loaded_models.clear()
        self.comfy.get_free_memory = self.get_free_memory
        self.comfy.soft_empty_cache = self.soft_empty_cache
        self.comfy.get_torch_device = lambda: device(0)

    @property
    def free(self) -> float:
        core = sum(loaded.model.size_now for loaded in self.comfy.current_loaded_models if is_core(loaded))
        return TOTAL - core - self.cached - sum(engine.gib for engine in self.engines)

    def get_free_memory(self, dev: Any = None, torch_free_too: bool = False) -> Any:
        self.asked.add(str(dev))
        both = int((self.free + self.cached) * GIB)
        return (both, int(self.cached * GIB)) if torch_free_too else both

    def soft_empty_cache(self, force: bool = False) -> None:
        self.emptied += 1
        self.cached = 0.0


class ScriptedEngine:
    """A pool with `gib` on gpu:0, of which `busy` are in use."""

    def __init__(self, card: Card, gib: float, busy: float = 0.0) -> None:
        self.gib, self.busy, self.asked = gib, busy, list[float]()
        card.engines.append(self)

    def held(self, name: str) -> int:
        return int(self.gib * GIB) if name == "gpu:0" else 0

    def give_back(self, name: str, num_bytes: int) -> Any:
        self.asked.append(round(num_bytes / GIB, 2))
        given = min(num_bytes / GIB, self.gib - self.busy)
        self.gib -= given
        ticket = importlib.import_module("comfyui_pipedit.host.ticket").Ticket("give-back", lambda job: None)
        ticket.succeed(int(given * GIB))
        return ticket


def device(index: int) -> Any:
    import torch

    return torch.device("cuda", index)


def is_core(loaded: Any) -> bool:
    return hasattr(loaded.model, "size_now")


def core_model(gib: float) -> Any:
    """A core model of so many GiB, whose memory is a number."""
    import torch
    from comfy.model_patcher import ModelPatcher

    class Numbers(ModelPatcher):
        size_now = 0.0

        def model_size(self) -> int:
            return int(gib * GIB)

        def loaded_size(self) -> int:
            return int(self.size_now * GIB)

        def model_dtype(self) -> Any:
            return torch.float16

        def partially_load(self, *_: Any, **__: Any) -> int:
            self.size_now = gib
            return int(gib * GIB)

        def partially_unload(self, device_to: Any, memory_to_free: float = 0, *_: Any, **__: Any) -> int:
            given = min(self.size_now, memory_to_free / GIB)
            self.size_now -= given
            return int(given * GIB)

        def detach(self, unpatch_all: bool = True) -> Any:
            if unpatch_all:
                self.size_now = 0.0
            return self.model

    return Numbers(torch.nn.Module(), device(0), torch.device("cpu"))


class Cases:
    """Each returns what happened."""

    def __init__(self, comfy: Any, memory: Any, pools_class: type) -> None:
        self.comfy, self.memory, self.pools_class = comfy, memory, pools_class
        self.kept: list[Any] = []

    def start(self, gib: float, busy: float = 0.0, key: tuple[str, ...] = ("gpu:0", "gpu:1")) -> tuple[Card, Any, Any]:
        """A card with a pool on it, that ComfyUI knows of."""
        card = Card(self.comfy)
        card.install()
        self.memory.entries.clear()
        pools, engine = self.pools_class(), ScriptedEngine(card, gib, busy)
        pools.engines[key] = engine
        self.memory.announce(pools)
        return card, pools, engine

    def load(self, gib: float) -> Any:
        model = core_model(gib)
        self.kept.append(model)
        self.comfy.load_models_gpu([model])
        return model

    def listed(self) -> int:
        return sum(self.memory.is_pools(loaded) for loaded in self.comfy.current_loaded_models)

    def request(self, card: Card, name: str, missing: float, who: str = "gpu:0,gpu:1") -> Any:
        neighbour = importlib.import_module("comfyui_pipedit.host.neighbour")
        free = int((card.free + missing) * GIB)
        return neighbour.Request(name, free, int(missing * GIB), who, lambda: None)

    # -- ComfyUI lacks memory ---------------------------------------------------------------------------------------

    def core_with_room(self) -> Any:
        _, _, engine = self.start(10)
        model = self.load(5)
        return {"asked": engine.asked, "listed": self.listed(), "loaded": model.size_now}

    def core_without_room(self) -> Any:
        _, _, engine = self.start(18)
        model = self.load(8)
        again = self.load(1)
        return {"asked": engine.asked, "held": round(engine.gib, 2), "listed": self.listed(),
                "loaded": [model.size_now, again.size_now]}

    def a_pool_at_work(self) -> Any:
        _, pools, engine = self.start(18, busy=18)
        self.load(8)
        off = self.listed()
        self.memory.announce(pools)
        return {"held": engine.gib, "listed": [off, self.listed()]}

    def unload_all(self) -> Any:
        _, _, engine = self.start(18)
        self.comfy.unload_all_models()
        return {"held": engine.gib, "listed": self.listed()}

    def twice_announced(self) -> Any:
        _, pools, _ = self.start(18)
        self.memory.announce(pools)
        return self.listed()

    def nothing_held(self) -> Any:
        self.start(0)
        return self.listed()

    def cpu_ranks(self) -> Any:
        self.start(18, key=("cpu:0", "cpu:1"))
        return self.listed()

    # -- a pool lacks memory ----------------------------------------------------------------------------------------

    def the_allocators_rest_is_enough(self) -> Any:
        card, pools, engine = self.start(10)
        model = self.load(6)
        card.cached, card.emptied = 4.0, 0
        self.memory.give(self.request(card, "gpu:0", missing=3), pools)
        return {"loaded": model.size_now, "emptied": card.emptied, "asked": engine.asked}

    def there_is_room_by_now(self) -> Any:
        card, pools, _ = self.start(10)
        model, request = self.load(6), self.request(card, "gpu:0", missing=1)
        request.free, card.emptied = int(card.free * GIB), 0
        self.memory.give(request, pools)
        return {"loaded": model.size_now, "emptied": card.emptied}

    def a_model_gives_what_is_missing(self) -> Any:
        card, pools, engine = self.start(10)
        model = self.load(8)
        before = card.free
        left = self.memory.give(self.request(card, "gpu:0", missing=3), pools)
        return {"freed": round(card.free - before, 2), "loaded": round(model.size_now, 2), "asked": engine.asked,
                "left": [[held.name, round(held.num_bytes / GIB, 2)] for held in left], "listed": self.listed()}

    def a_model_that_holds_nothing_stays(self) -> Any:
        card, pools, _ = self.start(10)
        self.load(8)
        bridge = self.load(0)
        self.memory.give(self.request(card, "gpu:0", missing=7.5), pools)
        return any(loaded.model is bridge for loaded in self.comfy.current_loaded_models)

    def another_pools_idle_weights_first(self) -> Any:
        card, pools, engine = self.start(5)
        other = ScriptedEngine(card, 6)
        pools.engines["gpu:0",] = other
        model = self.load(8)
        self.memory.give(self.request(card, "gpu:0", missing=4), pools)
        return {"asked": engine.asked, "other": other.asked, "loaded": model.size_now}

    def a_gpu_that_comfyui_does_not_use(self) -> Any:
        card, pools, _ = self.start(10)
        model = self.load(8)
        card.asked.clear()
        self.memory.give(self.request(card, "gpu:1", missing=3), pools)
        return {"asked": sorted(card.asked), "loaded": model.size_now}

    # -- while the prompt's thread waits ----------------------------------------------------------------------------

    def waiting_answers(self) -> Any:
        """The clip ends only once its pool got an answer: one core node's wait, and one of an async node."""
        card, _, engine = self.start(10)
        self.memory.pools.engines["gpu:0", "gpu:1"] = engine
        waiting = importlib.import_module("pack.waiting")
        ended = []
        for how in ("wait", "follow"):
            model = self.load(8)
            ticket = self.clip_that_asks(card)
            if how == "wait":
                waiting.wait([ticket], lambda: None)
            else:
                asyncio.run(waiting.follow([ticket], lambda: None))
            ended.append([ticket.result(), round(model.size_now, 2)])
        return ended

    def clip_that_asks(self, card: Card) -> Any:
        ticket = importlib.import_module("comfyui_pipedit.host.ticket").Ticket("clip", lambda job: None)
        request = self.request(card, "gpu:0", missing=3)
        request.wake = lambda: ticket.succeed("done")
        threading.Thread(target=self.memory.neighbour.ask, args=(request,)).start()
        return ticket

    def announced_after_a_wait(self) -> Any:
        self.start(0)
        _, _, engine = self.start(0)
        self.memory.pools.engines["gpu:0", "gpu:1"] = engine
        ticket = importlib.import_module("comfyui_pipedit.host.ticket").Ticket("clip", lambda job: None)
        engine.gib = 9
        ticket.succeed("done")
        importlib.import_module("pack.waiting").wait([ticket], lambda: None)
        return self.listed()


def main(comfy: Path) -> None:
    enter(comfy)
    load("comfyui_pipedit", ROOT / "comfyui_pipedit" / "__init__.py")
    load("pack", ROOT / "nodes" / "__init__.py")
    importlib.import_module("utils.install_util")  # ComfyUI's, before another package of that name is found
    import comfy.model_management as management

    cases = Cases(management, importlib.import_module("pack.memory"), importlib.import_module("pack.pools").Pools)
    for name in (name for name in vars(Cases) if name[0] != "_" and name not in HELPERS):
        print(json.dumps({"case": name, "found": getattr(cases, name)()}), flush=True)


HELPERS = ("start", "load", "listed", "request", "clip_that_asks")

if __name__ == "__main__":
    main(Path(sys.argv[1]))
