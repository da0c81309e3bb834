"""The entrance from diffusers: its attention dispatch is wrapped, and the models stay untouched.

A compiled block sees one opaque op, `pipedit::exchange`. Its arguments are tensors and constants that are equal for all
layers and plans; the plan is looked up inside, so that a new one neither breaks the graph nor compiles anew.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InvalidJob
from .exchange import Exchange
from .kernels import steady_attention
from .layout import Layout

CURRENT: ContextVar[tuple[Exchange, Layout | None] | None] = ContextVar("pipedit_exchange", default=None)
"""What the op does now, in this thread: exchange by a layout, attend locally (no layout), or nobody has set it up."""


class Exchanged:
    """Stands in a processor's `_parallel_config`: this module's attention goes through the exchange."""


MARKER = Exchanged()
"""One object for all modules: a compiled graph is guarded by its identity, so blocks share their code."""


@torch.library.custom_op("pipedit::exchange", mutates_args=())
def exchange(query: Tensor, key: Tensor, value: Tensor, scale: float | None, is_causal: bool) -> Tensor:
    """This rank's rows [B, s, H, D] attend to the rows of all ranks of the current layout -> contiguous [B, s, H, D].

    Local attention where there is no layout.
    """
    member, layout = CURRENT.get() or (None, None)
    if member is None:
        return _fresh(steady_attention(query, key, value, scale=scale, is_causal=is_causal))
    return _fresh(member.attend(query, key, value, layout, scale=scale, is_causal=is_causal))


@exchange.register_fake
def _exchange_shape(query: Tensor, key: Tensor, value: Tensor, scale: float | None, is_causal: bool) -> Tensor:
    return torch.empty_like(query, memory_format=torch.contiguous_format)


def _fresh(output: Tensor) -> Tensor:
    """The strides that compiled code was promised."""
    return output.contiguous()


def install() -> None:
    """Wraps diffusers' native attention backend, once a process. Modules without the marker run as before."""
    from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

    backends = _AttentionBackendRegistry._backends
    native = backends[AttentionBackendName.NATIVE]
    if not getattr(native, "exchanges", False):
        backends[AttentionBackendName.NATIVE] = _wrap(native)


def _wrap(backend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def dispatch(**arguments: Any) -> Tensor:
        if isinstance(arguments.get("_parallel_config"), Exchanged):
            return _exchange_from(**arguments)
        if arguments["query"].is_cpu and arguments.get("attn_mask") is None:
            return _in_whole_blocks(backend, **arguments)
        return backend(**arguments)

    dispatch.exchanges = True  # type: ignore[attr-defined]
    return dispatch


def _in_whole_blocks(backend: Callable[..., Tensor], query: Tensor, **arguments: Any) -> Tensor:
    """Local attention with the query rows padded to a multiple of 4.

    The CPU kernel takes 32 or more rows at a time and rounds a last block of 1 to 3 rows in another way: in text
    attention, where a rank has its own query rows only, these bits would depend on where the sequence is cut.
    """
    rows = query.shape[1]
    return backend(query=nn.functional.pad(query, (0, 0, 0, 0, 0, -rows % 4)), **arguments)[:, :rows]


def _exchange_from(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
                   is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
                   **unused: Any) -> Tensor:
    """diffusers' arguments as the op's; what the op can't do is refused, never dropped."""
    if attn_mask is not None or dropout_p or enable_gqa:
        raise InvalidJob("attention over several ranks takes no mask, no dropout and as many K, V heads as Q heads; "
                         "run this model on one rank")
    return exchange(query, key, value, scale, is_causal)


def mark(module: nn.Module) -> Callable[[], None]:
    """Sends a module's attention through the exchange; returns what undoes it."""
    processor: Any = module.processor
    before = processor._parallel_config
    processor._parallel_config = MARKER

    def undo() -> None:
        processor._parallel_config = before

    return undo
