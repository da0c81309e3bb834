"""What trains the demo model, and a clip of it by a pool: needs diffusers from the workers' folder."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from tiny_wan import use_worker_site

use_worker_site()

from diffusers import AutoencoderKLWan  # noqa: E402

from comfyui_pipedit.config import DEMO_FOLDER as WEIGHTS  # noqa: E402
from comfyui_pipedit.config import EngineConfig  # noqa: E402
from comfyui_pipedit.demo.captured import Tick, adamw, captured, set_rate, ticks, warm_cosine  # noqa: E402
from comfyui_pipedit.demo.clips import Attributes, Painter, random_attributes  # noqa: E402
from comfyui_pipedit.demo.judge import judge  # noqa: E402
from comfyui_pipedit.demo.prompts import JUDGED  # noqa: E402
from comfyui_pipedit.demo.sample import simple_sigmas, starting_noise  # noqa: E402
from comfyui_pipedit.demo.save import build_tokenizer, save_text_encoder  # noqa: E402
from comfyui_pipedit.demo.sheets import queue, wanted  # noqa: E402
from comfyui_pipedit.demo.text_encoder import TextEncoder  # noqa: E402
from comfyui_pipedit.demo.train_vae import Phase, Trainer, new_vae  # noqa: E402
from comfyui_pipedit.demo.whole_clip import decode_whole, encode_whole, prepare_whole  # noqa: E402
from comfyui_pipedit.host.engine import Engine  # noqa: E402
from comfyui_pipedit.requests import Settings, find_model  # noqa: E402

CPU = torch.device("cpu")


@pytest.mark.parametrize("frames", [1, 5, 9, 17])
@torch.no_grad()
def test_one_pass_over_a_whole_clip_equals_the_walk(frames: int) -> None:
    torch.manual_seed(0)
    walking, whole = new_vae(1, CPU), new_vae(1, CPU)
    whole.load_state_dict(walking.state_dict())
    prepare_whole(whole)
    clips = torch.rand(1, 3, frames, 32, 32) * 2 - 1
    latents = walking.encode(clips).latent_dist.mode()
    torch.testing.assert_close(encode_whole(whole, clips), latents, atol=1e-5, rtol=0)
    restored = decode_whole(whole, latents).clamp(-1, 1)
    torch.testing.assert_close(restored, walking.decode(latents).sample, atol=1e-4, rtol=0)


def test_a_clip_shows_its_shape_in_every_frame_and_moves_as_asked() -> None:
    torch.manual_seed(0)
    shown = Attributes(*(torch.full((8,), value) for value in (0, 1, 2, 2, 0)))
    clips = Painter(CPU).paint(shown)
    assert clips.shape == (8, 3, 17, 96, 96)
    red = (clips[:, 0] > 0).float()
    assert red.sum((2, 3)).min() > 150
    height = (red * torch.arange(96.0)[:, None]).sum((2, 3)) / red.sum((2, 3))
    assert (height.diff(dim=1) < 0).all()


def test_short_clips_begin_the_same_motion() -> None:
    shown = random_attributes(4, CPU, torch.Generator().manual_seed(3))
    torch.manual_seed(1)
    long = Painter(CPU).paint(shown, 17)
    torch.manual_seed(1)
    short = Painter(CPU).paint(shown, 5)
    assert (short[:, :, 4] - short[:, :, 0]).abs().amax() > 0.5
    assert (long[:, :, 16] - long[:, :, 0]).abs().mean() > (short[:, :, 4] - short[:, :, 0]).abs().mean()


def test_a_step_of_vae_training_moves_the_weights_of_both_halves() -> None:
    torch.manual_seed(0)
    trainer = Trainer(1, Painter(CPU, 48))
    before = {name: value.clone() for name, value in trainer.vae.state_dict().items()}
    set_rate(trainer.optimizer, 1e-3)
    assert trainer.step(Phase(5, 1, 1.0)).isfinite()
    moved = {name for name, value in trainer.vae.state_dict().items() if not torch.equal(value, before[name])}
    assert {"encoder.conv_in.weight", "decoder.conv_out.weight", "quant_conv.weight"} <= moved
    assert torch.equal(trainer.vae.quant_conv.weight[16:], before["quant_conv.weight"][16:])


def test_a_step_without_a_gpu_is_just_called() -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = adamw([weight], 0.0, (0.9, 0.99))
    set_rate(optimizer, 0.125)
    assert optimizer.param_groups[0]["lr"] == 0.125
    assert captured(lambda: weight.sum(), optimizer)().item() == 1.0


def test_the_rate_rises_then_falls() -> None:
    assert warm_cosine(0, 100, 0.0) == pytest.approx(0.01)
    assert warm_cosine(100, 100, 0.0) == 1.0
    assert warm_cosine(10_000, 100, 1.0) == pytest.approx(0.005)


def test_ticks_end_when_the_time_is_over() -> None:
    end = time.monotonic() + 0.05
    seen = list(ticks(end))
    assert time.monotonic() >= end
    assert seen[0] == Tick(0, 0.0)
    assert [tick.step for tick in seen] == list(range(len(seen)))
    assert seen[-1].done < 1


def test_the_schedule_goes_from_noise_to_nothing() -> None:
    sigmas = simple_sigmas(20)
    assert (sigmas[0], sigmas[-1], len(sigmas)) == (1.0, 0.0, 21)
    assert sigmas == sorted(sigmas, reverse=True)


def test_noise_depends_on_its_own_seed_only() -> None:
    assert torch.equal(starting_noise([5, 7])[1:], starting_noise([7]))


def test_saved_parts_are_the_committed_ones(tmp_path: Path) -> None:
    save_text_encoder(tmp_path, TextEncoder())
    assert (tmp_path / "config.json").read_text() == (WEIGHTS / "text_encoder" / "config.json").read_text()
    build_tokenizer().save(str(tmp_path / "tokenizer.json"))
    assert (tmp_path / "tokenizer.json").read_text() == (WEIGHTS / "tokenizer" / "tokenizer.json").read_text()


@torch.no_grad()
def test_the_trained_vae_restores_clips() -> None:
    torch.manual_seed(2)
    vae = AutoencoderKLWan.from_pretrained(WEIGHTS / "vae")
    clips = Painter(CPU).paint(random_attributes(2, CPU))
    latents = vae.encode(clips).latent_dist.mode()
    assert (vae.decode(latents).sample - clips).square().mean() < 4 * 10**-3.5  # 35 dB
    std = torch.tensor(vae.config.latents_std)
    assert 0.5 < (latents.std((0, 2, 3, 4)) / std).mean() < 1.5


def test_a_prompt_becomes_the_clip_it_asks_for() -> None:
    engine = Engine(EngineConfig(devices="cpu:3"))
    try:
        ticket, = queue(engine, find_model("demo"), JUDGED[:1], Settings(steps=10))
        ticket.wait()
        assert judge(ticket.result()) == wanted(JUDGED[0])
    finally:
        engine.close()
