"""A scripted engine for tests, put in at the one seam where nodes meet the engine; and nodes that make bad inputs.

POST /fake {"hold": [kinds], "fail": {kind: text}} installs it anew, "closed": N lets N engines end at once.
GET /fake tells what was asked of it.
POST /fake/release {} lets held work go on, {"fail_first": text} ends the oldest with an error.
Kinds: text, clip, evaluate, decode, encode.
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import sys
import threading
from typing import Any

import torch
from aiohttp import web
from comfy_api.latest import ComfyExtension, io
from server import PromptServer
from typing_extensions import override

KINDS = {
    "TextRequest": "text",
    "Job": "clip",
    "EvaluateRequest": "evaluate",
    "DecodeRequest": "decode",
    "EncodeRequest": "encode",
}


def pack_module(name: str) -> Any:
    """A module of the real pack, whose modules ComfyUI names after their path."""
    return next(module for key, module in sys.modules.items() if key.endswith(name) and key.startswith("/"))


class FakeEngine:
    """Answers at once, or when released; remembers what was asked."""

    def __init__(self, hold: list[str], fail: dict[str, str]) -> None:
        self.hold, self.fail, self.closed = hold, fail, False
        self.numbers = itertools.count(1)
        self.asked: list[dict[str, Any]] = []
        self.held: list[tuple[Any, Any]] = []
        self.cancelled: list[str] = []
        self.freed = 0
        self.lock = threading.Lock()

    def submit(self, request: Any) -> Any:
        if self.closed:
            raise importlib.import_module("comfyui_pipedit.errors").PoolClosed("the workers could not start")
        tickets = importlib.import_module("comfyui_pipedit.host.ticket")
        kind = KINDS[type(request).__name__]
        name = f"{kind}-{next(self.numbers)}"
        follow_up = getattr(request, "decode", None) is not None
        frames = tickets.Ticket(f"frames-of-{name}", self.cancel) if follow_up else None
        ticket = tickets.Ticket(name, self.cancel, frames)
        self.asked.append(describe(name, kind, request))
        if kind in self.hold:
            ticket.report(progress(kind, 1, 4))
            self.held.append((request, ticket))
        else:
            self.answer(request, ticket)
        return ticket

    def answer(self, request: Any, ticket: Any) -> None:
        kind = KINDS[type(request).__name__]
        if kind in self.fail:
            ticket.fail(importlib.import_module("comfyui_pipedit.errors").rebuild("WorkerDied", self.fail[kind]))
            return
        ticket.note_time(kind, 0.5)
        ticket.report(progress(kind, 4, 4))
        ticket.succeed(result(kind, request))
        if ticket.frames is not None and "frames" not in self.hold:
            self.finish_frames(request, ticket)

    def finish_frames(self, request: Any, ticket: Any) -> None:
        if "frames" in self.fail:
            ticket.frames.fail(
                importlib.import_module("comfyui_pipedit.errors").rebuild("WorkerDied", self.fail["frames"])
            )
        else:
            ticket.frames.succeed(frames_of(ticket.result(), request.files.geometry))

    def release(self) -> None:
        self.hold = []
        while self.held:
            self.answer(*self.held.pop(0))

    def cancel(self, job: str) -> None:
        errors = importlib.import_module("comfyui_pipedit.errors")
        self.cancelled.append(job)
        for _, ticket in self.held:
            if ticket.id == job:
                ticket.fail(errors.Cancelled(f"{job} was cancelled"))

    def status(self) -> dict[str, Any]:
        return {"state": "fake", "asked": len(self.asked)}

    def spans(self, since: float = 0.0) -> list[Any]:
        span = importlib.import_module("comfyui_pipedit.job").Span
        return [
            found
            for found in (span(1, "decode", "b", 3.0, 4.0), span(0, "denoise", "a", 1.0, 2.0))
            if found.end >= since
        ]

    def free(self) -> None:
        self.freed += 1

    def close(self) -> None:
        """Nothing to end."""


def progress(kind: str, done: int, total: int) -> Any:
    job = importlib.import_module("comfyui_pipedit.job")
    stage = {"text": job.Stage.ENCODING, "clip": job.Stage.DENOISING}.get(kind, job.Stage.DECODING)
    return job.Progress(stage, done, total, f"{kind} {done} of {total}")


def describe(name: str, kind: str, request: Any) -> dict[str, Any]:
    """What a request asks for, as JSON."""
    found: dict[str, Any] = {"id": name, "kind": kind}
    if kind == "clip":
        found |= {
            "seed": request.seed,
            "cfg": request.cfg,
            "shape": list(request.latent.shape),
            "noise": float(request.noise.sum()),
            "steps": request.table.num_steps,
            "negative": request.negative is not None,
            "decode": request.decode is not None,
            "sampler": request.table.sampler,
            "sigma": request.table.sigmas[1],
            "dtype": request.files.transformer.dtype,
            "text": float(request.positive.text.mean()),
        }
    elif kind == "evaluate":
        found |= {
            "sigma": request.sigma,
            "branches": len(request.branches),
            "shape": list(request.x.shape),
            "expert": request.expert.weights.path,
        }
    tiling = getattr(request, "tiling", None)
    return found | {
        "tiling": None if tiling is None else dataclasses.asdict(tiling),
        "texts": list(getattr(request, "texts", ())),
    }


def result(kind: str, request: Any) -> Any:
    """Something of the right shape that tells its input: a text's length, noise as the latent, means as frames."""
    if kind == "text":
        return [torch.full((1, 16, 64), float(len(text))) for text in request.texts]
    if kind == "clip":
        return request.latent + request.noise
    if kind == "evaluate":
        return [torch.zeros_like(request.x) for _ in request.branches]
    if kind == "decode":
        return frames_of(request.latent, request.geometry)
    frames, height, width, _ = request.frames.shape
    return torch.full(
        (1, request.geometry.channels, (frames - 1) // 4 + 1, height // 8, width // 8), request.frames.mean()
    )


def frames_of(latent: torch.Tensor, geometry: Any) -> torch.Tensor:
    _, _, length, height, width = latent.shape
    scale = geometry.spatial
    return torch.full((geometry.num_frames(length), height * scale, width * scale, 3), latent.mean().sigmoid().item())


class FakeSource(io.ComfyNode):
    """Values that core nodes cannot make."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="FakeSource",
            category="fake",
            inputs=[
                io.Conditioning.Input("text", optional=True),
                io.Latent.Input("latent", optional=True),
                io.String.Input("what", default=""),
            ],
            outputs=[io.Conditioning.Output("out_text"), io.Latent.Output("out_latent")],
        )

    @classmethod
    def execute(cls, what: str, text: Any = None, latent: Any = None) -> io.NodeOutput:
        if what == "two entries":
            text = [*text, *text]
        elif what == "control":
            text = [[text[0][0], {**text[0][1], "control": "x", "strength": 0.5}]]
        elif what == "wide":
            text = [[torch.zeros(1, 16, 4096), {"pooled_output": None}]]
        elif what == "mask":
            latent = {**latent, "noise_mask": torch.ones(8)}
        elif what == "two texts":
            text = [[torch.cat([text[0][0], text[0][0] + 1]), text[0][1]]]
        return io.NodeOutput(text, latent)


class Fake(ComfyExtension):
    @override
    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [FakeSource]


async def install(request: web.Request) -> web.Response:
    body = await request.json()
    engine = FakeEngine(body.get("hold", []), body.get("fail", {}))
    pools = pack_module("nodes.pools").pools
    closed = itertools.count()

    def factory(devices: str) -> FakeEngine:
        engine.closed = next(closed) < body.get("closed", 0)
        return engine

    pools.factory = factory
    pools.engines.clear()
    PromptServer.instance.fake_engine = engine
    return web.json_response({})


async def asked(request: web.Request) -> web.Response:
    engine = PromptServer.instance.fake_engine
    return web.json_response({"asked": engine.asked, "cancelled": engine.cancelled, "freed": engine.freed})


async def release(request: web.Request) -> web.Response:
    body, engine = await request.json(), PromptServer.instance.fake_engine
    if "fail_first" in body:
        _, ticket = engine.held.pop(0)
        ticket.fail(importlib.import_module("comfyui_pipedit.errors").rebuild("WorkerDied", body["fail_first"]))
    else:
        engine.release()
    return web.json_response({})


async def comfy_entrypoint() -> Fake:
    routes = PromptServer.instance.routes
    routes.post("/fake")(install)
    routes.get("/fake")(asked)
    routes.post("/fake/release")(release)
    return Fake()
