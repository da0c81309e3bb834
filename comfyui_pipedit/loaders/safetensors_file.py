"""Safetensors files: headers without torch's help, tensors as views of the mapped file.

A mapped tensor costs no private memory, so ranks of one host share one copy in the page cache.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import LoadError

STEMS = ("diffusion_pytorch_model", "model")
"""What diffusers and transformers call the weights of a component folder."""

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor of a file, as its header describes it. span: first byte in the file and the byte after the last."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    file: Path
    span: tuple[int, int] = (0, 0)

    @property
    def num_values(self) -> int:
        return math.prod(self.shape)

    def read(self) -> bytes:
        """Its bytes, read from the file; for small ones that the host must look into. LoadError if it is gone."""
        try:
            with self.file.open("rb") as file:
                file.seek(self.span[0])
                return file.read(self.span[1] - self.span[0])
        except OSError as error:
            raise LoadError(f"{self.file} cannot be read: {error.strerror}") from None


@dataclass(frozen=True, slots=True)
class Header:
    """What a file says of itself. unhandled: tensor name -> dtype that is not in DTYPES."""

    path: Path
    entries: dict[str, Entry]
    metadata: dict[str, str]
    unhandled: dict[str, str] = field(default_factory=dict)

    def checked(self) -> Header:
        """Itself; LoadError naming the first tensor whose dtype is not handled."""
        for name, dtype in self.unhandled.items():
            raise LoadError(f"{self.path}: tensor {name} has dtype {dtype}, which is not handled")
        return self


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. LoadError naming the file if it is missing or damaged."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise LoadError(f"{path} is missing") from None
    except (OSError, ValueError) as error:
        raise LoadError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(data, dict):
        raise LoadError(f"{path} should hold a JSON object, not a {type(data).__name__}")
    return data


def weight_files(folder: Path) -> tuple[Path, ...]:
    """The safetensors files of a component folder: one, or the shards that its index names."""
    for stem in STEMS:
        index, single = folder / f"{stem}.safetensors.index.json", folder / f"{stem}.safetensors"
        if index.is_file():
            return _shards(index)
        if single.is_file():
            return (single,)
    found = ", ".join(sorted(path.name for path in folder.glob("*.*"))) or "nothing"
    raise LoadError(f"{folder} has no {STEMS[0]}.safetensors or {STEMS[1]}.safetensors (or an index of shards); "
                    f"found: {found}")


def _shards(index: Path) -> tuple[Path, ...]:
    mapping = read_json(index).get("weight_map")
    if not isinstance(mapping, dict) or not mapping:
        raise LoadError(f"{index} has no weight_map")
    names = sorted(set(mapping.values()))
    for name in names:
        if Path(name).name != name:
            raise LoadError(f"{index} names {name!r}, which is not a file beside it")
        if not (index.parent / name).is_file():
            raise LoadError(f"{index.parent / name} is missing: shard {names.index(name) + 1} of {len(names)}")
    return tuple(index.parent / name for name in names)


def read_header(path: Path) -> Header:
    """The header of a file. LoadError if it is missing, truncated, longer than it says, or no safetensors file."""
    raw, start, data_bytes = _header_json(path)
    header, end = Header(path, {}, raw.pop("__metadata__", {})), 0
    for name, value in raw.items():
        try:
            dtype, shape, (first, last) = str(value["dtype"]), tuple(map(int, value["shape"])), value["data_offsets"]
        except (KeyError, TypeError, ValueError):
            raise LoadError(f"{path} is not a safetensors file: its header says {value!r} of {name}") from None
        if last > data_bytes:
            raise LoadError(f"{path} is cut off: tensor {name} ends at byte {last} of {data_bytes}; download it again")
        end = max(end, last)
        if dtype in DTYPES:
            header.entries[name] = Entry(name, DTYPES[dtype], shape, path, (start + first, start + last))
        else:
            header.unhandled[name] = dtype
    if end < data_bytes:
        raise LoadError(f"{path} has {data_bytes - end} bytes more than its header says; download it again")
    return header


def _header_json(path: Path) -> tuple[dict[str, Any], int, int]:
    """(header, where the data begin, their bytes)."""
    try:
        with path.open("rb") as file:
            total = os.fstat(file.fileno()).st_size
            head = file.read(8)
            length = struct.unpack("<Q", head)[0] if len(head) == 8 else total
            text = file.read(length) if length <= total - 8 else b""
    except OSError as error:
        raise LoadError(f"{path} cannot be read: {error.strerror}") from None
    if length > total - 8:
        raise LoadError(f"{path} is not a safetensors file, or it is cut off ({total} bytes)")
    try:
        header = json.loads(text)
    except ValueError:
        header = None
    if not isinstance(header, dict):
        raise LoadError(f"{path} is not a safetensors file: its header is not JSON")
    return header, 8 + length, total - 8 - length


def read_entries(files: tuple[Path, ...]) -> dict[str, Entry]:
    """Entries of all shards together."""
    entries: dict[str, Entry] = {}
    for file in files:
        entries.update(read_header(file).checked().entries)
    return entries


def mapped_tensors(entries: Mapping[str, Entry]) -> Iterator[tuple[str, Tensor]]:
    """(key, tensor) of all entries, file by file in the order of their names there, whatever the keys are.

    Tensors are read-only by contract: they view the mapped file.
    """
    ordered = sorted(entries.items(), key=lambda item: (item[1].file, item[1].name))
    for file, group in itertools.groupby(ordered, key=lambda item: item[1].file):
        with mapped(file) as read:
            for key, entry in group:
                yield key, read(entry.name)


@contextmanager
def mapped(file: Path) -> Iterator[Callable[[str], Tensor]]:
    """A function from a tensor's name to the tensor, a view of the mapped file. LoadError if the file, or the tensor,
    went away since its header was read."""
    from safetensors import SafetensorError, safe_open

    try:
        handle = safe_open(str(file), framework="pt", device="cpu")
    except (OSError, SafetensorError) as error:
        raise LoadError(f"{file} cannot be mapped: {error}") from None

    def read(name: str) -> Tensor:
        try:
            tensor: Tensor = handle.get_tensor(name)
        except SafetensorError as error:
            raise LoadError(f"{file} was changed after its header was read: {error}") from None
        return tensor

    with handle:
        yield read
