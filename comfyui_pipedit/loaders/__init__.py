"""From files to descriptions and mapped tensors. Nothing here imports diffusers or transformers.

Host: `inspect`, `combine`, `find_companions`, `stamp`, `check_text`, `check_dtype`, `converted_bytes`. Ranks:
`open_weights`, `buffer_layout`, `open_tokens`.
"""

from __future__ import annotations

from .companions import Companions, find_companions
from .model_files import (
    buffer_layout,
    check_dtype,
    combine,
    converted_bytes,
    inspect,
    open_tokens,
    open_weights,
    place,
    stamp,
)
from .prompt import segments
from .vocabulary import check_text, check_words, load_tokenizer, word_list
from .weight_files import WeightFiles

__all__ = ["Companions", "WeightFiles", "buffer_layout", "check_dtype", "check_text", "check_words",
           "combine", "converted_bytes", "find_companions", "inspect", "load_tokenizer", "open_tokens", "open_weights",
           "place", "segments", "stamp", "word_list"]
