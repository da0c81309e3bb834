"""UMT5 text encoders in single files: transformers' own names and the tokenizer's bytes beside them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import LoadError
from .safetensors_file import Entry

MARKER = "encoder.block.0.layer.0.SelfAttention.q.weight"
BIAS = "encoder.block.{}.layer.0.SelfAttention.relative_attention_bias.weight"
TOKENIZER = "spiece_model"
"""A tensor of bytes: the sentencepiece model."""

_KNOWN = re.compile(r"shared\.weight|encoder\.embed_tokens\.weight|encoder\.final_layer_norm\.weight|"
                    r"encoder\.block\.\d+\.layer\.[01]\.layer_norm\.weight|"
                    r"encoder\.block\.\d+\.layer\.0\.SelfAttention\.([qkvo]|relative_attention_bias)\.weight|"
                    r"encoder\.block\.\d+\.layer\.1\.DenseReluDense\.(wi_0|wi_1|wo)\.weight")
_BLOCK = ("layer.0.layer_norm", "layer.1.layer_norm", *(f"layer.0.SelfAttention.{part}" for part in
          ("q", "k", "v", "o", "relative_attention_bias")), *(f"layer.1.DenseReluDense.{part}" for part in
                                                             ("wi_0", "wi_1", "wo")))


@dataclass(frozen=True, slots=True)
class Encoder:
    """A UMT5 encoder: its config for transformers. Tensors keep their names."""

    kind: str
    config: dict[str, Any]

    def ours(self, original: str) -> str | None:
        """The name itself; None for one that no UMT5 encoder has."""
        return original if _KNOWN.fullmatch(original) else None

    def expected(self) -> set[str]:
        """Names of all tensors but the word table, which has two."""
        blocks = range(self.config["num_layers"])
        return {"encoder.final_layer_norm.weight",
                *(f"encoder.block.{block}.{part}.weight" for block in blocks for part in _BLOCK)}


def encoder(entries: Mapping[str, Entry], file: str) -> Encoder:
    """The config of a text encoder, from shapes. LoadError for T5 and for shapes that fit no UMT5."""
    table = entries.get("shared.weight") or entries.get("encoder.embed_tokens.weight")
    if table is None:
        raise LoadError(f"{file} has no word table (shared.weight)")
    layers = 1 + max(int(match[1]) for name in entries if (match := re.match(r"encoder\.block\.(\d+)\.", name)))
    if layers > 1 and BIAS.format(1) not in entries:
        raise LoadError(f"{file} is a T5 text encoder (position biases in its first block only); Wan needs umt5_xxl")
    bias, query, wide = (entries.get(name) for name in (
        BIAS.format(0), MARKER, "encoder.block.0.layer.1.DenseReluDense.wi_0.weight"))
    if bias is None or query is None or wide is None or not len(bias.shape) == len(wide.shape) == 2:
        raise LoadError(f"{file} is not a whole UMT5 text encoder: its first block lacks tensors")
    buckets, heads = bias.shape
    return Encoder("UMT5 text encoder", {
        "_class_name": "UMT5EncoderModel", "model_type": "umt5", "vocab_size": table.shape[0],
        "d_model": table.shape[1], "d_kv": query.shape[0] // heads, "d_ff": wide.shape[0], "num_layers": layers,
        "num_heads": heads, "relative_attention_num_buckets": buckets, "relative_attention_max_distance": 128,
        "feed_forward_proj": "gated-gelu", "layer_norm_epsilon": 1e-6, "dropout_rate": 0.1, "pad_token_id": 0,
        "eos_token_id": 1})
