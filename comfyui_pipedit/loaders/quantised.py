"""Scales of fp8 weights in single files, in the layouts that exist, and the names of formats that are not handled.

- "scaled_fp8": a marker tensor of that name; beside a weight X.weight its X.scale_weight (true = weight * scale) and
  often X.scale_input, meant for fp8 products.
- "comfy_quant": X.comfy_quant holds JSON as bytes, {"format": "float8_e4m3fn"}; beside it X.weight_scale and
  X.input_scale.
- "metadata": the same JSON for all layers in the file's metadata, `_quantization_metadata`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from ..errors import LoadError
from .safetensors_file import Entry, Header

FORMATS = {"float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2}
METADATA = "_quantization_metadata"
MARKER, CONFIG = "scaled_fp8", ".comfy_quant"
SCALES, INPUTS = (".scale_weight", ".weight_scale"), (".scale_input", ".input_scale")
CHOICE = "take the fp8_scaled, fp8_e4m3fn, fp16 or bf16 file of this model"


@dataclass(frozen=True, slots=True)
class Split:
    """A network's tensors without what belongs to its quantisation.

    scales, inputs: layer name -> its scale; layout: one of the three, "" for none.
    """

    tensors: dict[str, Entry]
    layout: str = ""
    scales: dict[str, Entry] = field(default_factory=dict)
    inputs: dict[str, Entry] = field(default_factory=dict)


def split(entries: Mapping[str, Entry], header: Header, prefix: str) -> Split:
    """Takes scales and markers out of a network's entries (names without the prefix).

    LoadError for a format that is not handled, and for scales that do not fit their weights.
    """
    file = header.path.name
    formats = _stated_formats(entries, header, prefix)
    _refuse_formats(formats, file)
    layout = "scaled_fp8" if MARKER in entries else ""
    if formats:
        layout = "comfy_quant" if any(name.endswith(CONFIG) for name in entries) else "metadata"
    found = Split({}, layout)
    for name, entry in entries.items():
        layer, dot, ending = name.rpartition(".")
        if dot + ending in SCALES:
            found.scales[layer] = entry
        elif dot + ending in INPUTS:
            found.inputs[layer] = entry
        elif name != MARKER and dot + ending != CONFIG:
            found.tensors[name] = entry
    _check(found, formats, file)
    return found


def _stated_formats(entries: Mapping[str, Entry], header: Header, prefix: str) -> dict[str, str]:
    """Layer -> format, as the file states it."""
    formats = {name.removesuffix(CONFIG): _format(entry.read(), header.path.name)
               for name, entry in entries.items() if name.endswith(CONFIG)}
    if METADATA in header.metadata:
        layers = _json(header.metadata[METADATA], header.path.name).get("layers")
        if not isinstance(layers, dict):
            raise LoadError(f"{header.path.name}: its {METADATA} names no layers")
        formats |= {name.removeprefix(prefix): _format(json.dumps(value), header.path.name)
                    for name, value in layers.items()}
    return formats


def _format(text: str | bytes, file: str) -> str:
    return str(_json(text, file).get("format"))


def _json(text: str | bytes, file: str) -> dict[str, object]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise LoadError(f"{file}: what it says of its quantisation is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise LoadError(f"{file}: what it says of its quantisation should be a JSON object, not {value!r}")
    return value


def _refuse_formats(formats: Mapping[str, str], file: str) -> None:
    for layer, name in formats.items():
        if name not in FORMATS:
            raise LoadError(f"{file} is quantised as {name} (layer {layer}), which is not handled; {CHOICE}")


def _check(found: Split, formats: Mapping[str, str], file: str) -> None:
    """LoadError for scales without a weight, scales of more than one value, and stated formats that are not there."""
    for what, group in (("a scale", found.scales), ("an input scale", found.inputs)):
        for layer, entry in group.items():
            if f"{layer}.weight" not in found.tensors:
                raise LoadError(f"{file} has {what} of {layer} and no weight for it")
            if group is found.scales and (entry.num_values != 1 or not entry.dtype.is_floating_point):
                raise LoadError(f"{file}: the scale of {layer} is {list(entry.shape)} {entry.dtype}; only one value a "
                                f"layer is handled; {CHOICE}")
    for layer, name in formats.items():
        weight = found.tensors.get(f"{layer}.weight")
        if weight is None or weight.dtype != FORMATS[name] or layer not in found.scales:
            raise LoadError(f"{file} states {name} for {layer}, and has no such weight with a scale")
