"""Trains the demo's transformer and text encoder:

    python -m comfyui_pipedit.demo.train_dit --vae DIR --seconds 480 --out DIR

Flow matching on latents of drawn clips, encoded once by the trained VAE. The whole step, data and noise included, is
one CUDA graph. Needs diffusers; made for one GPU. Writes the whole pipeline folder and a report on how well prompts are
followed.
"""
from __future__ import annotations

import argparse
import json
import time
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel

from .captions import Subject, caption_ids, subject, token_ids
from .captured import adamw, captured, set_rate, ticks, warm_cosine
from .clips import SIZE, Attributes, Painter, random_attributes
from .judge import judge
from .prompts import JUDGED, JudgedPrompt
from .sample import decode, euler, guided, starting_noise, uni_pc
from .save import SHIFT, save_demo
from .text_encoder import TextEncoder
from .whole_clip import encode_whole, prepare_whole

BATCH = 256
CAPTIONS = 4
DROPPED = 0.1
EMA = 0.998
EMA_EVERY = 5
FINISH_SECONDS = 45
CACHE_SHARE = 0.09


@dataclass(frozen=True, slots=True)
class Examples:
    """Normalised latents [n, 16, 5, 12, 12] and the ids of several captions each [n, CAPTIONS, 16]."""

    latents: torch.Tensor
    ids: torch.Tensor


def new_transformer(device: torch.device) -> WanTransformer3DModel:
    """The demo's Wan transformer: 8 heads of 32, 8 layers, 9 million parameters."""
    return WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=8, attention_head_dim=32, in_channels=16, out_channels=16,
        text_dim=64, freq_dim=256, ffn_dim=1024, num_layers=8, cross_attn_norm=True, qk_norm="rms_norm_across_heads",
    ).to(device)


def subjects(shown: Attributes) -> list[Subject]:
    """The words for a batch of attributes."""
    columns = (shown.colour, shown.shape, shown.direction, shown.speed, shown.background)
    return [subject(*row) for row in torch.stack(columns, 1).tolist()]


@torch.no_grad()
def make_examples(folder: Path, painter: Painter, until: float, limit: int, seed: int) -> Examples:
    """Draw, encode and caption clips until a time or a number of them is reached."""
    vae = AutoencoderKLWan.from_pretrained(folder).to(painter.device).eval()
    prepare_whole(vae)
    latents: list[torch.Tensor] = []
    shown: list[Subject] = []
    batch = min(64, limit)
    while not shown or (time.monotonic() < until and len(shown) < limit):
        attributes = random_attributes(batch, painter.device)
        latents.append(encode_whole(vae, painter.paint(attributes)).half())
        shown += subjects(attributes)
    mean, std = (torch.tensor(values, device=painter.device).view(1, -1, 1, 1, 1)
                 for values in (vae.config.latents_mean, vae.config.latents_std))
    normal = torch.cat([(part.float() - mean) / std for part in latents]).half()
    return Examples(normal, caption_ids(shown, CAPTIONS, seed).to(painter.device))


def noise_levels(batch: int, device: torch.device) -> torch.Tensor:
    """Half the levels as a sampler with this shift visits them, half nearer the middle (logit-normal), all shifted."""
    even, middle = torch.rand(batch, device=device), torch.sigmoid(torch.randn(batch, device=device))
    time = torch.where(torch.arange(batch, device=device) % 2 == 0, even, middle)
    return SHIFT * time / (1 + (SHIFT - 1) * time)


class Trainer:
    """Transformer and text encoder in training, with a running mean of their weights."""

    def __init__(self, examples: Examples, device: torch.device, batch: int) -> None:
        self.examples, self.device, self.batch = examples, device, batch
        self.transformer, self.text_encoder = new_transformer(device), TextEncoder().to(device)
        self.parameters = [*self.transformer.parameters(), *self.text_encoder.parameters()]
        self.optimizer = adamw(self.parameters, 0.01, (0.9, 0.98))
        self.mean = [parameter.detach().clone() for parameter in self.parameters]
        self.empty = torch.tensor(token_ids(""), device=device)

    def step(self) -> torch.Tensor:
        """One update on random examples; the loss, a tensor."""
        device, batch = self.device, self.batch
        pick = torch.randint(len(self.examples.latents), (batch,), device=device)
        clean = self.examples.latents[pick].float()
        ids = self.examples.ids[pick, torch.randint(CAPTIONS, (batch,), device=device)]
        ids = torch.where(torch.rand(batch, 1, device=device) < DROPPED, self.empty, ids)
        sigma, noise = noise_levels(batch, device), torch.randn_like(clean)
        level = sigma[:, None, None, None, None]
        text = self.text_encoder(ids)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda", cache_enabled=False):
            velocity = self.transformer((1 - level) * clean + level * noise, 1000 * sigma, text, return_dict=False)[0]
        loss = (velocity.float() - (noise - clean)).square().mean()
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        return loss.detach()

    def train(self, until: float, rate: float) -> int:
        """Train until a time; returns the number of steps."""
        run, total = captured(self.step, self.optimizer), torch.zeros((), device=self.device)
        for tick in ticks(until):
            set_rate(self.optimizer, rate * warm_cosine(tick.step, 500, tick.done))
            total += run()
            if tick.step % EMA_EVERY == 0:
                torch._foreach_lerp_(self.mean, [p.detach() for p in self.parameters], self._mean_weight(tick.step))
            if tick.step % 500 == 499:
                print(f"step {tick.step + 1}, {tick.done:.0%}, loss {total.item() / 500:.4f}", flush=True)
                total.zero_()
        return tick.step + 1

    def _mean_weight(self, step: int) -> float:
        return max(1 - EMA**EMA_EVERY, 1 / (1 + step / EMA_EVERY))

    @torch.no_grad()
    def take_mean(self) -> None:
        """Put the running mean in place of the weights."""
        for parameter, mean in zip(self.parameters, self.mean, strict=True):
            parameter.copy_(mean)


def validation_prompts(count: int) -> list[JudgedPrompt]:
    """Plain prompts of random content, other than the twenty judged ones: a model may be chosen by these."""
    shown = subjects(random_attributes(count, torch.device("cpu"), torch.Generator().manual_seed(7)))
    prompts = []
    for index, one in enumerate(shown):
        words = f"a {one.colour} {one.shape} moving {one.direction} {one.speed} on {one.background} background"
        prompts.append(JudgedPrompt(" ".join(words.split()), 10_000 + index, one.colour, one.shape, one.direction))
    return prompts


class Examiner:
    """Makes clips of prompts with a trained model and judges them."""

    def __init__(self, trainer: Trainer, vae: AutoencoderKLWan) -> None:
        self.trainer, self.vae = trainer, vae

    @torch.no_grad()
    def clips(self, prompts: list[JudgedPrompt], solver: str, steps: int, cfg: float) -> torch.Tensor:
        """Clips [n, frames, height, width, 3] in 0..1."""
        device, encoder = self.trainer.device, self.trainer.text_encoder
        text = encoder(torch.tensor([token_ids(prompt.text) for prompt in prompts], device=device))
        velocity = guided(self.trainer.transformer, text, encoder(self.trainer.empty[None]), cfg)
        solve = {"euler": euler, "uni_pc": uni_pc}[solver]
        latents = solve(velocity, starting_noise([prompt.seed for prompt in prompts]).to(device), steps)
        return torch.cat([decode(self.vae, part).clamp(0, 1) for part in latents.split(32)])

    def right(self, prompts: list[JudgedPrompt], solver: str, steps: int, cfg: float) -> list[float]:
        """Shares of prompts with colour, shape, direction, and all three right."""
        clips = self.clips(prompts, solver, steps, cfg)
        pairs = zip(prompts, clips, strict=True)
        marks = torch.tensor([_marks(prompt, clip) for prompt, clip in pairs], dtype=torch.float32)
        return [*marks.mean(0).tolist(), marks.prod(1).mean().item()]


def _marks(prompt: JudgedPrompt, clip: torch.Tensor) -> tuple[bool, bool, bool]:
    asked = (prompt.colour, prompt.shape, prompt.direction)
    return tuple(a == b for a, b in zip(astuple(judge(clip)), asked, strict=True))


def main() -> None:
    """Encode examples, train, examine, save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vae", type=Path, required=True, help="folder of the trained VAE")
    parser.add_argument("--out", type=Path, required=True, help="folder for the whole pipeline")
    parser.add_argument("--seconds", type=float, default=480, help="time for everything after the start of Python")
    parser.add_argument("--rate", type=float, default=1e-3, help="peak learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--examples", type=int, default=49_152, help="most clips to encode")
    parser.add_argument("--validation", type=int, default=96, help="prompts by which settings are compared")
    parser.add_argument("--compile", action="store_true", help="compile the transformer's blocks")
    train(parser.parse_args(), time.monotonic())


def train(args: argparse.Namespace, start: float) -> None:
    """Give each stage its share of the time."""
    torch.set_num_threads(min(8, torch.get_num_threads()))
    torch.manual_seed(args.seed)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    painter = Painter(torch.device("cuda" if torch.cuda.is_available() else "cpu"), SIZE)
    examples = make_examples(args.vae, painter, start + CACHE_SHARE * args.seconds, args.examples, args.seed)
    print(f"{len(examples.latents)} examples after {time.monotonic() - start:.0f} s", flush=True)
    trainer = Trainer(examples, painter.device, args.batch)
    if args.compile:
        for block in trainer.transformer.blocks:
            block.compile()
    steps = trainer.train(start + args.seconds - min(FINISH_SECONDS, args.seconds / 4), args.rate)
    trainer.take_mean()
    finish(trainer, steps, args)


def finish(trainer: Trainer, steps: int, args: argparse.Namespace) -> None:
    """Save first, then examine what was trained."""
    plain = new_transformer(torch.device("cpu"))
    plain.load_state_dict(trainer.transformer.state_dict())
    save_demo(args.out, plain, trainer.text_encoder, args.vae)
    trainer.transformer = plain.to(trainer.device, torch.float32).eval()
    vae = AutoencoderKLWan.from_pretrained(args.vae).to(trainer.device).eval()
    examiner = Examiner(trainer, vae)
    report: dict[str, Any] = {"steps": steps, "examples": len(trainer.examples.latents)}
    print(f"saved after {steps} steps", flush=True)
    for solver, cfg in (("uni_pc", 5.0), ("euler", 5.0), ("euler", 3.0)):
        report[f"validation {solver} {cfg:g}"] = examiner.right(validation_prompts(args.validation), solver, 20, cfg)
        print(json.dumps(report), flush=True)
    report["judged"] = examiner.right(list(JUDGED), "uni_pc", 20, 5.0)
    args.out.with_name(args.out.name + "_report.json").write_text(json.dumps(report, indent=1))
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
