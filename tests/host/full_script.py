"""A host with no room for buffers, for test_full.py: python full_script.py. Prints a line of JSON.

The limit on file sizes stands for a full memory: a memfd is a file. It is set once the pool is up, for this process.
"""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]
SECONDS = 30.0
LIMIT = 256
"""Bytes: less than any latent, frames or text of the toy family."""


def main() -> None:
    import torch
    import toy

    from comfyui_pipedit.host.engine import Engine
    from comfyui_pipedit.job import EncodeRequest

    engine = Engine(toy.config())
    try:
        before, pids = clip(engine, toy), engine.pool.pids()
        frames = EncodeRequest(toy.FILES.vae, toy.GEOMETRY, torch.rand(4, 3, 5, 3))
        requests = {"clip": toy.job(8), "decode": toy.decode_request(before[0]), "encode": frames}
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, hard))
        errors = {name: failure(engine, request) for name, request in requests.items()}
        text = failure(engine, toy.text_request("no buffer of the host's"))
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        after = clip(engine, toy)
        again = {name: failure(engine, request) for name, request in requests.items()}
        same = all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
        print(json.dumps({"errors": errors, "text": text, "again": again, "same clip": same,
                          "same ranks": engine.pool.pids() == pids}))
    finally:
        engine.close()


def clip(engine: Any, toy: Any) -> tuple[Any, Any]:
    ticket = engine.submit(toy.job())
    assert ticket.frames.wait(SECONDS)
    return ticket.result(), ticket.frames.result().clone()


def failure(engine: Any, request: Any) -> str:
    """Class and text of the error that a request ends with, "" if it ends well."""
    from comfyui_pipedit.errors import PipeDiTError

    try:
        ticket = engine.submit(request)
        assert ticket.wait(SECONDS), f"{ticket.id} did not end"
        ticket.result()
    except PipeDiTError as error:
        return f"{type(error).__name__}: {error}"
    return ""


if __name__ == "__main__":
    main()
