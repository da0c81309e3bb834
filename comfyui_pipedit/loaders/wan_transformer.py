"""Wan's transformers in single files: which variant a file is, and the config of diffusers' class, from shapes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import LoadError
from . import wan_names
from .safetensors_file import Entry
from .wan_names import Names

MARKER = "head.modulation"
"""A tensor that every Wan transformer has and no other model."""

HEAD_DIM = 128
"""Of all released Wan models; a small test file says its own in its metadata as "head_dim"."""

PATCH = (1, 2, 2)
TEXT_TOKENS = 512

OTHER_VARIANTS = {
    "control_adapter.": "Wan Fun Camera", "casual_audio_encoder.": "Wan 2.2 S2V (sound to video)",
    "audio_proj.": "HuMo or another Wan that follows sound", "face_adapter.": "Wan 2.2 Animate",
    "motion_encoder.": "Wan 2.2 Animate",
    "ref_conv.": "Wan Fun Control with a reference image",
}
"""Names that begin like this belong to a variant that is not handled."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A Wan transformer. names: the tables that its tensors are in, each with the number of its blocks."""

    kind: str
    config: dict[str, Any]
    names: tuple[tuple[Names, int], ...]

    def ours(self, original: str) -> str | None:
        """diffusers' name of a tensor; None for one that this variant does not have."""
        return next((found for names, _ in self.names if (found := names.ours(original))), None)

    def expected(self) -> set[str]:
        """Original names of all its tensors."""
        return {name for names, blocks in self.names for name in names.expected(blocks)}


def variant(entries: Mapping[str, Entry], metadata: Mapping[str, str], file: str) -> Variant:
    """Variant and config of a transformer. entries: by original name, without prefix and scales.

    LoadError for a variant that is not handled, for missing tensors and for shapes that fit no Wan.
    """
    _refuse_others(entries, file)
    config = _config(_Shapes(entries, file), metadata, file)
    names = [(wan_names.TRANSFORMER, config["num_layers"])]
    if config["image_dim"]:
        names = [(wan_names.IMAGE_BLOCKS, config["num_layers"]), (wan_names.IMAGE_EMBEDDING, 1)]
    if config["pos_embed_seq_len"]:
        names.append((wan_names.IMAGE_POSITIONS, 1))
    if "vace_layers" in config:
        names += [(wan_names.VACE_OUTSIDE, 1), (wan_names.VACE_BLOCKS, len(config["vace_layers"]))]
    return Variant(kind(config, file), config, tuple(names))


@dataclass(frozen=True, slots=True)
class _Shapes:
    entries: Mapping[str, Entry]
    file: str

    def of(self, name: str, dims: int) -> tuple[int, ...]:
        """Shape of a tensor that must be there with so many dimensions."""
        if name not in self.entries:
            raise LoadError(f"{self.file} has no tensor {name}: it is not a whole Wan transformer")
        shape = self.entries[name].shape
        if len(shape) != dims:
            raise LoadError(f"{self.file}: tensor {name} is {list(shape)}; a Wan transformer's has {dims} dimensions")
        return shape

    def count(self, blocks: str) -> int:
        """Blocks of that name, up to the highest number that occurs."""
        numbers = [int(name.split(".")[1]) for name in self.entries if re.match(rf"{blocks}\.\d+\.", name)]
        return max(numbers, default=-1) + 1


def _refuse_others(entries: Mapping[str, Entry], file: str) -> None:
    for name in entries:
        for beginning, model in OTHER_VARIANTS.items():
            if name.startswith(beginning):
                raise LoadError(f"{file} is {model} (it has {name}), which is not handled; Wan text to video, image to "
                                "video, TI2V-5B and VACE are")


def _config(shapes: _Shapes, metadata: Mapping[str, str], file: str) -> dict[str, Any]:
    dim, channels, *patch = shapes.of("patch_embedding.weight", 5)
    if tuple(patch) != PATCH:
        raise LoadError(f"{file}: patches of {patch} are not Wan's {list(PATCH)}")
    head_dim = _head_dim(metadata, dim, file)
    image = "img_emb.proj.1.weight" in shapes.entries
    image_dim = shapes.of("img_emb.proj.1.weight", 2)[1] if image else None
    positions = shapes.of("img_emb.emb_pos", 3)[1] if "img_emb.emb_pos" in shapes.entries else None
    config: dict[str, Any] = {
        "_class_name": "WanTransformer3DModel", "patch_size": list(PATCH), "num_attention_heads": dim // head_dim,
        "attention_head_dim": head_dim, "in_channels": channels,
        "out_channels": shapes.of("head.head.weight", 2)[0] // (PATCH[0] * PATCH[1] * PATCH[2]),
        "text_dim": shapes.of("text_embedding.0.weight", 2)[1], "freq_dim": shapes.of("time_embedding.0.weight", 2)[1],
        "ffn_dim": shapes.of("blocks.0.ffn.0.weight", 2)[0], "num_layers": shapes.count("blocks"),
        "cross_attn_norm": True, "qk_norm": "rms_norm_across_heads", "eps": 1e-6, "image_dim": image_dim,
        "added_kv_proj_dim": dim if image else None, "rope_max_seq_len": 1024, "pos_embed_seq_len": positions,
    }
    if "vace_patch_embedding.weight" in shapes.entries:
        config |= {"_class_name": "WanVACETransformer3DModel", "vace_in_channels": shapes.of(
            "vace_patch_embedding.weight", 5)[1], "vace_layers": _vace_layers(shapes, config["num_layers"], file)}
    return config


def _head_dim(metadata: Mapping[str, str], dim: int, file: str) -> int:
    text = metadata.get("head_dim", str(HEAD_DIM))
    head_dim = int(text) if text.isdecimal() else 0
    if head_dim < 1 or dim % head_dim:
        raise LoadError(f"{file}: width {dim} is not a multiple of the head size {text}"
                        f"{'' if 'head_dim' in metadata else ' that all released Wan models have'}")
    return head_dim


def _vace_layers(shapes: _Shapes, layers: int, file: str) -> list[int]:
    """Blocks that a VACE block is added to: evenly spread, as all released models have them."""
    count = shapes.count("vace_blocks")
    spread = list(range(0, layers, layers // count)) if 0 < count <= layers else []
    if len(spread) != count or not count:
        raise LoadError(f"{file}: {count} VACE blocks cannot be spread evenly over {layers} blocks")
    return spread


def boundary(config: Mapping[str, Any]) -> float:
    """The noise level at which Wan 2.2 A14B's expert for low noise takes over, as its authors set it."""
    return 0.9 if config["in_channels"] != (config.get("out_channels") or config["in_channels"]) else 0.875


def kind(config: Mapping[str, Any], file: str) -> str:
    """The name of the variant; LoadError if no Wan that is handled has these channels."""
    inputs = config["in_channels"]
    outputs = config.get("out_channels") or inputs
    if "vace_layers" in config and inputs == outputs:
        return "Wan VACE"
    if inputs == outputs:
        return "Wan 2.2 TI2V" if outputs == 48 else "Wan text to video"
    if inputs == 2 * outputs + 4:
        version = "2.1" if config.get("image_dim") else "2.2"
        ends = "first and last frame" if config.get("pos_embed_seq_len") else "image"
        return f"Wan {version} {ends} to video"
    if inputs in (3 * outputs, 3 * outputs + 4):
        return "Wan Fun Control"
    raise LoadError(f"{file} is a Wan with {inputs} input and {outputs} output channels; handled are equal numbers "
                    f"(text to video, VACE, TI2V), {2 * outputs + 4} inputs (image to video), {3 * outputs} and "
                    f"{3 * outputs + 4} (Fun Control)")
