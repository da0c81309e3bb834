"""Networks without memory of their own: built on the meta device, then given the tensors of a file as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from ..errors import LoadError


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    """A frozen network in evaluation mode whose parameters hold no memory yet.

    Buffers that no file stores are lost this way too: the caller must build their modules anew.
    """
    with torch.device("meta"):
        module = build()
    return module.requires_grad_(False).eval()


def assign(module: nn.Module, tensors: Iterable[tuple[str, Tensor]], what: str, optional: tuple[str, ...] = ()) -> None:
    """Makes the tensors the module's parameters, without a copy.

    optional: names that a file may leave out (tied weights). LoadError naming what is missing, unknown or of another
    shape.
    """
    state = dict(tensors)
    expected = module.state_dict()
    missing = sorted(expected.keys() - state.keys() - set(optional))
    unknown = sorted(state.keys() - expected.keys())
    if missing or unknown:
        wrong = _some("missing", missing) + _some("unknown", unknown)
        raise LoadError(f"{what} does not fit its config.json: {wrong.rstrip('; ')}")
    for name, tensor in state.items():
        if tensor.shape != expected[name].shape:
            raise LoadError(f"{what}: tensor {name} is {list(tensor.shape)} and the network has "
                            f"{list(expected[name].shape)}")
    module.load_state_dict(state, strict=False, assign=True)


def _some(what: str, names: list[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{what} {', '.join(names[:3])}{more}; "

