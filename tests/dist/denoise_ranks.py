"""The cases of test_denoise.py on four forked gloo ranks: python denoise_ranks.py MODEL_FOLDER OUT_FOLDER.

Inputs and kept latents are made before the fork, so all ranks map the same buffers. A rank that is in none of a case's
groups passes it by; pairs match their messages by order, so no barrier is needed.
"""

from __future__ import annotations

import os
import sys
import traceback
from dataclasses import dataclass, field, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WORLD = 4
GROUPS = {"1": (0,), "2": (0, 1), "3": (2, 0, 1), "4": (0, 1, 2, 3), "mixed": (3, 1)}
EVEN, UNEVEN, ODD = (3, 8, 8), (1, 10, 14), (3, 7, 9)
PLANS = (("1", 1), ("2", 1), ("2", 2), ("3", 1), ("3", 2), ("4", 1), ("mixed", 2))


@dataclass(frozen=True)
class Settings:
    """A clip: latent size, solver, guidance; `empty` = an all-zero start latent."""

    size: tuple[int, int, int] = EVEN
    sampler: str = "uni_pc"
    steps: int = 4
    cfg: float = 5.0
    denoise: float = 1.0
    empty: bool = True


@dataclass(frozen=True)
class Case:
    """A clip denoised by each (group, chunks) in turn; `cuts` are the steps at which the next one takes over."""

    settings: Settings
    plans: tuple[tuple[str, int], ...]
    cuts: tuple[int, ...] = ()
    name: str = field(default="")


CLIPS = {
    "even": Settings(),
    "uneven": Settings(size=UNEVEN),
    "odd": Settings(size=ODD, sampler="euler", denoise=0.6, empty=False),
    "unguided": Settings(size=UNEVEN, sampler="heun", cfg=1.0, steps=2),
    "noisy": Settings(size=UNEVEN, sampler="lcm", cfg=1.5, steps=3, empty=False),
}


def all_cases() -> list[Case]:
    cases = [Case(settings, (plan,), name=f"{clip}-{plan[0]}x{plan[1]}") for clip, settings in CLIPS.items()
             for plan in (PLANS if clip in ("even", "uneven") else (("1", 1), ("3", 2)))]
    cases.append(Case(CLIPS["even"], (("2", 1), ("mixed", 2), ("4", 1)), cuts=(1, 3), name="even-moved"))
    cases.append(Case(CLIPS["noisy"], (("1", 1), ("4", 1)), cuts=(2,), name="noisy-moved"))
    return cases


def main() -> None:
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    import tiny_wan

    tiny_wan.use_worker_site()
    import torch

    torch.set_num_threads(1)
    from comfyui_pipedit import loaders, models

    model_folder, out = Path(sys.argv[1]), Path(sys.argv[2])
    models.preload()
    files = loaders.inspect(model_folder)
    bench = Bench(files, out)
    opens = [(case, bench.prepare(case)) for case in all_cases()]
    pids = [fork(rank, bench, opens, out) for rank in range(WORLD)]
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    if any(codes):
        sys.exit(f"exit codes of the ranks: {codes}")
    for case, (_, kept) in opens:
        torch.save(kept.read(), out / f"{case.name}.pt")


class Bench:
    """Makes messages and buffers as the host would."""

    def __init__(self, files, out: Path) -> None:
        self.files, self.out, self.fds = files, out, []

    def prepare(self, case: Case):
        """(message of the whole clip, its kept latent)."""
        from clip_inputs import clip_inputs

        from comfyui_pipedit.plan import Group, Plan
        from comfyui_pipedit.wire.buffer import KeptLatent
        from comfyui_pipedit.wire.messages import BranchRef, Open

        def branch(text):
            return None if text is None else BranchRef(self.share(text), (), ())

        inputs = clip_inputs(case.settings)
        kept = KeptLatent.create(inputs.noise.shape, inputs.table.num_state_tensors)
        plan = Plan(Group((0,)), Group((0,)))
        message = Open(
            seq=1, job=case.name, experts=self.files.experts, switch_step=inputs.table.num_steps,
            geometry=self.files.geometry, plan=plan, table=inputs.table, cfg=case.settings.cfg,
            positive=branch(inputs.positive), negative=branch(inputs.negative), latent=self.share(inputs.latent),
            mask=None,
            noise=self.share(inputs.noise), noises=tuple(self.share(noise) for noise in inputs.noises),
            kept=replace(kept.ref, fd=self.add(kept.fd)), first_step=0)
        return message, kept

    def share(self, tensor):
        from comfyui_pipedit.wire import buffer

        fd, ref = buffer.share(tensor, "input")
        return buffer.at(ref, self.add(fd))

    def add(self, fd: int) -> int:
        self.fds.append(fd)
        return len(self.fds) - 1


def fork(rank: int, bench: Bench, opens: list, out: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        run_rank(rank, bench, opens, out)
        code = 0
    finally:
        if code:
            traceback.print_exc()
        sys.stderr.flush()
        os._exit(code)


def run_rank(rank: int, bench: Bench, opens: list, out: Path) -> None:
    import datetime

    import torch
    import torch.distributed as dist

    from comfyui_pipedit.parallel.fabric_p2p import PointToPoint
    from comfyui_pipedit.parallel.sequence import Context
    from comfyui_pipedit.worker.device import Device
    from comfyui_pipedit.worker.residency import Residency

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", store=dist.FileStore(str(out / "world"), WORLD), rank=rank, world_size=WORLD,
                            timeout=datetime.timedelta(seconds=60))
    dist.new_group = None  # a process group per clip is against the design: a call of it fails
    fabric = PointToPoint()
    fabric.warm_up()
    phases: list[str] = []
    context = Context(rank, fabric, phases.append)
    device = Device.parse(f"cpu:{rank}")
    residency = Residency(device, context, phases.append)
    residency.load(bench.files.transformer)
    with torch.inference_mode():
        for case, (message, _) in opens:
            run_case(rank, case, message, bench, residency, context, device)
            dist.barrier()  # cases stay apart, so that an error is the one of its case
    torch.save(phases, out / f"phases-{rank}.pt")


def run_case(rank: int, case: Case, message, bench: Bench, residency, context, device) -> None:
    import torch.distributed as dist

    from comfyui_pipedit.plan import Group, Plan
    from comfyui_pipedit.worker.denoise import Denoise

    edges = [0, *case.cuts, message.table.num_steps]
    for (group, chunks), first, last in zip(case.plans, edges[:-1], edges[1:], strict=True):
        members = GROUPS[group]
        if rank in members:
            plan = Plan(Group(members), Group((members[0],)), chunks)
            opened = replace(message, plan=plan, first_step=first)
            clip = Denoise(opened, bench.fds, residency, context, device, context.exchange.on_phase)
            assert clip.units == message.table.num_steps
            for step in range(first, last):
                clip.run(step, step + 1)
        if case.cuts:
            dist.barrier()  # the next group reads what this one kept


if __name__ == "__main__":
    main()
