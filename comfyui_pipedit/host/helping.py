"""Who helps a clip with its attention (Aco, PipeDiT section 3.3): decode ranks of its plan that have nothing to do.

Decided anew for each lease, so a helper leaves at the next boundary once its rank is needed.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from ..wire.messages import Help, Lease, Message
from .tasks import ClipTask, Task


def helpers(task: ClipTask, tasks: Collection[Task]) -> tuple[int, ...]:
    """Decode ranks that no task needs or has leases on, as many as there are heads for; none before the clip's own
    ranks have counted what the next unit takes."""
    known = task.attention.get(task.weights)
    if known is None or task.alone:
        return ()
    needed = {rank for other in tasks for rank in other.ranks}
    needed |= {rank for other in tasks if other is not task for rank in +other.leases}
    idle = [rank for rank in task.plan.decode.ranks if rank not in needed]
    return tuple(idle[:max(0, known.heads - task.plan.denoise.size)])


def orders(task: ClipTask, lease: Lease, tasks: Collection[Task]) -> dict[int, Message]:
    """What each rank is told for a lease: the ranks of the clip to do it, its helpers to serve it."""
    chosen = helpers(task, tasks)
    told: dict[int, Message] = dict.fromkeys(task.ranks, replace(lease, helpers=chosen))
    if chosen:
        told |= dict.fromkeys(chosen, _help(task, lease, chosen))
    return told


def _help(task: ClipTask, lease: Lease, chosen: tuple[int, ...]) -> Help:
    job, row = task.job, task.attention[task.weights]
    rows = sum(len(step) for step in job.table.steps[lease.first:lease.last])
    tokens = job.files.geometry.num_tokens(tuple(job.latent.shape))
    return Help(lease.seq, lease.job, lease.last, task.plan, chosen, tokens, replace(row, calls=row.calls * rows))
