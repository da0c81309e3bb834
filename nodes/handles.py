"""What goes along the Loader's links: small values that name files and reach the pool when a node uses them.

`PoolClip` and `PoolVAE` stand in for ComfyUI's CLIP and VAE: core CLIPTextEncode, VAEDecode, VAEEncode and the tiled
forms of both work on them and nothing is loaded into ComfyUI's process.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor

from comfyui_pipedit.errors import InvalidJob, OutOfMemory
from comfyui_pipedit.host.ticket import Ticket
from comfyui_pipedit.job import Geometry, ModelFiles, TextRequest, Tiling, Weights
from comfyui_pipedit.loaders.vocabulary import check_text

from . import convert, waiting
from .pools import Pools, Request

CLIP_NAME = "PipeDiT Loader's clip"
VAE_NAME = "PipeDiT Loader's vae"

log = logging.getLogger("pipedit")


class LivesInThePool(AttributeError):
    """Asked for something of a model that is not in this process; hasattr is False."""


def refuse_attribute(name: str, loader: str) -> NoReturn:
    raise LivesInThePool(f"{name} lives in the PipeDiT pool; connect a core {loader} here")


@dataclass(frozen=True, slots=True, eq=False)
class PoolModel:
    """A PIPEDIT_MODEL: which files, on which devices."""

    pools: Pools = field(repr=False)
    devices: str
    files: ModelFiles = field(repr=False)

    def submit(self, *requests: Request) -> tuple[Ticket, ...]:
        """One ticket a request; the first one starts the pool."""
        return self.pools.submit(self.devices, requests)

    def __str__(self) -> str:
        return f"{self.files.name} on {self.devices}"


@dataclass(frozen=True, slots=True)
class Tokens:
    """A prompt on its way from `tokenize` to `encode_from_tokens`; the pool tokenizes."""

    text: str


@dataclass(frozen=True, slots=True, eq=False)
class PoolClip:
    """A CLIP whose text encoder is in the pool."""

    model: PoolModel
    weights: Weights

    def clone(self) -> PoolClip:
        """Itself: it cannot be changed."""
        return self

    def tokenize(self, text: str, return_word_ids: bool = False, **options: Any) -> Tokens:
        """Checks a prompt: InvalidJob for words the model does not know."""
        if options:
            raise InvalidJob(f"{CLIP_NAME}: {', '.join(options)} is not supported; connect a core CLIPLoader")
        with waiting.naming(CLIP_NAME):
            check_text(self.model.files, text)
        return Tokens(text)

    def encode_from_tokens(self, tokens: Tokens, return_pooled: bool | str = False, return_dict: bool = False) -> Any:
        """The embedding float32 [1, L, D] with zeros after the text; None as pooled output if asked for."""
        with waiting.naming(CLIP_NAME):
            tickets = self.model.submit(TextRequest(self.weights, (tokens.text,)))
            waiting.wait(tickets)
        text: Tensor = tickets[0].result()[0]
        if return_dict:
            return {"cond": text, "pooled_output": None}
        return (text, None) if return_pooled else text

    def encode_from_tokens_scheduled(
        self,
        tokens: Tokens,
        unprojected: bool = False,
        add_dict: Mapping[str, Any] | None = None,
        show_pbar: bool = True,
    ) -> list[list[Any]]:
        """CONDITIONING of a prompt."""
        return convert.conditioning_output(self.encode_from_tokens(tokens), add_dict or {})

    def __getattr__(self, name: str) -> Any:
        refuse_attribute(name, "CLIPLoader")

    def __str__(self) -> str:
        return f"text encoder of {self.model}"


@dataclass(frozen=True, slots=True, eq=False)
class PoolVAE:
    """A VAE that is in the pool."""

    model: PoolModel
    weights: Weights

    @property
    def geometry(self) -> Geometry:
        return self.model.files.geometry

    @property
    def latent_channels(self) -> int:
        return self.geometry.channels

    @property
    def latent_dim(self) -> int:
        """Video: time, height and width."""
        return 3

    @property
    def output_channels(self) -> int:
        return 3

    def spacial_compression_decode(self) -> int:
        """Pixels a latent pixel."""
        return self.geometry.spatial

    def spacial_compression_encode(self) -> int:
        """Pixels a latent pixel."""
        return self.geometry.spatial

    def temporal_compression_decode(self) -> int:
        """Frames a latent frame (the first one gives one)."""
        return self.geometry.temporal

    def begin_decode(self, samples: Any, tiling: Tiling | None, label: str = "") -> tuple[Ticket, ...]:
        """Decodes of samples [B, C, T, h, w]: those that run already for this very tensor, or new ones."""
        checked = convert.checked_samples(samples, self.geometry, self.model.files.name)
        running = self.model.pools.take(checked, self.weights, tiling)
        if running is not None:
            return running
        return self.model.submit(*convert.decodes(checked, self.weights, self.geometry, tiling, label))

    def decode(self, samples: Tensor, vae_options: Mapping[str, Any] | None = None) -> Tensor:
        """Frames float32 [B, F, H, W, 3] in 0..1 of samples [B, C, T, h, w]."""
        if vae_options:
            raise InvalidJob(f"{VAE_NAME}: {', '.join(vae_options)} is not supported; connect a core VAELoader")
        return self._decode(samples, None)

    def decode_tiled(
        self,
        samples: Tensor,
        tile_x: int = 32,
        tile_y: int = 32,
        overlap: int = 8,
        tile_t: int = 999,
        overlap_t: int = 1,
    ) -> Tensor:
        """`decode` in tiles; sizes in latent pixels and latent frames, as ComfyUI's VAEDecodeTiled gives them."""
        with waiting.naming(VAE_NAME):
            tile = convert.square(tile_x, tile_y)
        return self._decode(samples, convert.latent_tiling(self.geometry, tile, overlap, tile_t, overlap_t))

    def _decode(self, samples: Tensor, tiling: Tiling | None) -> Tensor:
        with waiting.naming(VAE_NAME):
            tickets = self.begin_decode(samples, tiling)
            waiting.wait(tickets)
        return _stack(tickets)

    def encode(self, pixels: Tensor) -> Tensor:
        """Latent float32 [B, C, T, h, w] of IMAGE [F, H, W, 3] (one clip) or [B, F, H, W, 3]; in tiles where memory is
        too small for the whole."""
        try:
            return self._encode(pixels, None)
        except OutOfMemory as error:
            log.warning("%s; encoding again, in tiles", error)
        return self._encode(pixels, convert.SMALL_TILES)

    def encode_tiled(
        self,
        pixel_samples: Tensor,
        tile_x: int | None = None,
        tile_y: int | None = None,
        overlap: int | None = None,
        tile_t: int | None = None,
        overlap_t: int | None = None,
    ) -> Tensor:
        """`encode` in tiles; sizes in pixels and frames, as ComfyUI's VAEEncodeTiled gives them."""
        with waiting.naming(VAE_NAME):
            tiling = convert.encode_tiling(tile_x, tile_y, overlap, tile_t, overlap_t)
        return self._encode(pixel_samples, tiling)

    def _encode(self, pixels: Tensor, tiling: Tiling | None) -> Tensor:
        with waiting.naming(VAE_NAME):
            tickets = self.model.submit(*convert.encodes(pixels, self.weights, self.geometry, tiling))
            waiting.wait(tickets)
        return torch.cat([ticket.result() for ticket in tickets])

    def __getattr__(self, name: str) -> Any:
        refuse_attribute(name, "VAELoader")

    def __str__(self) -> str:
        return f"VAE of {self.model}"


def _stack(tickets: Sequence[Ticket]) -> Tensor:
    clips = [ticket.result() for ticket in tickets]
    return clips[0].unsqueeze(0) if len(clips) == 1 else torch.stack(clips)
