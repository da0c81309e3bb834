"""Names in LoRA files -> names in diffusers' Wan transformer, and what each tensor of such a file is for.

Data, and small functions over it. Known: the original names (ComfyUI's), diffusers' own, both with dots or underscores.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from .wan_names import IMAGE_BLOCKS, IMAGE_EMBEDDING, IMAGE_POSITIONS, VACE_BLOCKS, VACE_OUTSIDE

_ROWS = (*IMAGE_BLOCKS.rows, *IMAGE_EMBEDDING.rows, *IMAGE_POSITIONS.rows, *VACE_OUTSIDE.rows, *VACE_BLOCKS.rows)

_FORMS: dict[str, str] = {
    form: row.ours for row in _ROWS for name in (row.original, row.ours) for form in (name, name.replace(".", "_"))
}
"""Whatever a module may be called, "*" for its block's number -> diffusers' name of it."""

_NUMBER = re.compile(r"(?<=blocks[._])\d+(?=[._])")

PREFIXES = ("base_model.model.", "model.diffusion_model.", "diffusion_model.", "transformer.", "unet.", "pipe.dit.",
            "lora_unet__", "lora_unet_", "lora_transformer_", "lycoris_")
"""What writers put before the name of a module; several may stand in a row."""

IMAGE_PARTS = (".add_k_proj.", ".add_v_proj.", ".norm_added_k.", ".image_embedder.")
"""Parts of names that only Wan 2.1's image-to-video models have."""

RAW = ("weight", "bias", "scale_shift_table", "pos_embed")
"""Last parts of names that are parameters themselves, not modules."""

_PAIRS = ((".lora_down.weight", ".lora_up.weight"), (".lora_A.weight", ".lora_B.weight"),
          (".lora_A.default.weight", ".lora_B.default.weight"), (".lora.down.weight", ".lora.up.weight"),
          ("_lora.down.weight", "_lora.up.weight"), (".lora_A", ".lora_B"),
          (".lora_linear_layer.down.weight", ".lora_linear_layer.up.weight"))

ROLES: dict[str, str] = {
    **{down: "down" for down, _ in _PAIRS}, **{up: "up" for _, up in _PAIRS},
    ".alpha": "alpha", ".diff": "difference", ".w_norm": "difference", ".diff_b": "bias", ".b_norm": "bias",
}
"""End of a tensor's name -> its role in a module's adapter."""

UNSUPPORTED: dict[str, str] = {
    **dict.fromkeys((".dora_scale", ".lora_magnitude_vector", ".lora_magnitude_vector.weight",
                     ".lora_magnitude_vector.default.weight"), "DoRA"),
    **dict.fromkeys((".hada_w1_a", ".hada_w1_b", ".hada_w2_a", ".hada_w2_b", ".hada_t1", ".hada_t2"), "LoHa"),
    **dict.fromkeys((".lokr_w1", ".lokr_w1_a", ".lokr_w1_b", ".lokr_w2", ".lokr_w2_a", ".lokr_w2_b", ".lokr_t2"),
                    "LoKr"),
    **dict.fromkeys((".oft_blocks", ".oft_diag", ".rescale"), "OFT"),
    **dict.fromkeys((".a1.weight", ".a2.weight", ".b1.weight", ".b2.weight"), "GLoRA"),
    ".lora_mid.weight": "LoCon with a middle tensor", ".reshape_weight": "a reshaped weight",
    ".set_weight": "a replaced weight",
    **dict.fromkeys((".lora_B.bias", ".lora_B.default.bias", ".lora_up.bias"), "a low-rank bias"),
}
"""End of a tensor's name -> the kind of adapter that is not handled."""

_SUFFIXES = sorted({**ROLES, **UNSUPPORTED}, key=len, reverse=True)


def split_key(key: str) -> tuple[str, str]:
    """A tensor's name -> (what it changes, the end of the name); the end is "" if nothing is known of it."""
    suffix = next((suffix for suffix in _SUFFIXES if key.endswith(suffix)), "")
    return key.removesuffix(suffix), suffix


def diffusers_name(name: str) -> str | None:
    """A module or parameter of a file -> diffusers' name for it; None if no Wan has it."""
    stem = _without_prefixes(name)
    for ending in ("", ".weight", ".bias"):
        found = _module_name(stem.removesuffix(ending)) if stem.endswith(ending) else None
        if found:
            return found + ending
    return None


def parameter_name(module: str, role: str) -> str:
    """The parameter that an adapter changes: a module's bias, its weight, or a bare parameter."""
    if module.rpartition(".")[2] in RAW:
        return module
    return f"{module}.bias" if role == "bias" else f"{module}.weight"


def looks_like(keys: Iterable[str]) -> str:
    """What kind of file has such keys, for someone who picked the wrong one."""
    text = "\n".join(keys)
    return next((kind for kind, pattern in _LOOKS if re.search(pattern, text, re.MULTILINE)), "")


_LOOKS = (
    ("the weights of a whole model, not a LoRA", r"attn\d?\.(to_)?(q|k|qkv)\.weight$"),
    ("a LoRA for HunyuanVideo", r"img_mod[._]linear|img_mlp[._]fc1|img_attn_qkv\.|individual_token_refiner"),
    ("a LoRA for Flux (or HunyuanVideo)", r"double_blocks|single_blocks|single_transformer_blocks"),
    ("a LoRA for Qwen-Image", r"transformer_blocks[._]\d+[._](img_mod|txt_mlp|img_mlp)"),
    ("a LoRA for Stable Diffusion 3", r"joint_blocks|transformer_blocks[._]\d+[._]ff_context"),
    ("a LoRA for SDXL", r"lora_te2_|(down|input|output|up)_blocks.*transformer_blocks[._][2-9]"),
    ("a LoRA for Stable Diffusion 1.5 or SDXL", r"(down|input|output|up|mid|middle)_block|lora_te1?_text_model"),
    ("a LoRA for LTX-Video", r"patchify_proj|transformer_blocks[._]\d+[._]attn[12][._]to_"),
    ("a LoRA for CogVideoX", r"transformer_blocks[._]\d+[._](norm1[._]linear|attn1)"),
    ("a LoRA for another Wan", r"blocks[._]\d+[._](self_attn|cross_attn|attn[12]|ffn)[._]"),
)


def _without_prefixes(name: str) -> str:
    prefix = next((prefix for prefix in PREFIXES if name.startswith(prefix)), "")
    return _without_prefixes(name[len(prefix):]) if prefix else name


def _module_name(stem: str) -> str | None:
    number = _NUMBER.search(stem)
    if stem in _FORMS or number is None:
        return _FORMS.get(stem)
    found = _FORMS.get(f"{stem[:number.start()]}*{stem[number.end():]}")
    return found.replace("*", number[0]) if found else None
