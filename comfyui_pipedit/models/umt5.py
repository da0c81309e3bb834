"""UMT5 text encoder with its tokenizer: Wan's, and small ones of the same architecture."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import UMT5Config, UMT5EncoderModel

from ..errors import LoadError
from ..loaders import open_tokens, segments
from ..loaders.tokens import TextTokens
from .family import WeightSource
from .skeleton import assign, on_meta


class UMT5Text:
    """Texts to embeddings [1, L, D]: the encoder's output for the text and its end token, zeros up to L.

    L is the tokenizer's length (Wan 512), more for a longer text, as in ComfyUI. An empty text is its end token alone.
    """

    def __init__(self, model: UMT5EncoderModel, tokens: TextTokens) -> None:
        self.model, self.tokens = model, tokens

    def encode(self, text: str) -> Tensor:
        """float32 [1, L, D]. InvalidJob for words that a closed vocabulary lacks."""
        ids: list[int] = []
        weights: list[float] = []
        for segment in segments(text):
            *words, _ = self.tokens.ids(segment.text)
            ids += words
            weights += [segment.weight] * len(words)
        *_, end = self.tokens.ids("")
        hidden = self._weighted(self._hidden([*ids, end]), [*weights, 1.0], end)
        return torch.nn.functional.pad(hidden, (0, 0, 0, max(0, self.tokens.length - hidden.shape[1])))

    def _hidden(self, ids: list[int]) -> Tensor:
        device = self.model.shared.weight.device
        found: Tensor = self.model(input_ids=torch.tensor([ids], device=device)).last_hidden_state
        return found.float()

    def _weighted(self, hidden: Tensor, weights: list[float], end: int) -> Tensor:
        """Each token's way from an empty text's embedding, times its weight; an empty text is zero but for its end
        token, at the first place."""
        if all(weight == 1.0 for weight in weights):
            return hidden
        empty = torch.zeros_like(hidden)
        empty[:, :1] = self._hidden([end])
        factors = torch.tensor(weights, device=hidden.device)[None, :, None]
        return torch.where(factors == 1.0, hidden, (hidden - empty) * factors + empty)

    def parameters(self) -> list[Tensor]:
        """The network's tensors."""
        return list(self.model.parameters())


def load_text(source: WeightSource) -> UMT5Text:
    """The encoder with the source's tensors, and the tokenizer beside it."""
    config = UMT5Config.from_dict({**source.config, "tie_word_embeddings": True})
    model = on_meta(lambda: UMT5EncoderModel(config))
    tables = ("shared.weight", "encoder.embed_tokens.weight")
    assign(model, source.tensors(), f"{source.root.name}'s text encoder", optional=tables)
    _tie(model, source)
    return UMT5Text(model, open_tokens(source.root))


def _tie(model: UMT5EncoderModel, source: WeightSource) -> None:
    """One word table under both its names, whichever the file holds."""
    held = [table for table in (model.shared, model.encoder.embed_tokens) if not table.weight.is_meta]
    if not held:
        raise LoadError(f"{source.root.name}'s text encoder has no word table (shared.weight)")
    model.shared.weight = model.encoder.embed_tokens.weight = held[0].weight
