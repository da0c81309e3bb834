"""Checks and conversions at the border to ComfyUI's values, without ComfyUI."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from comfyui_pipedit.errors import InvalidJob
from comfyui_pipedit.job import Geometry, ModelFiles, Weights
from nodes import convert

GEOMETRY = Geometry(16, 8, 4, (1, 2, 2), 64, 16, 8, (0.0,) * 16, (1.0,) * 16)
FILES = ModelFiles("toy", GEOMETRY, Weights("wan", "transformer", "/toy"), shift=3.0)
TEXT = [[torch.ones(1, 16, 64), {"pooled_output": None}]]


def settings(**changes: Any) -> convert.Settings:
    return convert.Settings(**{"seed": 3, "steps": 4, "cfg": 5.0, "sampler": "euler", "scheduler": "simple", **changes})


def latent(*shape: int) -> dict[str, Any]:
    return {"samples": torch.zeros(*(shape or (1, 16, 3, 8, 8)))}


def test_noise_of_a_batch_is_drawn_whole_then_cut() -> None:
    jobs = convert.jobs(FILES, TEXT, TEXT, latent(3, 16, 2, 4, 4), settings())
    whole = torch.randn(3, 16, 2, 4, 4, generator=torch.Generator().manual_seed(3))
    assert torch.equal(torch.cat([job.noise for job in jobs]), whole)


def test_batch_index_repeats_and_skips_as_core_does() -> None:
    found = convert.batch_noise(3, torch.zeros(3, 16, 2, 4, 4), [2, 0, 2])
    generator = torch.Generator().manual_seed(3)
    drawn = [torch.randn(1, 16, 2, 4, 4, generator=generator) for _ in range(3)]
    assert torch.equal(found, torch.cat([drawn[2], drawn[0], drawn[2]]))
    with pytest.raises(InvalidJob, match="1 entries for 3 clips"):
        convert.batch_noise(3, torch.zeros(3, 16, 2, 4, 4), [0])


def test_texts_are_repeated_over_the_batch() -> None:
    texts = torch.arange(2.0).view(2, 1, 1).expand(2, 16, 64)
    found = [
        job.positive.text[0, 0, 0].item()
        for job in convert.jobs(FILES, [[texts, {}]], TEXT, latent(3, 16, 2, 4, 4), settings())
    ]
    assert found == [0.0, 1.0, 0.0]


def test_cfg_1_drops_the_negative_and_others_need_one() -> None:
    (job,) = convert.jobs(FILES, TEXT, TEXT, latent(), settings(cfg=1.0))
    assert job.negative is None and job.branches == 1
    with pytest.raises(InvalidJob, match="negative is not connected"):
        convert.jobs(FILES, TEXT, None, latent(), settings())


def test_largest_seed() -> None:
    (job,) = convert.jobs(FILES, TEXT, TEXT, latent(), settings(seed=2**64 - 1))
    assert job.noise.std() > 0.9


@pytest.mark.parametrize(
    ("shape", "text"),
    [
        ((1, 16, 8, 8), "4 dimensions"),
        ((1, 48, 3, 8, 8), "48 channels and toy needs 16"),
        ((1, 16, 0, 8, 8), "empty"),
    ],
)
def test_latents_of_another_kind(shape: tuple[int, ...], text: str) -> None:
    with pytest.raises(InvalidJob, match=text):
        convert.jobs(FILES, TEXT, TEXT, latent(*shape), settings())


def test_nested_latents() -> None:
    nested = torch.nested.nested_tensor([torch.zeros(16, 3, 8, 8), torch.zeros(8, 3, 8, 8)])
    with pytest.raises(InvalidJob, match="nested tensor"):
        convert.jobs(FILES, TEXT, TEXT, {"samples": nested}, settings())


@pytest.mark.parametrize(
    ("conditioning", "text"),
    [
        ([*TEXT, *TEXT], "2 conditioning entries"),
        ([], "0 conditioning entries"),
        ([[TEXT[0][0], {"concat_latent_image": 1, "area": (1, 1)}]], "carries area, concat_latent_image"),
        ([[torch.zeros(1, 77, 768), {}]], r"\[1, 77, 768\] and toy needs \[1, length, 64\]"),
        ([[torch.zeros(16, 64), {}]], r"\[16, 64\]"),
    ],
)
def test_conditionings_that_are_not_one_plain_text(conditioning: Any, text: str) -> None:
    with pytest.raises(InvalidJob, match=text):
        convert.embedding(conditioning, "positive", FILES)


def test_keys_that_core_ignores_for_wan_are_no_reason_to_refuse() -> None:
    found = convert.embedding([[TEXT[0][0], {"pooled_output": torch.ones(1, 768), "control": None}]], "positive", FILES)
    assert torch.equal(found, TEXT[0][0])


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((512, 64, 64, 8), (512, 64, 64, 8)),
        ((128, 64, 64, 8), (128, 32, 64, 8)),
        ((512, 64, 8, 8), (512, 64, 8, 4)),
        ((512, 64, 16, 12), (512, 64, 16, 4)),
    ],
)
def test_tiles_have_cores_limits(sizes: tuple[int, int, int, int], expected: tuple[int, int, int, int]) -> None:
    found = convert.tiling("on", GEOMETRY, *sizes)
    assert found is not None
    assert (found.tile, found.overlap, found.temporal_tile, found.temporal_overlap) == expected
    assert convert.tiling("off", GEOMETRY, *sizes) is None and convert.tiling("auto", GEOMETRY, *sizes) is None


def test_pixels_are_cut_to_whole_latents_in_the_middle() -> None:
    pixels = torch.rand(7, 70, 69, 4)
    (request,) = convert.encodes(pixels, Weights("wan", "vae", "/toy"), GEOMETRY)
    assert torch.equal(request.frames, pixels[:5, 3:67, 2:66, :3])
    with pytest.raises(InvalidJob, match="8 or more"):
        convert.encodes(torch.rand(1, 7, 64, 3), Weights("wan", "vae", "/toy"), GEOMETRY)


def test_a_latent_keeps_its_other_keys() -> None:
    found = convert.latent_output({"samples": 1, "batch_index": [4], "downscale_ratio_spacial": 8}, torch.ones(1))
    assert found == {"samples": torch.ones(1), "batch_index": [4]}
