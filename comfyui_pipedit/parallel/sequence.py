"""Runs a model on a slice of its tokens: forward hooks, driven by the family's SequencePlan and the current layout.

The hooks stay where they are; without a layout they do nothing. So one installed model serves any plan.
"""

from __future__ import annotations

import fnmatch
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import LoadError, OutOfStep
from ..models.family import Gather, SequencePlan, Split
from . import attention
from .exchange import Exchange, OnPhase, quiet
from .fabric import Fabric
from .kernels import Attention, steady_attention
from .layout import Layout

Undo = Callable[[], None]


class Context:
    """A rank's exchange and the layout that its models run by now. `kernel`: attention on own heads.

    `on_phase` is told what the rank waits for, and "" when it goes on.
    """

    def __init__(self, rank: int, fabric: Fabric, on_phase: OnPhase = quiet,
                 kernel: Attention = steady_attention) -> None:
        self.exchange = Exchange(rank, fabric, kernel, on_phase)
        self.layout: Layout | None = None

    @property
    def rank(self) -> int:
        return self.exchange.rank

    @contextmanager
    def using(self, layout: Layout | None) -> Iterator[None]:
        """Runs models by a layout in which this rank holds tokens; None = whole sequences on this rank alone."""
        before, self.layout = self.layout, layout
        token = attention.CURRENT.set((self.exchange, layout))
        try:
            yield
        finally:
            attention.CURRENT.reset(token)
            self.layout = before


def install(module: nn.Module, plan: SequencePlan, context: Context) -> Undo:
    """Hooks a model up by its family's plan; returns what takes all of it off again.

    LoadError, before anything is hooked, if a name of the plan does not exist in the model.
    """
    plans = (plan, *(more for name, more in plan.beside if hasattr(module, name)))
    exchanged = [found for each in plans for pattern in each.attention for found in _matching(module, pattern)]
    entries: list[Split | Gather] = []
    for each in plans:
        entries += [*each.splits, *each.gathers]
    placed = [(_find(module, entry.module), entry) for entry in entries]
    if exchanged:
        attention.install()
    undos = [attention.mark(found) for found in exchanged] + [_hook(target, entry, context) for target, entry in placed]

    def undo() -> None:
        for step in undos:
            step()

    return undo


def _matching(module: nn.Module, pattern: str) -> list[nn.Module]:
    found = [child for name, child in module.named_modules() if fnmatch.fnmatchcase(name, pattern)]
    if not found:
        raise LoadError(f"{type(module).__name__} has no attention module {pattern!r}; its sequence can't be cut")
    return found


def _find(module: nn.Module, name: str) -> nn.Module:
    try:
        return module.get_submodule(name)
    except AttributeError as error:
        raise LoadError(f"{type(module).__name__} has no module {name!r}; its sequence can't be cut there") from error


def _hook(target: nn.Module, entry: Split | Gather, context: Context) -> Undo:
    if isinstance(entry, Gather):
        return target.register_forward_hook(_gather_output(entry, context)).remove
    if entry.output:
        return target.register_forward_hook(_split_output(entry, context)).remove
    return target.register_forward_pre_hook(_split_input(target, entry, context), with_kwargs=True).remove


def _split_input(target: nn.Module, split: Split, context: Context) -> Callable[..., Any]:
    names = list(inspect.signature(target.forward).parameters)
    position = names.index(split.value) if isinstance(split.value, str) else split.value
    name = names[position]

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if context.layout is None:
            return None
        if position < len(args):
            return (*args[:position], own_tokens(args[position], split, context), *args[position + 1:]), kwargs
        return args, {**kwargs, name: own_tokens(kwargs.get(name), split, context)}

    return hook


def _split_output(split: Split, context: Context) -> Callable[..., Any]:
    def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if context.layout is None:
            return None
        if not isinstance(output, tuple):
            return own_tokens(output, split, context)
        index = int(split.value)
        return *output[:index], own_tokens(output[index], split, context), *output[index + 1:]

    return hook


def _gather_output(gather: Gather, context: Context) -> Callable[..., Any]:
    def hook(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor | None:
        layout = context.layout
        return None if layout is None else context.exchange.gather(output, layout.segments, gather.dim)

    return hook


def own_tokens(tensor: Any, split: Split, context: Context) -> Any:
    """This rank's tokens of a tensor, and the replicated ones if it has them; what the plan doesn't mean stays whole.

    OutOfStep if its token dimension is not the layout's.
    """
    if not isinstance(tensor, Tensor) or split.num_dims not in (0, tensor.dim()):
        return tensor
    assert context.layout is not None, "hooks ask only where there is a layout"
    segments = context.layout.segments
    start, stop = segments.of(context.rank)
    total, have = segments.num_tokens, tensor.shape[split.dim]
    if have not in (total, total + segments.replicated):
        raise OutOfStep(f"{split.module or 'the model'} has {have} tokens in {split.value!r} and the plan cuts {total}")
    own = tensor.narrow(split.dim, start, stop - start)
    if have > total:
        own = torch.cat((own, tensor.narrow(split.dim, total, have - total)), dim=split.dim)
    # a copy even where a view would do: compiled code is guarded by strides and by the offset in memory
    return own.clone(memory_format=torch.contiguous_format)
