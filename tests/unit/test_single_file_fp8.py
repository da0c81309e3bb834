"""Weights that stay in fp8: which, where they lie, their scales, what is computed from them, and casts at load."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_wan
import torch
import wan_files
from safetensors.torch import load_file
from torch import Tensor, nn

from comfyui_pipedit import loaders
from comfyui_pipedit.job import Weights
from comfyui_pipedit.loaders.precision import FP8, true_values
from comfyui_pipedit.models import fp8
from comfyui_pipedit.models.fp8 import Fp8Linear
from comfyui_pipedit.parallel.sequence import Context
from comfyui_pipedit.worker.device import Device
from comfyui_pipedit.worker.residency import PlacedWeights, Residency

CPU = Device.parse("cpu:0")
E4M3, E5M2 = FP8
SCALED = ["scaled_fp8", "comfy_quant", "metadata"]
GAIN = 0.1
"""Brings the blocks' weights to a standard deviation of 0.0125, that of a 14B model: below it fp8 loses bits."""

State = dict[str, Tensor]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A transformer and a text encoder in each layout: t2v-LAYOUT.safetensors, text-LAYOUT.safetensors."""
    tiny_wan.use_worker_site()
    root, pieces = tmp_path_factory.mktemp("fp8"), wan_files.pieces()
    model = wan_files.original_transformer(wan_files.transformer("t2v"))
    model = {name: GAIN * tensor if wan_files.LINEAR.fullmatch(name) and tensor.dim() == 2 else tensor
             for name, tensor in model.items()}
    text = wan_files.text_tensors(wan_files.text_encoder(len_of(pieces)), pieces)
    for name, layout in wan_files.layouts().items():
        wan_files.write(root / f"t2v-{name}.safetensors", model, layout)
        wan_files.write(root / f"text-{name}.safetensors", text, layout)
    return root


def len_of(pieces: bytes) -> int:
    import sentencepiece

    return int(sentencepiece.SentencePieceProcessor(model_proto=pieces).get_piece_size())


def weights(folder: Path, layout: str, dtype: str = "default", part: str = "transformer") -> Weights:
    name = "t2v" if part == "transformer" else "text"
    return Weights("wan", part, str(folder / f"{name}-{layout}.safetensors"), dtype)


def load(asked: Weights) -> Any:
    """The network as a rank holds it; the converted copy is in a buffer, as on a real rank."""
    size = loaders.converted_bytes(asked, on_gpu=False)
    residency = Residency(CPU, Context(0, SimpleNamespace()), lambda phase: None)
    residency.load(asked, torch.zeros(size, dtype=torch.uint8) if size else None)
    return residency.get(asked)


def run(network: nn.Module) -> Tensor:
    draw = torch.Generator().manual_seed(0)
    x, text = torch.randn(1, 16, 3, 8, 8, generator=draw), torch.randn(1, 16, 32, generator=draw)
    with torch.inference_mode():
        result: Tensor = network(hidden_states=x, timestep=torch.tensor([700.0]), encoder_hidden_states=text,
                                 return_dict=False)[0]
    return result


def explicit(folder: Path, layout: str) -> State:
    """The true values of a file's tensors in float32, by the network's names: weight * scale, written out here."""
    state = load_file(folder / f"t2v-{layout}.safetensors")
    true = {}
    for name, tensor in state.items():
        layer, _, ending = name.rpartition(".")
        scales = [state[other] for other in (f"{layer}.scale_weight", f"{layer}.weight_scale") if other in state]
        if ending in ("weight", "bias", "modulation"):
            true[name] = tensor.float() * scales[0] if scales and ending == "weight" else tensor.float()
    table = loaders.open_weights(weights(folder, "fp32"))
    names = {entry.name: ours for ours, entry in table.entries.items()}
    return {names[name]: tensor for name, tensor in true.items()}


def plain(state: State) -> nn.Module:
    """A network of diffusers' class with these float32 tensors."""
    network = wan_files.transformer("t2v")
    network.load_state_dict(state, assign=True)
    return network


def fp8_layers(network: nn.Module) -> dict[str, Fp8Linear]:
    return {name: module for name, module in network.named_modules() if isinstance(module, Fp8Linear)}


def miss(left: Tensor, right: Tensor) -> float:
    return float((left - right).abs().max() / right.abs().max())


# -- kept in fp8 -----------------------------------------------------------------------------------

@pytest.mark.parametrize("layout", [*SCALED, "fp8", "fp8_e5m2"])
def test_the_blocks_linear_layers_stay_as_they_are_stored(folder: Path, layout: str) -> None:
    asked = weights(folder, layout)
    network = load(asked)
    held = fp8_layers(network)
    linears = {name for name, module in wan_files.transformer("t2v").named_modules()
               if isinstance(module, nn.Linear) and name.startswith("blocks.")}
    assert len(linears) == 20 and held.keys() == linears
    kinds = {module.weight.dtype for name, module in network.named_modules() if isinstance(module, nn.Linear)}
    assert kinds == {torch.float32}, "what is outside of the blocks is dequantised"
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(asked.path)]
    mapped = [range(*(int(end, 16) for end in line[0].split("-"))) for line in lines]
    for module in held.values():
        assert module.weight.dtype == (E5M2 if layout == "fp8_e5m2" else E4M3)
        assert any(module.weight.data_ptr() in span for span in mapped), "no copy on the host"
        assert (module.scale is not None) == (layout in SCALED)


@pytest.mark.parametrize("layout", [*SCALED, "fp8", "fp8_e5m2", "scaled_bf16"])
def test_results_are_those_of_explicit_dequantisation_bit_for_bit(folder: Path, layout: str) -> None:
    expected = run(plain(explicit(folder, layout)))
    found = run(load(weights(folder, layout)))
    assert expected.std() > 0.1 and torch.equal(found, expected)
    assert torch.equal(run(load(weights(folder, layout, "fp32"))), expected)


def test_scales_bring_a_file_closer_than_plain_fp8(folder: Path) -> None:
    bf16 = run(load(weights(folder, "bf16")))
    scaled, unscaled = run(load(weights(folder, "scaled_fp8"))), run(load(weights(folder, "bf16", "fp8_e4m3fn")))
    assert 0.0 < miss(scaled, bf16) < 0.7 * miss(unscaled, bf16) < 0.01


def test_the_host_converts_nothing_that_stays_in_fp8(folder: Path) -> None:
    asked = weights(folder, "scaled_fp8")
    files = loaders.open_weights(asked)
    layout = loaders.buffer_layout(asked, files, torch.float32)
    assert {files.entries[name].dtype for name in layout} == {torch.bfloat16, E4M3}
    assert {name for name in layout if files.entries[name].dtype == E4M3} == {
        "condition_embedder.text_embedder.linear_1.weight"}
    values = sum(files.entries[name].num_values for name in layout)
    assert 4 * values <= loaders.converted_bytes(asked, on_gpu=False) < 4 * values + 64 * len(layout)
    assert loaders.converted_bytes(asked, on_gpu=True) == 0
    everything = loaders.converted_bytes(weights(folder, "scaled_fp8", "fp32"), on_gpu=False)
    assert everything >= 4 * sum(entry.num_values for entry in files.entries.values())


def test_a_scaled_weight_that_is_not_in_fp8_is_multiplied_once(folder: Path) -> None:
    """scale_weight beside bfloat16 weights: the dtype would fit, but the values do not."""
    asked = weights(folder, "scaled_bf16", "bf16")
    files = loaders.open_weights(asked)
    assert files.scales and files.scales.keys() <= loaders.buffer_layout(asked, files, torch.bfloat16).keys()
    tensors = dict(PlacedWeights(asked, CPU, None, True).tensors())
    true = explicit(folder, "scaled_bf16")
    for name in files.scales:
        assert torch.equal(tensors[name], true[name].bfloat16())


@pytest.mark.parametrize(("dtype", "kind"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
@pytest.mark.parametrize("layout", ["scaled_fp8", "fp8"])
def test_a_weight_dtype_dequantises_at_load(folder: Path, layout: str, dtype: str, kind: torch.dtype) -> None:
    asked = weights(folder, layout, dtype)
    tensors, true = dict(PlacedWeights(asked, CPU, None, True).tensors()), explicit(folder, layout)
    names = [name for name in true if name.endswith("to_q.weight") or "ffn" in name]
    assert len(names) > 8 and all(torch.equal(tensors[name], true[name].to(kind)) for name in names)
    assert not any(tensor.dtype in FP8 for tensor in tensors.values())


# -- cast to fp8 at load ---------------------------------------------------------------------------

@pytest.mark.parametrize(("dtype", "kind"), [("fp8_e4m3fn", E4M3), ("fp8_e4m3fn_fast", E4M3), ("fp8_e5m2", E5M2)])
@pytest.mark.parametrize("layout", ["fp32", "bf16"])
def test_a_16_bit_file_is_cast(folder: Path, layout: str, dtype: str, kind: torch.dtype) -> None:
    asked, true = weights(folder, layout, dtype), explicit(folder, layout)
    network = load(asked)
    held = fp8_layers(network)
    assert len(held) == 20 and all(name.startswith("blocks.") for name in held)
    for name, module in held.items():
        assert torch.equal(module.weight.view(torch.uint8), true[f"{name}.weight"].to(kind).view(torch.uint8))
        assert module.scale is None
    rounded = {name: tensor.to(kind).float() if name.removesuffix(".weight") in held else tensor
               for name, tensor in true.items()}
    assert torch.equal(run(network), run(plain(rounded)))
    sizes = {slot.dtype for slot in loaders.buffer_layout(asked, loaders.open_weights(asked), torch.float32).values()}
    assert sizes == ({kind} if layout == "fp32" else {kind, torch.float32}), "the shared copy is in fp8 too"


def test_another_fp8_than_the_files_is_made_of_the_true_values(folder: Path) -> None:
    true = explicit(folder, "scaled_fp8")
    for name, module in fp8_layers(load(weights(folder, "scaled_fp8", "fp8_e5m2"))).items():
        assert module.scale is None and torch.equal(module.weight.float(), true[f"{name}.weight"].to(E5M2).float())
    for module in fp8_layers(load(weights(folder, "scaled_fp8", "fp8_e4m3fn"))).values():
        assert module.scale is not None, "the file's own fp8 keeps its scales"


def test_fast_is_the_same_on_the_cpu(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        fast = run(load(weights(folder, "scaled_fp8", "fp8_e4m3fn_fast")))
    assert torch.equal(fast, run(load(weights(folder, "scaled_fp8")))) and not caplog.records


def test_a_device_without_fp8_products_says_so_once(folder: Path, monkeypatch: pytest.MonkeyPatch,
                                                    caplog: pytest.LogCaptureFixture) -> None:
    """A CPU that says it is a GPU, on which the product fails."""
    def fail(*arguments: Any, **options: Any) -> Tensor:
        raise RuntimeError("needs compute capability 8.9\nand more")

    monkeypatch.setattr(torch, "_scaled_mm", fail)
    monkeypatch.setattr(Device, "on_gpu", True)
    monkeypatch.setattr(Device, "torch", torch.device("cpu"))
    monkeypatch.setattr(Device, "label", "GPU 0")
    asked = weights(folder, "scaled_fp8", "fp8_e4m3fn_fast")
    residency = Residency(CPU, Context(0, SimpleNamespace()), lambda phase: None)
    monkeypatch.setattr(Device, "synchronize", lambda self: None)
    monkeypatch.setattr(Device, "bring", lambda self, tensors: tensors)
    with caplog.at_level(logging.WARNING):
        residency.load(asked)
    assert [record.getMessage() for record in caplog.records] == [
        "t2v-scaled_fp8.safetensors: no products in fp8 on GPU 0 (needs compute capability 8.9); it computes in 16 "
        "bits from the fp8 weights"]
    network = residency.get(asked)
    assert not any(module.fast for module in fp8_layers(network).values())
    assert network.patch_embedding.weight.dtype == torch.bfloat16, "fp8 is computed in bfloat16"


# -- the layer -------------------------------------------------------------------------------------

def layer(fast: bool, scaled: bool = True, out: int = 64, inputs: int = 48) -> Fp8Linear:
    draw = torch.Generator().manual_seed(1)
    weight, bias = torch.randn(out, inputs, generator=draw) / inputs ** 0.5, torch.randn(out, generator=draw)
    scale = weight.abs().max() / 448.0 if scaled else None
    held = (weight if scale is None else weight / scale).to(E4M3)
    return Fp8Linear(held, scale, bias.bfloat16(), fast)


@pytest.mark.parametrize("scaled", [True, False])
def test_products_in_fp8_are_near_and_do_not_depend_on_other_tokens(scaled: bool) -> None:
    assert fp8.multiplies(torch.device("cpu")) == "", "this torch multiplies in fp8 on the CPU as well"
    x = torch.randn(6, 5, 48, generator=torch.Generator().manual_seed(2)).bfloat16()
    x = x * torch.logspace(-3, 3, 6)[:, None, None].bfloat16()
    zeros = torch.zeros(1, 48).bfloat16()
    assert torch.equal(layer(True, scaled)(zeros), layer(False, scaled)(zeros)), "the bias alone"
    exact, found = layer(False, scaled)(x), layer(True, scaled)(x)
    assert found.shape == (6, 5, 64) and found.dtype == torch.bfloat16 and not torch.equal(found, exact)
    for i in range(6):
        assert miss(found[i], exact[i]) < 0.06, "small tokens beside large ones keep their precision"
        assert miss(layer(True, scaled)(x[i, :2]), found[i, :2]) < 0.01


def test_sizes_and_kinds_that_cannot_be_multiplied_in_fp8_are_not() -> None:
    assert layer(True).fast and not layer(True, inputs=40).fast and not layer(True, out=8).fast
    assert not Fp8Linear(torch.zeros(16, 16).to(E5M2), None, None, True).fast


@pytest.mark.parametrize("stored", FP8)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_true_values_are_rounded_once(stored: torch.dtype, dtype: torch.dtype) -> None:
    """Every value that fp8 has, times scales that 16 bits cannot hold."""
    values = torch.arange(256, dtype=torch.uint8).view(stored)
    values = values[values.float().isfinite()]
    for scale in (1.0 / 3.0, 0.0123456789, 3.1415927):
        expected = (values.float() * torch.tensor([scale])).to(dtype)
        assert torch.equal(true_values(values, torch.tensor(scale), dtype), expected)


# -- text encoder ----------------------------------------------------------------------------------

@pytest.mark.parametrize("layout", ["fp32", "fp16", "bf16", "fp8", "scaled_fp8", "scaled_bf16", "comfy_quant",
                                    "metadata"])
def test_text_encoders_in_every_layout(folder: Path, layout: str) -> None:
    with torch.inference_mode():
        exact = load(weights(folder, "fp32", part="text")).encode("a red circle")
        held = load(weights(folder, layout, part="text"))
        found = held.encode("a red circle")
    held_in_fp8 = len(fp8_layers(held.model))
    assert held_in_fp8 == (0 if layout in ("fp32", "fp16", "bf16", "scaled_bf16") else 14)
    assert found.shape == exact.shape == (1, 512, 32) and miss(found, exact) < (0.2 if held_in_fp8 else 0.02)
    with torch.inference_mode():
        assert torch.equal(load(weights(folder, layout, "fp32", part="text")).encode("a red circle"), found), (
            "held in fp8 or dequantised at load, the bits are the same")


def test_the_bytes_of_a_network_are_counted_as_they_are_held(folder: Path) -> None:
    sizes = {}
    for layout in ("bf16", "scaled_fp8"):
        residency = Residency(CPU, Context(0, SimpleNamespace()), lambda phase: None)
        sizes[layout] = residency.load(replace(weights(folder, layout), dtype="default"))
    values = sum(parameter.numel() for parameter in wan_files.transformer("t2v").parameters())
    held = sum(module.weight.numel() for module in fp8_layers(load(weights(folder, "scaled_fp8"))).values())
    assert sizes == {"bf16": 4 * values, "scaled_fp8": 4 * (values - held) + held}
