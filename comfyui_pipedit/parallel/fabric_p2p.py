"""Point to point on the world communicator: gloo on the CPU, NCCL on CUDA, the same code. Never a process group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import WorkerStuck
from .fabric import Parcel


@contextmanager
def naming(peers: Sequence[int]) -> Iterator[None]:
    """Makes what torch raises for a lost peer or a timeout, in a wait or before, a WorkerStuck that names the peers."""
    try:
        yield
    except RuntimeError as error:
        raise WorkerStuck(f"an exchange with ranks {', '.join(map(str, peers))} broke: {error}") from error


@dataclass(frozen=True, slots=True, eq=False)
class Posted:
    """A batch under way; it keeps the sent tensors alive until they were waited for."""

    works: tuple[dist.Work, ...]
    peers: tuple[int, ...]
    sent: tuple[Tensor, ...]

    def wait(self) -> None:
        """WorkerStuck, with the ranks at the other ends, if one of them ended or passed the world's timeout."""
        with naming(self.peers):
            for work in self.works:
                work.wait()


class PointToPoint:
    """The fabric on torch.distributed's world. `device`: where this rank's tensors are."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)

    def post(self, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> Posted:
        """Starts all messages as one batch; empty tensors are left out (by both ends). WorkerStuck as in `wait`."""
        outgoing = [(peer, tensor.contiguous()) for peer, tensor in sends if tensor.numel()]
        incoming = [(peer, tensor) for peer, tensor in receives if tensor.numel()]
        peers = tuple(sorted({peer for peer, _ in outgoing + incoming}))
        ops = [dist.P2POp(dist.isend, tensor, peer) for peer, tensor in outgoing]
        ops += [dist.P2POp(dist.irecv, tensor, peer) for peer, tensor in incoming]
        with naming(peers):
            works = dist.batch_isend_irecv(ops) if ops else []
        return Posted(tuple(works), peers, tuple(tensor for _, tensor in outgoing))

    def warm_up(self) -> None:
        """Connects all pairs once; every rank of the world calls it. NCCL needs a collective of all ranks before a
        batch of some, and connects a pair at its first message, which would cost that job the time."""
        dist.all_reduce(torch.zeros(1, device=self.device))
        others = [rank for rank in range(dist.get_world_size()) if rank != dist.get_rank()]
        receives = [(rank, torch.empty(1, device=self.device)) for rank in others]
        self.post([(rank, torch.zeros(1, device=self.device)) for rank in others], receives).wait()
