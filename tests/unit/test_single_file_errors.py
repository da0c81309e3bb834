"""What is said of files that are not Wan's, not whole, or in a form that is not handled."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_wan
import torch
import wan_files
from safetensors.torch import save_file
from torch import Tensor

from comfyui_pipedit import loaders
from comfyui_pipedit.errors import LoadError
from comfyui_pipedit.loaders.safetensors_file import mapped_tensors, read_header

State = dict[str, Tensor]
BYTES = torch.zeros(4, dtype=torch.uint8)
ONE = torch.ones(1)
LAYER = "blocks.0.self_attn.q"


@pytest.fixture(scope="module")
def states() -> dict[str, State]:
    """Tensors of a whole transformer, VAE and text encoder, by Wan's own names."""
    tiny_wan.use_worker_site()
    model = wan_files.pieces()
    return {"t2v": wan_files.original_transformer(wan_files.transformer("t2v")),
            "vace": wan_files.original_transformer(wan_files.transformer("vace")),
            "vae": wan_files.original_vae(wan_files.vae("2.1")),
            "text": wan_files.text_tensors(wan_files.text_encoder(64), model)}


def save(path: Path, state: State, **metadata: str) -> Path:
    save_file(state, path, {"head_dim": "16", **metadata})
    return path


def without(state: State, *names: str) -> State:
    return {name: tensor for name, tensor in state.items() if not name.startswith(names)}


@pytest.mark.parametrize(("name", "said"), [
    ("wan.gguf", "is a GGUF file, which is not handled; take the fp8_scaled .safetensors file"),
    ("wan.ckpt", r"may hold Python code \(.ckpt\) and is not opened; take the .safetensors"),
    ("wan.PTH", r"may hold Python code \(.pth\)"), ("wan.pt", "may hold Python code"), ("wan.bin", "may hold Python"),
    ("wan.zip", "is no .safetensors file"), ("wan.safetensors", "not a safetensors file, or it is cut off"),
])
def test_other_kinds_of_files(tmp_path: Path, name: str, said: str) -> None:
    (tmp_path / name).write_bytes(b"anything at all")
    with pytest.raises(LoadError, match=said):
        loaders.inspect(tmp_path / name)


def test_a_missing_file_and_a_damaged_header(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"gone.safetensors is missing: neither a folder nor a file"):
        loaders.inspect(tmp_path / "gone.safetensors")
    (tmp_path / "folder.safetensors").symlink_to(tmp_path / "gone.safetensors")
    with pytest.raises(LoadError, match=r"folder.safetensors is missing"):
        loaders.inspect(tmp_path / "folder.safetensors")
    with pytest.raises(LoadError, match=r"gone.safetensors cannot be read: No such file"):
        read_header(tmp_path / "gone.safetensors")
    for header, said in ((b"[]", "its header is not JSON"), (b'{"a": {"dtype": "F32"}}', "its header says .* of a"),
                         (b'{"a": {"dtype": "F32", "shape": [9], "data_offsets": [0, 36]}}',
                          "cut off: tensor a ends at byte 36 of 0; download it again")):
        (tmp_path / "x.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
        with pytest.raises(LoadError, match=said):
            loaders.inspect(tmp_path / "x.safetensors")


def test_a_file_that_goes_or_is_replaced_after_its_header_was_read(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.zeros(2)}, path)
    entries = read_header(path).entries
    save_file({"b": torch.zeros(2)}, path)
    with pytest.raises(LoadError, match=r"x.safetensors was changed after its header was read: .*a"):
        list(mapped_tensors(entries))
    path.write_text("<html>not found</html>")
    with pytest.raises(LoadError, match=r"x.safetensors cannot be mapped: "):
        list(mapped_tensors(entries))
    path.unlink()
    with pytest.raises(LoadError, match=r"x.safetensors cannot be mapped: No such file"):
        list(mapped_tensors(entries))
    with pytest.raises(LoadError, match=r"x.safetensors cannot be read: No such file"):
        entries["a"].read()


@pytest.mark.parametrize(("names", "looks"), [
    (["txt_in.individual_token_refiner.blocks.0.norm1.weight", "double_blocks.0.img_attn.qkv.weight"], "HunyuanVideo"),
    (["double_blocks.0.img_attn.norm.key_norm.scale", "img_in.weight"], "Flux"),
    (["model.diffusion_model.joint_blocks.0.context_block.attn.qkv.weight"], "Stable Diffusion 3"),
    (["model.diffusion_model.input_blocks.1.0.in_layers.0.weight", "first_stage_model.decoder.up.0.block.0.norm.bias"],
     "Stable Diffusion 1, 2 or XL"),
    (["transformer_blocks.0.img_mod.1.weight"], "Qwen-Image"),
    (["adaln_single.emb.timestep_embedder.linear_1.bias", "patchify_proj.weight"], "LTX-Video"),
    (["t5_yproj.weight"], "Mochi"), (["blocks.block0.blocks.0.block.attn.to_q.0.weight"], "Cosmos"),
    (["blocks.0.self_attn.q.lora_A.weight"], "a LoRA: use a LoRA node"),
    (["diffusion_model.blocks.0.self_attn.q.lora_down.weight"], "a LoRA: use a LoRA node"),
    (["blocks.0.attn1.to_q.weight", "patch_embedding.weight"], "diffusers' names: put its whole folder"),
    (["decoder.up_blocks.0.resnets.0.conv1.weight"], "a VAE with diffusers' names"),
    (["blocks.0.attn.q.weight", "token_embedding.weight"], "take umt5_xxl_fp8_e4m3fn_scaled"),
    (["text_model.encoder.layers.0.mlp.fc1.weight"], "a CLIP text encoder"),
    (["vision_model.encoder.layers.0.mlp.fc1.weight"], "a CLIP vision model"),
    (["model.layers.0.self_attn.q_proj.weight"], "a language model"), (["decoder.1.weight"], "a small preview VAE"),
    (["something.weight"], "$"),
])
def test_other_models_are_named(tmp_path: Path, names: list[str], looks: str) -> None:
    save(tmp_path / "x.safetensors", {name: ONE.clone() for name in names})
    with pytest.raises(LoadError, match=rf"x.safetensors is not a Wan file(; it looks like .*)?{looks}"):
        loaders.inspect(tmp_path / "x.safetensors")


@pytest.mark.parametrize(("added", "said"), [
    ("control_adapter.conv.weight", "is Wan Fun Camera .it has control_adapter.conv.weight., which is not handled"),
    ("casual_audio_encoder.encoder.final_linear.weight", "S2V"), ("audio_proj.audio_proj_glob_1.layer.bias", "HuMo"),
    ("face_adapter.fuser_blocks.0.k_norm.weight", "Animate"), ("ref_conv.weight", "Fun Control"),
    ("blocks.0.self_attn.extra.weight", "a Wan text to video with tensors that it should not have: blocks.0.self_at"),
    ("blocks.0.self_attn.q.weight_scale_2", "with tensors that it should not have: blocks.0.self_attn.q.weight_s"),
    ("blocks.7.modulation", r"not all of its tensors; missing: blocks.2.cross_attn.k.bias, .* and \d+ more"),
])
def test_transformers_with_more_than_is_handled(states: dict[str, State], tmp_path: Path, added: str,
                                                said: str) -> None:
    save(tmp_path / "x.safetensors", {**states["t2v"], added: ONE.clone()})
    with pytest.raises(LoadError, match=said):
        loaders.inspect(tmp_path / "x.safetensors")


@pytest.mark.parametrize(("part", "change", "said"), [
    ("t2v", lambda s: without(s, "blocks.1.ffn.2"), "missing: blocks.1.ffn.2.bias, blocks.1.ffn.2.weight$"),
    ("t2v", lambda s: without(s, "patch_embedding.w"), "has no tensor patch_embedding.weight"),
    ("t2v", lambda s: {**s, "patch_embedding.weight": torch.ones(64, 16, 1, 4, 4)}, "are not Wan's"),
    ("t2v", lambda s: {**s, "patch_embedding.weight": torch.ones(64, 16)}, "is .64, 16.; a Wan transformer's has 5"),
    ("t2v", lambda s: {**s, "patch_embedding.weight": torch.ones(64, 32, 1, 2, 2)}, "32 input and 16 output channels"),
    ("vace", lambda s: without(s, "vace_blocks"), "0 VACE blocks cannot be spread"),
    ("vae", lambda s: without(s, "encoder."), "is not a whole Wan VAE .decoder alone"),
    ("vae", lambda s: without(s, "decoder.head.2"), "a Wan 2.1 VAE with not all of its tensors; missing: decoder.head"),
    ("vae", lambda s: {**s, "conv2.weight": torch.ones(4, 4, 1, 1, 1)}, "a VAE with 4 latent and 3 input channels"),
    ("vae", lambda s: s, "x.safetensors is a Wan 2.1 VAE; it has no Wan transformer"),
    ("text", lambda s: s, "is a UMT5 text encoder; it has no Wan transformer"),
    ("text", lambda s: without(s, "encoder.block.1.layer.0.SelfAttention.rel"), "is a T5 text encoder .*umt5_xxl"),
    ("text", lambda s: without(s, "shared"), "has no word table"),
    ("text", lambda s: without(s, "encoder.final"), "missing: encoder.final_layer_norm.weight$"),
    ("text", lambda s: {**s, "encoder.block.0.layer.1.DenseReluDense.wi.weight": ONE}, "should not have: .*wi.weight"),
])
def test_files_that_are_not_whole_or_not_a_transformer(states: dict[str, State], tmp_path: Path, part: str,
                                                       change: Callable[[State], State], said: str) -> None:
    save(tmp_path / "x.safetensors", change(states[part]))
    with pytest.raises(LoadError, match=said):
        loaders.inspect(tmp_path / "x.safetensors")


def test_a_text_encoder_without_a_tokenizer(states: dict[str, State], tmp_path: Path) -> None:
    model = save(tmp_path / "wan.safetensors", states["t2v"])
    bare = save(tmp_path / "text.safetensors", without(states["text"], "spiece_model"))
    with pytest.raises(LoadError, match=r"text.safetensors holds no tokenizer \(spiece_model\); take ComfyUI's file"):
        loaders.combine(model, None, bare, "mine")
    damaged = save(tmp_path / "damaged.safetensors", {**states["text"], "spiece_model": BYTES})
    with pytest.raises(LoadError, match=r"damaged.safetensors: its tokenizer cannot be read"):
        loaders.open_tokens(damaged)


def as_bytes(text: str) -> Tensor:
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


@pytest.mark.parametrize(("added", "metadata", "said"), [
    ({f"{LAYER}.comfy_quant": as_bytes('{"format": "nvfp4"}')}, "",
     r"is quantised as nvfp4 \(layer blocks.0.self_attn.q\), which is not handled; take the fp8_scaled"),
    ({f"{LAYER}.comfy_quant": as_bytes('{"format": "int8_tensorwise"}')}, "", "quantised as int8_tensorwise"),
    ({}, json.dumps({"layers": {LAYER: {"format": "mxfp8"}}}), "quantised as mxfp8"),
    ({}, json.dumps({"layers": {LAYER: {"format": "float8_e4m3fn"}}}), "states float8_e4m3fn for .*no such weight"),
    ({}, json.dumps({"version": 1}), "its _quantization_metadata names no layers"),
    ({}, "{", "what it says of its quantisation is not JSON"), ({}, "[]", "should be a JSON object, not"),
    ({f"{LAYER}.scale_weight": torch.ones(64, 1)}, "", r"the scale of .* is \[64, 1\] .*only one value a layer is"),
    ({"blocks.0.self_attn.x.scale_weight": ONE}, "", "has a scale of blocks.0.self_attn.x and no weight for it"),
    ({"blocks.0.self_attn.x.scale_input": ONE}, "", "has an input scale of blocks.0.self_attn.x and no weight"),
])
def test_quantisation_that_is_not_handled(states: dict[str, State], tmp_path: Path, added: State, metadata: str,
                                          said: str) -> None:
    said_in_file = {"_quantization_metadata": metadata} if metadata else {}
    save(tmp_path / "x.safetensors", {**states["t2v"], **{name: tensor.clone() for name, tensor in added.items()}},
         **said_in_file)
    with pytest.raises(LoadError, match=said):
        loaders.inspect(tmp_path / "x.safetensors")


def test_a_dtype_of_a_format_that_is_not_handled(states: dict[str, State], tmp_path: Path) -> None:
    """Scales of mxfp8: the format is named where the file states it, else the dtype."""
    exponents = {f"{LAYER}.weight_scale": torch.zeros(64, 2, dtype=torch.uint8).view(torch.float8_e8m0fnu)}
    stated = {f"{LAYER}.comfy_quant": as_bytes('{"format": "mxfp8"}')}
    save(tmp_path / "x.safetensors", {**states["t2v"], **exponents, **stated})
    with pytest.raises(LoadError, match="is quantised as mxfp8"):
        loaders.inspect(tmp_path / "x.safetensors")
    save(tmp_path / "y.safetensors", {**states["t2v"], **exponents})
    with pytest.raises(LoadError, match=r"tensor blocks.0.self_attn.q.weight_scale has dtype F8_E8M0, which is not"):
        loaders.inspect(tmp_path / "y.safetensors")
