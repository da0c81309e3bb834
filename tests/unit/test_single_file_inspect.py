"""`python -m comfyui_pipedit inspect`: what it says of each kind of file, in words and as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny_wan
import torch
import wan_files

from comfyui_pipedit import inspect_file, loaders
from comfyui_pipedit.__main__ import main
from comfyui_pipedit.loaders.precision import FP8, rules

RELEASED = {"num_attention_heads": 40, "attention_head_dim": 128, "ffn_dim": 13824, "num_layers": 40, "text_dim": 4096}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tiny_wan.use_worker_site()
    root = tmp_path_factory.mktemp("models")
    wan_files.write_all(root)
    return root


def said(capsys: pytest.CaptureFixture[str], path: Path, *options: str) -> str:
    assert main(["inspect", str(path), *options]) == 0
    return capsys.readouterr().out.strip()


@pytest.mark.parametrize(("file", "parts"), [
    ("diffusion_models/wan-t2v-scaled_fp8", (
        "wan-t2v-scaled_fp8.safetensors: Wan text to video (width 64, 2 layers, 4 heads of 16, 16 channels in, 16 ou",
        "0.149 million parameters", "float8_e4m3fn, ", "; 21 weights have a scale (the older layout, scaled_fp8); 21 ",
        "default (stays in fp8, computed in bf16) or fp8_e4m3fn or fp8_e4m3fn_fast", "16 latent channels (Wan 2.1's)")),
    ("diffusion_models/wan-t2v-comfy_quant", ("21 weights have a scale (the newer layout, comfy_quant).",)),
    ("diffusion_models/wan-t2v-metadata", ("21 weights have a scale (the newer layout, in the file's metadata).",)),
    ("diffusion_models/wan-t2v-bf16", ("100.0 % bfloat16.", "default (as stored) or bf16 or fp16 ")),
    ("diffusion_models/wan-i2v-2.1", ("Wan 2.1 image to video (", "36 channels in, 16 out")),
    ("diffusion_models/wan-i2v-2.2", ("Wan 2.2 image to video (",)),
    ("diffusion_models/wan-flf2v", ("Wan 2.1 first and last frame to video (",)),
    ("diffusion_models/wan-ti2v-5b", ("Wan 2.2 TI2V (", "a VAE of 48 latent channels (Wan 2.2's)")),
    ("diffusion_models/wan-vace", ("Wan VACE (",)),
    ("vae/wan_2.1_vae", ("Wan 2.1 VAE (16 latent channels)", "vae_name beside a transformer of 16 channels out")),
    ("vae/wan_2.2_vae", ("Wan 2.2 VAE (48 latent channels)",)),
    ("text_encoders/umt5-fp8", ("UMT5 text encoder (width 32, 2 layers, ", "clip_name1 beside a transformer of text")),
    ("checkpoints/wan", ("Wan text to video", "Wan 2.1 VAE", "UMT5", "Not used: text_encoders.umt5xxl.logit_scale.")),
])
def test_a_file_in_words(folder: Path, capsys: pytest.CaptureFixture[str], file: str, parts: tuple[str, ...]) -> None:
    text = said(capsys, folder / f"{file}.safetensors")
    assert "\n" not in text and [part for part in parts if part not in text] == []


def test_a_folder_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, tiny_wan.write_model(tmp_path / "tiny"))
    assert text.startswith("tiny: Wan text to video (width 64") and "Wan 2.1 VAE" in text and "UMT5" in text


def test_the_same_as_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(said(capsys, folder / "diffusion_models" / "wan-t2v-scaled_fp8.safetensors", "--json"))
    (part,) = found["parts"]
    assert part["part"] == "transformer" and part["layout"] == "scaled_fp8" and part["scaled"] == 21
    assert part["parameters"] == sum(part["dtypes"].values()) and part["config"]["num_layers"] == 2
    assert part["held"]["default"] == part["held"]["fp8_e4m3fn"] < part["held"]["bf16"] < part["held"]["fp32"]
    assert found["unused"] == []


def test_what_is_wrong_is_an_error_with_its_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "wan.gguf").write_bytes(b"GGUF")
    assert main(["inspect", str(tmp_path / "wan.gguf")]) == 1
    assert capsys.readouterr().err.startswith("LoadError: wan.gguf is a GGUF file, which is not handled; take")


def test_a_released_size_from_its_header_alone(tmp_path: Path) -> None:
    """14B in scaled fp8: weights are at most 0.58 of bfloat16's, on a GPU as in the file."""
    from diffusers import WanTransformer3DModel

    tiny_wan.use_worker_site()
    with torch.device("meta"):
        network = WanTransformer3DModel(**RELEASED)
    file = wan_files.write_hollow(tmp_path / "wan2.2_t2v_high_noise_14B_fp8_scaled.safetensors", network, "BF16")
    assert file.stat().st_blocks < 10_000, "nothing of it is on the disk"
    found = inspect_file.report(file)
    (part,) = found.parts
    assert part.kind.startswith("Wan text to video 14B (width 5120, 40 layers, 40 heads of 128, 16 channels in, 16 out")
    assert part.parameters == sum(tensor.numel() for tensor in network.parameters()) > 14e9
    assert part.num_bytes < 0.58 * 2 * part.parameters and part.held["default"] < 0.58 * part.held["bf16"]
    assert "14.29 billion parameters" in inspect_file.paragraph(found)
    files = loaders.open_weights(loaders.inspect(file).transformer)
    held = rules("wan", "transformer", "default", torch.bfloat16)
    kept = sum(entry.num_values for name, entry in files.entries.items() if held.target(name, entry.dtype) in FP8)
    assert kept > 0.97 * part.parameters
