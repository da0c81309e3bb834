"""A small UMT5 encoder for training: names and arithmetic of transformers' UMT5EncoderModel, no wait for the host.

transformers' own class asks the GPU about masks on the way, which a captured training step can't. A test compares both.
"""
from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from .words import MAX_TOKENS, vocabulary

CONFIG = {
    "architectures": ["UMT5EncoderModel"], "model_type": "umt5", "vocab_size": len(vocabulary()),
    "d_model": 64, "d_kv": 16,
    "d_ff": 128, "num_layers": 2, "num_heads": 4, "relative_attention_num_buckets": 32,
    "relative_attention_max_distance": 128, "dropout_rate": 0.0, "layer_norm_epsilon": 1e-6, "initializer_factor": 1.0,
    "feed_forward_proj": "gated-gelu", "is_encoder_decoder": False, "use_cache": False, "pad_token_id": 0,
    "eos_token_id": 1, "decoder_start_token_id": 0, "torch_dtype": "float32",
}
WIDTH, HEADS, HEAD_WIDTH, HIDDEN = CONFIG["d_model"], CONFIG["num_heads"], CONFIG["d_kv"], CONFIG["d_ff"]


class RMSNorm(nn.Module):
    """Scale to unit mean square, then by a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + CONFIG["layer_norm_epsilon"])


class SelfAttention(nn.Module):
    """Attention without scaling, with a learned bias for each distance of two tokens."""

    def __init__(self) -> None:
        super().__init__()
        inner = HEADS * HEAD_WIDTH
        self.q, self.k, self.v = (nn.Linear(WIDTH, inner, bias=False) for _ in range(3))
        self.o = nn.Linear(inner, WIDTH, bias=False)
        self.relative_attention_bias = nn.Embedding(CONFIG["relative_attention_num_buckets"], HEADS)
        nn.init.normal_(self.q.weight, std=(WIDTH * HEAD_WIDTH) ** -0.5)
        nn.init.normal_(self.relative_attention_bias.weight, std=0.1)

    def forward(self, x: torch.Tensor, mask: torch.Tensor, buckets: torch.Tensor) -> torch.Tensor:
        q, k, v = (layer(x).unflatten(-1, (HEADS, HEAD_WIDTH)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        bias = self.relative_attention_bias(buckets).permute(2, 0, 1) + mask
        weights = (q @ k.transpose(-1, -2) + bias).softmax(-1)
        return self.o((weights @ v).transpose(1, 2).flatten(2))


class GatedGelu(nn.Module):
    """The feed-forward layer of UMT5."""

    def __init__(self) -> None:
        super().__init__()
        self.wi_0, self.wi_1 = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.wo = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.wo(F.gelu(self.wi_0(x), approximate="tanh") * self.wi_1(x))


class AttentionLayer(nn.Module):
    """Norm, attention, residual."""

    def __init__(self) -> None:
        super().__init__()
        self.layer_norm, self.SelfAttention = RMSNorm(), SelfAttention()

    def forward(self, x: torch.Tensor, mask: torch.Tensor, buckets: torch.Tensor) -> torch.Tensor:
        return x + self.SelfAttention(self.layer_norm(x), mask, buckets)


class FeedForwardLayer(nn.Module):
    """Norm, feed-forward, residual."""

    def __init__(self) -> None:
        super().__init__()
        self.layer_norm, self.DenseReluDense = RMSNorm(), GatedGelu()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.DenseReluDense(self.layer_norm(x))


class Block(nn.Module):
    """One layer of the encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.ModuleList([AttentionLayer(), FeedForwardLayer()])


class Stack(nn.Module):
    """All layers and the last norm."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.ModuleList(Block() for _ in range(CONFIG["num_layers"]))
        self.final_layer_norm = RMSNorm()


class TextEncoder(nn.Module):
    """Token ids -> text embeddings as the demo's transformer takes them."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Embedding(CONFIG["vocab_size"], WIDTH)
        self.encoder = Stack()
        self.register_buffer("buckets", distance_buckets(MAX_TOKENS), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Embeddings [n, MAX_TOKENS, 64] of ids [n, MAX_TOKENS], zeros where the id is that of the padding (0)."""
        mask = torch.where(ids == 0, -torch.inf, 0.0)[:, None, None]
        x = self.shared(ids)
        for block in self.encoder.block:
            x = block.layer[1](block.layer[0](x, mask, self.buckets))
        return self.encoder.final_layer_norm(x) * (ids != 0)[..., None]


def distance_buckets(tokens: int) -> torch.Tensor:
    """Bucket of each (query, key) pair: exact for near tokens, logarithmic for far ones, each side apart (T5, 2.1)."""
    half = CONFIG["relative_attention_num_buckets"] // 2
    exact = half // 2
    distance = torch.arange(tokens)[None] - torch.arange(tokens)[:, None]
    far = torch.log(distance.abs().clamp(min=1) / exact) / math.log(CONFIG["relative_attention_max_distance"] / exact)
    logarithmic = (exact + far * (half - exact)).long().clamp(max=half - 1)
    return torch.where(distance.abs() < exact, distance.abs(), logarithmic) + half * (distance > 0)
