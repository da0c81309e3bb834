"""Trains the demo's VAE: `python -m comfyui_pipedit.demo.train_vae --seconds 420 --out weights/vae`.

Needs diffusers; made for one GPU.

A curriculum over clip length (1, 5, then 17 frames): most of what a frame needs is learned where steps are cheap. The
loss weighs pixels by how far they are from the clip's mean colour, that is the shape far above the background.
"""
from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import AutoencoderKLWan

from .captured import adamw, captured, set_rate, ticks, warm_cosine
from .clips import SIZE, Painter, random_attributes
from .judge import judge
from .whole_clip import decode_whole, encode_whole, prepare_whole

NOISE = 0.1
FINISH_SECONDS = 20
MEASURED_CLIPS = 32


@dataclass(frozen=True, slots=True)
class Phase:
    """Part of the curriculum: clip length, batch, share of the time."""

    frames: int
    clips: int
    share: float


PHASES = (Phase(1, 256, 0.15), Phase(5, 48, 0.25), Phase(17, 16, 0.60))


def new_vae(blocks: int, device: torch.device) -> AutoencoderKLWan:
    """A Wan 2.1 VAE of base width 8, with a fixed variance of its latents (only their mean is trained and used)."""
    vae = AutoencoderKLWan(
        base_dim=8, z_dim=16, dim_mult=[1, 2, 4, 4], num_res_blocks=blocks, attn_scales=[],
        temperal_downsample=[False, True, True],
    )
    with torch.no_grad():
        vae.quant_conv.weight[16:].zero_()
        vae.quant_conv.bias[16:].fill_(2 * math.log(NOISE))
    return vae.to(device)


def weighted_error(restored: torch.Tensor, clips: torch.Tensor) -> torch.Tensor:
    """L1 plus squared error, up to ninefold where a clip differs from its own mean colour."""
    weight = 1 + 8 * (clips - clips.mean((2, 3, 4), keepdim=True)).abs().amax(1, keepdim=True)
    error = restored - clips
    return (weight * (error.abs() + error.square())).mean()


class Trainer:
    """A VAE in training: one step draws clips, restores them from noisy latents, and updates the weights."""

    def __init__(self, blocks: int, painter: Painter) -> None:
        self.painter, self.vae = painter, new_vae(blocks, painter.device)
        prepare_whole(self.vae)
        _to_channels_last(self.vae)
        self.optimizer = adamw(list(self.vae.parameters()), 0.0, (0.9, 0.99))

    def step(self, phase: Phase) -> torch.Tensor:
        """One update on fresh clips; the loss, a tensor."""
        shown = random_attributes(phase.clips, self.painter.device)
        clips = self.painter.paint(shown, phase.frames).contiguous(memory_format=torch.channels_last_3d)
        kind = self.painter.device.type
        with torch.autocast(kind, torch.bfloat16, enabled=kind == "cuda", cache_enabled=False):
            latents = encode_whole(self.vae, clips)
            restored = decode_whole(self.vae, latents + NOISE * torch.randn_like(latents))
        loss = weighted_error(restored.float(), clips) + 1e-3 * latents.float().square().mean()
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.vae.parameters(), 1.0)
        self.optimizer.step()
        return loss.detach()

    def train(self, phase: Phase, until: float, rate: float, begun: float) -> int:
        """Train until a time. `begun` is the share of the curriculum that lies behind; returns the number of steps."""
        run = captured(lambda: self.step(phase), self.optimizer)
        for tick in ticks(until):
            set_rate(self.optimizer, rate * warm_cosine(tick.step, 100, begun + phase.share * tick.done))
            loss = run()
            if tick.step % 250 == 0:
                print(f"{phase.frames} frames, step {tick.step}, {tick.done:.0%}, loss {loss.item():.4f}", flush=True)
        return tick.step + 1


def _to_channels_last(vae: torch.nn.Module) -> None:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    for parameter in vae.parameters():
        if parameter.dim() in formats:
            parameter.data = parameter.data.contiguous(memory_format=formats[parameter.dim()])


@torch.no_grad()
def latent_statistics(vae: AutoencoderKLWan, painter: Painter, batches: int = 4) -> tuple[list[float], list[float]]:
    """Mean and standard deviation of each latent channel over drawn clips."""
    latents = []
    for _ in range(batches):
        latents.append(vae.encode(painter.paint(random_attributes(32, painter.device))).latent_dist.mode())
    every = torch.cat(latents)
    return every.mean((0, 2, 3, 4)).tolist(), every.std((0, 2, 3, 4)).tolist()


@torch.no_grad()
def measure(vae: AutoencoderKLWan, painter: Painter) -> dict[str, float]:
    """PSNR in dB of restored clips: all frames, the first, the last, and from latents with 20 % of noise added; and the
    share of restored clips on which the judge says what it says of the drawn ones."""
    clips = painter.paint(random_attributes(MEASURED_CLIPS, painter.device))
    latents = vae.encode(clips).latent_dist.mode()
    deviation = torch.tensor(vae.config.latents_std, device=painter.device).view(1, -1, 1, 1, 1)
    restored = vae.decode(latents).sample
    noisy = vae.decode(latents + 0.2 * deviation * torch.randn_like(latents)).sample
    sure = [judge((clip.permute(1, 2, 3, 0) + 1) / 2) == judge((true.permute(1, 2, 3, 0) + 1) / 2)
            for clip, true in zip(restored, clips, strict=True)]
    return {
        "judged_alike": sum(sure) / len(sure), "psnr": _psnr(restored, clips),
        "psnr_first": _psnr(restored[:, :, 0], clips[:, :, 0]),
        "psnr_last": _psnr(restored[:, :, -1], clips[:, :, -1]), "psnr_noisy": _psnr(noisy, clips),
    }


def _psnr(restored: torch.Tensor, clips: torch.Tensor) -> float:
    return 10 * math.log10(4 / (restored - clips).square().mean().item())


def walking_copy(vae: AutoencoderKLWan, painter: Painter) -> AutoencoderKLWan:
    """The trained weights in an ordinary VAE, in eval mode, with the measured statistics in its config."""
    plain = new_vae(vae.config.num_res_blocks, painter.device)
    plain.load_state_dict(vae.state_dict())
    plain.eval().requires_grad_(False)
    mean, std = latent_statistics(plain, painter)
    plain.register_to_config(latents_mean=mean, latents_std=std)
    return plain


def main() -> None:
    """Train by the curriculum, measure, save in diffusers' layout."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=480, help="time for everything after the start of Python")
    parser.add_argument("--out", type=Path, required=True, help="folder for config.json and weights")
    parser.add_argument("--blocks", type=int, default=1, help="residual blocks a stage")
    parser.add_argument("--rate", type=float, default=4e-3, help="peak learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--size", type=int, default=SIZE, help="edge of clips in pixels (smaller for a try on a CPU)")
    train(parser.parse_args(), time.monotonic())


def train(args: argparse.Namespace, start: float) -> None:
    """Give the phases their shares of the time."""
    torch.set_num_threads(min(8, torch.get_num_threads()))
    torch.manual_seed(args.seed)
    torch.backends.cudnn.benchmark, torch.backends.cudnn.benchmark_limit = True, 4
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    trainer = Trainer(args.blocks, Painter(torch.device("cuda" if torch.cuda.is_available() else "cpu"), args.size))
    steps, begun = [], 0.0
    first, last = time.monotonic(), start + args.seconds - min(FINISH_SECONDS, args.seconds / 10)
    for phase in PHASES:
        steps.append(trainer.train(phase, first + (begun + phase.share) * (last - first), args.rate, begun))
        begun += phase.share
    finish(trainer, steps, args.out)


def finish(trainer: Trainer, steps: list[int], out: Path) -> None:
    """Save a trained VAE, then measure it; the measurement is printed and lies beside the weights' folder."""
    torch.backends.cudnn.benchmark = False
    vae = walking_copy(trainer.vae, trainer.painter)
    vae.save_pretrained(out)
    print("saved", out, flush=True)
    report = {**measure(vae, trainer.painter), "steps": steps}
    out.with_name(out.name + "_report.json").write_text(json.dumps(report, indent=1))
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
