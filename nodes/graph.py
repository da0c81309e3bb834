"""Reading a prompt's graph: is this Sampler's latent decoded by a Decode of ours, and how?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

LOADER, LORA, DECODE = "PipeDiTLoader", "PipeDiTLoRA", "PipeDiTVAEDecode"
MODEL_SLOT, VAE_SLOT = 0, 2
DECODE_WIDGETS = ("tiling", "tile_size", "overlap", "temporal_size", "temporal_overlap")
Prompt = Mapping[str, Mapping[str, Any]]


def direct_decode(prompt: Prompt, sampler: str) -> dict[str, Any] | None:
    """The widgets of the Decode that is linked straight to a Sampler, or None if the pool cannot know how to decode.

    It can when the Decode's vae comes from the very Loader that the Sampler's model comes from, its widgets are
    constants, it has no plan of its own, and something uses its frames.
    """
    loader = loader_of(prompt, sampler)
    if loader is None:
        return None
    for node, inputs in nodes_of(prompt, DECODE):
        widgets = {name: inputs.get(name) for name in DECODE_WIDGETS}
        linked = link(inputs.get("samples")) == (sampler, 0) and link(inputs.get("vae")) == (loader, VAE_SLOT)
        constant = all(value is not None and link(value) is None for value in widgets.values())
        if linked and constant and inputs.get("plan") is None and is_used(prompt, node):
            return widgets
    return None


def loader_of(prompt: Prompt, node: str) -> str | None:
    """The Loader that a node's model comes from, directly or through LoRA nodes; None if it cannot be told."""
    seen: set[str] = set()
    while node not in seen:
        seen.add(node)
        source = link(prompt.get(node, {}).get("inputs", {}).get("model"))
        if source is None or source[1] != MODEL_SLOT:
            return None
        node = source[0]
        if (kind := prompt.get(node, {}).get("class_type")) != LORA:
            return node if kind == LOADER else None
    return None


def nodes_of(prompt: Prompt, kind: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(id, inputs) of the nodes of a class."""
    return ((name, node.get("inputs", {})) for name, node in prompt.items() if node.get("class_type") == kind)


def link(value: Any) -> tuple[str, int] | None:
    """(node, slot) if an input's value is a link."""
    if isinstance(value, list) and len(value) == 2 and isinstance(value[1], int):
        return str(value[0]), value[1]
    return None


def is_used(prompt: Prompt, node: str) -> bool:
    """Whether any input is linked to this node."""
    values = (value for other in prompt.values() for value in other.get("inputs", {}).values())
    return any(target is not None and target[0] == node for target in map(link, values))
