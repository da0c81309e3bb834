"""Embeddings that were made before: a text of the same encoder is not encoded twice."""

from __future__ import annotations

import threading
from collections import OrderedDict

from torch import Tensor

from ..job import TextRequest, Weights

ROOM = 256 << 20
"""Bytes of embeddings that are kept: about 30 texts of Wan's 512 x 4096."""


class Texts:
    """Encoder and text -> embedding float32 [1, L, D], the least used ones forgotten. Safe from any thread.

    The encoder's stamp is part of the key, so a replaced file is another encoder.
    """

    def __init__(self, room: int = ROOM) -> None:
        self._room = room
        self._known: OrderedDict[tuple[Weights, str], Tensor] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, request: TextRequest) -> list[Tensor] | None:
        """Copies of all embeddings of a request; None if one of them is not there."""
        keys = [(request.weights, text) for text in request.texts]
        with self._lock:
            if any(key not in self._known for key in keys):
                return None
            for key in keys:
                self._known.move_to_end(key)
            return [self._known[key].clone() for key in keys]

    def keep(self, request: TextRequest, embeddings: list[Tensor]) -> None:
        """Takes copies of what the pool made of a request."""
        with self._lock:
            for text, embedding in zip(request.texts, embeddings, strict=True):
                self._known.pop((request.weights, text), None)
                self._known[request.weights, text] = embedding.clone()
            while sum(tensor.nbytes for tensor in self._known.values()) > self._room:
                self._known.popitem(last=False)

    def forget(self) -> None:
        """Gives all memory back."""
        with self._lock:
            self._known.clear()
