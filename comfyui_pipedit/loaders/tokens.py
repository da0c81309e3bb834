"""Tokenizers, for workers: a folder's tokenizer.json, or the sentencepiece model inside a single file."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from ..errors import LoadError, SetupError
from .vocabulary import check_words, load_tokenizer, text_tokens, word_list

END = "</s>"


class TextTokens(Protocol):
    """A text as token ids. length: texts are padded to it."""

    length: int

    def ids(self, text: str) -> list[int]:
        """Ids of a text without escapes, its end token last. InvalidJob for words outside a closed vocabulary."""
        ...


class FolderTokens:
    """A pipeline folder's tokenizer."""

    def __init__(self, root: Path) -> None:
        folder = root / "tokenizer"
        self.length = text_tokens(folder / "tokenizer_config.json")
        self._vocabulary = word_list(folder / "tokenizer.json")
        self._tokenizer = load_tokenizer(root)
        end = self._tokenizer.token_to_id(END)
        if end is None:
            raise LoadError(f"the tokenizer has no end token {END!r}")
        self._end = end

    def ids(self, text: str) -> list[int]:
        check_words(self._tokenizer, self._vocabulary, text)
        return [*self._tokenizer.encode(text, add_special_tokens=False).ids, self._end]


class PieceTokens:
    """A sentencepiece model."""

    def __init__(self, model: bytes, file: str, length: int) -> None:
        try:
            from sentencepiece import SentencePieceProcessor
        except ImportError as error:
            raise SetupError(f"{file} needs the package sentencepiece, which ComfyUI requires too ({error})") from error
        try:
            self._pieces = SentencePieceProcessor(model_proto=model)
        except RuntimeError as error:
            raise LoadError(f"{file}: its tokenizer cannot be read: {error}") from None
        self.length = length

    def ids(self, text: str) -> list[int]:
        return [*self._pieces.encode(text), self._pieces.eos_id()]
