"""Wan's VAEs in single files: the config of diffusers' AutoencoderKLWan, from the shapes in the header."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import LoadError
from . import wan_names
from .safetensors_file import Entry
from .wan_names import Names

MARKER = "decoder.middle.0.residual.0.gamma"
NESTED = re.compile(r"encoder\.downsamples\.\d+\.downsamples\.")
"""Only Wan 2.2's VAE numbers modules within their stage."""

STATISTICS: dict[int, tuple[tuple[float, ...], tuple[float, ...]]] = {
    16: ((-0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508,
          0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921),
         (2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743,
          3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160)),
    48: ((-0.2289, -0.0052, -0.1323, -0.2339, -0.2799, 0.0174, 0.1838, 0.1557,
          -0.1382, 0.0542, 0.2813, 0.0891, 0.1570, -0.0098, 0.0375, -0.1825,
          -0.2246, -0.1207, -0.0698, 0.5109, 0.2665, -0.2108, -0.2158, 0.2502,
          -0.2055, -0.0322, 0.1109, 0.1567, -0.0729, 0.0899, -0.2799, -0.1230,
          -0.0313, -0.1649, 0.0117, 0.0723, -0.2839, -0.2083, -0.0520, 0.3748,
          0.0152, 0.1957, 0.1433, -0.2944, 0.3573, -0.0548, -0.1681, -0.0667),
         (0.4765, 1.0364, 0.4514, 1.1677, 0.5313, 0.4990, 0.4818, 0.5013,
          0.8158, 1.0344, 0.5894, 1.0901, 0.6885, 0.6165, 0.8454, 0.4978,
          0.5759, 0.3523, 0.7135, 0.6804, 0.5833, 1.4146, 0.8986, 0.5659,
          0.7069, 0.5338, 0.4889, 0.4917, 0.4069, 0.4999, 0.6866, 0.4093,
          0.5709, 0.6065, 0.6415, 0.4944, 0.5726, 1.2042, 0.5458, 1.6887,
          0.3971, 1.0600, 0.3943, 0.5537, 0.5444, 0.4089, 0.7468, 0.7744)),
}
"""Mean and standard deviation of each latent channel, by number of channels: of Wan 2.1's VAE (Wan 2.2 A14B has it too)
and of Wan 2.2 TI2V's. They are in no file."""

SPATIAL = {16: 8, 48: 16}
TEMPORAL = 4
"""Pixels and frames a latent cell stands for, where there is no VAE file to read it from."""


@dataclass(frozen=True, slots=True)
class Coder:
    """A Wan VAE: the config of diffusers' class, and its table of names."""

    kind: str
    config: dict[str, Any]
    names: Names

    def ours(self, original: str) -> str | None:
        """diffusers' name of a tensor; None for one that this VAE does not have."""
        return self.names.ours(original)

    def expected(self) -> set[str]:
        """Original names of the tensors that it must have; shortcuts and time convolutions depend on the stage."""
        return {name for name in self.names.expected(0) if ".shortcut." not in name and ".time_conv." not in name}


def coder(entries: Mapping[str, Entry], file: str) -> Coder:
    """The config of a VAE. entries: by original name, without prefix. LoadError for shapes that fit no Wan VAE."""
    shapes = _Shapes(entries, file)
    nested = any(map(NESTED.match, entries))
    blocks, stages = _structure(entries, nested, file)
    base, inputs = shapes.of("encoder.conv1.weight")[:2]
    channels = shapes.of("conv2.weight")[0]
    patch = math.isqrt(inputs // 3)
    if channels not in STATISTICS or inputs != 3 * patch * patch:
        raise LoadError(f"{file} is a VAE with {channels} latent and {inputs} input channels; Wan's have "
                        f"{' or '.join(map(str, STATISTICS))} latent channels")
    places = [_place("encoder.downsamples", stage, 0, blocks, nested) for stage in range(stages)]
    samplers = [_place("encoder.downsamples", stage, blocks, blocks, nested) for stage in range(stages - 1)]
    mult = [shapes.of(f"{place}.residual.6.weight")[0] // base for place in places]
    mean, std = STATISTICS[channels]
    temporal = [f"{place}.time_conv.weight" in entries for place in samplers]
    config = {
        "_class_name": "AutoencoderKLWan", "base_dim": base,
        "decoder_base_dim": shapes.of("decoder.head.0.gamma")[0] // mult[0], "z_dim": channels, "dim_mult": mult,
        "num_res_blocks": blocks, "attn_scales": [], "temperal_downsample": temporal, "dropout": 0.0,
        "latents_mean": list(mean), "latents_std": list(std), "is_residual": nested, "in_channels": inputs,
        "out_channels": inputs, "patch_size": patch if patch > 1 else None, "scale_factor_temporal": 2 ** sum(temporal),
        "scale_factor_spatial": 2 ** (stages - 1) * patch,
    }
    return Coder("Wan 2.2 VAE" if nested else "Wan 2.1 VAE", config, wan_names.vae(blocks, stages, nested))


@dataclass(frozen=True, slots=True)
class _Shapes:
    entries: Mapping[str, Entry]
    file: str

    def of(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor that must be there."""
        if name not in self.entries or not self.entries[name].shape:
            raise LoadError(f"{self.file} has no tensor {name}: it is not a whole Wan VAE (decoder alone?)")
        return self.entries[name].shape


def _structure(entries: Mapping[str, Entry], nested: bool, file: str) -> tuple[int, int]:
    """(residual blocks of a stage of the encoder, stages)."""
    inner = r"\d+\.downsamples\." if nested else ""
    found = [re.match(rf"encoder\.downsamples\.({inner}(\d+))\.resample\.1\.weight$", name) for name in entries]
    samplers = {match[1]: int(match[2]) for match in found if match}
    if not samplers:
        raise LoadError(f"{file} has no encoder.downsamples that resample: it is not a whole Wan VAE (decoder alone?)")
    return min(samplers.values()), len(samplers) + 1


def _place(name: str, stage: int, place: int, blocks: int, nested: bool) -> str:
    inner = name.split(".")[-1]
    return f"{name}.{stage}.{inner}.{place}" if nested else f"{name}.{stage * (blocks + 1) + place}"
