"""What a prompt may say, known from a model's tokenizer files: words of a closed vocabulary."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InvalidJob
from ..job import ModelFiles
from .prompt import plain
from .safetensors_file import read_json

if TYPE_CHECKING:
    from tokenizers import Tokenizer

DEFAULT_TEXT_TOKENS = 512
"""Wan's text length, used where the tokenizer names none (transformers then writes a huge number)."""


def text_tokens(path: Path) -> int:
    """Length that texts are padded to: model_max_length of a tokenizer_config.json (Wan: 512)."""
    length = read_json(path).get("model_max_length") if path.is_file() else None
    return int(length) if isinstance(length, int) and 0 < length <= 4096 else DEFAULT_TEXT_TOKENS


def word_list(path: Path) -> tuple[str, ...]:
    """The words of a WordLevel tokenizer.json in id order, without its special tokens; () for an open vocabulary."""
    data = read_json(path)
    model = data.get("model") or {}
    if model.get("type") != "WordLevel":
        return ()
    special = {token["content"] for token in data.get("added_tokens") or [] if token.get("special")}
    special.add(model.get("unk_token", "<unk>"))
    vocab: dict[str, Any] = model.get("vocab") or {}
    return tuple(word for word in sorted(vocab, key=lambda word: vocab[word]) if word not in special)


def check_words(tokenizer: Tokenizer, vocabulary: tuple[str, ...], text: str) -> None:
    """InvalidJob naming the words that a closed vocabulary lacks, their nearest neighbours, and the vocabulary."""
    if not vocabulary:
        return
    encoding = tokenizer.encode(text, add_special_tokens=False)
    known = set(vocabulary)
    places = zip(encoding.tokens, encoding.offsets, strict=True)
    unknown = [text[start:stop] for token, (start, stop) in places if token not in known]
    if unknown:
        raise InvalidJob(_unknown_words(list(dict.fromkeys(unknown)), vocabulary))


def _unknown_words(unknown: list[str], vocabulary: tuple[str, ...]) -> str:
    named = []
    for word in unknown:
        near = difflib.get_close_matches(word.lower(), vocabulary, n=1)
        named.append(f"{word!r}" + (f" (nearest: {near[0]})" if near else ""))
    return f"this model does not know {', '.join(named)}; its words are: {', '.join(vocabulary)}"


def check_text(files: ModelFiles, text: str) -> None:
    """Host-side check of a prompt at graph time; raises InvalidJob as `segments` and `check_words` do."""
    words = plain(text)
    if files.vocabulary and files.text is not None:
        check_words(load_tokenizer(Path(files.text.path)), files.vocabulary, words)


def load_tokenizer(root: Path) -> Tokenizer:
    """The tokenizer of a pipeline folder, without padding or truncation. LoadError if tokenizer.json is missing."""
    from tokenizers import Tokenizer

    path = root / "tokenizer" / "tokenizer.json"
    read_json(path)
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer
