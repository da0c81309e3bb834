"""The pool on GPUs, as many ranks as there are: the demo model in fp32, and Wan 2.1 1.3B's shapes with random weights.

With -s it prints what was measured (docs/benchmarks.md).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from comfyui_pipedit.config import EngineConfig
from comfyui_pipedit.host.engine import Engine
from comfyui_pipedit.job import ModelFiles
from comfyui_pipedit.plan import Group, Plan
from comfyui_pipedit.requests import Clip, Settings, encode_texts, find_model, make_job

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
PROMPT = "a red circle moving right on black background"
ONE = Plan(Group((0,)), Group((0,)))


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """A rank on each GPU."""
    made = Engine(EngineConfig())
    assert made.devices[0] == "gpu:0"
    yield made
    made.close()


@pytest.fixture(scope="module")
def wan_1b(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    """A folder of Wan 2.1 1.3B's shapes in bf16 with the full Wan VAE, all weights random."""
    import tiny_wan

    tiny_wan.use_worker_site()
    from diffusers import AutoencoderKLWan

    root = tmp_path_factory.mktemp("wan") / "wan-1b"
    tiny_wan.write_model(root)
    network = tiny_wan.transformer(num_attention_heads=12, attention_head_dim=128, text_dim=tiny_wan.TEXT_WIDTH,
                                   ffn_dim=8960, freq_dim=256, num_layers=30, rope_max_seq_len=1024)
    network.bfloat16().save_pretrained(root / "transformer")
    tiny_wan.randomise(AutoencoderKLWan()).bfloat16().save_pretrained(root / "vae")
    return find_model(str(root))


def demo_in_fp32() -> ModelFiles:
    """The demo's transformer is stored in fp16, which is what GPU ranks compute in by default."""
    files = find_model("demo")
    return replace(files, transformer=replace(files.transformer, dtype="fp32"))


def everyone(engine: Engine, chunks: int = 1) -> Plan:
    """All ranks denoise, the last decodes too."""
    size = len(engine.devices)
    return Plan(Group(tuple(range(size))), Group((size - 1,)), chunks)


def clip(engine: Engine, files: ModelFiles, texts: list[Tensor], size: Clip, settings: Settings,
         plan: Plan) -> tuple[Tensor, Tensor, float]:
    """(latent, frames, seconds until both were there)."""
    started = time.monotonic()
    ticket = engine.submit(make_job(files, texts, size.latent_shape(files), settings, decode=True, plan=plan))
    assert ticket.frames is not None
    ticket.frames.wait()
    return ticket.result(), ticket.frames.result().clone(), time.monotonic() - started


def relative(found: Tensor, reference: Tensor) -> float:
    return ((found - reference).abs().max() / reference.abs().max()).item()


def relative_l2(found: Tensor, reference: Tensor) -> float:
    return ((found - reference).norm() / reference.norm()).item()


@pytest.mark.parametrize("sampler", ["euler", "uni_pc"])
def test_the_demo_model(engine: Engine, sampler: str) -> None:
    files, settings = demo_in_fp32(), Settings(seed=3, sampler=sampler, cfg=3.0)
    texts = encode_texts(engine, files, (PROMPT, ""))
    one, frames, _ = clip(engine, files, texts, Clip(), settings, ONE)
    again, *_ = clip(engine, files, texts, Clip(), settings, ONE)
    assert torch.equal(one, again)
    plans = [everyone(engine, chunks) for chunks in (1, 2, 4)]
    found = [clip(engine, files, texts, Clip(), settings, plan) for plan in plans]
    worst = max(relative(latent, one) for latent, *_ in found)
    print(f"\n{len(engine.devices)} GPUs against one, demo, {sampler}, 20 steps: {worst:.2e}")
    assert worst <= 1e-4
    assert all(torch.equal(latent, found[0][0]) for latent, *_ in found)
    assert max(relative(each, frames) for _, each, _ in found) <= 1e-3


def test_a_gpu_agrees_with_the_cpu(engine: Engine) -> None:
    files, settings = demo_in_fp32(), Settings(seed=3, steps=4, cfg=3.0)
    texts = encode_texts(engine, files, (PROMPT, ""))
    found, frames, _ = clip(engine, files, texts, Clip(), settings, ONE)
    host = Engine(EngineConfig(devices="cpu:1"))
    try:
        latent, pixels, _ = clip(host, files, encode_texts(host, files, (PROMPT, "")), Clip(), settings, ONE)
    finally:
        host.close()
    apart, seen = relative(found, latent), relative(frames, pixels)
    print(f"\ndemo, GPU against CPU, 4 steps: latent {apart:.2e}, frames {seen:.2e}")
    assert apart <= 1e-3
    assert seen <= 1e-2


@pytest.mark.parametrize("cfg", [1.0, 5.0])
def test_wan_1b_shapes(engine: Engine, wan_1b: ModelFiles, cfg: float) -> None:
    generator = torch.Generator().manual_seed(0)
    width = wan_1b.geometry.text_width
    texts = [torch.randn((1, 512, width), generator=generator) for _ in range(2 if cfg != 1 else 1)]
    size, settings = Clip(832, 480, 33), Settings(seed=5, steps=4, cfg=cfg)
    one, frames, first = clip(engine, wan_1b, texts, size, settings, ONE)
    _, _, seconds = clip(engine, wan_1b, texts, size, settings, ONE)
    assert one.isfinite().all() and frames.isfinite().all()
    print(f"\n1.3B shapes, 832x480x33, 4 steps, cfg {cfg:g}: one GPU {seconds:.2f} s (with loading {first:.2f} s)")
    found = {}
    for chunks in (1, 2, 3):
        latent, _, took = clip(engine, wan_1b, texts, size, settings, everyone(engine, chunks))
        found[chunks] = latent
        print(f"{len(engine.devices)} GPUs, {chunks} chunks: relative L2 {relative_l2(latent, one):.2e}, {took:.2f} s")
    assert max(relative_l2(latent, one) for latent in found.values()) <= 2e-2
    assert all(torch.equal(latent, found[1]) for latent in found.values())
