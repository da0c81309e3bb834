"""What is asked of the pool and what comes back: frozen nouns.

Tensors are CPU tensors; the wire turns them into mapped buffers. Latents here are in VAE space, as ComfyUI's LATENT is;
the worker normalises them for the model (models/geometry.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from .errors import InvalidJob

if TYPE_CHECKING:
    from torch import Tensor

    from .plan import Plan
    from .sampling import SolverTable


class Stage(str, Enum):
    """Where a job is. Its trajectory is WAITING, LOADING, DENOISING, DECODING, DONE; FAILED and CANCELLED end it."""

    WAITING = "waiting"
    LOADING = "loading"
    ENCODING = "encoding"
    DENOISING = "denoising"
    DECODING = "decoding"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Weights:
    """Files of one network: the key under which it is resident in a rank.

    family: name in the registry of models/. part: "transformer", "vae" or "text". path: absolute file or folder.
    dtype: "default" (the file's own; float32 on the CPU), "bf16", "fp16" or "fp32". stamp: which state of the files is
    meant (loaders.stamp), so that a replaced file is another network; "" = whatever is there.
    """

    family: str
    part: str
    path: str
    dtype: str = "default"
    stamp: str = ""


@dataclass(frozen=True, slots=True)
class LoraUse:
    """A LoRA file at some strength. path: absolute; stamp: the state that the file was in when the graph read it."""

    path: str
    stamp: str
    strength: float


@dataclass(frozen=True, slots=True)
class Expert:
    """A transformer as some steps use it: resident weights, and the LoRAs that are their state then, in order."""

    weights: Weights
    loras: tuple[LoraUse, ...] = ()


@dataclass(frozen=True, slots=True)
class Geometry:
    """How a family's latents relate to frames: channels, spatial and temporal factors, patch (t, h, w), text width and
    length.

    `mean` and `std` (one per channel) take VAE space to model space: (x - mean) / std.
    """

    channels: int
    spatial: int
    temporal: int
    patch: tuple[int, int, int]
    text_width: int
    text_tokens: int
    num_heads: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def num_tokens(self, latent_shape: tuple[int, ...]) -> int:
        """Tokens of a latent [B, C, T, h, w] after padding h and w to the patch (as core pads)."""
        sizes = zip(latent_shape[-3:], self.patch, strict=True)
        counts = [-(-size // patch) for size, patch in sizes]
        return counts[0] * counts[1] * counts[2]

    def num_frames(self, latent_frames: int) -> int:
        """Frames that decode from `latent_frames` latent frames: the first gives one, the others `temporal` each."""
        return (latent_frames - 1) * self.temporal + 1


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model as a person picked it: files, and what is known from their headers without loading weights.

    transformer_low: Wan 2.2 A14B's expert for low noise; it takes over at the first step whose sigma is below
    `boundary`. loras, loras_low: what the two are used with.
    """

    name: str
    geometry: Geometry
    transformer: Weights
    vae: Weights | None = None
    text: Weights | None = None
    shift: float = 1.0
    vocabulary: tuple[str, ...] = field(default=(), repr=False)
    transformer_low: Weights | None = None
    boundary: float = 0.875
    loras: tuple[LoraUse, ...] = ()
    loras_low: tuple[LoraUse, ...] = ()

    @property
    def experts(self) -> tuple[Expert, ...]:
        """The one transformer, or the one for high noise and the one for low."""
        high = Expert(self.transformer, self.loras)
        return (high,) if self.transformer_low is None else (high, Expert(self.transformer_low, self.loras_low))


@dataclass(frozen=True, slots=True, eq=False)
class TextRequest:
    """Texts to encode; the result is a list of float32 [1, L, D] tensors with zeros after each text's tokens."""

    weights: Weights
    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Tiling:
    """Tiles of a decode or an encode, in pixels and frames; None anywhere means one piece."""

    tile: int = 512
    overlap: int = 64
    temporal_tile: int = 64
    temporal_overlap: int = 8


@dataclass(frozen=True, slots=True, eq=False)
class DecodeRequest:
    """A latent [1, C, T, h, w] float32 in VAE space -> frames float32 [F, H, W, 3] in 0..1."""

    weights: Weights
    geometry: Geometry
    latent: Tensor
    tiling: Tiling | None = None
    label: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class EncodeRequest:
    """Frames float32 [F, H, W, 3] in 0..1 -> latent float32 [1, C, T, h, w] in VAE space (mode of the posterior).

    InvalidJob for tiles that cut the frames elsewhere than between latent cells, or that overlap wholly.
    """

    weights: Weights
    geometry: Geometry
    frames: Tensor
    tiling: Tiling | None = None

    def __post_init__(self) -> None:
        tiling, cell = self.tiling, self.geometry.spatial
        if tiling is None or max(self.frames.shape[1:3], default=0) <= tiling.tile:
            return
        if not 0 <= tiling.overlap < tiling.tile or tiling.tile % cell or tiling.overlap % cell:
            raise InvalidJob(f"tiles of {tiling.tile} pixels that overlap by {tiling.overlap}: both must be multiples "
                             f"of {cell}, and the overlap smaller than the tile")


@dataclass(frozen=True, slots=True, eq=False)
class Branch:
    """What the model is told in one guidance branch.

    text: embedding float32 [1, L, D]. extras: further tensors by the family's names (models/FAMILY.py lists them), as
    the graph gives them: latents in VAE space.
    """

    text: Tensor
    extras: Mapping[str, Tensor] = field(default_factory=dict)


def check_latent(latent: Tensor, files: ModelFiles) -> None:
    """InvalidJob unless it is one clip's latent [1, C, T, h, w] of this model."""
    channels = files.geometry.channels
    if latent.dim() != 5 or latent.shape[0] != 1:
        raise InvalidJob(f"a job's latent is [1, C, T, h, w], not {list(latent.shape)}")
    if latent.shape[1] != channels:
        raise InvalidJob(f"the latent has {latent.shape[1]} channels and {files.name} needs {channels}; use the "
                         f"empty-latent node of this model's family")


def check_text(text: Tensor, files: ModelFiles, name: str) -> None:
    """InvalidJob unless it is an embedding [1, L, D] of this model's text encoder."""
    width = files.geometry.text_width
    if text.dim() != 3 or text.shape[0] != 1 or text.shape[2] != width:
        raise InvalidJob(f"{name} must be a text embedding [1, L, {width}] of {files.name}'s own text encoder, not "
                         f"{list(text.shape)}")


@dataclass(frozen=True, slots=True, eq=False)
class EvaluateRequest:
    """One call of the model on one latent -> a list of its velocities, float32 like x, one a branch.

    x: float32 [1, C, T, h, w] in model space. mask: see Job. It carries all it needs: nothing is kept between calls.
    """

    files: ModelFiles
    x: Tensor
    sigma: float
    branches: tuple[Branch, ...]
    mask: Tensor | None = None
    plan: Plan | None = None

    def __post_init__(self) -> None:
        check_latent(self.x, self.files)
        for branch in self.branches:
            check_text(branch.text, self.files, "conditioning")

    @property
    def expert(self) -> Expert:
        """The transformer for this noise level."""
        return self.files.experts[-1 if self.sigma < self.files.boundary else 0]


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """One clip to denoise.

    negative None = one guidance branch.
    latent, noise: float32 [1, C, T, h, w]; latent in VAE space, noise unit normal. noises: further draws of the solver.
    mask: float32 [1, 1 or C, T, h, w], 1 where the latent is made and 0 where it is kept; None = all is made.
    switch_step: first step of the second expert; None = by the model's boundary.
    decode: when set, the pool decodes right after the last step, into the same ticket's frames.
    """

    files: ModelFiles
    positive: Branch
    negative: Branch | None
    latent: Tensor
    noise: Tensor
    table: SolverTable
    cfg: float
    seed: int
    noises: tuple[Tensor, ...] = ()
    mask: Tensor | None = None
    switch_step: int | None = None
    decode: Weights | None = None
    tiling: Tiling | None = None
    plan: Plan | None = None
    label: str = ""

    def __post_init__(self) -> None:
        check_latent(self.latent, self.files)
        for name, branch in (("positive", self.positive), ("negative", self.negative)):
            if branch is not None:
                check_text(branch.text, self.files, name)

    @property
    def branches(self) -> int:
        """Evaluations of one model call: 2 with guidance, 1 at cfg 1 (the negative is skipped, as core does)."""
        return 1 if self.negative is None or self.cfg == 1.0 else 2

    @property
    def switch(self) -> int:
        """First step of the second expert; the number of steps where there is none."""
        steps = self.table.num_steps
        if self.files.transformer_low is None:
            return steps
        if self.switch_step is not None:
            return min(self.switch_step, steps)
        sigmas = [rows[0].sigma for rows in self.table.steps]
        return next((step for step, sigma in enumerate(sigmas) if sigma < self.files.boundary), steps)

    def expert(self, step: int) -> Expert:
        """The transformer of a step."""
        return self.files.experts[-1 if step >= self.switch else 0]


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a job is now, for a progress bar: `done` of `total` units of this stage, and a sentence."""

    stage: Stage
    done: int = 0
    total: int = 0
    text: str = ""


@dataclass(frozen=True, slots=True)
class Span:
    """What a rank did and when: seconds of the monotonic clock, which all processes of a host share."""

    rank: int
    name: str
    job: str
    start: float
    end: float
