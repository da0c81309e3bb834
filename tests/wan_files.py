"""ComfyUI's single files with tiny random weights, in every layout that exists: python tests/wan_files.py FOLDER.

The weights are those of tiny networks of diffusers' classes (tiny_wan.py), under Wan's own names.
"""

from __future__ import annotations

import io
import json
import math
import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tiny_wan

if TYPE_CHECKING:
    from torch import Tensor, nn

HEAD_DIM = 16
PREFIX = "model.diffusion_model."
LINEAR = re.compile(r"(vace_)?blocks\.\d+\..*\.weight|text_embedding\.0\.weight|"
                    r"encoder\.block\..*\.(q|k|v|o|w\w+)\.weight")
"""What quantising tools take; the text embedding is outside of the blocks and is quantised in many files."""

VARIANTS: dict[str, dict[str, Any]] = {
    "t2v": {},
    "i2v-2.1": {"in_channels": 36, "image_dim": 24, "added_kv_proj_dim": 64},
    "flf2v": {"in_channels": 36, "image_dim": 24, "added_kv_proj_dim": 64, "pos_embed_seq_len": 8},
    "i2v-2.2": {"in_channels": 36},
    "ti2v-5b": {"in_channels": 48, "out_channels": 48},
    "vace": {"num_layers": 4, "vace_layers": [0, 2], "vace_in_channels": 96},
}
VAES: dict[str, dict[str, Any]] = {
    "2.1": {"base_dim": 4, "num_res_blocks": 2},
    "2.1-short": {"base_dim": 4, "num_res_blocks": 1},
    "2.2": {"base_dim": 4, "decoder_base_dim": 8, "z_dim": 48, "num_res_blocks": 2, "is_residual": True,
            "in_channels": 12, "out_channels": 12, "patch_size": 2, "scale_factor_spatial": 16},
}
SENTENCES = ("a red circle moving left", "a green square moving right", "blue circle on black background",
             "two (red) squares, one circle: blue and green!", "The quick brown fox jumps over the lazy dog.")

State = dict[str, "Tensor"]
Layout = Callable[[State], tuple[State, dict[str, str]]]
"""Tensors by original name -> (the same as a file holds them, the file's metadata)."""


def transformer(variant: str, **changes: Any) -> nn.Module:
    """A tiny network of a variant, of diffusers' class."""
    config = {**VARIANTS[variant], **changes}
    if "vace_layers" not in config:
        return tiny_wan.transformer(**config)
    from diffusers import WanVACETransformer3DModel

    base = dict(tiny_wan.transformer().config)
    known = {key: value for key, value in base.items() if not key.startswith("_")}
    return tiny_wan.randomise(WanVACETransformer3DModel(**{**known, **config})).eval()


def vae(kind: str) -> nn.Module:
    from diffusers import AutoencoderKLWan

    from comfyui_pipedit.loaders.wan_vae_file import STATISTICS

    config = VAES[kind]
    mean, std = STATISTICS[config.get("z_dim", 16)]
    network = AutoencoderKLWan(latents_mean=list(mean), latents_std=list(std), **config)
    return tiny_wan.randomise(network).eval()


def text_encoder(vocabulary: int) -> nn.Module:
    from transformers import UMT5Config, UMT5EncoderModel

    config = UMT5Config(vocab_size=vocabulary, d_model=tiny_wan.TEXT_WIDTH, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
    return tiny_wan.randomise(UMT5EncoderModel(config)).eval()


def pieces() -> bytes:
    """A small sentencepiece model with umt5's special tokens."""
    import sentencepiece

    made = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES), model_writer=made, vocab_size=64, hard_vocab_limit=False, num_threads=1,
        pad_id=0, eos_id=1, unk_id=2, bos_id=-1, minloglevel=2)
    return made.getvalue()


def original_transformer(network: nn.Module) -> State:
    """Its tensors by Wan's own names."""
    from comfyui_pipedit.loaders import wan_names as names

    table = names.IMAGE_BLOCKS + names.IMAGE_EMBEDDING + names.IMAGE_POSITIONS + names.VACE_OUTSIDE + names.VACE_BLOCKS
    return _renamed(network, table.original)


def original_vae(network: Any) -> State:
    """Its tensors by Wan's own names."""
    from comfyui_pipedit.loaders import wan_names

    config = network.config
    table = wan_names.vae(config.num_res_blocks, len(config.dim_mult), config.is_residual)
    return _renamed(network, table.original)


def text_tensors(network: nn.Module, model: bytes) -> State:
    """Its tensors and its tokenizer, as ComfyUI's files hold them."""
    import torch

    state = {name: tensor.contiguous() for name, tensor in network.state_dict().items() if "embed_tokens" not in name}
    return {**state, "spiece_model": torch.tensor(list(model), dtype=torch.uint8)}


def _renamed(network: nn.Module, original: Callable[[str], str | None]) -> State:
    state = {}
    for ours, tensor in network.state_dict().items():
        name = original(ours)
        assert name is not None, f"no original name for {ours}"
        state[name] = tensor.contiguous()
    return state


def plain(dtype: str) -> Layout:
    """All floating tensors in one dtype."""
    import torch

    kind = getattr(torch, dtype)
    return lambda state: ({name: tensor.to(kind) if tensor.is_floating_point() else tensor
                           for name, tensor in state.items()}, {})


def fp8(dtype: str = "float8_e4m3fn") -> Layout:
    """All matrices in fp8 without scales, the rest in bfloat16."""
    import torch

    def make(state: State) -> tuple[State, dict[str, str]]:
        kinds = {name: getattr(torch, dtype) if tensor.dim() == 2 else torch.bfloat16 for name, tensor in state.items()}
        return {name: tensor.to(kinds[name]) if tensor.is_floating_point() else tensor
                for name, tensor in state.items()}, {}

    return make


def _scaled(state: State, held: str, ending: str, linear: re.Pattern[str] = LINEAR) -> tuple[State, list[str]]:
    """(linear weights in `held` with a scale beside them and the rest in bfloat16, names of those layers)."""
    import torch

    kind = getattr(torch, held)
    made, layers = {}, []
    for name, tensor in state.items():
        if not tensor.is_floating_point() or not linear.fullmatch(name) or tensor.dim() != 2:
            made[name] = tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
            continue
        scale = tensor.abs().max() / 448.0
        layers.append(name.removesuffix(".weight"))
        made[name] = (tensor / scale).to(kind)
        made[f"{layers[-1]}.{ending}"] = scale.clone()
    return made, layers


def scaled_fp8(held: str = "float8_e4m3fn", linear: re.Pattern[str] = LINEAR) -> Layout:
    """The older layout: a marker, scale_weight and scale_input."""
    import torch

    def make(state: State) -> tuple[State, dict[str, str]]:
        made, layers = _scaled(state, held, "scale_weight", linear)
        made["scaled_fp8"] = torch.zeros(2, dtype=torch.float8_e4m3fn)
        made |= {f"{layer}.scale_input": torch.tensor(0.5) for layer in layers}
        return made, {}

    return make


def comfy_quant(format_name: str = "float8_e4m3fn") -> Layout:
    """The newer layout: JSON as bytes beside each weight."""
    import torch

    def make(state: State) -> tuple[State, dict[str, str]]:
        made, layers = _scaled(state, "float8_e4m3fn", "weight_scale")
        said = torch.tensor(list(json.dumps({"format": format_name}).encode()), dtype=torch.uint8)
        return {**made, **{f"{layer}.comfy_quant": said.clone() for layer in layers}}, {}

    return make


def in_metadata(format_name: str = "float8_e4m3fn") -> Layout:
    """The newer layout with its JSON in the file's metadata."""

    def make(state: State) -> tuple[State, dict[str, str]]:
        made, layers = _scaled(state, "float8_e4m3fn", "weight_scale")
        said = {"format_version": "1.0", "layers": {layer: {"format": format_name} for layer in layers}}
        return made, {"_quantization_metadata": json.dumps(said)}

    return make


def layouts() -> dict[str, Layout]:
    """Every layout that is handled, by name."""
    return {"fp32": plain("float32"), "fp16": plain("float16"), "bf16": plain("bfloat16"), "fp8": fp8(),
            "fp8_e5m2": fp8("float8_e5m2"), "scaled_fp8": scaled_fp8(), "scaled_bf16": scaled_fp8("bfloat16"),
            "comfy_quant": comfy_quant(), "metadata": in_metadata()}


def write(file: Path, state: State, layout: Layout, prefix: str = "", head_dim: int = HEAD_DIM) -> Path:
    """Writes tensors as a single file; returns it."""
    from safetensors.torch import save_file

    made, metadata = layout(state)
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file({prefix + name: tensor for name, tensor in made.items()}, file,
              {"head_dim": str(head_dim), "format": "pt", **metadata})
    return file


def write_hollow(file: Path, network: nn.Module, held: str) -> Path:
    """A released size's file with its whole header and no bytes on the disk: fp8 with scales, the rest in `held`.

    network: on the meta device.
    """
    import struct

    sizes = {"F8_E4M3": 1, "BF16": 2, "F32": 4}
    kinds = {}
    for name, tensor in original_transformer(network).items():
        linear = LINEAR.fullmatch(name) and tensor.dim() == 2
        kinds[name] = ("F8_E4M3" if linear else held, list(tensor.shape))
        if linear:
            kinds[name.removesuffix("weight") + "scale_weight"] = ("F32", [])
    header: dict[str, Any] = {}
    end = 0
    for name, (kind, shape) in {**kinds, "scaled_fp8": ("F8_E4M3", [2])}.items():
        begin, end = end, end + math.prod(shape) * sizes[kind]
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text)
    os.truncate(file, 8 + len(text) + end)
    return file


def write_checkpoint(file: Path, transformer: State, vae: State, text: State) -> Path:
    """One file with all three, under ComfyUI's prefixes, and a tensor that none of them needs."""
    import torch

    encoder = {f"text_encoders.umt5xxl.transformer.{name}": tensor for name, tensor in text.items()}
    encoder["text_encoders.spiece_model"] = encoder.pop("text_encoders.umt5xxl.transformer.spiece_model")
    return write(file, {**{PREFIX + name: tensor for name, tensor in transformer.items()},
                        **{f"vae.{name}": tensor for name, tensor in vae.items()}, **encoder,
                        "text_encoders.umt5xxl.logit_scale": torch.tensor(4.6)}, plain("float32"))


def write_all(folder: Path) -> list[Path]:
    """A file of each variant and each layout."""
    model = pieces()
    text = text_tensors(text_encoder(piece_count(model)), model)
    made: Mapping[str, State] = {name: original_transformer(transformer(name)) for name in VARIANTS}
    files = [write(folder / "diffusion_models" / f"wan-{name}.safetensors", state, plain("float32"))
             for name, state in made.items()]
    for name, layout in layouts().items():
        files += [write(folder / "diffusion_models" / f"wan-t2v-{name}.safetensors", made["t2v"], layout, PREFIX),
                  write(folder / "text_encoders" / f"umt5-{name}.safetensors", text, layout)]
    vaes = {name: original_vae(vae(name)) for name in VAES}
    files += [write(folder / "vae" / f"wan_{name}_vae.safetensors", state, plain("float32"))
              for name, state in vaes.items()]
    return [*files, write_checkpoint(folder / "checkpoints" / "wan.safetensors", made["t2v"], vaes["2.1"], text)]


def piece_count(model: bytes) -> int:
    import sentencepiece

    return int(sentencepiece.SentencePieceProcessor(model_proto=model).get_piece_size())


if __name__ == "__main__":
    sys.path.insert(0, str(tiny_wan.ROOT))
    tiny_wan.use_worker_site()
    for path in write_all(Path(sys.argv[1])):
        print(path)
