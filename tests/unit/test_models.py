"""The Wan family against diffusers' own classes: weights in their places, velocity, streamed and tiled decode, text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_wan
import torch
from torch import Tensor

from comfyui_pipedit import loaders, models
from comfyui_pipedit.errors import InvalidJob, LoadError, OutOfStep
from comfyui_pipedit.job import Branch, EncodeRequest, ModelFiles, Tiling, Weights
from comfyui_pipedit.models.geometry import to_model, to_vae
from comfyui_pipedit.models.tiling import Axis, axes, decode_tiles, encode_axes, encode_tiles, num_tiles
from comfyui_pipedit.parallel.sequence import Context
from comfyui_pipedit.worker.device import Device
from comfyui_pipedit.worker.residency import PlacedWeights, Residency

CPU = Device.parse("cpu:0")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    tiny_wan.use_worker_site()
    with torch.inference_mode(False):
        return loaders.inspect(tiny_wan.write_model(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture(scope="module")
def halves(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    """The same model with float16 files."""
    tiny_wan.use_worker_site()
    with torch.inference_mode(False):
        return loaders.inspect(tiny_wan.write_model(tmp_path_factory.mktemp("halves") / "tiny", "float16", shards=True))


@pytest.fixture(scope="module")
def residency(files: ModelFiles) -> Residency:
    loaded = Residency(CPU, Context(0, SimpleNamespace()), lambda text: None)
    for weights in (files.transformer, files.vae, files.text):
        assert loaded.load(weights) > 0
    return loaded


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# -- weights ---------------------------------------------------------------------------------------

def test_a_loaded_network_is_the_stored_one(files: ModelFiles, residency: Residency) -> None:
    for weights, stored in ((files.transformer, tiny_wan.transformer()), (files.vae, tiny_wan.vae())):
        network = residency.get(weights)
        expected = dict(stored.state_dict())
        assert network.state_dict().keys() == expected.keys()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in network.state_dict().items())
        assert not any(tensor.is_meta for tensor in (*network.parameters(), *network.buffers()))
        assert not any(module.training for module in network.modules())
    for name, table in tiny_wan.transformer().named_buffers():
        assert torch.equal(residency.get(files.transformer).get_buffer(name), table), "position tables are in no file"


def test_weights_of_the_right_dtype_are_views_of_the_file(files: ModelFiles) -> None:
    tensors = dict(PlacedWeights(files.transformer, CPU, None, True).tensors())
    file = Path(files.transformer.path) / "transformer" / "diffusion_pytorch_model.safetensors"
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(file))]
    mapped = [range(*(int(end, 16) for end in line[0].split("-"))) for line in lines]
    assert all(any(tensor.data_ptr() in span for span in mapped) for tensor in tensors.values())


def test_a_converted_copy_is_written_by_one_and_mapped_by_all(halves: ModelFiles) -> None:
    weights = halves.transformer
    buffer = torch.zeros(loaders.converted_bytes(weights, on_gpu=False), dtype=torch.uint8)
    reader = dict(PlacedWeights(weights, CPU, buffer, False).tensors())
    assert all(not tensor.any() for tensor in reader.values()), "a reader writes nothing"
    writer = dict(PlacedWeights(weights, CPU, buffer, True).tensors())
    stored = tiny_wan.transformer().state_dict()
    for name, tensor in reader.items():
        assert tensor.dtype == torch.float32 and torch.equal(tensor, stored[name].half().float())
        assert tensor.data_ptr() == writer[name].data_ptr()


def test_a_16_bit_network_keeps_named_modules_in_float32(halves: ModelFiles) -> None:
    tensors = dict(PlacedWeights(replace(halves.transformer, dtype="fp16"), CPU, None, True).tensors())
    assert tensors["blocks.0.ffn.net.2.weight"].dtype == torch.float16
    for name in ("blocks.1.scale_shift_table", "scale_shift_table", "condition_embedder.time_embedder.linear_1.weight"):
        assert tensors[name].dtype == torch.float32


@pytest.mark.parametrize(("change", "said"), [
    ({"num_layers": 3}, "missing blocks.2"), ({"num_layers": 1}, "unknown blocks.1"),
    ({"ffn_dim": 64}, r"blocks.0.ffn.net.0.proj.bias is \[128\] and the network has \[64\]"),
])
def test_weights_that_do_not_fit_their_config(files: ModelFiles, change: dict[str, int], said: str) -> None:
    class Changed(PlacedWeights):
        @property
        def config(self) -> dict[str, Any]:
            return {**super().config, **change}

    with pytest.raises(LoadError, match=said):
        models.family("wan").load_transformer(Changed(files.transformer, CPU, None, True))


def test_residency_counts_forgets_and_refuses(files: ModelFiles) -> None:
    loaded = Residency(CPU, Context(0, SimpleNamespace()), lambda text: None)
    with pytest.raises(OutOfStep, match="before it was loaded"):
        loaded.get(files.vae)
    size = loaded.load(files.vae)
    assert size == sum(tensor.numel() * 4 for tensor in tiny_wan.vae().parameters())
    before = loaded.get(files.vae)
    assert loaded.load(files.vae) == size and loaded.get(files.vae) is before
    loaded.unload((files.vae,))
    with pytest.raises(OutOfStep):
        loaded.get(files.vae)
    with pytest.raises(LoadError, match="no part 'clip'"):
        loaded.load(replace(files.vae, part="clip"))


def test_unknown_family_names_the_known_ones() -> None:
    with pytest.raises(InvalidJob, match=r"'wam' is not available here; allowed: .*wan.*; nearest: 'wan'"):
        models.family("wam")


def test_registered_families_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_families", {})
    made = SimpleNamespace(name="none")
    models.register("none", made)
    assert models.family("none") is made


# -- velocity --------------------------------------------------------------------------------------

@pytest.mark.parametrize("size", [(1, 4, 4), (3, 7, 9), (2, 1, 3), (5, 12, 6)])
def test_velocity_is_the_networks_own_on_the_padded_latent(files: ModelFiles, residency: Residency,
                                                           size: tuple[int, ...]) -> None:
    x, text = draw(1, 16, *size), draw(1, 16, 32, seed=1)
    rows, columns = (torch.arange(extent + extent % 2) % extent for extent in size[1:])
    padded = x[:, :, :, rows][..., columns]
    expected = tiny_wan.transformer()(padded, torch.tensor([700.0]), text).sample[..., : size[1], : size[2]]
    found = models.family("wan").velocity(residency.get(files.transformer), x, 0.7, Branch(text))
    assert found.shape == x.shape and found.dtype == torch.float32
    assert torch.equal(found, expected)
    assert 0.3 < found.std() < 5.0


def test_velocity_sees_latent_sigma_and_text(files: ModelFiles, residency: Residency) -> None:
    wan, model = models.family("wan"), residency.get(files.transformer)
    x, text = draw(1, 16, 2, 4, 4), draw(1, 16, 32, seed=1)
    first = wan.velocity(model, x, 0.7, Branch(text))
    for changed in ((x + 0.1, 0.7, text), (x, 0.5, text), (x, 0.7, -text)):
        other = wan.velocity(model, *changed[:2], Branch(changed[2]))
        assert (first - other).abs().max() > 0.05


# -- space -----------------------------------------------------------------------------------------

def test_model_space_and_back(files: ModelFiles) -> None:
    latent = draw(1, 16, 2, 3, 4)
    normal = to_model(latent, files.geometry)
    assert torch.allclose(normal[0, 3], (latent[0, 3] - files.geometry.mean[3]) / files.geometry.std[3])
    assert torch.allclose(to_vae(normal, files.geometry), latent, atol=1e-6)
    assert not to_model(torch.zeros_like(latent), files.geometry).any(), "an empty latent is not shifted"


# -- decode ----------------------------------------------------------------------------------------

def reference_frames(latent: Tensor) -> Tensor:
    """diffusers' own decode of the whole latent."""
    return ((tiny_wan.vae().decode(latent).sample[0] + 1) / 2).clamp(0, 1).movedim(0, -1)


def pieces(files: ModelFiles, residency: Residency, latent: Tensor, tiling: Tiling | None = None) -> list[Tensor]:
    wan = models.family("wan")
    found = list(wan.decode_pieces(residency.get(files.vae), latent, tiling, files.geometry))
    assert len(found) == wan.num_pieces(tuple(latent.shape), tiling, files.geometry)
    return found


def test_streamed_decode_is_exact(files: ModelFiles, residency: Residency) -> None:
    latent = draw(1, 16, 4, 5, 7)
    found = pieces(files, residency, latent)
    assert [len(piece) for piece in found] == [1, 4, 4, 4]
    assert torch.equal(torch.cat(found), reference_frames(latent))
    assert torch.cat(found).std() > 0.05


def test_two_decodes_take_turns_on_one_network(files: ModelFiles, residency: Residency) -> None:
    wan, vae = models.family("wan"), residency.get(files.vae)
    latents = [draw(1, 16, 3, 4, 4, seed=seed) for seed in (1, 2)]
    streams = [wan.decode_pieces(vae, latent, None, files.geometry) for latent in latents]
    turns = list(zip(*streams, strict=True))
    for latent, found in zip(latents, zip(*turns, strict=True), strict=True):
        assert torch.equal(torch.cat(found), reference_frames(latent))


def test_one_tile_is_the_whole(files: ModelFiles, residency: Residency) -> None:
    latent = draw(1, 16, 3, 4, 4)
    assert torch.equal(torch.cat(pieces(files, residency, latent, Tiling())), reference_frames(latent))


def test_tiled_decode_streams_finished_frames_in_order(files: ModelFiles, residency: Residency) -> None:
    latent = draw(1, 16, 6, 10, 13)
    found = pieces(files, residency, latent, Tiling(64, 16, 12, 4))
    assert torch.cat(found).shape == (21, 80, 104, 3)
    assert len(found) == 3 * 2 * 2 and not any(len(piece) for piece in found[:3]) and len(found[3]) == 8


def brute_force(latent: Tensor, cut: tuple[Axis, Axis, Axis]) -> Tensor:
    """Blending written out sample by sample: each box's weight is the product of its distances to its own ends."""
    total = torch.zeros(1, 3, *(axis.samples(axis.size) for axis in cut), dtype=torch.float64)
    weights = torch.zeros_like(total)
    for t in cut[0].starts:
        for y in cut[1].starts:
            for x in cut[2].starts:
                box = latent[:, :, t:t + cut[0].tile, y:y + cut[1].tile, x:x + cut[2].tile]
                samples = fake_decode(box)
                for index in torch.cartesian_prod(*(torch.arange(extent) for extent in samples.shape[2:])).tolist():
                    weight = 1.0
                    for axis, i, extent in zip(cut, index, samples.shape[2:], strict=True):
                        feather = axis.samples(axis.overlap)
                        if feather < extent:
                            weight *= min(1.0, (i + 1) / feather) * min(1.0, (extent - i) / feather)
                    place = tuple(start * axis.scale + i for axis, start, i in zip(cut, (t, y, x), index, strict=True))
                    total[(..., *place)] += samples[(..., *index)].double() * weight
                    weights[(..., *place)] += weight
    return total / weights


def fake_decode(box: Tensor) -> Tensor:
    """Samples that depend on their box, so that a wrong weight shows: twice the size in space, 2t - 1 in time."""
    grown = box[:, :3].repeat_interleave(2, 2).repeat_interleave(2, 3).repeat_interleave(2, 4)[:, :, 1:]
    return grown + box.mean()


def test_blending_is_the_written_out_formula() -> None:
    latent = draw(1, 4, 5, 7, 6)
    cut = (Axis(5, 3, 1, 2, first_short=True), Axis(7, 4, 1, 2), Axis(6, 4, 2, 2))
    assert num_tiles(cut) == 2 * 2 * 2
    found = torch.cat(list(decode_tiles(fake_decode, latent, cut)), dim=2)
    assert torch.allclose(found.double(), brute_force(latent, cut), atol=1e-5)


@pytest.mark.parametrize(("tiling", "expected"), [
    (Tiling(), (16, 2, 64, 8)), (Tiling(64, 64, 8, 8), (2, 1, 8, 2)), (Tiling(96, 32, 64, 64), (16, 8, 12, 3)),
    (Tiling(256, 64, 12, 4), (3, 1, 32, 8)),
])
def test_tiles_are_limited_as_comfyui_limits_them(files: ModelFiles, tiling: Tiling, expected: tuple[int, ...]) -> None:
    time, height, width = axes((1, 16, 21, 60, 104), tiling, files.geometry)
    assert (time.tile, time.overlap, height.tile, height.overlap) == expected
    assert (width.tile, width.overlap) == (height.tile, height.overlap)


# -- encode ----------------------------------------------------------------------------------------

def test_vae_encode_is_the_posteriors_mode(files: ModelFiles, residency: Residency) -> None:
    frames = torch.rand(9, 24, 32, 3, generator=torch.Generator().manual_seed(0))
    expected = tiny_wan.vae().encode(frames.movedim(-1, 0)[None] * 2 - 1).latent_dist.mode()
    found = models.family("wan").vae_encode(residency.get(files.vae), frames, None, files.geometry)
    assert found.shape == (1, 16, 3, 3, 4) and torch.equal(found, expected)


def test_vae_encode_cuts_what_comfyui_cuts(files: ModelFiles, residency: Residency) -> None:
    frames = torch.rand(7, 29, 18, 3, generator=torch.Generator().manual_seed(0))
    wan, vae = models.family("wan"), residency.get(files.vae)
    inner = wan.vae_encode(vae, frames[:5, 2:26, 1:17], None, files.geometry)
    assert torch.equal(wan.vae_encode(vae, frames, None, files.geometry), inner)
    for wrong in (frames[:, :7], frames[:0], frames[..., :1], frames[0]):
        with pytest.raises(InvalidJob, match="at least one of 8x8 pixels"):
            wan.vae_encode(vae, wrong, None, files.geometry)


def fake_encode(box: Tensor) -> Tensor:
    """Cells that depend on their box: every second pixel, and of the frames the first and every second one."""
    return box[:, :, ::2, ::2, ::2] + box.mean()


def test_blending_of_an_encode_is_the_written_out_formula() -> None:
    samples = draw(1, 4, 9, 14, 12)
    cut = (Axis(5, 3, 1, 2, first_short=True), Axis(7, 4, 1, 2), Axis(6, 4, 2, 2))
    total, weights = torch.zeros(1, 4, 5, 7, 6), torch.zeros(5, 7, 6)
    for corner in product(*(axis.starts for axis in cut)):
        t, y, x = (2 * start for start in corner)
        cells = fake_encode(samples[:, :, t:t + 5, y:y + 8, x:x + 8])
        for index in product(*map(range, cells.shape[2:])):
            place = tuple(start + i for start, i in zip(corner, index, strict=True))
            weight = 1.0
            for axis, i, extent in zip(cut, index, cells.shape[2:], strict=True):
                weight *= min(1.0, (i + 1) / axis.overlap) * min(1.0, (extent - i) / axis.overlap)
            total[(..., *place)] += cells[(..., *index)] * weight
            weights[place] += weight
    assert torch.allclose(encode_tiles(fake_encode, samples, 4, cut), total / weights, atol=1e-5)


@pytest.mark.parametrize(("tiling", "expected"), [
    (Tiling(), (16, 2, 64, 8)), (Tiling(64, 64, 8, 8), (2, 1, 8, 8)), (Tiling(96, 32, 64, 64), (16, 8, 12, 4)),
    (Tiling(256, 64, 12, 4), (3, 1, 32, 8)), (Tiling(256, 64, 5, 0), (2, 1, 32, 8)),
])
def test_tiles_of_an_encode_are_limited_as_comfyui_limits_them(files: ModelFiles, tiling: Tiling,
                                                               expected: tuple[int, ...]) -> None:
    time, height, width = encode_axes((83, 480, 832, 3), tiling, files.geometry)
    assert (time.size, height.size, width.size) == (21, 60, 104)
    assert (time.tile, time.overlap, height.tile, height.overlap) == expected
    assert (width.tile, width.overlap) == (height.tile, height.overlap)


@pytest.mark.parametrize(("tile", "overlap"), [(64, 64), (60, 16), (64, 12), (64, -8)])
def test_tiles_that_do_not_fit_the_cells_are_refused(files: ModelFiles, tile: int, overlap: int) -> None:
    tiling = Tiling(tile, overlap)
    EncodeRequest(files.vae, files.geometry, torch.zeros(1, tile, tile, 3), tiling)
    with pytest.raises(InvalidJob, match="must be multiples of 8, and the overlap smaller"):
        EncodeRequest(files.vae, files.geometry, torch.zeros(1, tile, tile + 8, 3), tiling)


def test_a_tiled_encode_hands_the_network_a_tile_at_a_time(files: ModelFiles, residency: Residency,
                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    vae, seen = residency.get(files.vae), []
    encode = vae.encode
    monkeypatch.setattr(vae, "encode", lambda samples: (seen.append(tuple(samples.shape[2:])), encode(samples))[1])
    frames = torch.rand(9, 40, 64, 3, generator=torch.Generator().manual_seed(0))
    found = models.family("wan").vae_encode(vae, frames, Tiling(40, 16, 8, 4), files.geometry)
    assert found.shape == (1, 16, 3, 5, 8) and seen == [(5, 40, 40), (5, 40, 40)] * 2


# -- text ------------------------------------------------------------------------------------------

def test_text_is_the_encoders_output_with_zeros_after_it(files: ModelFiles, residency: Residency) -> None:
    found = residency.get(files.text).encode("a red circle moving left")
    ids = [3, 4, 7, 9, 10, 1]
    padded = torch.tensor([ids + [0] * 10])
    mask = (torch.arange(16) < 6).long()[None]
    expected = tiny_wan.text_encoder()(padded, attention_mask=mask).last_hidden_state
    assert found.shape == (1, 16, 32) and not found[0, 6:].any()
    assert torch.allclose(found[0, :6], expected[0, :6], atol=1e-5)


def test_empty_and_long_texts(files: ModelFiles, residency: Residency) -> None:
    encoder = residency.get(files.text)
    assert encoder.encode("").abs().sum(-1).count_nonzero() == 1
    assert encoder.encode("red " * 40).shape == (1, 41, 32), "a longer text gives a longer embedding, as in ComfyUI"


def test_the_encoder_refuses_unknown_words(residency: Residency, files: ModelFiles) -> None:
    with pytest.raises(InvalidJob, match="'purple'"):
        residency.get(files.text).encode("a purple circle")


def test_weights_stretch_the_way_from_an_empty_text(files: ModelFiles, residency: Residency) -> None:
    encoder = residency.get(files.text)
    plain, empty = encoder.encode("a red circle"), encoder.encode("")
    found = encoder.encode("(a:0.5) (red:1.3) circle")
    assert torch.equal(found[0, 2:], plain[0, 2:])
    assert torch.allclose(found[0, 1], 1.3 * plain[0, 1])
    assert torch.allclose(found[0, 0], empty[0, 0] + 0.5 * (plain[0, 0] - empty[0, 0]))


def test_half_precision_text_encoder_loads(halves: ModelFiles) -> None:
    weights: Weights = replace(halves.text, dtype="bf16")
    encoder = models.family("wan").load_text(PlacedWeights(weights, CPU, None, True))
    found = encoder.encode("a red circle")
    assert found.dtype == torch.float32 and torch.isfinite(found).all()
    assert encoder.model.encoder.embed_tokens.weight is encoder.model.shared.weight
