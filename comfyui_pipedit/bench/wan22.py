"""Wan 2.2 A14B's sizes with random weights, on all GPUs there are: `python -m comfyui_pipedit.bench.wan22 --files DIR`.

One line of JSON a measurement: loading a bf16 file out of the page cache beside what the machine can do, memory of host
and GPU, fp8 beside bf16, LoRA changes on resident weights, and a clip by two experts with a LoRA each. DIR needs 57 GB.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..config import WORKER_SITE, EngineConfig
from ..host.engine import Engine
from ..job import Job, LoraUse, ModelFiles
from ..loaders import combine
from ..loaders.lora import read_lora
from ..requests import Clip, Settings, make_job

GIB = 2.0**30
SMALL, WHOLE = Clip(256, 256, 5), Clip(832, 480, 81)
PIECE = 64 << 20


def main() -> None:
    """Makes what is missing of the files, then measures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--files", type=Path, required=True, help="folder for the random files")
    parser.add_argument("--changes", type=int, default=10, help="LoRA changes to time")
    args = parser.parse_args()
    sys.path.append(str(WORKER_SITE))
    files = Files.made(args.files)
    say("machine reads the bf16 file", gib_s=page_cache_speed(files.bf16), pinned_gib_s=pinned_speed())
    exact, scaled = (resident(name, path, args.changes, files.loras[0]) for name, path in
                     (("bf16", files.bf16), ("fp8_scaled", files.high)))
    say("distance to bf16, the same weights", fp8_scaled=distance(scaled, exact),
        fp8_unscaled=distance(cast_to_fp8(files.bf16), exact))
    two_experts(files)


def distance(found: Tensor, exact: Tensor) -> float:
    """Relative L2."""
    return ((found - exact).norm() / exact.norm()).item()


def cast_to_fp8(path: Path) -> Tensor:
    """The small clip's latent of a file that is cast to fp8 without scales."""
    files = combine(path, None, None, "cast")
    files = replace(files, transformer=replace(files.transformer, dtype="fp8_e4m3fn"))
    with engine_of_all() as engine:
        return submit(engine, text_job(files, SMALL, 1))


@dataclass(frozen=True, slots=True)
class Files:
    """Paths of the random files."""

    bf16: Path
    high: Path
    low: Path
    loras: tuple[Path, Path]

    @classmethod
    def made(cls, folder: Path) -> Files:
        """Writes them if they are not there, on the first GPU."""
        from .files import A14B, write_lora, write_transformer

        device = torch.device("cuda", 0)
        names = ("high_bf16", "high_fp8_scaled", "low_fp8_scaled", "lora_high", "lora_low")
        bf16, high, low, first, second = (folder / f"{name}.safetensors" for name in names)
        for path, fp8, seed in ((bf16, False, 1), (high, True, 1), (low, True, 2)):
            if not path.exists():
                write_transformer(path, A14B, fp8=fp8, seed=seed, device=device)
        for path, seed in ((first, 3), (second, 4)):
            if not path.exists():
                write_lora(path, A14B, rank=64, seed=seed, device=device)
        torch.cuda.empty_cache()
        return cls(bf16, high, low, (first, second))


def say(what: str, **values: float | str) -> None:
    """A measurement as a line of JSON."""
    rounded = {name: round(value, 4) if isinstance(value, float) else value for name, value in values.items()}
    print(json.dumps({"what": what, "gpus": torch.cuda.device_count(), **rounded}), flush=True)


def page_cache_speed(path: Path, threads: int = 12) -> float:
    """GiB/s of threads that copy a file out of the page cache; it is read once before."""
    buffers: list[Any] = [torch.empty(PIECE, dtype=torch.uint8).fill_(1).numpy() for _ in range(threads)]
    size = path.stat().st_size

    def read(index: int) -> None:
        with path.open("rb", buffering=0) as file:
            for place in range(index * PIECE, size, threads * PIECE):
                os.preadv(file.fileno(), [memoryview(buffers[index])], place)

    def run() -> float:
        started = time.monotonic()
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(read, range(threads)))
        return size / GIB / (time.monotonic() - started)

    run()
    return max(run(), run())


def pinned_speed() -> float:
    """GiB/s of copies from pinned memory to the first GPU."""
    source = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(1 << 30, dtype=torch.uint8, device="cuda:0")
    target.copy_(source)
    torch.cuda.synchronize()
    started = time.monotonic()
    for _ in range(8):
        target.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    return 8 / (time.monotonic() - started)


def resident(name: str, path: Path, changes: int, lora: Path) -> Tensor:
    """Loads a transformer on all ranks, changes LoRAs on it, and says what that takes. The latent of a small clip."""
    files = combine(path, None, None, name)
    before = used_gib()
    with engine_of_all() as engine, PeakHost(engine) as host:
        submit(engine, text_job(files, SMALL, 0))
        latent, first = timed(engine, text_job(files, SMALL, 1))
        timed_loads = []
        for seed in (2, 3):
            engine.free()
            _, cold = timed(engine, text_job(files, SMALL, seed))
            _, warm = timed(engine, text_job(files, SMALL, seed + 10))
            timed_loads.append(cold - warm)
        size = path.stat().st_size / GIB
        load = statistics.median(timed_loads)
        say(f"load {name}", seconds=load, gib_s=size / load, file_gib=size, small_clip_s=first)
        say(f"memory {name}", gpu_gib=max(used_gib()) - max(before), weights_gib=weights_gib(engine),
            host_peak_gib=host.peak_gib, host_bound_gib=1.15 * size + 2)
        lora_changes(engine, name, files, lora, changes)
        submit(engine, text_job(files, WHOLE, 4, steps=1))
        beside = max(engine.status()["peaks"].values()) / GIB
        say(f"peak {name} at 832x480x81", gpu_gib=max(used_gib()) - max(before), beside_weights_gib=beside,
            whole_gib=weights_gib(engine) + beside)
    return latent


def lora_changes(engine: Engine, name: str, files: ModelFiles, lora: Path, changes: int) -> None:
    """Seconds and GPU memory of strengths that change on resident weights."""
    base = statistics.median(timed(engine, text_job(files, SMALL, seed))[1] for seed in (20, 21, 22))
    read, memory, seconds = read_lora(lora), [], []
    for index in range(changes):
        use = (read.use(0.1 * (index + 1)),) if index % 3 else ()
        _, took = timed(engine, text_job(replace(files, loras=use), SMALL, 30 + index))
        seconds.append(took - base)
        memory.append(max(used_gib()))
    say(f"LoRA changes on {name}", median_s=statistics.median(seconds), worst_s=max(seconds), changes=changes,
        growth_gib=memory[-1] - memory[min(2, changes - 1)])


def two_experts(files: Files) -> None:
    """832x480x81, 4 steps at cfg 1, two experts in fp8 with a LoRA each: with loading, and again."""
    one = combine(files.high, None, None, "A14B", files.low)
    uses: list[LoraUse] = [read_lora(path).use(1.0) for path in files.loras]
    both = replace(one, loras=(uses[0],), loras_low=(uses[1],))
    with engine_of_all() as engine:
        for name in ("with loading", "again", "a third time"):
            latent, took = timed(engine, text_job(both, WHOLE, 7, steps=4))
            say(f"A14B fp8_scaled, two LoRAs, 832x480x81, 4 steps, cfg 1, {name}", seconds=took,
                finite=str(bool(latent.isfinite().all())), gpu_gib=max(used_gib()))


@contextmanager
def engine_of_all() -> Iterator[Engine]:
    """All GPUs denoise."""
    count = torch.cuda.device_count()
    engine = Engine(EngineConfig(devices=",".join(f"gpu:{i}" for i in range(count)), split=str(count)))
    try:
        yield engine
    finally:
        engine.close()


def text_job(files: ModelFiles, clip: Clip, seed: int, steps: int = 1) -> Job:
    """A clip of a random embedding of 512 tokens at cfg 1."""
    text = torch.randn((1, 512, files.geometry.text_width), generator=torch.Generator().manual_seed(0))
    settings = Settings(seed=seed, steps=steps, cfg=1.0, shift=5.0)
    return make_job(files, [text], clip.latent_shape(files), settings)


def submit(engine: Engine, job: Job) -> Tensor:
    """The latent of a job."""
    ticket = engine.submit(job)
    ticket.wait()
    result: Tensor = ticket.result()
    return result


def timed(engine: Engine, job: Job) -> tuple[Tensor, float]:
    """(latent, seconds) of a job."""
    started = time.monotonic()
    return submit(engine, job), time.monotonic() - started


def used_gib() -> list[float]:
    """Memory in use on each GPU, whoever uses it."""
    found = (torch.cuda.mem_get_info(i) for i in range(torch.cuda.device_count()))
    return [(total - free) / GIB for free, total in found]


def weights_gib(engine: Engine) -> float:
    """Bytes of weights on the first rank."""
    return sum(engine.status()["resident"]["0"].values()) / GIB


class PeakHost:
    """Largest sum of the proportional set sizes of a pool's processes, mapped files included; sampled."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._over = engine, threading.Event()
        self.peak_gib = 0.0

    def __enter__(self) -> PeakHost:
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(0.3):
            total = sum(pss_kib(pid) for pid in self._engine.pool.pids())
            self.peak_gib = max(self.peak_gib, total / (1 << 20))


def pss_kib(pid: int) -> int:
    """Proportional set size of a process; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)


if __name__ == "__main__":
    main()
