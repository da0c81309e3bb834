"""The list of nodes."""

from __future__ import annotations

from comfy_api.latest import ComfyExtension, io
from typing_extensions import override

from .advanced import PipeDiTSamplerAdvanced
from .bridge import PipeDiTModelBridge
from .decode import PipeDiTVAEDecode
from .loader import PipeDiTLoader
from .lora import PipeDiTLoRA
from .sampler import PipeDiTSampler


class PipeDiTExtension(ComfyExtension):
    """What `comfy_entrypoint` gives ComfyUI."""

    @override
    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        samplers = [PipeDiTSampler, PipeDiTSamplerAdvanced]
        return [PipeDiTLoader, PipeDiTLoRA, *samplers, PipeDiTVAEDecode, PipeDiTModelBridge]
