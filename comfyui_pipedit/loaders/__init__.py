"""From files to descriptions and mapped tensors. Nothing here imports diffusers or transformers.

Host: `inspect`, `stamp`, `check_text`, `check_dtype`, `converted_bytes`. Ranks: `open_weights`, `buffer_layout`,
`load_tokenizer`.
"""

from __future__ import annotations

from .diffusers_dir import WeightFiles, buffer_layout, check_dtype, converted_bytes, inspect, open_weights, stamp
from .vocabulary import check_text, check_weights, check_words, load_tokenizer, unescape, word_list

__all__ = ["WeightFiles", "buffer_layout", "check_dtype", "check_text", "check_weights", "check_words",
           "converted_bytes", "inspect", "load_tokenizer", "open_weights", "stamp", "unescape", "word_list"]
