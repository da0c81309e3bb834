"""Checks and conversions at the border to ComfyUI's values, without ComfyUI."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from comfyui_pipedit import sampling
from comfyui_pipedit.errors import InvalidJob
from comfyui_pipedit.job import Geometry, ModelFiles, Tiling, Weights
from nodes import convert
from nodes.conditioning import read

GEOMETRY = Geometry(16, 8, 4, (1, 2, 2), 64, 16, 8, (0.0,) * 16, (1.0,) * 16)
FILES = ModelFiles("toy", GEOMETRY, Weights("wan", "transformer", "/toy"), shift=3.0)
TEXT = [[torch.ones(1, 16, 64), {"pooled_output": None}]]


def settings(**changes: Any) -> convert.Settings:
    levels = sampling.sigmas("simple", 4, shift=3.0)
    return convert.Settings(**{"seed": 3, "cfg": 5.0, "sampler": "euler", "levels": levels, **changes})


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
        ([[TEXT[0][0], {"control": 1, "area": (1, 1), "concat_mask": None}]], "carries area, control,"),
        ([[TEXT[0][0], {"start_percent": 0.2, "end_percent": 1.0, "hooks": 1}]], "carries hooks, start_percent,"),
        ([[TEXT[0][0], {"gligen": 1, "mask": 1, "strength": 0.0}]], "carries gligen, mask, strength,"),
        ([[TEXT[0][0], {"time_dim_concat": torch.zeros(1, 16, 1, 8, 8)}]], "carries time_dim_concat,"),
        ([[torch.zeros(1, 77, 768), {}]], r"\[1, 77, 768\] and toy needs \[1, length, 64\]"),
        ([[torch.zeros(16, 64), {}]], r"\[16, 64\]"),
    ],
)
def test_conditionings_that_are_not_one_plain_text(conditioning: Any, text: str) -> None:
    with pytest.raises(InvalidJob, match=text):
        read(conditioning, "positive", FILES)


def test_keys_that_core_ignores_for_wan_are_no_reason_to_refuse() -> None:
    ignored = {"pooled_output": torch.ones(1, 768), "control": None, "guidance": 3.5, "reference_latents": [1],
               "start_percent": 0.0, "end_percent": 1.0, "strength": 0.4}
    found = read([[TEXT[0][0], ignored]], "positive", FILES).branch(0, 1)
    assert torch.equal(found.text, TEXT[0][0]) and not found.extras


def test_what_a_model_may_read_goes_along_by_cores_names() -> None:
    images = SimpleNamespace(penultimate_hidden_states=torch.ones(1, 257, 5))
    guides = [torch.full((1, 2, 1, 1, 1), float(i)) for i in range(2)]
    extra = {"concat_latent_image": torch.ones(1, 16, 3, 8, 8), "concat_mask": torch.zeros(1, 1, 3, 8, 8),
             "concat_mask_index": 16, "clip_vision_output": images, "vace_frames": guides, "vace_mask": guides,
             "vace_strength": [0.5, 2]}
    found = read([[TEXT[0][0], extra]], "positive", FILES).branch(0, 1).extras
    assert {name: list(tensor.shape) for name, tensor in found.items()} == {
        "concat_latent_image": [1, 16, 3, 8, 8], "concat_mask": [1, 1, 3, 8, 8], "concat_mask_index": [1],
        "clip_vision_output": [1, 257, 5], "vace_frames": [2, 2, 1, 1, 1], "vace_mask": [2, 2, 1, 1, 1],
        "vace_strength": [2]}
    assert found["vace_frames"].flatten().tolist() == [0, 0, 1, 1] and found["vace_strength"].tolist() == [0.5, 2.0]


def test_guides_of_different_sizes_are_refused_with_their_sizes() -> None:
    guides = [torch.zeros(1, 32, 3, 8, 8), torch.zeros(1, 32, 4, 8, 8)]
    told = read([[TEXT[0][0], {"vace_frames": guides}]], "positive", FILES)
    with pytest.raises(InvalidJob, match=r"\[32, 3, 8, 8\], \[32, 4, 8, 8\]"):
        told.branch(0, 1)


@pytest.mark.parametrize(("have", "count", "expected"), [
    (1, 3, [0, 0, 0]), (2, 3, [0, 1, 1]), (3, 2, [0, 2]), (4, 1, [0]), (2, 5, [0, 0, 1, 1, 1]), (5, 3, [0, 2, 4]),
])
def test_images_are_stretched_over_a_batch(have: int, count: int, expected: list[int]) -> None:
    image = torch.arange(float(have)).view(-1, 1, 1, 1, 1)
    told = read([[TEXT[0][0], {"concat_latent_image": image}]], "positive", FILES)
    assert [told.branch(i, count).extras["concat_latent_image"].item() for i in range(count)] == expected


def test_an_unequal_number_of_masks_and_clips_starts_again() -> None:
    mask = torch.arange(2.0).view(2, 1, 1, 1, 1).expand(2, 1, 3, 8, 8)
    found = convert.jobs(FILES, TEXT, TEXT, {**latent(3, 16, 3, 8, 8), "noise_mask": mask}, settings())
    assert [job.mask.mean().item() for job in found if job.mask is not None] == [0.0, 1.0, 0.0]
    assert all(job.mask is None for job in convert.jobs(FILES, TEXT, TEXT, latent(), settings()))


@pytest.mark.parametrize("shape", [(8,), (1, 1, 1, 3, 8, 8), (1, 17, 3, 8, 8), (0, 8, 8)])
def test_masks_of_another_kind(shape: tuple[int, ...]) -> None:
    with pytest.raises(InvalidJob, match=r"noise_mask is \["):
        convert.jobs(FILES, TEXT, TEXT, {**latent(), "noise_mask": torch.zeros(shape)}, settings())


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


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((128, 128, 64, 16, 12), Tiling(128, 64, 16, 12)),
        ((None, 512, None, None, None), Tiling(512, 64, convert.ALL_FRAMES, 1)),
    ],
)
def test_sizes_of_a_tiled_encode_are_taken_as_they_are(sizes: tuple[int | None, ...], expected: Tiling) -> None:
    assert convert.encode_tiling(*sizes) == expected


def test_tiles_are_square() -> None:
    with pytest.raises(InvalidJob, match="tiles must be square, not 512 x 256"):
        convert.encode_tiling(None, 256, 64, 16, 4)


def test_a_latent_keeps_its_other_keys() -> None:
    found = convert.latent_output({"samples": 1, "batch_index": [4], "downscale_ratio_spacial": 8}, torch.ones(1))
    assert found == {"samples": torch.ones(1), "batch_index": [4]}
