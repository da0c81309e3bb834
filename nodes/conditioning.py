"""ComfyUI's CONDITIONING to what a model is told (job.Branch), item by item of a batch as ComfyUI cuts it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from comfyui_pipedit.errors import InvalidJob
from comfyui_pipedit.job import Branch, ModelFiles

Conditioning = Sequence[Sequence[Any]]

IGNORED = frozenset({
    "pooled_output", "attention_mask", "guidance", "frame_rate", "width", "height", "crop_w", "crop_h", "target_width",
    "target_height", "aesthetic_score", "unclip_conditioning", "noise_augmentation", "reference_latents",
    "reference_latents_method", "camera_conditions", "audio_embed", "face_video_pixels", "pose_video_latent",
    "reference_motion", "control_video", "prompt_type",
})
"""Keys that core nodes set and that ComfyUI's Wan (text, image and TI2V to video, VACE) ignores as well."""

HARMLESS: Mapping[str, Callable[[Any], bool]] = {
    "start_percent": lambda value: value <= 0.0, "end_percent": lambda value: value >= 1.0,
    "strength": lambda value: value != 0.0,
}
"""Keys that change nothing with these values, where there is one entry."""


COMPOSED = frozenset({"area", "mask", "start_percent", "end_percent", "strength", "default"})
"""Keys by which ComfyUI weighs an estimate by place and time, and adds it to others."""


def is_composed(conditioning: Conditioning) -> bool:
    """Whether ComfyUI puts several estimates together for it, or one that does not count everywhere and always."""
    return len(conditioning) > 1 or any(
        key in COMPOSED and value is not None and not _changes_nothing(key, value)
        for _, extra in conditioning for key, value in extra.items())


@dataclass(frozen=True, slots=True)
class Told:
    """One plain CONDITIONING: its text [N, L, D] and what else it carries that a model may read, by ComfyUI's keys."""

    text: Tensor
    values: Mapping[str, Any]

    def branch(self, index: int, count: int) -> Branch:
        """What the model is told for item `index` of a batch of `count`."""
        extras = {key: READERS[key](value, index, count) for key, value in self.values.items()}
        return Branch(_repeated(self.text, index, count), extras)


def read(conditioning: Conditioning, name: str, files: ModelFiles) -> Told:
    """Checks a CONDITIONING of one entry. InvalidJob by name for none, for keys that would change the result and are
    not supported, for values of another kind than ComfyUI's nodes make, and for another text width."""
    if len(conditioning) != 1:
        raise InvalidJob(f"{name} has {len(conditioning)} conditioning entries, and one is needed: connect CLIP Text "
                         "Encode")
    text, extra = conditioning[0]
    values = {key: value for key, value in extra.items() if value is not None and not _changes_nothing(key, value)}
    unknown = sorted(key for key in values if key not in READERS)
    if unknown:
        raise InvalidJob(
            f"{name} carries {', '.join(unknown)}, which this version does not support; "
            "connect CLIP Text Encode directly, or a node for Wan between"
        )
    width = files.geometry.text_width
    if text.dim() != 3 or text.shape[2] != width:
        raise InvalidJob(
            f"{name} has a text embedding {list(text.shape)} and {files.name} needs [1, length, {width}]; use "
            "the clip of PipeDiT Loader, or CLIPLoader with this model's own text encoder"
        )
    return Told(text.to("cpu", torch.float32), values)


def _changes_nothing(key: str, value: Any) -> bool:
    return key in IGNORED or (key in HARMLESS and HARMLESS[key](value))


# -- readers: a key's value, item of a batch, size of the batch -> float32 tensor on the CPU ------------------------


def _repeated(value: Tensor, index: int, count: int) -> Tensor:
    """An item of a batch that starts again where it is too short."""
    return _item(value, index % len(value))


def _spread(value: Tensor, index: int, count: int) -> Tensor:
    """An item of a batch that is stretched or thinned out to `count`."""
    have = len(value)
    if have > count > 1:
        return _item(value, min(round(index * ((have - 1) / (count - 1))), have - 1))
    return _item(value, index if have >= count else min(int((index + 0.5) * (have / count)), have - 1))


def _item(value: Tensor, index: int) -> Tensor:
    return value[index:index + 1].to("cpu", torch.float32)


def _images(value: Any, index: int, count: int) -> Tensor:
    """Hidden states [1, N, D] of a CLIP_VISION_OUTPUT; two images of one clip are side by side already."""
    return _repeated(value.penultimate_hidden_states, index, count)


def _guides(value: Sequence[Tensor], index: int, count: int) -> Tensor:
    """[n, ...] of n guides, each a batch."""
    shapes = [list(guide.shape[1:]) for guide in value]
    if any(shape != shapes[0] for shape in shapes):
        raise InvalidJob(f"guides of different sizes, {shapes}: chained WanVaceToVideo nodes need the same size, "
                         "length, and all or none a reference image")
    return torch.cat([_repeated(guide, index, count) for guide in value])


def _numbers(value: Any, index: int, count: int) -> Tensor:
    return torch.tensor([value] if isinstance(value, (int, float)) else list(value), dtype=torch.float32)


READERS: Mapping[str, Callable[[Any, int, int], Tensor]] = {
    "concat_latent_image": _spread,
    "concat_mask": _spread,
    "concat_mask_index": _numbers,
    "clip_vision_output": _images,
    "vace_frames": _guides,
    "vace_mask": _guides,
    "vace_strength": _numbers,
}
