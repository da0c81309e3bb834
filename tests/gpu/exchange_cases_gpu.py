"""What the ranks do in test_exchange_gpu.py, beside the cases of tests/dist."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tiny_wan
import torch
import torch.distributed as dist
import wan_cases
from torch import Tensor

from comfyui_pipedit.parallel import sequence
from comfyui_pipedit.parallel.exchange import Exchange
from comfyui_pipedit.parallel.fabric_p2p import PointToPoint
from comfyui_pipedit.parallel.kernels import steady_attention
from comfyui_pipedit.parallel.layout import Layout
from comfyui_pipedit.plan import Group


def everyone() -> Group:
    return Group(tuple(range(dist.get_world_size())))


def milliseconds(work: Callable[[], Any], repeats: int = 10) -> float:
    """Mean time of a call on this device after two calls that warm it up."""
    for _ in range(2):
        work()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / repeats


def attention_over_ranks(device: torch.device, dtype: torch.dtype, tokens: int, heads: int, width: int,
                         chunks: Sequence[int]) -> dict[str, Any]:
    """One attention over all ranks: whether it has the bits of one rank's, and what both take.

    "bits": chunk count -> bool; "ms": "alone" or chunk count -> milliseconds.
    """
    draw = torch.Generator().manual_seed(0)
    qkv = torch.randn((3, 1, tokens, heads, width), generator=draw).to(device, dtype).unbind(0)
    fabric = PointToPoint(device)
    fabric.warm_up()
    exchange = Exchange(dist.get_rank(), fabric)
    alone = steady_attention(*qkv)
    bits, times = {}, {"alone": milliseconds(lambda: steady_attention(*qkv))}
    for count in chunks:
        layout = Layout.even(everyone(), tokens, heads, count)
        rows = slice(*layout.segments.of(exchange.rank))
        own = [x[:, rows] for x in qkv]
        bits[count] = torch.equal(exchange.attend(*own, layout), alone[:, rows])
        times[str(count)] = milliseconds(lambda own=own, layout=layout: exchange.attend(*own, layout))
    return {"bits": bits, "ms": times}


def wan_1b_blocks(device: torch.device, size: tuple[int, int, int], layers: int,
                  chunks: Sequence[int]) -> dict[str, Any]:
    """Some blocks of Wan 2.1 1.3B's shapes with random weights in bf16: relative L2 distance to one rank, and times.

    "error": chunk count -> float; "equal": whether all chunk counts agree bit for bit; "ms": "alone" or chunk count.
    """
    torch.manual_seed(0)
    network = tiny_wan.transformer(num_attention_heads=12, attention_head_dim=128, ffn_dim=8960, freq_dim=256,
                                   num_layers=layers, rope_max_seq_len=1024).to(device, torch.bfloat16)
    arguments = {name: value.bfloat16() if isinstance(value, Tensor) and value.dim() > 2 else value
                 for name, value in wan_cases.on(device, wan_cases.inputs(size)).items()}
    context = sequence.Context(dist.get_rank(), PointToPoint(device))
    sequence.install(network, wan_cases.plan(), context)
    outputs, times = {"alone": network(**arguments)[0].float()}, {"alone": milliseconds(lambda: network(**arguments))}
    for count in chunks:
        with context.using(Layout.even(everyone(), wan_cases.num_tokens(size), 12, count)):
            outputs[str(count)] = network(**arguments)[0].float()
            times[str(count)] = milliseconds(lambda: network(**arguments))
    alone, *others = outputs.values()
    errors = {name: ((output - alone).norm() / alone.norm()).item() for name, output in outputs.items()}
    return {"error": errors, "equal": all(torch.equal(others[0], output) for output in others), "ms": times}
