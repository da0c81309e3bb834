"""Which models a Loader can offer and what each name stands for. Paths come only from ComfyUI's model folders."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from comfyui_pipedit.config import PACKAGE_ROOT
from comfyui_pipedit.errors import InvalidJob, PipeDiTError, not_one_of
from comfyui_pipedit.host.devices import resolve
from comfyui_pipedit.job import ModelFiles
from comfyui_pipedit.loaders import inspect

DEMO = "demo"
DEMO_FOLDER = PACKAGE_ROOT / "demo" / "weights"
DIFFUSERS = "diffusers/"
CHECKPOINTS = "checkpoints/"
INDEX = "model_index.json"
MAX_DEPTH = 4
DTYPES = ("default", "fp8_e4m3fn", "fp8_e4m3fn_fast", "fp8_e5m2", "bf16", "fp16", "fp32")
DTYPES_NOW = ("default", "bf16", "fp16", "fp32")


class Folders(Protocol):
    """The part of ComfyUI's `folder_paths` that is used here."""

    def get_filename_list(self, folder_name: str) -> list[str]: ...

    def get_folder_paths(self, folder_name: str) -> list[str]: ...


def diffusers_folders(root: Path, depth: int = MAX_DEPTH) -> Iterator[Path]:
    """Folders below `root` that hold a model_index.json, not looking inside of them."""
    if not root.is_dir() or depth < 0:
        return
    if (root / INDEX).is_file():
        yield root
        return
    for entry in sorted(os.scandir(root), key=lambda entry: entry.name):
        if entry.is_dir() and not entry.name.startswith("."):
            yield from diffusers_folders(Path(entry.path), depth - 1)


@dataclass(frozen=True, slots=True)
class Catalog:
    """The names of a Loader's lists; `folders` maps those that this version can read to their diffusers folder."""

    folders: Mapping[str, Path]
    files: tuple[str, ...]
    text_encoders: tuple[str, ...]
    vaes: tuple[str, ...]

    @classmethod
    def read(cls, paths: Folders) -> Catalog:
        """What lies in ComfyUI's model folders now."""
        folders = {DEMO: DEMO_FOLDER}
        for place in paths.get_folder_paths("diffusers"):
            for folder in diffusers_folders(Path(place)):
                folders.setdefault(DIFFUSERS + folder.relative_to(place).as_posix(), folder)
        files = (
            *paths.get_filename_list("diffusion_models"),
            *(CHECKPOINTS + name for name in paths.get_filename_list("checkpoints")),
        )
        return cls(
            MappingProxyType(folders),
            files,
            tuple(paths.get_filename_list("text_encoders")),
            tuple(paths.get_filename_list("vae")),
        )

    @property
    def names(self) -> list[str]:
        """All of `unet_name`'s choices, the demo first."""
        return [*self.folders, *self.files]

    def folder(self, name: str) -> Path:
        """The diffusers folder of a choice; InvalidJob with the way out for anything else."""
        if name in self.folders:
            return self.folders[name]
        if name in self.files:
            raise InvalidJob(
                f"unet_name {name!r} is a single file; this version reads diffusers folders: put the model's folder "
                f"(with its {INDEX}) into models/diffusers, or choose {DEMO!r}"
            )
        raise not_one_of("unet_name", name, self.folders)

    def load(self, name: str, weight_dtype: str) -> ModelFiles:
        """The model behind a choice, read from its JSON files only; weights stay where they are."""
        files = inspect(self.folder(name))
        return replace(files, name=name, transformer=replace(files.transformer, dtype=weight_dtype))


def refuse_later(name: str, value: str, allowed: tuple[str, ...], known: tuple[str, ...], why: str) -> None:
    """InvalidJob for a value that a later version brings (`why`), and for one that is no choice at all."""
    if value in allowed:
        return
    if value in known:
        raise InvalidJob(f"{name} {value!r}: {why}; choose {' or '.join(map(repr, allowed))}")
    raise not_one_of(name, value, allowed)


def check_loader(catalog: Catalog, values: Mapping[str, str | None]) -> None:
    """InvalidJob (or SetupError for absent GPUs) naming the first of a Loader's values that does not work here.

    A value of None stands for one that comes over a link and is not known yet.
    """
    given = {name: value for name, value in values.items() if value is not None}
    if "unet_name" in given:
        catalog.folder(given["unet_name"])
    refuse_later(
        "unet_name_low",
        given.get("unet_name_low", "none"),
        ("none",),
        tuple(catalog.names),
        "a second model for low noise comes with Wan 2.2's two-expert models",
    )
    refuse_later(
        "weight_dtype", given.get("weight_dtype", "default"), DTYPES_NOW, DTYPES, "fp8 weights come in a later version"
    )
    for name in ("clip_name1", "clip_name2", "vae_name"):
        allowed = ("none",) if name == "clip_name2" else ("auto", "none")
        known = catalog.vaes if name == "vae_name" else catalog.text_encoders
        refuse_later(
            name,
            given.get(name, allowed[0]),
            allowed,
            ("auto", *known),
            "separate files come in a later version, the folder brings its own",
        )
    resolve(given.get("devices", "auto"))


def complaint(catalog: Catalog, values: Mapping[str, str | None]) -> str | None:
    """The text of what `check_loader` raises, for ComfyUI's validation; None if all is well."""
    try:
        check_loader(catalog, values)
    except PipeDiTError as error:
        return str(error)
    return None


def fingerprint(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """Name, size and time of each file of a model: a replaced file makes the Loader run again."""
    stats = ((path, path.stat()) for path in sorted(folder.rglob("*")) if path.is_file())
    return tuple((path.relative_to(folder).as_posix(), stat.st_size, stat.st_mtime_ns) for path, stat in stats)
