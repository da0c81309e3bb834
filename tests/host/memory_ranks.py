"""Memory of ranks that hold one model: memory_ranks.py MODEL_FOLDER RANKS... -> a line of JSON for each number of
ranks, bytes summed over them.

"file" and "buffer": proportional set size (a page shared by n processes counts 1/n in each) of the mapped weight files
and of the shared buffers; "anonymous": memory of the ranks' own that loading and touching every weight added.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import sys
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
HEADER = 5


def main() -> None:
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    import tiny_wan

    tiny_wan.use_worker_site()
    import torch

    torch.set_num_threads(1)
    from comfyui_pipedit import models

    models.preload()
    for ranks in map(int, sys.argv[2:]):
        print(json.dumps(measure(Path(sys.argv[1]), ranks)))


def measure(folder: Path, ranks: int) -> dict[str, int]:
    """Forks so many ranks and adds up what they report."""
    import torch

    from comfyui_pipedit import loaders
    from comfyui_pipedit.wire import buffer

    weights = loaders.inspect(folder).transformer
    size = loaders.converted_bytes(weights, on_gpu=False)
    shared = buffer.allocate((size,), torch.uint8, "weights")[:2] if size else None
    context = multiprocessing.get_context("fork")
    meeting = context.Barrier(ranks)
    pipes = [context.Pipe(duplex=False) for _ in range(ranks)]
    processes = [context.Process(target=rank_main, args=(rank, weights, shared, folder, meeting, pipes[rank][1]))
                 for rank in range(ranks)]
    for process in processes:
        process.start()
    for _, sender in pipes:
        sender.close()
    reports = [receiver.recv() for receiver, _ in pipes]
    for process in processes:
        process.join()
    return {key: sum(report[key] for report in reports) for key in reports[0]}


def rank_main(rank: int, weights: Any, shared: Any, folder: Path, meeting: Barrier, report: Connection) -> None:
    """Loads, touches every byte, and measures while all ranks hold the model."""
    from comfyui_pipedit.parallel.sequence import Context
    from comfyui_pipedit.wire import buffer
    from comfyui_pipedit.worker.device import Device
    from comfyui_pipedit.worker.residency import Residency

    residency = Residency(Device.parse(f"cpu:{rank}"), Context(rank, SimpleNamespace()), lambda text: None)
    before = anonymous_bytes()
    mapped = buffer.attach(*shared) if shared else None
    residency.load(weights, mapped, writer=rank == 0)
    total = sum(touch(parameter) for parameter in residency.get(weights).parameters())
    meeting.wait(60)
    pss = mapped_bytes(str(folder), "memfd:pipedit:weights")
    meeting.wait(60)
    added = anonymous_bytes() - before
    report.send({"file": pss[0], "buffer": pss[1], "anonymous": added, "finite": int(math.isfinite(total))})


def touch(parameter: Any) -> float:
    """A number that all its values were read for, without a copy of them: their sum, the largest byte of fp8."""
    import torch

    return float(parameter.sum() if parameter.element_size() > 1 else parameter.view(torch.uint8).max())


def mapped_bytes(*names: str) -> list[int]:
    """PSS of this process's mappings whose file name contains each of the names."""
    totals, current = [0] * len(names), ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        fields = line.split(maxsplit=HEADER)
        if not fields[0].endswith(":"):
            current = fields[HEADER] if len(fields) > HEADER else ""
        elif fields[0] == "Pss:":
            for i, name in enumerate(names):
                totals[i] += int(fields[1]) * 1024 * (name in current)
    return totals


def anonymous_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


if __name__ == "__main__":
    main()
