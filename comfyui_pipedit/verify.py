"""`python -m comfyui_pipedit verify`: does this machine give the same numbers on any number of ranks?

One pool, many plans: every split of every rank count, every chunk count, an even and an uneven number of tokens. A row
compares the final latent and the decoded frames with one rank's. With --tiny it needs no model and tries every variant.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass

from torch import Tensor

from .config import EngineConfig
from .errors import InvalidJob
from .host.devices import on_gpu, resolve
from .host.engine import Engine
from .job import Job, ModelFiles
from .plan import Group, Plan, split_groups
from .requests import Clip, Settings, encode_texts, find_model, make_job
from .verify_tiny import FAMILIES, Case, cases, check_families, tiny_models

Outcome = tuple[Tensor, Tensor]
"""Latent and frames of a clip."""

SIZES = (Clip(96, 96, 17), Clip(112, 112, 17))
PROMPT = "a red circle moving right on black background"
GPU_TOLERANCE = 1e-4
"""Relative, fp32 without TF32 (on gloo ranks it is 0: bit-equal)."""


@dataclass(frozen=True, slots=True)
class Row:
    """One plan against one rank. Errors are max|a - b| and that over max|b|, for latent and frames."""

    model: str
    split: str
    chunks: int
    tokens: int
    max_error: float
    relative_error: float
    frames_error: float
    passed: bool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--model", default="demo", help="'demo' or a Wan 2.1 folder in diffusers' layout")
    parser.add_argument("--tiny", action="store_true", help="tiny random models of --families in place of --model")
    parser.add_argument("--families", default="wan", help=f"with --tiny: {', '.join(FAMILIES)}")
    parser.add_argument("--ranks", default="1,2,3,4", help="numbers of ranks to verify")
    parser.add_argument("--devices", default="", help="default: cpu:N, or as many GPUs as the largest number of ranks")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--json", action="store_true", help="rows as JSON, one a line")


def run(options: argparse.Namespace) -> int:
    """Prints a row for each plan; 0 if all pass, 1 if not."""
    counts = parse_counts(options.ranks)
    devices = options.devices or default_devices(max(counts))
    check_families(options.families)
    files = None if options.tiny else find_model(options.model)
    engine = Engine(EngineConfig(devices=devices, split=str(len(resolve(devices)))))
    passed = True
    try:
        with ExitStack() as stack:
            for case in model_cases(engine, files, options) if files else cases(stack.enter_context(tiny_models()),
                                                                               options.steps):
                for row in rows(engine, case, counts):
                    passed &= row.passed
                    print(json.dumps(asdict(row)) if options.json else sentence(row), flush=True)
    finally:
        engine.close()
    return 0 if passed else 1


def model_cases(engine: Engine, files: ModelFiles, options: argparse.Namespace) -> Iterator[Case]:
    """A clip of each size of one model, of a prompt."""
    texts = encode_texts(engine, files, (options.prompt, ""))
    settings = Settings(seed=1, steps=options.steps)
    for clip in SIZES:
        yield Case(files.name, files, make_job(files, texts, clip.latent_shape(files), settings, decode=True))


def parse_counts(text: str) -> list[int]:
    """"1,2,4" -> [1, 2, 4]. InvalidJob for other texts."""
    parts = text.split(",")
    if not all(part.strip().isdigit() and int(part) > 0 for part in parts):
        raise InvalidJob(f"--ranks {text!r} is not a list of numbers, like 1,2,4")
    return [int(part) for part in parts]


def default_devices(count: int) -> str:
    """The machine's GPUs, as many as needed; CPU ranks if it has none."""
    found = resolve("auto")
    return ",".join(found[:count]) if on_gpu(found) else f"cpu:{count}"


def splits(count: int) -> list[str]:
    """All ways to divide `count` ranks that a person would: all shared, and every N+M with at least half denoising."""
    return [str(count)] + [f"{n}+{count - n}" for n in range((count + 1) // 2, count)]


def plans(split: str, num_heads: int, world: int) -> Iterator[Plan]:
    """A plan for each chunk count, from one to a head a chunk."""
    denoise, decode = split_groups(split, world)
    for chunks in range(1, -(-num_heads // denoise.size) + 1):
        yield Plan(denoise, decode, chunks)


def rows(engine: Engine, case: Case, counts: list[int]) -> Iterator[Row]:
    """Makes a clip by each plan and yields a row for each."""
    tolerance = GPU_TOLERANCE if on_gpu(engine.devices) else 0.0
    geometry = case.files.geometry
    tokens = geometry.num_tokens(tuple(case.job.latent.shape))
    reference = outcome(engine, case.by(Plan(Group((0,)), Group((0,)))))
    for split in (split for count in counts for split in splits(count)):
        for plan in plans(split, geometry.num_heads, len(engine.devices)):
            found = outcome(engine, case.by(plan))
            yield compare((case.name, split, plan.chunks, tokens), found, reference, tolerance)


def outcome(engine: Engine, job: Job) -> Outcome:
    """Latent and frames of a clip."""
    ticket = engine.submit(job)
    assert ticket.frames is not None
    ticket.wait()
    latent = ticket.result()
    ticket.frames.wait()
    return latent, ticket.frames.result()


def compare(what: tuple[str, str, int, int], found: Outcome, reference: Outcome, tolerance: float) -> Row:
    """The row of one run against the reference run. what: model, split, chunks, tokens."""
    difference = (found[0] - reference[0]).abs().max().item()
    relative = difference / reference[0].abs().max().item()
    frames = (found[1] - reference[1]).abs().max().item()
    return Row(*what, difference, relative, frames, relative <= tolerance and frames <= 10 * tolerance)


def sentence(row: Row) -> str:
    """A row for a person."""
    verdict = "pass" if row.passed else "FAIL"
    return (f"{verdict}  {row.model:<11}  split {row.split:>4}  chunks {row.chunks}  tokens {row.tokens:>5}  "
            f"max {row.max_error:.2e}  relative {row.relative_error:.2e}  frames {row.frames_error:.2e}")
