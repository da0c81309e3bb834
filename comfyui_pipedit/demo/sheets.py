"""Makes and judges the twenty clips on a pool: `python -m comfyui_pipedit.demo.sheets --out docs/demo`.

What a user gets is judged: engine, exchange and solvers included. Writes a sheet of frames for each prompt and
scores.json. Exit code 1 if fewer than 18 clips show the right colour, shape and direction.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from ..config import EngineConfig
from ..contact_sheet import Clip, draw
from ..host.engine import Engine
from ..host.ticket import Ticket
from ..job import ModelFiles
from ..requests import Clip as ClipSize
from ..requests import Settings, encode_texts, find_model, make_job
from .judge import Verdict, judge
from .prompts import JUDGED, JudgedPrompt

NEEDED = 18


def queue(engine: Engine, files: ModelFiles, prompts: tuple[JudgedPrompt, ...], settings: Settings) -> list[Ticket]:
    """A ticket of the frames of each prompt, against an empty negative prompt."""
    *texts, empty = encode_texts(engine, files, (*(prompt.text for prompt in prompts), ""))
    shape = ClipSize().latent_shape(files)
    tickets = []
    for prompt, text in zip(prompts, texts, strict=True):
        own = Settings(prompt.seed, settings.steps, settings.cfg, settings.sampler, settings.scheduler)
        ticket = engine.submit(make_job(files, [text, empty], shape, own, decode=True, label=prompt.text))
        assert ticket.frames is not None
        tickets.append(ticket.frames)
    return tickets


def wanted(prompt: JudgedPrompt) -> Verdict:
    """The verdict that a prompt asks for."""
    return Verdict(prompt.colour, prompt.shape, prompt.direction)


def file_name(prompt: JudgedPrompt) -> str:
    """Name of a prompt's sheet, for example 101-red-circle-right.png."""
    return f"{prompt.seed}-{prompt.colour}-{prompt.shape}-{prompt.direction}.png"


def make_sheet(prompt: JudgedPrompt, clip: torch.Tensor, folder: Path) -> None:
    """Six frames of a clip in a row, below the prompt."""
    folder.mkdir(parents=True, exist_ok=True)
    frames = (clip * 255).round().byte().cpu().numpy()
    draw([Clip(f"{prompt.text} (seed {prompt.seed})", frames)], folder / file_name(prompt), columns=6, height=96)


def row(prompt: JudgedPrompt, clip: torch.Tensor) -> dict[str, object]:
    """A line of scores.json."""
    verdict = judge(clip)
    return {"prompt": prompt.text, "seed": prompt.seed, **asdict(verdict), "right": verdict == wanted(prompt)}


def main() -> None:
    """Make, judge and draw all clips with one solver."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="demo", help="'demo' or a pipeline folder")
    parser.add_argument("--out", type=Path, help="folder for the sheets and scores.json; none are written without it")
    parser.add_argument("--solver", default="euler")
    parser.add_argument("--scheduler", default="simple")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--cfg", type=float, default=5.0)
    parser.add_argument("--devices", default="auto")
    args = parser.parse_args()
    settings = Settings(steps=args.steps, cfg=args.cfg, sampler=args.solver, scheduler=args.scheduler)
    engine, rows = Engine(EngineConfig(devices=args.devices)), []
    try:
        for prompt, ticket in zip(JUDGED, queue(engine, find_model(args.model), JUDGED, settings), strict=True):
            ticket.wait()
            rows.append(row(prompt, ticket.result()))
            print(rows[-1], flush=True)
            if args.out:
                make_sheet(prompt, ticket.result(), args.out)
    finally:
        engine.close()
    sys.exit(report(rows, args))


def report(rows: list[dict[str, object]], args: argparse.Namespace) -> int:
    """Print the score, write scores.json; the exit code."""
    right = sum(bool(row["right"]) for row in rows)
    print(f"{right} of {len(rows)} right: {args.solver}, {args.scheduler}, {args.steps} steps, cfg {args.cfg:g}")
    if args.out:
        settings = {"solver": args.solver, "scheduler": args.scheduler, "steps": args.steps, "cfg": args.cfg}
        (args.out / "scores.json").write_text(json.dumps({**settings, "right": right, "clips": rows}, indent=1) + "\n")
    return 0 if right >= NEEDED else 1


if __name__ == "__main__":
    main()
