"""Whether the host has the memory that a clip takes there: known before anything is drawn, shared or forked."""

from __future__ import annotations

import math
from pathlib import Path

from ..errors import OutOfMemory
from ..job import Geometry

GIB = 2.0**30
LATENTS = 10
"""float32 latents of a clip in the host: start, noise, both slots of a kept latent with a solver's history."""


def clip_bytes(shape: tuple[int, ...], geometry: Geometry, *, decode: bool) -> int:
    """Bytes of a clip of a latent [1, C, T, h, w]: latents, and with `decode` its frames in float32."""
    latents = LATENTS * 4 * math.prod(shape)
    if not decode:
        return latents
    length, height, width = shape[-3:]
    return latents + 12 * geometry.num_frames(length) * height * width * geometry.spatial**2


def available_bytes() -> int | None:
    """Memory that processes can still have, as Linux estimates it; None where it does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    found = next((line for line in lines if line.startswith("MemAvailable:")), None)
    return None if found is None else int(found.split()[1]) * 1024


def check_room(shape: tuple[int, ...], geometry: Geometry, *, decode: bool) -> None:
    """OutOfMemory with both numbers if a clip of this latent is larger than what the host has left."""
    needed, available = clip_bytes(shape, geometry, decode=decode), available_bytes()
    if available is not None and needed > available:
        length, height, width = shape[-3:]
        size = f"{width * geometry.spatial}x{height * geometry.spatial}x{geometry.num_frames(length)}"
        raise OutOfMemory(f"a clip of {size} takes {needed / GIB:,.1f} GiB of this machine's memory and "
                          f"{available / GIB:,.1f} GiB are available; use a smaller size or fewer frames")
