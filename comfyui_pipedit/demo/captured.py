"""Training steps as CUDA graphs: launching kernels of models this small takes longer than running them."""
from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

WARM_UP_STEPS = 3


@dataclass(frozen=True, slots=True)
class Tick:
    """Where a timed training loop stands: the step's number and the share of its time that is over."""

    step: int
    done: float


def captured(step: Callable[[], torch.Tensor], optimizer: torch.optim.Optimizer) -> Callable[[], torch.Tensor]:
    """`step` (forward, backward, update; no input, no host value, no synchronisation) as a replayable CUDA graph.

    Runs it a few times first. On the CPU the step itself is returned. The next call overwrites the returned loss.
    """
    if not torch.cuda.is_available():
        return step
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP_STEPS):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    optimizer.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        loss = step()

    def replay() -> torch.Tensor:
        graph.replay()
        return loss

    return replay


def adamw(parameters: list[torch.nn.Parameter], weight_decay: float, betas: tuple[float, float]) -> torch.optim.AdamW:
    """AdamW that a CUDA graph can hold: its rate is a tensor on the GPU, changed by `set_rate`."""
    if not torch.cuda.is_available():
        return torch.optim.AdamW(parameters, 0.0, betas, weight_decay=weight_decay)
    rate = torch.zeros((), device="cuda")
    return torch.optim.AdamW(parameters, rate, betas, weight_decay=weight_decay, fused=True, capturable=True)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of all groups, in place where it is a tensor."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def warm_cosine(step: int, warm_up: int, done: float) -> float:
    """Factor of the peak learning rate: linear over `warm_up` steps, half a cosine over the time, at last 0.5 %."""
    return min(1.0, (step + 1) / warm_up) * (0.005 + 0.995 * 0.5 * (1 + math.cos(math.pi * done)))


def ticks(until: float, every: int = 10) -> Iterator[Tick]:
    """Count steps until the monotonic clock shows `until`; waits for the GPU every few steps, so the time is real."""
    start, step, done = time.monotonic(), 0, 0.0
    seconds = max(until - start, 1e-3)
    while done < 1:
        yield Tick(step, done)
        step += 1
        if step % every == 0 and torch.cuda.is_available():
            torch.cuda.synchronize()
        if step % every == 0 or not torch.cuda.is_available():
            done = (time.monotonic() - start) / seconds
