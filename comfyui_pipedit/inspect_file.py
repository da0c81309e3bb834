"""`python -m comfyui_pipedit inspect FILE`: what a model is, how it is stored, and which node settings fit it."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .config import DEMO_FOLDER
from .loaders import WeightFiles, place
from .loaders.model_files import FAMILY
from .loaders.precision import DTYPES, FP8, FP8_NAMES, held_bytes, on_a_gpu
from .loaders.wan_transformer import kind as transformer_kind

GIB = 2.0**30
LAYOUTS = {"scaled_fp8": "the older layout, scaled_fp8", "comfy_quant": "the newer layout, comfy_quant",
           "metadata": "the newer layout, in the file's metadata"}
SIZES = {1536: "1.3B", 3072: "5B", 5120: "14B"}
"""Width of a released transformer -> what it is called by."""

NAMED = 3


@dataclass(frozen=True, slots=True)
class PartReport:
    """One network. dtypes: values stored in each. held: bytes on a GPU by weight_dtype. fits: what goes with it."""

    part: str
    kind: str
    parameters: int
    num_bytes: int
    dtypes: dict[str, int]
    layout: str
    scaled: int
    input_scales: int
    held: dict[str, int]
    fits: dict[str, str]
    config: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Report:
    """A file or folder. unused: tensors that belong to no network."""

    path: str
    parts: tuple[PartReport, ...]
    unused: tuple[str, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("file", type=Path, help="a .safetensors file, a folder in diffusers' layout, or 'demo'")
    parser.add_argument("--json", action="store_true", help="everything, as JSON")


def run(options: argparse.Namespace) -> int:
    """Prints the report. LoadError if the file is not handled, which says why."""
    demo = str(options.file) == "demo" and not options.file.exists()
    found = report(DEMO_FOLDER if demo else options.file)
    print(json.dumps(asdict(found), indent=2) if options.json else paragraph(found))
    return 0


def report(path: Path) -> Report:
    """What a file's header tells. LoadError as the loaders raise it."""
    at = place(path)
    parts = tuple(_part(part, at.config(part), at.open(part)) for part in at.parts)
    return Report(str(at.path), parts, at.unused)


def _part(part: str, config: dict[str, Any], files: WeightFiles) -> PartReport:
    dtypes: Counter[str] = Counter()
    for entry in files.entries.values():
        dtypes[_short(entry.dtype)] += entry.num_values
    kind, fits = {"transformer": _transformer, "vae": _vae, "text": _text}[part](config)
    return PartReport(
        part=part, kind=kind, parameters=sum(dtypes.values()),
        num_bytes=sum(entry.num_values * entry.dtype.itemsize for entry in files.entries.values()),
        dtypes=dict(dtypes.most_common()), layout=files.layout, scaled=len(files.scales),
        input_scales=files.input_scales, held=_held(part, files), fits=fits, config=config)


def _short(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def _transformer(config: dict[str, Any]) -> tuple[str, dict[str, str]]:
    heads, size, channels = config["num_attention_heads"], config["attention_head_dim"], config["in_channels"]
    latents = config.get("out_channels") or channels
    name = f"{transformer_kind(config, 'this file')} {SIZES.get(heads * size, '')}".rstrip()
    kind = (f"{name} (width {heads * size}, {config['num_layers']} layers, {heads} heads of {size}, {channels} "
            f"channels in, {latents} out, text width {config['text_dim']})")
    return kind, {"vae_name": f"a VAE of {latents} latent channels ({'Wan 2.2' if latents == 48 else 'Wan 2.1'}'s)",
                  "clip_name1": f"a umt5 text encoder of width {config['text_dim']}"}


def _vae(config: dict[str, Any]) -> tuple[str, dict[str, str]]:
    version, channels = "2.2" if config.get("is_residual") else "2.1", config["z_dim"]
    return (f"Wan {version} VAE ({channels} latent channels)",
            {"vae_name": f"beside a transformer of {channels} channels out"})


def _text(config: dict[str, Any]) -> tuple[str, dict[str, str]]:
    kind = (f"UMT5 text encoder (width {config['d_model']}, {config['num_layers']} layers, {config['vocab_size']} "
            "tokens)")
    return kind, {"clip_name1": f"beside a transformer of text width {config['d_model']}"}


def _held(part: str, files: WeightFiles) -> dict[str, int]:
    """Bytes on a GPU by weight_dtype; only a transformer has a choice."""
    names = ("default", *DTYPES, *FP8_NAMES) if part == "transformer" else ("default",)
    return {name: held_bytes(files.entries, on_a_gpu(FAMILY, part, name, files.stored_dtype)) for name in names}


def paragraph(found: Report) -> str:
    """The report in words."""
    sentences = [f"{Path(found.path).name}:"]
    for part in found.parts:
        sentences += [f"{part.kind}, {_stored(part)}.", f"In the Loader: {'; '.join(_settings(part))}."]
    if found.unused:
        more = f" and {len(found.unused) - NAMED} more" if len(found.unused) > NAMED else ""
        sentences.append(f"Not used: {', '.join(found.unused[:NAMED])}{more}.")
    return " ".join(sentences)


def _stored(part: PartReport) -> str:
    shares = ", ".join(f"{100 * count / part.parameters:.1f} % {dtype}" for dtype, count in part.dtypes.items())
    scales = f"; {part.scaled} weights have a scale ({LAYOUTS[part.layout]})" if part.scaled else ""
    inputs = f"; {part.input_scales} scales for inputs are not used" if part.input_scales else ""
    return f"{_count(part.parameters)} parameters in {_size(part.num_bytes)}: {shares}{scales}{inputs}"


def _settings(part: PartReport) -> list[str]:
    chosen = [f"{name} {value}" for name, value in part.fits.items()]
    if part.part != "transformer":
        return [*chosen, f"a GPU holds {_size(part.held['default'])}"]
    kept = any(dtype in part.dtypes for dtype in map(_short, FP8))
    by_size: dict[int, list[str]] = {}
    for name, size in part.held.items():
        shown = f"default ({'stays in fp8, computed in bf16' if kept else 'as stored'})" if name == "default" else name
        by_size.setdefault(size, []).append(shown)
    sizes = [f"{' or '.join(names)} {_size(size)}" for size, names in by_size.items()]
    return [f"weight_dtype, and what a GPU then holds: {', '.join(sizes)}", *chosen]


def _size(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB / 10 else f"{num_bytes / 2**20:.2f} MiB"


def _count(values: int) -> str:
    return f"{values / 1e9:.2f} billion" if values >= 1e8 else f"{values / 1e6:.3f} million"
