"""Attention on one rank. A head must get the same bits whatever heads share its call, or plans would change frames."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ..errors import SetupError

Attention = Callable[..., Tensor]
"""(q, k, v [B, S, heads, D], scale: float | None, is_causal: bool) -> [B, S, heads, D], any strides."""

FASTEST_FIRST = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION,
                 SDPBackend.MATH)


def local_attention(query: Tensor, key: Tensor, value: Tensor, scale: float | None = None,
                    is_causal: bool = False) -> Tensor:
    """Attention on [B, S, heads, D] by the kernel that torch picks; on the CPU that treats each head by itself."""
    q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
    return scaled_dot_product_attention(q, k, v, scale=scale, is_causal=is_causal).transpose(1, 2)


def steady_attention(query: Tensor, key: Tensor, value: Tensor, scale: float | None = None,
                     is_causal: bool = False) -> Tensor:
    """Attention on [B, S, heads, D] with independent heads: on a GPU by the kernel that `pick_attention` found."""
    if query.is_cpu:
        return local_attention(query, key, value, scale, is_causal)
    return pick_attention(query.device, query.dtype, query.shape[-1])(query, key, value, scale, is_causal)


def attention_by(backend: SDPBackend) -> Attention:
    """`local_attention` by one backend of torch; RuntimeError when called where that backend can't run."""

    def attention(query: Tensor, key: Tensor, value: Tensor, scale: float | None = None,
                  is_causal: bool = False) -> Tensor:
        with sdpa_kernel(backend):
            return local_attention(query, key, value, scale, is_causal)

    return attention


def heads_are_independent(attention: Attention, query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether every head alone gives the bits that it gives among all heads of [B, S, heads, D]."""
    whole = attention(query, key, value)
    heads = range(query.shape[2])
    alone = [attention(*(tensor[:, :, head:head + 1] for tensor in (query, key, value))) for head in heads]
    return torch.equal(whole, torch.cat(alone, dim=2))


@lru_cache
def pick_attention(device: torch.device, dtype: torch.dtype, head_dim: int, num_heads: int = 4,
                   tokens: tuple[int, ...] = (96, 2000)) -> Attention:
    """The fastest backend whose heads are independent, probed at `tokens` rows. SetupError if none runs here."""
    for backend in FASTEST_FIRST:
        attention = attention_by(backend)
        if _runs_and_is_independent(attention, device, dtype, (num_heads, head_dim), tokens):
            return attention
    raise SetupError(f"no attention kernel of this torch gives each head its own bits on {device} in {dtype}")


def _runs_and_is_independent(attention: Attention, device: torch.device, dtype: torch.dtype, shape: tuple[int, int],
                             tokens: Sequence[int]) -> bool:
    try:
        return all(heads_are_independent(attention, *_probe(device, dtype, (1, rows, *shape))) for rows in tokens)
    except RuntimeError:
        # torch has no other way to say that a backend can't run on this device, type or shape
        return False


def _probe(device: torch.device, dtype: torch.dtype, shape: tuple[int, ...]) -> Sequence[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn((3, *shape), generator=generator).to(device, dtype).unbind(0)
