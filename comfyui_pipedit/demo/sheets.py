"""Makes and judges the twenty clips: `python -m comfyui_pipedit.demo.sheets --out docs/demo`. Needs diffusers.

A plain loop on one device, without the pool and its solvers, so that it checks those too. Writes a sheet of frames for
each prompt and scores.json. Exit code 1 if fewer than 18 clips show the right colour, shape and direction.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from safetensors.torch import load_file

from ..contact_sheet import Clip, draw
from .captions import token_ids
from .judge import Verdict, judge
from .prompts import JUDGED, JudgedPrompt
from .sample import decode, euler, guided, starting_noise, uni_pc
from .text_encoder import TextEncoder

WEIGHTS = Path(__file__).with_name("weights")
NEEDED = 18


class DemoModel:
    """The three networks of a pipeline folder, in fp32 on the CPU."""

    def __init__(self, folder: Path) -> None:
        self.text_encoder = TextEncoder()
        self.text_encoder.load_state_dict(read_weights(folder / "text_encoder"))
        self.transformer = loaded(WanTransformer3DModel, folder / "transformer")
        self.vae = loaded(AutoencoderKLWan, folder / "vae")

    @torch.no_grad()
    def clip(self, prompt: JudgedPrompt, solver: str, steps: int, cfg: float) -> torch.Tensor:
        """The clip of a prompt, [17, 96, 96, 3] in 0..1, against an empty negative prompt."""
        text, empty = self.text_encoder(torch.tensor([token_ids(prompt.text), token_ids("")])).split(1)
        solve = {"euler": euler, "uni_pc": uni_pc}[solver]
        latents = solve(guided(self.transformer, text, empty, cfg), starting_noise([prompt.seed]), steps)
        return decode(self.vae, latents)[0].clamp(0, 1)


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder's safetensors files, as fp32."""
    shards = [load_file(path) for path in sorted(folder.glob("*.safetensors"))]
    return {name: tensor.float() for shard in shards for name, tensor in shard.items()}


def loaded(model_class: Any, folder: Path) -> Any:
    """A diffusers model from its folder, without accelerate, which `from_pretrained` wants for some."""
    model = model_class.from_config(json.loads((folder / "config.json").read_text()))
    model.load_state_dict(read_weights(folder))
    return model.eval()


def wanted(prompt: JudgedPrompt) -> Verdict:
    """The verdict that a prompt asks for."""
    return Verdict(prompt.colour, prompt.shape, prompt.direction)


def file_name(prompt: JudgedPrompt) -> str:
    """Name of a prompt's sheet, for example 101-red-circle-right.png."""
    return f"{prompt.seed}-{prompt.colour}-{prompt.shape}-{prompt.direction}.png"


def make_sheet(prompt: JudgedPrompt, clip: torch.Tensor, folder: Path) -> None:
    """Six frames of a clip in a row, below the prompt."""
    frames = (clip * 255).round().byte().cpu().numpy()
    draw([Clip(f"{prompt.text} (seed {prompt.seed})", frames)], folder / file_name(prompt), columns=6, height=96)


def main() -> None:
    """Make, judge and draw all clips with one solver."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, default=WEIGHTS, help="pipeline folder")
    parser.add_argument("--out", type=Path, help="folder for the sheets and scores.json; none are written without it")
    parser.add_argument("--solver", choices=("uni_pc", "euler"), default="uni_pc")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--cfg", type=float, default=5.0)
    args = parser.parse_args()
    model, rows = DemoModel(args.model), []
    for prompt in JUDGED:
        clip = model.clip(prompt, args.solver, args.steps, args.cfg)
        verdict = judge(clip)
        rows.append({"prompt": prompt.text, "seed": prompt.seed, **asdict(verdict), "right": verdict == wanted(prompt)})
        print(rows[-1], flush=True)
        if args.out:
            args.out.mkdir(parents=True, exist_ok=True)
            make_sheet(prompt, clip, args.out)
    sys.exit(report(rows, args))


def report(rows: list[dict[str, object]], args: argparse.Namespace) -> int:
    """Print the score, write scores.json; the exit code."""
    right = sum(bool(row["right"]) for row in rows)
    print(f"{right} of {len(rows)} right: {args.solver}, {args.steps} steps, cfg {args.cfg:g}")
    if args.out:
        settings = {"solver": args.solver, "steps": args.steps, "cfg": args.cfg}
        (args.out / "scores.json").write_text(json.dumps({**settings, "right": right, "clips": rows}, indent=1) + "\n")
    return 0 if right >= NEEDED else 1


if __name__ == "__main__":
    main()
