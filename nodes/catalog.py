"""Which models a Loader can offer and what each name stands for. Paths come only from ComfyUI's model folders."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from comfyui_pipedit import loaders
from comfyui_pipedit.config import DEMO_FOLDER
from comfyui_pipedit.errors import InvalidJob, PipeDiTError, not_one_of
from comfyui_pipedit.host.devices import resolve
from comfyui_pipedit.job import ModelFiles

DEMO = "demo"
DIFFUSERS = "diffusers/"
CHECKPOINTS = "checkpoints/"
INDEX = "model_index.json"
MAX_DEPTH = 4
DTYPES = ("default", "fp8_e4m3fn", "fp8_e4m3fn_fast", "fp8_e5m2", "bf16", "fp16", "fp32")
AUTO, NONE = "auto", "none"


class Folders(Protocol):
    """The part of ComfyUI's `folder_paths` that is used here."""

    def get_filename_list(self, folder_name: str) -> list[str]: ...

    def get_folder_paths(self, folder_name: str) -> list[str]: ...

    def get_full_path(self, folder_name: str, filename: str) -> str | None: ...


def diffusers_folders(root: Path, depth: int = MAX_DEPTH) -> Iterator[Path]:
    """Folders below `root` that hold a model_index.json, not looking inside of them."""
    if depth < 0:
        return
    if os.path.isfile(root / INDEX):
        yield root
    else:
        for folder in subfolders(root):
            yield from diffusers_folders(folder, depth - 1)


def subfolders(root: Path) -> list[Path]:
    """The folders in a folder, by name; none where it may not be read. One bad folder must not take the node away."""
    try:
        names = sorted(os.listdir(root))
    except OSError:
        return []
    return [root / name for name in names if not name.startswith(".") and os.path.isdir(root / name)]


@dataclass(frozen=True, slots=True)
class Choice:
    """A Loader's widgets but `devices`; None stands for one that comes over a link and is not known yet."""

    unet_name: str | None
    unet_name_low: str | None = NONE
    weight_dtype: str | None = "default"
    clip_name1: str | None = AUTO
    clip_name2: str | None = NONE
    vae_name: str | None = AUTO


@dataclass(frozen=True, slots=True)
class Catalog:
    """The names of a Loader's lists, each with its file or folder."""

    models: Mapping[str, Path]
    text_encoders: Mapping[str, Path]
    vaes: Mapping[str, Path]

    @classmethod
    def read(cls, paths: Folders) -> Catalog:
        """What lies in ComfyUI's model folders now."""
        models = {DEMO: DEMO_FOLDER}
        for place in paths.get_folder_paths("diffusers"):
            for folder in diffusers_folders(Path(place)):
                models.setdefault(DIFFUSERS + folder.relative_to(place).as_posix(), folder)
        models |= listed(paths, "diffusion_models")
        models |= {CHECKPOINTS + name: path for name, path in listed(paths, "checkpoints").items()}
        return cls(models, listed(paths, "text_encoders"), listed(paths, "vae"))

    def path(self, name: str, widget: str = "unet_name") -> Path:
        """What a model's name stands for. InvalidJob for a name that is not in the list."""
        if name not in self.models:
            raise not_one_of(widget, name, self.models)
        return self.models[name]

    def load(self, choice: Choice) -> ModelFiles:
        """The model behind a Loader's widgets, read from headers and JSON files; weights stay where they are.

        LoadError names a file that is of another kind, damaged, or does not go with the others.
        """
        assert choice.unet_name and choice.unet_name_low and choice.weight_dtype
        main = self.path(choice.unet_name)
        low = None if choice.unet_name_low == NONE else self.path(choice.unet_name_low, "unet_name_low")
        vae, text = self.companions(main, choice)
        files = loaders.combine(main, vae, text, choice.unet_name, low)
        return with_dtype(files, choice.weight_dtype)

    def companions(self, main: Path, choice: Choice) -> tuple[Path | None, Path | None]:
        """(VAE, text encoder): those that are named; for "auto" the model's own, else what fits by its header."""
        place = loaders.place(main)
        vae, text = (named(choice.vae_name, self.vaes), named(choice.clip_name1, self.text_encoders))
        wanted = {part for part, value in (("vae", choice.vae_name), ("text", choice.clip_name1)) if value == AUTO}
        own = wanted.intersection(place.parts)
        vae, text = (main if "vae" in own else vae, main if "text" in own else text)
        if missing := wanted - own:
            found = loaders.find_companions(loaders.inspect(main), self.vaes, self.text_encoders)
            vae = self.vaes[found.vae] if "vae" in missing and found.vae else vae
            text = self.text_encoders[found.text] if "text" in missing and found.text else text
        return vae, text


def listed(paths: Folders, category: str) -> dict[str, Path]:
    """Name -> file of a category of model folders. ComfyUI lists links that lead nowhere too: they are left out."""
    files = ((name, paths.get_full_path(category, name)) for name in paths.get_filename_list(category))
    return {name: Path(file) for name, file in files if file is not None}


def named(value: str | None, files: Mapping[str, Path]) -> Path | None:
    """The file of a widget's value; None for "auto" and "none"."""
    return None if value in (AUTO, NONE, None) else files[str(value)]


def with_dtype(files: ModelFiles, dtype: str) -> ModelFiles:
    """The model with its transformers held in a dtype."""
    low = files.transformer_low
    return replace(files, transformer=replace(files.transformer, dtype=dtype),
                   transformer_low=None if low is None else replace(low, dtype=dtype))


def check_loader(catalog: Catalog, choice: Choice, devices: str | None) -> None:
    """InvalidJob (or SetupError for absent GPUs) naming the first of a Loader's values that does not work here."""
    for widget, value, allowed in (
        ("unet_name", choice.unet_name, tuple(catalog.models)),
        ("unet_name_low", choice.unet_name_low, (NONE, *catalog.models)),
        ("weight_dtype", choice.weight_dtype, DTYPES),
        ("clip_name1", choice.clip_name1, (AUTO, NONE, *catalog.text_encoders)),
        ("vae_name", choice.vae_name, (AUTO, NONE, *catalog.vaes)),
    ):
        if value is not None and value not in allowed:
            raise not_one_of(widget, value, allowed)
    if choice.clip_name2 not in (NONE, None):
        raise InvalidJob(f"clip_name2 {choice.clip_name2!r}: Wan's models have one text encoder; a second one comes "
                         f"with other models in a later version; choose {NONE!r}")
    if devices is not None:
        resolve(devices)


def complaint(catalog: Catalog, choice: Choice, devices: str | None) -> str | None:
    """The text of what `check_loader` raises, for ComfyUI's validation; None if all is well."""
    try:
        check_loader(catalog, choice, devices)
    except PipeDiTError as error:
        return str(error)
    return None


def fingerprint(catalog: Catalog, choice: Choice) -> tuple[tuple[str, int, int], ...]:
    """Name, size and time of each file that a Loader may read: a replaced or an added file makes it run again."""
    chosen = [catalog.models.get(name or "") for name in (choice.unet_name, choice.unet_name_low)]
    beside = [*catalog.vaes.values(), *catalog.text_encoders.values()]
    return tuple(entry for path in (*chosen, *beside) if path is not None for entry in files_of(path))


def files_of(path: Path) -> Iterator[tuple[str, int, int]]:
    """(name, size, time) of a file, or of the files in a folder."""
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.is_file():
            stat = file.stat()
            yield file.relative_to(path.parent).as_posix(), stat.st_size, stat.st_mtime_ns
