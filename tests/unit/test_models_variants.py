"""Wan's variants against diffusers' own classes where these can say what is right, and what is refused by name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_wan
import torch
from torch import Tensor, nn

from comfyui_pipedit import models
from comfyui_pipedit.errors import InvalidJob
from comfyui_pipedit.job import Branch, Geometry, Weights
from comfyui_pipedit.models.geometry import normalised
from comfyui_pipedit.parallel.sequence import Context
from comfyui_pipedit.worker.device import Device
from comfyui_pipedit.worker.residency import Residency

SIZE = (2, 4, 6)
SIGMA = 0.7


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    tiny_wan.use_worker_site()
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield
    torch.set_num_threads(before)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def geometry(channels: int = 16) -> Geometry:
    mean, std = tuple(0.1 * i for i in range(channels)), tuple(1.0 + 0.1 * i for i in range(channels))
    return Geometry(channels, 8, 4, (1, 2, 2), tiny_wan.TEXT_WIDTH, tiny_wan.TEXT_TOKENS, 4, mean, std)


def stored(variant: str) -> nn.Module:
    """diffusers' network; the family's has the same weights."""
    return tiny_wan.transformer(**tiny_wan.VARIANTS[variant])


def velocity(variant: str, x: Tensor, mask: Tensor | None = None, rows: int = 512, **extras: Tensor) -> Tensor:
    wan = models.family("wan")
    network = wan.load_transformer(tiny_wan.Weights(stored(variant)))
    given = Branch(draw(1, rows, tiny_wan.TEXT_WIDTH, seed=1), extras)
    return wan.velocity(network, x, SIGMA, wan.prepare(network, given, tuple(x.shape), mask, geometry(x.shape[1])))


def by_diffusers(variant: str, x: Tensor, timestep: Tensor | None = None, **more: Any) -> Tensor:
    time = torch.tensor([SIGMA]) * 1000 if timestep is None else timestep
    sample: Tensor = stored(variant)(x, time, draw(1, 512, tiny_wan.TEXT_WIDTH, seed=1), **more).sample
    return sample


def close(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).abs().max() / b.abs().max() < 1e-5)


@pytest.mark.parametrize(("variant", "tokens"), [("i2v-2.1", 5), ("flf-2.1", 10)])
def test_image_to_video_is_diffusers_where_the_text_has_512_rows(variant: str, tokens: int) -> None:
    x, image, mask = draw(1, 16, *SIZE), draw(1, 16, *SIZE, seed=2), draw(1, 4, *SIZE, seed=3)
    states = draw(1, tokens, tiny_wan.IMAGE_WIDTH, seed=4)
    found = velocity(variant, x, concat_latent_image=image, concat_mask=mask, clip_vision_output=states)
    whole = torch.cat((x, 1.0 - mask, normalised(image, geometry())), dim=1)
    ends = states.unflatten(1, (2, -1)).squeeze(0) if variant == "flf-2.1" else states
    assert close(found, by_diffusers(variant, whole, encoder_hidden_states_image=ends))


def test_fewer_and_more_rows_of_text_count() -> None:
    """diffusers would take 496 rows off an image's tokens, or read an image as text."""
    x, states = draw(1, 16, *SIZE), draw(1, 5, tiny_wan.IMAGE_WIDTH, seed=4)
    found = [velocity("i2v-2.1", x, rows=rows, clip_vision_output=states) for rows in (16, 512, 600)]
    other = velocity("i2v-2.1", x, rows=16, clip_vision_output=-states)
    assert all((a - b).abs().max() > 0.01 for a, b in ((found[0], found[1]), (found[1], found[2]), (found[0], other)))


def test_vace_is_diffusers_with_one_guide_and_not_with_two() -> None:
    x, frames, masks = draw(1, 16, *SIZE), draw(2, 32, *SIZE, seed=2), draw(2, 64, *SIZE, seed=3)
    whole = torch.cat((normalised(frames, geometry()), masks), dim=1)
    one = velocity("vace", x, vace_frames=frames[:1], vace_mask=masks[:1], vace_strength=torch.tensor([0.6]))
    expected = by_diffusers("vace", x, control_hidden_states=whole[:1],
                            control_hidden_states_scale=torch.tensor([0.6, 0.6]))
    assert close(one, expected)
    two = velocity("vace", x, vace_frames=frames, vace_mask=masks, vace_strength=torch.tensor([0.6, 1.0]))
    assert (two - one).abs().max() > 0.01


def test_ti2v_tells_each_token_its_part_of_the_timestep() -> None:
    x, mask = draw(1, 48, *SIZE), torch.ones(1, 1, *SIZE)
    mask[:, :, 0] = 0.0
    mask[:, :, 1, :2] = 0.5
    times = torch.tensor([[0.0] * 6 + [0.75] * 6]) * SIGMA * 1000
    assert close(velocity("ti2v", x, mask), by_diffusers("ti2v", x, times))
    assert close(velocity("ti2v", x), by_diffusers("ti2v", x))


def test_what_is_kept_has_noise_except_in_ti2v() -> None:
    wan, latent, noise = models.family("wan"), draw(1, 16, *SIZE), draw(1, 16, *SIZE, seed=1)
    assert torch.equal(wan.kept_part(stored("t2v"), latent, noise, 0.25), 0.25 * noise + 0.75 * latent)
    assert torch.equal(wan.kept_part(stored("ti2v"), latent, noise, 0.25), latent)


@pytest.mark.parametrize("variant", tiny_wan.VARIANTS)
def test_a_variant_in_16_bits_is_the_same_up_to_rounding(variant: str, tmp_path: Path) -> None:
    """Loaded as ranks load it, with the modules in float32 that diffusers keeps so."""
    network, wan = stored(variant), models.family("wan")
    x, mask = draw(1, 48 if variant == "ti2v" else 16, *SIZE), draw(1, 1, *SIZE).abs()
    text = Branch(draw(1, 16, tiny_wan.TEXT_WIDTH))
    network.save_pretrained(tmp_path / "transformer")
    (tmp_path / "model_index.json").write_text(json.dumps({"transformer": ["diffusers", type(network).__name__]}))
    residency, found = Residency(Device.parse("cpu:0"), Context(0, SimpleNamespace()), lambda text: None), []
    for dtype in ("fp32", "bf16"):
        weights = Weights("wan", "transformer", str(tmp_path), dtype)
        residency.load(weights)
        loaded = residency.get(weights)
        given = wan.prepare(loaded, text, tuple(x.shape), mask, geometry(x.shape[1]))
        found.append(wan.velocity(loaded, x, SIGMA, given))
    assert 1e-5 < (found[1] - found[0]).abs().max() / found[0].abs().max() < 0.03


@pytest.mark.parametrize(("variant", "extras", "text"), [
    ("i2v-2.2", {"concat_latent_image": (1, 16, 3, 4, 6)}, r"\[1, 16, 3, 4, 6\].*2 latent frames"),
    ("i2v-2.2", {"concat_latent_image": (1, 48, 2, 4, 6)}, r"takes 20 more channels \(or 16 and a mask\)"),
    ("i2v-2.2", {"concat_latent_image": (1, 20, 2, 4, 6)}, "a multiple of 16"),
    ("i2v-2.2", {"concat_latent_image": (1, 16, 2, 4, 6), "concat_mask": (1, 1, 3, 4, 6)}, "concat_mask is"),
    ("i2v-2.1", {"clip_vision_output": (1, 5, 32)}, r"takes \[1, N, 24\]; use CLIPVisionLoader"),
    ("vace", {"vace_frames": (1, 32, 3, 4, 6)}, r"vace_frames is \[1, 32, 3, 4, 6\].*\[1, 32, 2, 4, 6\]"),
    ("vace", {"vace_frames": (2, 32, *SIZE), "vace_mask": (1, 64, *SIZE)}, "vace_mask is"),
    ("vace", {"vace_frames": (2, 32, *SIZE), "vace_strength": (1,)}, "1 values for 2 guides"),
])
def test_what_does_not_fit_the_clip_is_named(variant: str, extras: dict[str, tuple[int, ...]], text: str) -> None:
    with pytest.raises(InvalidJob, match=text):
        velocity(variant, draw(1, 16, *SIZE), rows=8, **{name: draw(*shape) for name, shape in extras.items()})
