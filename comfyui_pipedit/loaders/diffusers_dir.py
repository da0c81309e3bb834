"""Models in diffusers' folder layout: model_index.json and one folder a component."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import LoadError
from .safetensors_file import read_entries, read_json, weight_files
from .tokens import FolderTokens
from .vocabulary import text_tokens, word_list
from .weight_files import DEFAULT_SHIFT, TextFacts, WeightFiles, digest

INDEX, CONFIG, LOW = "model_index.json", "config.json", "transformer_2"
FOLDERS = {"transformer": "transformer", "vae": "vae", "text": "text_encoder"}
TOKENIZER = "tokenizer"
STAMPED = (".json", ".safetensors")
CLASSES = {"transformer": ("WanTransformer3DModel", "WanVACETransformer3DModel"), "vae": ("AutoencoderKLWan",),
           "text": ("UMT5EncoderModel",)}


@dataclass(frozen=True, slots=True)
class DiffusersFolder:
    """A pipeline folder as a place of weights (weight_files.Place)."""

    path: Path

    @property
    def parts(self) -> tuple[str, ...]:
        """Transformer and VAE always, a text encoder where model_index.json names one."""
        if not self.path.is_dir():
            raise LoadError(f"{self.path} is missing: neither a folder nor a file")
        entry = read_json(self.path / INDEX).get(FOLDERS["text"])
        has_text = isinstance(entry, list) and bool(entry[0])
        return ("transformer", "vae", "text") if has_text else ("transformer", "vae")

    def config(self, part: str) -> dict[str, Any]:
        """LoadError if model_index.json does not name the component, or names one of another class."""
        if self._folder(part) == self.path:
            return read_json(self.path / CONFIG)
        index, folder, classes = self.path / INDEX, FOLDERS[part], CLASSES[part]
        entry = read_json(index).get(folder)
        if not isinstance(entry, list) or len(entry) != 2 or not entry[1]:
            raise LoadError(f"{index} names no {folder}; a Wan folder has {', '.join(FOLDERS.values())}")
        if entry[1] not in classes:
            raise LoadError(f"{index}: {folder} is a {entry[1]}; only {' and '.join(classes)} is handled")
        return read_json(self.path / folder / CONFIG)

    @property
    def unused(self) -> tuple[str, ...]:
        return ()

    @property
    def low(self) -> DiffusersFolder | None:
        """The folder of the second transformer: a component's folder is a place of its own."""
        named = read_json(self.path / INDEX).get(LOW)
        return DiffusersFolder(self.path / LOW) if isinstance(named, list) and named[0] else None

    @property
    def boundary(self) -> float | None:
        ratio = read_json(self.path / INDEX).get("boundary_ratio")
        return float(ratio) if isinstance(ratio, (int, float)) else None

    def open(self, part: str) -> WeightFiles:
        folder = self._folder(part)
        return WeightFiles(folder, read_json(folder / CONFIG), read_entries(weight_files(folder)))

    def stamp(self, part: str) -> str:
        folders = (self._folder(part), self.path / TOKENIZER) if part == "text" else (self._folder(part),)
        files = [path for folder in folders for path in sorted(folder.glob("*")) if path.suffix in STAMPED]
        return digest(self.path, files)

    def _folder(self, part: str) -> Path:
        """A component's folder, which may be this one."""
        inside = self.path / FOLDERS[part]
        return self.path if (self.path / CONFIG).is_file() else inside

    @property
    def shift(self) -> float:
        """flow_shift (UniPC) or shift (flow matching Euler) of the folder's scheduler, else ComfyUI's for Wan."""
        path = self.path / "scheduler" / "scheduler_config.json"
        config = read_json(path) if path.is_file() else {}
        value = config.get("flow_shift", config.get("shift", DEFAULT_SHIFT))
        if not isinstance(value, (int, float)) or value <= 0:
            raise LoadError(f"{path}: flow_shift must be a number above 0, not {value!r}")
        return float(value)

    @property
    def text(self) -> TextFacts:
        folder = self.path / TOKENIZER
        return TextFacts(text_tokens(folder / "tokenizer_config.json"), word_list(folder / "tokenizer.json"))

    def tokens(self) -> FolderTokens:
        return FolderTokens(self.path)
