"""Nodes that tests link into a real ComfyUI: conditioning without a text encoder."""

from __future__ import annotations

import torch
from comfy_api.latest import ComfyExtension, io
from typing_extensions import override

WIDTH, LENGTH = 4096, 512


def conditioning(seed: int, rows: int) -> torch.Tensor:
    """[1, 512, 4096] float32 as Wan's text encoder gives it: `rows` rows of text, exact zeros after them."""
    text = torch.zeros(1, LENGTH, WIDTH)
    text[:, :rows] = torch.randn(1, rows, WIDTH, generator=torch.Generator().manual_seed(seed))
    return text


class ProbeConditioning(io.ComfyNode):
    """Conditioning of Wan's shape from a seed; `extra` names a key that it carries besides."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ProbeConditioning",
            category="probe",
            inputs=[
                io.Int.Input("seed", default=1, min=0),
                io.Int.Input("rows", default=12, min=1, max=LENGTH),
                io.String.Input("extra", default="", optional=True),
            ],
            outputs=[io.Conditioning.Output()],
        )

    @classmethod
    def execute(cls, seed: int, rows: int, extra: str = "") -> io.NodeOutput:
        more = {extra: torch.ones(1)} if extra else {}
        return io.NodeOutput([[conditioning(seed, rows), {"pooled_output": None, **more}]])


class Probe(ComfyExtension):
    """The pack."""

    @override
    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [ProbeConditioning]


async def comfy_entrypoint() -> Probe:
    return Probe()
