"""fp8 weights on a GPU: what is held there, what is computed from them, products in fp8. With -s it prints times."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_wan
import torch
import wan_files
from torch import Tensor

from comfyui_pipedit.job import Weights
from comfyui_pipedit.models import fp8
from comfyui_pipedit.models.fp8 import Fp8Linear
from comfyui_pipedit.parallel.sequence import Context
from comfyui_pipedit.worker.device import Device
from comfyui_pipedit.worker.residency import Residency

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
WIDE = {"num_attention_heads": 40, "attention_head_dim": 128, "ffn_dim": 13824, "freq_dim": 256, "num_layers": 2,
        "rope_max_seq_len": 1024}
"""Two blocks of a 14B model."""

LAYERS = {"q": (5120, 5120), "ffn up": (13824, 5120), "ffn down": (5120, 13824)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tiny_wan.use_worker_site()
    root = tmp_path_factory.mktemp("models")
    state = wan_files.original_transformer(wan_files.transformer("t2v", **WIDE))
    for name in ("bf16", "scaled_fp8"):
        wan_files.write(root / f"{name}.safetensors", state, wan_files.layouts()[name], head_dim=128)
    pieces = wan_files.pieces()
    text = wan_files.text_tensors(wan_files.text_encoder(wan_files.piece_count(pieces)), pieces)
    wan_files.write(root / "text.safetensors", text, wan_files.scaled_fp8())
    return root


def load(file: Path, dtype: str = "default", part: str = "transformer", device: str = "gpu:0") -> Any:
    """(network, bytes that it added to the device's memory)."""
    residency = Residency(Device.parse(device), Context(0, SimpleNamespace()), lambda phase: None)
    weights = Weights("wan", part, str(file), dtype)
    before = torch.cuda.memory_allocated()
    residency.load(weights)
    return residency.get(weights), torch.cuda.memory_allocated() - before


def run(network: Any) -> Tensor:
    draw = torch.Generator().manual_seed(0)
    x, text = torch.randn(1, 16, 5, 32, 32, generator=draw), torch.randn(1, 64, 32, generator=draw)
    with torch.inference_mode():
        result: Tensor = network(hidden_states=x.cuda().bfloat16(), timestep=torch.tensor([700.0]).cuda(),
                                 encoder_hidden_states=text.cuda().bfloat16(), return_dict=False)[0]
    return result.float()


def miss(left: Tensor, right: Tensor) -> float:
    """Relative L2."""
    return float((left.float() - right.float()).norm() / right.float().norm())


def test_weights_take_half_and_give_what_dequantised_ones_give(folder: Path) -> None:
    bf16, bf16_bytes = load(folder / "bf16.safetensors")
    held, held_bytes = load(folder / "scaled_fp8.safetensors")
    loaded, loaded_bytes = load(folder / "scaled_fp8.safetensors", "bf16")
    print(f"\nMiB on the GPU: bf16 {bf16_bytes / 2**20:.0f}, fp8 {held_bytes / 2**20:.0f}")
    outside = sum(parameter.numel() * parameter.element_size() for name, parameter in bf16.named_parameters()
                  if not name.startswith("blocks."))
    assert loaded_bytes == pytest.approx(bf16_bytes, rel=0.01)
    assert held_bytes - outside < 0.52 * (bf16_bytes - outside)
    exact = run(held)
    assert torch.equal(exact, run(loaded)) and miss(exact, run(bf16)) < 0.1
    fast, _ = load(folder / "scaled_fp8.safetensors", "fp8_e4m3fn_fast")
    cast, _ = load(folder / "bf16.safetensors", "fp8_e4m3fn")
    near = {"scaled": exact, "in fp8 products": run(fast), "cast at load": run(cast)}
    print("relative L2 to bf16:", {name: f"{miss(result, run(bf16)):.4f}" for name, result in near.items()})
    assert 0 < miss(run(fast), exact) < 0.1 and miss(exact, run(bf16)) < miss(run(cast), run(bf16))


def test_text_on_a_gpu(folder: Path) -> None:
    held, _ = load(folder / "text.safetensors", part="text")
    exact, _ = load(folder / "text.safetensors", part="text", device="cpu:0")
    assert sum(isinstance(module, Fp8Linear) for module in held.model.modules()) == 14
    with torch.inference_mode():
        found = held.encode("a red circle").cpu()
        assert torch.isfinite(found).all() and miss(found, exact.encode("a red circle")) < 0.03


def milliseconds(call: Any) -> float:
    for _ in range(3):
        call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(10):
        call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 10


@pytest.mark.parametrize("name", list(LAYERS))
def test_products_in_fp8(name: str) -> None:
    assert fp8.multiplies(torch.device("cuda")) == ""
    out, inputs = LAYERS[name]
    weight = torch.randn(out, inputs, device="cuda") / inputs**0.5
    scale = (weight.abs().max() / 448.0).cpu()
    bias = torch.randn(out, device="cuda").bfloat16()
    held = (weight / scale).to(torch.float8_e4m3fn)
    plain, fast = (Fp8Linear(held, scale, bias, quick) for quick in (False, True))
    with torch.inference_mode():
        assert torch.equal(plain.dequantised(torch.bfloat16), (held.float() * scale.cuda()).bfloat16()), "rounded once"
        x = torch.randn(1, 32760, inputs, device="cuda").bfloat16()
        assert miss(fast(x), plain(x)) < 0.05
        assert torch.equal(fast(x[:, :16380]), fast(x)[:, :16380]), "other tokens change nothing"
        dense = weight.bfloat16()
        times = [milliseconds(lambda: torch.nn.functional.linear(x, dense, bias)), milliseconds(lambda: plain(x)),
                 milliseconds(lambda: fast(x))]
    print(f"\n{name} {out} x {inputs}, 32,760 tokens: ms in bf16 {times[0]:.2f}, from fp8 {times[1]:.2f}, "
          f"in fp8 {times[2]:.2f}")
