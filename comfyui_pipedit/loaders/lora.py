"""LoRA files for Wan: what is in one, known from its header, and what of it takes effect on a model.

`read_lora` and `fit` are for host and ranks; they read no weights. `LoraFile.open` maps the tensors.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from ..errors import LoadError
from ..job import LoraUse
from . import lora_keys
from .safetensors_file import Entry, mapped, read_entries

INPUT_LAYERS = ("patch_embedding.weight",)
"""Weights whose inputs differ between Wan's variants: a LoRA for another variant leaves them alone, as in ComfyUI."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """A change to one parameter.

    parameter: diffusers' name. tensors, shapes: (down [rank, in...], up [out, rank]) or (difference,), as the file
    names them. alpha: None where the file has none, which means a scale of 1.
    """

    parameter: str
    tensors: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    alpha: float | None = None

    @property
    def low_rank(self) -> bool:
        return len(self.tensors) == 2

    @property
    def module(self) -> str:
        """The module it belongs to, as blocks.3.attn1.to_q."""
        return self.parameter.rpartition(".")[0]

    @property
    def rank(self) -> int:
        """0 for a whole difference."""
        return self.shapes[0][0] if self.low_rank else 0

    @property
    def scale(self) -> float:
        """What a strength is multiplied with."""
        return self.alpha / self.rank if self.low_rank and self.alpha is not None else 1.0

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the parameter that it was made for (a file may flatten a convolution's inputs)."""
        return (self.shapes[1][0], *self.shapes[0][1:]) if self.low_rank else self.shapes[0]

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether it can be added to a parameter of this shape."""
        if not self.low_rank:
            return self.shape == shape
        return self.shape[0] == shape[0] and math.prod(self.shape[1:]) == math.prod(shape[1:])


@dataclass(frozen=True, slots=True)
class LoraFile:
    """A LoRA file by its header.

    unsupported: (module as the file names it, kind) of the adapters that are not handled. strange: modules that no Wan
    has, and tensors that belong to no adapter, by the file's names. looks_like: "" or what such names are used for.
    """

    path: str
    stamp: str
    adapters: tuple[Adapter, ...]
    unsupported: tuple[tuple[str, str], ...] = ()
    strange: tuple[str, ...] = ()
    looks_like: str = ""

    def use(self, strength: float) -> LoraUse:
        """This file at a strength, as a key."""
        return LoraUse(self.path, self.stamp, strength)

    @contextmanager
    def open(self) -> Iterator[Callable[[str], Tensor]]:
        """A function from a tensor's name to the tensor, a view of the mapped file. LoadError if the file is not the
        one that was read."""
        if stamp_of(Path(self.path)) != self.stamp:
            raise LoadError(f"{self.path} was changed after the graph had read it; queue again to use what is there "
                            "now")
        with mapped(Path(self.path)) as read:
            yield read


@dataclass(frozen=True, slots=True)
class LoraReport:
    """What of a file takes effect on a model.

    matched: the adapters that do. unmatched: names without a place in this model. harmless: the same, but known to be
    no loss (image keys of Wan 2.1 on a model without them). misfits: sentences about input layers of another size.
    unsupported: (kind, number of weights).
    """

    name: str
    matched: tuple[Adapter, ...]
    unmatched: tuple[str, ...]
    harmless: tuple[str, ...]
    misfits: tuple[str, ...]
    unsupported: tuple[tuple[str, int], ...]

    @property
    def complete(self) -> bool:
        """Whether nothing of the file is lost."""
        return not (self.unmatched or self.misfits or self.unsupported)

    @property
    def text(self) -> str:
        """One line for people."""
        parts = [f"{len(self.matched)} weights take effect"]
        if self.unmatched:
            parts.append(f"{len(self.unmatched)} have no place in this model ({_some(self.unmatched)})")
        if self.harmless:
            parts.append(f"{len(self.harmless)} image weights are not needed")
        parts += [f"{count} use {kind}, which is not supported" for kind, count in self.unsupported]
        return f"{self.name}: {', '.join([*parts, *self.misfits])}"


def stamp_of(path: Path) -> str:
    """The state of a file, as its size and time of change make it: 16 hex digits. LoadError if it is missing."""
    try:
        stat = path.stat()
    except OSError as error:
        raise LoadError(f"{path} cannot be read: {error.strerror}") from None
    return hashlib.sha256(f"{stat.st_size} {stat.st_mtime_ns}".encode()).hexdigest()[:16]


def read_lora(path: str | Path) -> LoraFile:
    """What a LoRA file holds: its header, and the alphas, a few bytes each.

    LoadError if the file is missing, damaged, or says two things about one weight.
    """
    file = Path(path).absolute()
    stamp = stamp_of(file)
    entries = read_entries((file,))
    modules, strange = _by_module(entries)
    kinds = {name: kind for name, parts in modules.items() if (kind := _unsupported_kind(parts))}
    handled = {name: parts for name, parts in modules.items() if name not in kinds}
    alphas = _read_alphas(file, [parts[".alpha"] for parts in handled.values() if ".alpha" in parts])
    adapters: list[Adapter] = []
    for name, parts in handled.items():
        made = _adapters(lora_keys.diffusers_name(name), parts, entries, alphas, file)
        adapters += made
        strange += _left_over(parts, made) if made else [name]
    _check_once(adapters, file)
    return LoraFile(str(file), stamp, tuple(adapters), tuple(kinds.items()), tuple(strange),
                    lora_keys.looks_like(entries))


def fit(file: LoraFile, shapes: Mapping[str, tuple[int, ...]], fp8: Collection[str] = ()) -> LoraReport:
    """What of a file takes effect on the model whose parameters have these shapes (diffusers' names).

    fp8: the weights that are kept in fp8, which take low-rank changes only. LoadError if nothing takes effect, or if a
    weight other than an input layer has another shape.
    """
    known = [adapter for adapter in file.adapters if adapter.parameter in shapes]
    wrong = [adapter for adapter in known if not adapter.fits(tuple(shapes[adapter.parameter]))]
    misfits = [_misfit(adapter, shapes) for adapter in wrong]
    if any(adapter.parameter not in INPUT_LAYERS for adapter in wrong):
        raise LoadError(f"{_name(file)} was made for a model of another size: {_some(misfits, '; ')}")
    dense = [adapter for adapter in known if adapter.parameter in fp8 and not adapter.low_rank]
    matched = tuple(adapter for adapter in known if adapter not in wrong and adapter not in dense)
    placeless = [adapter.parameter for adapter in file.adapters if adapter.parameter not in shapes]
    harmless = () if any(map(_of_images, shapes)) else tuple(filter(_of_images, placeless))
    unmatched = tuple(name for name in placeless if name not in harmless) + file.strange
    kinds = Counter(kind for _, kind in file.unsupported)
    if dense:
        kinds["a whole difference on an fp8 weight"] = len(dense)
    report = LoraReport(_name(file), matched, unmatched, harmless, tuple(misfits), tuple(sorted(kinds.items())))
    if not matched:
        raise LoadError(_nothing(report, file))
    return report


def _by_module(entries: Mapping[str, Entry]) -> tuple[dict[str, dict[str, str]], list[str]]:
    """({module as the file names it: {end of name: tensor's name}}, names whose end is unknown)."""
    modules: dict[str, dict[str, str]] = {}
    strange = []
    for key in sorted(entries):
        name, suffix = lora_keys.split_key(key)
        if suffix:
            modules.setdefault(name, {})[suffix] = key
        else:
            strange.append(key)
    return modules, strange


def _unsupported_kind(parts: dict[str, str]) -> str:
    """"" for a module whose tensors are all handled."""
    return next((lora_keys.UNSUPPORTED[suffix] for suffix in sorted(parts) if suffix in lora_keys.UNSUPPORTED), "")


def _adapters(module: str | None, parts: dict[str, str], entries: Mapping[str, Entry], alphas: dict[str, float],
              file: Path) -> list[Adapter]:
    """The changes that the tensors of one module make: to its weight, its bias, both or none."""
    if module is None:
        return []
    roles = {lora_keys.ROLES[suffix]: tensor for suffix, tensor in parts.items()}
    groups = [("difference", ("difference",)), ("bias", ("bias",)), ("low rank", ("down", "up"))]
    made = []
    for kind, names in groups:
        if not all(name in roles for name in names):
            continue
        tensors = tuple(roles[name] for name in names)
        alpha = alphas.get(roles.get("alpha", "")) if kind == "low rank" else None
        adapter = Adapter(lora_keys.parameter_name(module, kind), tensors,
                          tuple(entries[tensor].shape for tensor in tensors), alpha)
        _check_ranks(adapter, file)
        made.append(adapter)
    return made


def _left_over(parts: dict[str, str], made: list[Adapter]) -> list[str]:
    """Tensors of a module that no adapter uses, as an up without its down."""
    used = {tensor for adapter in made for tensor in adapter.tensors}
    return [tensor for suffix, tensor in parts.items() if suffix != ".alpha" and tensor not in used]


def _check_once(adapters: list[Adapter], file: Path) -> None:
    first: dict[str, Adapter] = {}
    for adapter in adapters:
        other = first.setdefault(adapter.parameter, adapter)
        if other is not adapter:
            raise LoadError(f"{file.name} changes {adapter.parameter} twice: {other.tensors[0]} and "
                            f"{adapter.tensors[0]}")


def _check_ranks(adapter: Adapter, file: Path) -> None:
    down, up = adapter.shapes[0], adapter.shapes[-1]
    if adapter.low_rank and (len(down) < 2 or len(up) < 2 or not down[0] or math.prod(up[1:]) != down[0]):
        raise LoadError(f"{file.name}: {adapter.tensors[0]} is {list(down)} and {adapter.tensors[1]} is {list(up)}: "
                        "no rank fits both")


def _read_alphas(file: Path, names: list[str]) -> dict[str, float]:
    with mapped(file) as read:
        tensors = {name: read(name) for name in names}
    wrong = [name for name, tensor in tensors.items() if tensor.numel() != 1]
    if wrong:
        raise LoadError(f"{file.name}: {_some(wrong)} should hold one number")
    return {name: float(tensor.item()) for name, tensor in tensors.items()}


def _of_images(name: str) -> bool:
    return any(part in name for part in lora_keys.IMAGE_PARTS)


def _misfit(adapter: Adapter, shapes: Mapping[str, tuple[int, ...]]) -> str:
    return (f"{adapter.parameter} is {list(shapes[adapter.parameter])} in the model and {list(adapter.shape)} in the "
            "LoRA")


def _nothing(report: LoraReport, file: LoraFile) -> str:
    reasons = [f"{count} of its weights use {kind}, which is not supported" for kind, count in report.unsupported]
    if report.unmatched or report.harmless:
        names = report.unmatched + report.harmless
        reasons.append(f"{len(names)} of its names have no place in it ({_some(names)})")
    reasons += report.misfits
    guess = f"; it looks like {file.looks_like}" if file.looks_like and not report.unsupported else ""
    return f"{report.name} changes nothing in this model: {', '.join(reasons) or 'it is empty'}{guess}"


def _name(file: LoraFile) -> str:
    return Path(file.path).name


def _some(names: Collection[str], separator: str = ", ") -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return separator.join(list(names)[:3]) + more
