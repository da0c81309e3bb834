"""Names in LoRA files -> names in diffusers' Wan transformer, and what each tensor of such a file is for.

Data, and small functions over it. Known: the original names (ComfyUI's), diffusers' own, both with dots or underscores.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_ATTENTION = {"q": "to_q", "k": "to_k", "v": "to_v", "o": "to_out.0", "norm_q": "norm_q", "norm_k": "norm_k",
              "k_img": "add_k_proj", "v_img": "add_v_proj", "norm_k_img": "norm_added_k"}

BLOCK: dict[str, str] = {
    **{f"self_attn.{name}": f"attn1.{ours}" for name, ours in _ATTENTION.items()},
    **{f"cross_attn.{name}": f"attn2.{ours}" for name, ours in _ATTENTION.items()},
    "ffn.0": "ffn.net.0.proj", "ffn.2": "ffn.net.2", "norm3": "norm2", "modulation": "scale_shift_table",
    "before_proj": "proj_in", "after_proj": "proj_out",
}
"""Inside a block (`blocks.N.`, `vace_blocks.N.`): original name -> diffusers' name."""

TOP: dict[str, str] = {
    "patch_embedding": "patch_embedding", "vace_patch_embedding": "vace_patch_embedding",
    "time_embedding.0": "condition_embedder.time_embedder.linear_1",
    "time_embedding.2": "condition_embedder.time_embedder.linear_2",
    "time_projection.1": "condition_embedder.time_proj",
    "text_embedding.0": "condition_embedder.text_embedder.linear_1",
    "text_embedding.2": "condition_embedder.text_embedder.linear_2",
    "img_emb.proj.0": "condition_embedder.image_embedder.norm1",
    "img_emb.proj.1": "condition_embedder.image_embedder.ff.net.0.proj",
    "img_emb.proj.3": "condition_embedder.image_embedder.ff.net.2",
    "img_emb.proj.4": "condition_embedder.image_embedder.norm2",
    "img_emb.emb_pos": "condition_embedder.image_embedder.pos_embed",
    "head.head": "proj_out", "head.modulation": "scale_shift_table",
}
"""Outside of the blocks."""

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


def _all_forms(table: dict[str, str]) -> dict[str, str]:
    """The table with diffusers' own names too, everything with dots and with underscores."""
    dotted = {**{ours: ours for ours in table.values()}, **table}
    return {**{name.replace(".", "_"): ours for name, ours in dotted.items()}, **dotted}


_BLOCK_FORMS, _TOP_FORMS = _all_forms(BLOCK), _all_forms(TOP)


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
    match = re.fullmatch(r"(blocks|vace_blocks)[._](\d+)[._](.+)", stem)
    if not match:
        return _TOP_FORMS.get(stem)
    inner = _BLOCK_FORMS.get(match[3])
    return f"{match[1]}.{match[2]}.{inner}" if inner else None
