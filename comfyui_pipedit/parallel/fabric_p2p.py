"""Point to point on the world communicator: gloo on the CPU, NCCL on CUDA, the same code. Never a process group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import WorkerStuck
from .fabric import Parcel


@dataclass(frozen=True, slots=True, eq=False)
class Posted:
    """A batch under way; it keeps the sent tensors alive until they were waited for."""

    works: tuple[dist.Work, ...]
    peers: tuple[int, ...]
    sent: tuple[Tensor, ...]

    def wait(self) -> None:
        """WorkerStuck, with the ranks at the other ends, if one of them ended or passed the world's timeout."""
        try:
            for work in self.works:
                work.wait()
        except RuntimeError as error:
            peers = ", ".join(map(str, self.peers))
            raise WorkerStuck(f"an exchange with ranks {peers} broke: {error}") from error


class PointToPoint:
    """The fabric on torch.distributed's world. `device`: where this rank's tensors are."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)

    def post(self, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> Posted:
        """Starts all messages as one batch; empty tensors are left out (by both ends alike)."""
        outgoing = [(peer, tensor.contiguous()) for peer, tensor in sends if tensor.numel()]
        ops = [dist.P2POp(dist.isend, tensor, peer) for peer, tensor in outgoing]
        ops += [dist.P2POp(dist.irecv, tensor, peer) for peer, tensor in receives if tensor.numel()]
        works = dist.batch_isend_irecv(ops) if ops else []
        return Posted(tuple(works), tuple(sorted({op.peer for op in ops})), tuple(tensor for _, tensor in outgoing))

    def warm_up(self) -> None:
        """Connects all pairs once; every rank of the world calls it. NCCL needs a collective of all ranks before a
        batch of some, and connects a pair at its first message, which would cost that job the time."""
        dist.all_reduce(torch.zeros(1, device=self.device))
        others = [rank for rank in range(dist.get_world_size()) if rank != dist.get_rank()]
        receives = [(rank, torch.empty(1, device=self.device)) for rank in others]
        self.post([(rank, torch.zeros(1, device=self.device)) for rank in others], receives).wait()
