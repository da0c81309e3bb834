"""What the ranks do in test_wan_bits.py and test_compile.py: a small Wan with 8 heads, alone and over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import tiny_wan
import torch
import torch.distributed as dist
from torch import Tensor, nn

from comfyui_pipedit.models.family import SequencePlan
from comfyui_pipedit.parallel import sequence
from comfyui_pipedit.parallel.fabric_p2p import PointToPoint
from comfyui_pipedit.parallel.kernels import local_attention, steady_attention
from comfyui_pipedit.parallel.layout import Layout
from comfyui_pipedit.plan import Group

HEADS = 8
Size = tuple[int, int, int]
"""Latent frames, height, width; a token is 1 x 2 x 2."""


def model() -> nn.Module:
    return tiny_wan.transformer(num_attention_heads=HEADS)


def plan() -> SequencePlan:
    """The family's; imported here because only the ranks see diffusers."""
    from comfyui_pipedit.models.wan import Wan

    return Wan.sequence_plan


def inputs(size: Size, per_token: bool = False) -> dict[str, Any]:
    """A forward's arguments; `per_token`: a timestep for each token, as Wan 2.2's image-to-video variant has."""
    draw = torch.Generator().manual_seed(1)
    timestep = torch.linspace(100, 900, num_tokens(size))[None] if per_token else torch.tensor([500.0])
    return {"hidden_states": torch.randn(1, 16, *size, generator=draw), "timestep": timestep,
            "encoder_hidden_states": torch.randn(1, 12, tiny_wan.TEXT_WIDTH, generator=draw), "return_dict": False}


def on(device: torch.device, arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in arguments.items()}


def relative_error(a: Tensor, b: Tensor) -> float:
    return ((a - b).abs().max() / b.abs().max()).item()


def num_tokens(size: Size) -> int:
    return size[0] * (size[1] // 2) * (size[2] // 2)


def wrong_heads(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """Attention whose heads are one off: what a wrong order of heads would give."""
    return local_attention(query, key, value, **options).roll(1, dims=2)


class CountingFabric(PointToPoint):
    """Counts the batches in which something travels."""

    batches = 0

    def post(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> Any:
        self.batches += bool(sends or receives)
        return super().post(sends, receives)


def differences(device: torch.device, sizes: Sequence[Size], groups: Sequence[tuple[int, ...]], chunks: Sequence[int],
                per_token: bool = False, wrong: bool = False) -> dict[str, float]:
    """max|a - b| / max|b| of each size x group x chunk count on this rank, `b` being the model on this rank alone."""
    network, kernel = model().to(device), wrong_heads if wrong else steady_attention
    context = sequence.Context(dist.get_rank(), CountingFabric(device), kernel=kernel)
    sequence.install(network, plan(), context)
    found = {}
    for size in sizes:
        arguments = on(device, inputs(size, per_token))
        alone = network(**arguments)[0]
        for ranks, count in product((ranks for ranks in groups if context.rank in ranks), chunks):
            layout = Layout.even(Group(ranks), num_tokens(size), HEADS, count)
            over_ranks = run(network, arguments, context, layout)
            found[f"{num_tokens(size)} tokens on {ranks} in {count}"] = relative_error(over_ranks, alone)
    return found


def run(network: nn.Module, arguments: dict[str, Any], context: sequence.Context, layout: Layout) -> Tensor:
    """The model's output by a layout, once it is sure that something was sent."""
    context.exchange.fabric.batches = 0
    with context.using(layout):
        output = network(**arguments)[0]
    assert (context.exchange.fabric.batches > 0) == (len(layout.ranks) > 1)
    return output


def untouched(device: torch.device, size: Size) -> dict[str, bool]:
    """When a model gives the bits that it gave before it was installed, in a diffusers that was not wrapped yet."""
    network, arguments = model(), inputs(size)
    alone = network(**arguments)[0]
    context = sequence.Context(dist.get_rank(), PointToPoint(device))
    undo = sequence.install(network, plan(), context)
    same = {"installed": torch.equal(network(**arguments)[0], alone)}
    with context.using(None):
        same["no layout"] = torch.equal(network(**arguments)[0], alone)
    undo()
    with context.using(Layout.even(Group((0,)), num_tokens(size) - 1, HEADS)):
        same["taken off"] = torch.equal(network(**arguments)[0], alone)
    return same


class Graphs:
    """A compiler backend that runs graphs as they are and keeps them."""

    def __init__(self) -> None:
        self.all: list[torch.fx.GraphModule] = []

    def __call__(self, graph: torch.fx.GraphModule, example: Sequence[Tensor]) -> Any:
        self.all.append(graph)
        return graph.forward

    @property
    def exchanges(self) -> list[int]:
        """Exchange ops in each graph."""
        op = torch.ops.pipedit.exchange
        return [sum(node.target in (op, op.default) for node in graph.graph.nodes) for graph in self.all]


def compiled(device: torch.device, size: Size, plans: Sequence[tuple[tuple[int, ...], int]], layers: int,
             dynamic: bool) -> dict[str, Any]:
    """Rank 0 compiles each block by itself, then plans (group, chunks) run; how many graphs there are after each."""
    graphs = Graphs()
    network, arguments = tiny_wan.transformer(num_attention_heads=HEADS, num_layers=layers), inputs(size)
    alone = network(**arguments)[0]
    context = sequence.Context(dist.get_rank(), PointToPoint(device))
    sequence.install(network, plan(), context)
    for block in network.blocks if context.rank == 0 else ():
        block.forward = torch.compile(block.forward, backend=graphs, fullgraph=True, dynamic=dynamic)
    counts, worst = [], 0.0
    for ranks, chunks in plans:
        if context.rank in ranks:
            with context.using(Layout.even(Group(ranks), num_tokens(size), HEADS, chunks)):
                worst = max(worst, (network(**arguments)[0] - alone).abs().max().item())
        counts.append(len(graphs.all))
    return {"graphs": counts, "exchanges": graphs.exchanges, "worst": worst}
