"""What the ranks do in test_variant_bits.py: each variant of Wan through its family, alone and over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import tiny_wan
import torch
import torch.distributed as dist
from torch import Tensor, nn
from wan_cases import HEADS, CountingFabric, Size, relative_error

from comfyui_pipedit.job import Branch, Geometry
from comfyui_pipedit.parallel import sequence
from comfyui_pipedit.parallel.layout import Layout
from comfyui_pipedit.plan import Group

SIGMA = 0.7


def geometry(channels: int) -> Geometry:
    mean, std = tuple(0.1 * i for i in range(channels)), tuple(1.0 + 0.1 * i for i in range(channels))
    return Geometry(channels, 8, 4, (1, 2, 2), tiny_wan.TEXT_WIDTH, tiny_wan.TEXT_TOKENS, HEADS, mean, std)


def told(variant: str, size: Size, images: int = 257) -> tuple[Branch, Tensor | None]:
    """What a branch of a clip carries, and the clip's mask."""
    def draw(seed: int, *shape: int) -> Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed))

    extras: dict[str, Tensor] = {}
    if "image_dim" in tiny_wan.VARIANTS[variant]:
        extras["clip_vision_output"] = draw(1, 1, images, tiny_wan.IMAGE_WIDTH)
    channels = {36: 16, 48: 32}.get(tiny_wan.VARIANTS[variant].get("in_channels"), 0)
    if channels and variant != "ti2v":
        extras |= {"concat_latent_image": draw(2, 1, channels, *size), "concat_mask": draw(3, 1, 4, *size)}
    if variant == "vace":
        extras |= {"vace_frames": draw(4, 2, 32, *size), "vace_mask": draw(5, 2, 64, *size),
                   "vace_strength": torch.tensor([0.5, 1.3])}
    mask = draw(6, 1, 1, *size).abs() if variant == "ti2v" else None
    return Branch(draw(7, 1, 512, tiny_wan.TEXT_WIDTH), extras), mask


def velocity(network: nn.Module, variant: str, size: Size) -> Tensor:
    """One evaluation as a clip has it."""
    from comfyui_pipedit.models.wan import Wan

    wan, space = Wan(), geometry(48 if variant == "ti2v" else 16)
    x = torch.randn(1, space.channels, *size, generator=torch.Generator().manual_seed(8))
    branch, mask = told(variant, size)
    prepared = wan.prepare(network, branch, tuple(x.shape), mask, space)
    return wan.velocity(network, x, SIGMA, prepared)


def differences(device: torch.device, variant: str, sizes: Sequence[Size], groups: Sequence[tuple[int, ...]],
                chunks: Sequence[int]) -> dict[str, float]:
    """max|a - b| / max|b| of each size x group x chunk count on this rank, `b` being the model on this rank alone."""
    from comfyui_pipedit.models.wan import Wan

    stored = tiny_wan.transformer(num_attention_heads=HEADS, **tiny_wan.VARIANTS[variant])
    network = Wan().load_transformer(tiny_wan.Weights(stored, device))
    context = sequence.Context(dist.get_rank(), CountingFabric(device))
    sequence.install(network, Wan.sequence_plan, context)
    found = {}
    for size in sizes:
        alone, tokens = velocity(network, variant, size), geometry(16).num_tokens((1, 16, *size))
        for ranks, count in product((ranks for ranks in groups if context.rank in ranks), chunks):
            with context.using(Layout.even(Group(ranks), tokens, HEADS, count)):
                over_ranks = velocity(network, variant, size)
            found[f"{size} on {ranks} in {count}"] = relative_error(over_ranks, alone)
    assert context.exchange.fabric.batches > 0
    return found
