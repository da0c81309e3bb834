"""From the `devices` setting to the list of ranks, in the host: counts and names GPUs, makes no context on them."""

from __future__ import annotations

import re

import torch

from ..errors import InvalidJob, SetupError

CPU_RANKS = 3
"""Ranks of "auto" on a machine without a GPU: two denoise, one decodes."""

MAX_CPU_RANKS = 64
"""Each is a process of some 100 MB; no model has use for more."""


def resolve(devices: str) -> tuple[str, ...]:
    """"auto", "cpu:N" or "gpu:0,gpu:1" -> one name a rank. InvalidJob for other texts, SetupError for absent GPUs."""
    text = devices.replace(" ", "").lower()
    if text == "auto":
        count = torch.cuda.device_count()
        return tuple(f"gpu:{i}" for i in range(count)) or tuple(f"cpu:{i}" for i in range(CPU_RANKS))
    if match := re.fullmatch(r"cpu:(\d+)", text):
        count = int(match[1])
        if not 1 <= count <= MAX_CPU_RANKS:
            nearest = min(max(count, 1), MAX_CPU_RANKS)
            raise InvalidJob(f"devices {devices!r} asks for {count} CPU ranks; allowed: 1 to {MAX_CPU_RANKS}; "
                             f"nearest: 'cpu:{nearest}'")
        return tuple(f"cpu:{i}" for i in range(count))
    if re.fullmatch(r"gpu:\d+(,gpu:\d+)*", text):
        return _gpus(tuple(text.split(",")))
    raise InvalidJob(f"devices {devices!r} is none of 'auto', 'cpu:N' (N CPU ranks) and 'gpu:0,gpu:1'; nearest: 'auto'")


def on_gpu(devices: tuple[str, ...]) -> bool:
    """Whether these ranks are GPUs (a pool never mixes kinds)."""
    return devices[0].startswith("gpu:")


def hardware(devices: tuple[str, ...]) -> dict[str, str]:
    """GPU -> the hardware's own name, whatever CUDA_VISIBLE_DEVICES makes of the numbers. {} for CPU ranks.

    Reading a GPU's properties makes no context on it, so it costs no memory there.
    """
    return {name: _uuid(int(name[4:])) for name in devices if name.startswith("gpu:")}


def _uuid(index: int) -> str:
    """A GPU's UUID; where torch does not tell it, the number that this process knows it by."""
    return str(getattr(torch.cuda.get_device_properties(index), "uuid", f"gpu-{index}"))


def _gpus(names: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(names)) < len(names):
        raise InvalidJob(f"devices {','.join(names)!r} names a GPU twice")
    count = torch.cuda.device_count()
    absent = [name for name in names if int(name[4:]) >= count]
    if absent:
        here = ", ".join(f"gpu:{i}" for i in range(count)) or "no GPU (use 'cpu:N')"
        raise SetupError(f"devices: {', '.join(absent)} not found; this machine has {here}")
    return names
