"""Models in diffusers' folder layout: model_index.json and one folder a component.

`inspect` is for the host: JSON and nothing else. `open_weights` is for a rank: configs and mapped tensors.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import InvalidJob, LoadError
from ..job import Geometry, ModelFiles, Weights
from . import precision
from .safetensors_file import Entry, mapped_tensors, read_entries, read_json, weight_files
from .vocabulary import text_tokens, word_list

FOLDERS = {"transformer": "transformer", "vae": "vae", "text": "text_encoder"}
TOKENIZER = "tokenizer"
STAMPED = (".json", ".safetensors")
CLASSES = {"transformer": "WanTransformer3DModel", "vae": "AutoencoderKLWan", "text": "UMT5EncoderModel"}
DEFAULT_SHIFT = 8.0
"""ComfyUI's own for Wan, used where a folder names none."""


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """One component on disk: its config, and the headers of its files."""

    folder: Path
    config: dict[str, Any]
    files: tuple[Path, ...]
    entries: dict[str, Entry]

    @property
    def stored_dtype(self) -> torch.dtype:
        """The dtype that holds most of its values."""
        return precision.stored_dtype(self.entries.values())

    def mapped(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) that view the mapped files: never write to them."""
        return mapped_tensors(self.files)


def inspect(folder: str | Path) -> ModelFiles:
    """What the host knows of a pipeline folder, from its JSON files and the sizes and times of its weights.

    LoadError names the file and what is wrong with it: missing, another model, a variant that is not handled.
    """
    root = Path(folder).resolve()
    if not root.is_dir():
        raise LoadError(f"{root} is not a folder")
    index = read_json(root / "model_index.json")
    if index.get("transformer_2", [None])[0] or index.get("boundary_ratio") or index.get("expand_timesteps"):
        raise LoadError(f"{root.name} is Wan 2.2 (see model_index.json); only Wan 2.1 text to video is handled yet")
    transformer, vae = (_component(root, index, part) for part in ("transformer", "vae"))
    has_text = "text_encoder" in index and bool(index["text_encoder"][0])
    text = _component(root, index, "text") if has_text else None
    return ModelFiles(
        name=root.name,
        geometry=_geometry(root, transformer, vae, text),
        transformer=_weights(root, "transformer"),
        vae=_weights(root, "vae"),
        text=_weights(root, "text") if has_text else None,
        shift=_shift(root),
        vocabulary=word_list(root / TOKENIZER / "tokenizer.json") if has_text else (),
    )


def open_weights(weights: Weights) -> WeightFiles:
    """Config and headers of one component. LoadError if a file is missing, damaged, or not the one that is meant."""
    folder = Path(weights.path) / FOLDERS[weights.part]
    files = weight_files(folder)
    opened = WeightFiles(folder, read_json(folder / "config.json"), files, read_entries(files))
    if weights.stamp not in ("", stamp(Path(weights.path), weights.part)):
        raise LoadError(f"{folder} was changed after the graph had read it; queue again to use what is there now")
    return opened


def stamp(root: Path, part: str) -> str:
    """The state of one component's files, as their names, sizes and times of change make it: 16 hex digits."""
    folders = (FOLDERS[part], TOKENIZER) if part == "text" else (FOLDERS[part],)
    paths = [path for name in folders for path in sorted((root / name).glob("*"))]
    stats = [(path.relative_to(root).as_posix(), path.stat()) for path in paths
             if path.suffix in STAMPED and path.is_file()]
    facts = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def _weights(root: Path, part: str) -> Weights:
    return Weights("wan", part, str(root), stamp=stamp(root, part))


def converted_bytes(weights: Weights, *, on_gpu: bool) -> int:
    """Bytes of the shared buffer for a network's converted copy; 0 = ranks use the mapped file as it is.

    GPU ranks convert on the GPU and need none; neither do weights without a path (a family that reads no files).
    """
    if on_gpu or not weights.path:
        return 0
    layout = buffer_layout(weights, open_weights(weights), precision.DTYPES.get(weights.dtype, precision.CPU_DEFAULT))
    return precision.layout_bytes(layout)


def buffer_layout(weights: Weights, files: WeightFiles, compute: torch.dtype) -> dict[str, precision.Slot]:
    """Where the converted tensors of one component lie in the shared buffer."""
    keep_fp32 = precision.KEEP_FP32.get((weights.family, weights.part), ())
    return precision.converted_layout(files.entries, compute, keep_fp32)


def _component(root: Path, index: dict[str, Any], part: str) -> dict[str, Any]:
    """The config of a component; LoadError if it is missing or of another class."""
    folder, expected = FOLDERS[part], CLASSES[part]
    entry = index.get(folder)
    if not isinstance(entry, list) or len(entry) != 2 or not entry[1]:
        raise LoadError(f"{root / 'model_index.json'} names no {folder}; a Wan 2.1 text-to-video folder has "
                        f"{', '.join(FOLDERS.values())}")
    if entry[1] != expected:
        raise LoadError(f"{root / 'model_index.json'}: {folder} is a {entry[1]}; only {expected} is handled yet")
    return read_json(root / folder / "config.json")


def _need(config: dict[str, Any], key: str, path: Path) -> Any:
    if config.get(key) is None:
        raise LoadError(f"{path} has no {key!r}")
    return config[key]


def _geometry(root: Path, transformer: dict[str, Any], vae: dict[str, Any], text: dict[str, Any] | None) -> Geometry:
    where, vae_file = root / "transformer" / "config.json", root / "vae" / "config.json"
    channels = int(_need(transformer, "in_channels", where))
    _refuse_variants(root, transformer, vae)
    mean, std = (tuple(map(float, _need(vae, key, vae_file))) for key in ("latents_mean", "latents_std"))
    if not len(mean) == len(std) == channels == vae.get("z_dim", channels):
        raise LoadError(f"{vae_file}: z_dim {vae.get('z_dim')}, {len(mean)} means and {len(std)} stds do not fit the "
                        f"transformer's {channels} channels")
    width = int(_need(transformer, "text_dim", where))
    if text is not None and text.get("d_model") != width:
        raise LoadError(f"{root / 'text_encoder' / 'config.json'}: d_model {text.get('d_model')} is not the "
                        f"transformer's text_dim {width}")
    return Geometry(
        channels=channels, spatial=2 ** (len(_need(vae, "dim_mult", vae_file)) - 1),
        temporal=2 ** sum(map(bool, _need(vae, "temperal_downsample", vae_file))),
        patch=tuple(_need(transformer, "patch_size", where)), text_width=width,
        text_tokens=text_tokens(root / TOKENIZER / "tokenizer_config.json"),
        num_heads=int(_need(transformer, "num_attention_heads", where)), mean=mean, std=std)


def _refuse_variants(root: Path, transformer: dict[str, Any], vae: dict[str, Any]) -> None:
    channels = transformer["in_channels"]
    if (transformer.get("image_dim") or transformer.get("added_kv_proj_dim")
            or (transformer.get("out_channels") or channels) != channels):
        raise LoadError(f"{root.name} is an image-to-video Wan; only text to video is handled yet")
    if vae.get("is_residual") or vae.get("patch_size"):
        raise LoadError(f"{root.name} has the Wan 2.2 VAE; only Wan 2.1's is handled yet")


def _shift(root: Path) -> float:
    """flow_shift (UniPC) or shift (flow matching Euler) of the folder's scheduler, else ComfyUI's default for Wan."""
    path = root / "scheduler" / "scheduler_config.json"
    config = read_json(path) if path.is_file() else {}
    value = config.get("flow_shift", config.get("shift", DEFAULT_SHIFT))
    if not isinstance(value, (int, float)) or value <= 0:
        raise LoadError(f"{path}: flow_shift must be a number above 0, not {value!r}")
    return float(value)


def check_dtype(name: str) -> str:
    """A weight dtype that can be computed in now. InvalidJob naming the allowed ones otherwise."""
    allowed = ("default", *precision.DTYPES)
    if name not in allowed:
        raise InvalidJob(f"weight_dtype {name!r} is not supported yet; allowed: {', '.join(allowed)}; "
                         "nearest: 'default'")
    return name
