"""Memory on a real GPU: who has it, what work takes against what was expected, claims, and giving back.

With -s it prints what was measured (docs/memory.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from comfyui_pipedit.config import EngineConfig
from comfyui_pipedit.errors import OutOfMemory
from comfyui_pipedit.host import devices, estimate
from comfyui_pipedit.host.engine import Engine
from comfyui_pipedit.host.neighbour import Held, Neighbour, Request
from comfyui_pipedit.job import DecodeRequest, ModelFiles, Tiling
from comfyui_pipedit.plan import Group, Plan
from comfyui_pipedit.requests import Clip, Settings, find_model, make_job

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
GIB = 2**30
ONE = Plan(Group((0,)), Group((0,)))


def free() -> int:
    return int(torch.cuda.mem_get_info(0)[0])


@pytest.fixture(scope="module")
def wan(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    """Wan 2.1 14B's width with two layers, and the full VAE, in bf16 with random weights."""
    import tiny_wan

    tiny_wan.use_worker_site()
    from diffusers import AutoencoderKLWan

    root = tiny_wan.write_model(tmp_path_factory.mktemp("wan") / "wan")
    network = tiny_wan.transformer(num_attention_heads=40, attention_head_dim=128, text_dim=tiny_wan.TEXT_WIDTH,
                                   ffn_dim=13824, freq_dim=256, num_layers=2, rope_max_seq_len=1024)
    network.bfloat16().save_pretrained(root / "transformer")
    tiny_wan.randomise(AutoencoderKLWan()).bfloat16().save_pretrained(root / "vae")
    return find_model(str(root))


@pytest.fixture(scope="module")
def neighbour() -> Neighbour:
    return Neighbour()


@pytest.fixture(scope="module")
def engine(neighbour: Neighbour) -> Iterator[Engine]:
    """One rank."""
    made = Engine(EngineConfig(devices="gpu:0"), neighbour=neighbour)
    yield made
    made.close()


def clip(engine: Engine, wan: ModelFiles, length: int = 33) -> object:
    texts = [torch.zeros(1, 512, wan.geometry.text_width)]
    size = Clip(832, 480, length)
    job = make_job(wan, texts, size.latent_shape(wan), Settings(seed=5, steps=1, cfg=1.0), decode=False, plan=ONE)
    ticket = engine.submit(job)
    assert ticket.wait(120)
    return ticket.result()


def decode(engine: Engine, wan: ModelFiles, width: int, height: int, tiling: Tiling | None = None) -> None:
    assert wan.vae is not None
    latent = torch.zeros(1, 16, 3, height // 8, width // 8)
    ticket = engine.submit(DecodeRequest(wan.vae, wan.geometry, latent, tiling))
    assert ticket.wait(120)
    ticket.result()


def test_a_gpus_name_costs_no_memory_there() -> None:
    torch.zeros(1, device="cuda")
    before = free()
    names = devices.hardware(tuple(f"gpu:{i}" for i in range(torch.cuda.device_count())))
    assert len(set(names.values())) == len(names) and all(len(name) > 30 for name in names.values())
    assert free() == before


def test_what_work_takes_is_about_what_was_expected(engine: Engine, wan: ModelFiles) -> None:
    for length in (17, 33):
        clip(engine, wan, length)
    for size in ((832, 480), (1280, 720)):
        decode(engine, wan, *size)
        decode(engine, wan, *size, tiling=Tiling())
    for work, peak in engine.scheduler.claims._peaks.items():
        expected = estimate.activation_bytes(work)
        print(f"\n{work.kind} {work.label}{' tiled' if work.tiling else ''}: measured {peak / GIB:.2f} GiB, "
              f"expected {expected / GIB:.2f}")
        assert expected <= peak < 1.25 * expected
    assert len(engine.scheduler.claims._peaks) == 6


def test_an_idle_pool_gives_its_memory_back(engine: Engine, wan: ModelFiles) -> None:
    clip(engine, wan)
    before, held = free(), engine.held("gpu:0")
    ticket = engine.give_back("gpu:0", held)
    assert ticket.wait(60)
    print(f"\nheld {held / GIB:.2f} GiB, gave {ticket.result() / GIB:.2f}")
    assert ticket.result() == pytest.approx(free() - before, abs=GIB / 64) and ticket.result() > 0.9 * held
    assert engine.held("gpu:0") == 0


def test_what_does_not_fit_asks_once_and_is_refused_before_it_begins(engine: Engine, neighbour: Neighbour,
                                                                     wan: ModelFiles) -> None:
    clip(engine, wan)
    assert engine.give_back("gpu:0", 2**50).wait(60)
    hog = torch.empty(free() - GIB, dtype=torch.uint8, device="cuda")
    generation = engine.pool.generation
    texts = [torch.zeros(1, 512, wan.geometry.text_width)]
    job = make_job(wan, texts, Clip(832, 480, 33).latent_shape(wan), Settings(seed=6, steps=1, cfg=1.0), decode=False,
                   plan=ONE)
    asked: list[Request] = []

    def nothing(request: Request) -> tuple[Held, ...]:
        asked.append(request)
        return (Held("Hog", hog.numel()),)

    ticket = engine.submit(job)
    while not ticket.wait(0.05):
        neighbour.serve(nothing)
    with pytest.raises(OutOfMemory, match=r"short for 832x480x33: weights .* \(of these ComfyUI: Hog ") as caught:
        ticket.result()
    print(f"\n{caught.value}")
    assert engine.pool.generation == generation and len(asked) == 1

    def everything(request: Request) -> tuple[Held, ...]:
        nonlocal hog
        hog = torch.empty(0)
        torch.cuda.empty_cache()
        assert free() >= request.free
        return ()

    ticket = engine.submit(replace(job, seed=7))
    while not ticket.wait(0.05):
        neighbour.serve(everything)
    assert ticket.result().isfinite().all() and hog.numel() == 0


def test_another_program_is_told(engine: Engine, wan: ModelFiles, tmp_path: Path) -> None:
    import subprocess
    import sys

    clip(engine, wan, 17)
    code = ("from comfyui_pipedit.config import EngineConfig; from comfyui_pipedit.host.engine import Engine; "
            "Engine(EngineConfig(devices='gpu:0'))._start()")
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False)
    assert "DeviceTaken" in done.stderr and "gpu:0 is in use by process" in done.stderr
