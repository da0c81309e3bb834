"""Attention for others (Aco, PipeDiT section 3.3): a rank without tokens and without weights owns a share of the heads.

What it must know of a model was counted by the ranks that have it, in a lease that they did alone.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..parallel.exchange import Exchange, Form
from ..parallel.layout import Layout
from ..wire.messages import Attention, Help


def alike(seen: Mapping[Form, int], rows: int) -> Attention | None:
    """What each of `rows` rows of a solver's table took; None if it took several forms, or nothing was exchanged."""
    if len(seen) != 1 or not rows:
        return None
    (form, calls), = seen.items()
    options = dict(form.options)
    if calls % rows or set(options) != {"scale", "is_causal"}:
        return None
    dtype = str(form.dtype).removeprefix("torch.")
    return Attention(calls // rows, form.batch, form.heads, form.size, dtype, options["scale"], options["is_causal"])


def serve(message: Help, exchange: Exchange, device: torch.device) -> None:
    """Owns its share of the heads for a whole lease. Afterwards its buffers are free for a decode."""
    form = message.attention
    layout = Layout.even(message.plan.denoise, message.num_tokens, form.heads, message.plan.chunks, message.helpers)
    try:
        for _ in range(form.calls):
            exchange.serve(layout, (form.batch, form.heads, form.size), getattr(torch, form.dtype), device,
                           scale=form.scale, is_causal=form.causal)
    finally:
        exchange.scratch.clear()
