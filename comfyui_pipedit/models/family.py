"""What a model family tells the engine about its networks, and the calls it must answer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from ..job import Branch, Geometry, Tiling


@dataclass(frozen=True, slots=True)
class Split:
    """A tensor of which a rank keeps only its own tokens.

    module: name below the model ("" = the model itself). value: name or position of an argument of its forward, or,
    with `output`, position in the tuple that it returns (0 for a lone tensor). dim: the token dimension.
    num_dims: split only a tensor of so many dimensions (0 = any); Wan's timestep has a token dimension in one variant.
    """

    module: str
    value: str | int
    dim: int = 1
    num_dims: int = 0
    output: bool = False


@dataclass(frozen=True, slots=True)
class Gather:
    """A module's output tensor that is put together from all ranks' tokens along `dim`."""

    module: str
    dim: int = 1


@dataclass(frozen=True, slots=True)
class SequencePlan:
    """How a model runs on a slice of its tokens. `attention`: name patterns (fnmatch) of the self-attention modules
    whose Q, K, V must be exchanged; all other modules work token by token or see tensors that every rank has whole.
    beside: (module name, plan): what is added for a model that has such a module, as one of its variants does."""

    splits: tuple[Split, ...]
    gathers: tuple[Gather, ...]
    attention: tuple[str, ...]
    beside: tuple[tuple[str, SequencePlan], ...] = ()


class WeightSource(Protocol):
    """One component's weights, ready for a device: what a family builds its networks from."""

    @property
    def root(self) -> Path:
        """The folder of the whole model (for its tokenizer)."""
        ...

    @property
    def config(self) -> dict[str, Any]:
        """The component's config.json."""
        ...

    @property
    def device(self) -> torch.device: ...

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) on the device and in the dtype to compute in; on the CPU often a view of a mapped file."""
        ...


class TextEncoder(Protocol):
    """A text encoder with its tokenizer."""

    def encode(self, text: str) -> Tensor:
        """Embeddings [1, L, D], zeros after the text's tokens. InvalidJob for words that the model does not know."""
        ...

    def parameters(self) -> Iterable[Tensor]:
        """Its network's tensors, for counting bytes."""
        ...


class Family(Protocol):
    """A kind of video model. It knows no ranks: a rank hooks the exchange into the transformer by `sequence_plan`.

    Latents are float32 [1, C, T, h, w]; frames float32 [F, H, W, 3] in 0..1.
    """

    name: str
    sequence_plan: SequencePlan

    def load_transformer(self, source: WeightSource) -> nn.Module: ...

    def load_vae(self, source: WeightSource) -> nn.Module: ...

    def load_text(self, source: WeightSource) -> TextEncoder: ...

    def prepare(self, model: nn.Module, branch: Branch, shape: tuple[int, ...], mask: Tensor | None,
                geometry: Geometry) -> Branch:
        """A branch as `velocity` takes it, made once a clip: extras in the form the network sees them, on the device.

        shape: of the clip's latent. mask: float32 [1, 1 or C, T, h, w], see job.Job. InvalidJob for extras that do not
        fit the network or the clip.
        """
        ...

    def velocity(self, model: nn.Module, x: Tensor, sigma: float, branch: Branch) -> Tensor:
        """One evaluation at `sigma` in 0..1 of a latent in model space -> its velocity, float32, same shape.

        branch: what `prepare` made. Sizes that the patch does not divide are padded as ComfyUI pads them, and cropped.
        """
        ...

    def kept_part(self, model: nn.Module, latent: Tensor, noise: Tensor, sigma: float) -> Tensor:
        """What the network sees at `sigma` where a mask keeps the start latent. latent in model space."""
        ...

    def num_pieces(self, shape: tuple[int, ...], tiling: Tiling | None, geometry: Geometry) -> int:
        """How many pieces `decode_pieces` yields for a latent of this shape."""
        ...

    def decode_pieces(self, vae: nn.Module, latent: Tensor, tiling: Tiling | None,
                      geometry: Geometry) -> Iterator[Tensor]:
        """Decodes a latent in VAE space: pieces of frames in order, possibly empty ones. Several decodes may be under
        way on one network. Whole (tiling None): exactly what the network's own decode gives. Tiled: what ComfyUI's
        VAEDecodeTiled gives."""
        ...

    def vae_encode(self, vae: nn.Module, frames: Tensor, tiling: Tiling | None, geometry: Geometry) -> Tensor:
        """Frames on any device -> the mode of the posterior, in VAE space. Surplus rows, columns and last frames are
        cut as ComfyUI does. Tiled: what ComfyUI's VAEEncodeTiled gives."""
        ...
