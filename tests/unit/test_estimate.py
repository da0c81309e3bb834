"""What the host expects of memory, against real networks walked on shapes alone, and against files."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import tiny_wan
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from comfyui_pipedit import loaders
from comfyui_pipedit.host import estimate
from comfyui_pipedit.host.estimate import Work
from comfyui_pipedit.job import Geometry, Tiling, Weights

BF16 = torch.bfloat16
BLOCK = {"num_layers": 1, "cross_attn_norm": True, "qk_norm": "rms_norm_across_heads", "attention_head_dim": 128}
WAN_1B = {**BLOCK, "num_attention_heads": 12, "ffn_dim": 8960}
WAN_14B = {**BLOCK, "num_attention_heads": 40, "ffn_dim": 13824}
VAE_21: dict[str, Any] = {"base_dim": 96}
VAE_22 = {"base_dim": 160, "decoder_base_dim": 256, "z_dim": 48, "is_residual": True, "in_channels": 12,
          "out_channels": 12, "patch_size": 2, "latents_mean": [0.0] * 48, "latents_std": [1.0] * 48}
GEOMETRY = Geometry(channels=16, spatial=8, temporal=4, patch=(1, 2, 2), text_width=4096, text_tokens=512, num_heads=12,
                    mean=(0.0,) * 16, std=(1.0,) * 16)
GEOMETRY_22 = Geometry(channels=48, spatial=16, temporal=4, patch=(1, 2, 2), text_width=4096, text_tokens=512,
                       num_heads=24, mean=(0.0,) * 48, std=(1.0,) * 48)
SHAPE = (1, 16, 21, 60, 104)


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all storages that are alive, and the most there were."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            storage = tensor.untyped_storage() if isinstance(tensor, torch.Tensor) else None
            if storage is not None and storage._cdata not in self.live:
                self.live[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self.live.pop, storage._cdata, None)
        self.peak = max(self.peak, sum(self.live.values()))
        return result


def peak_of(work: Callable[[], object]) -> int:
    """Bytes alive at the peak of a walk on the meta device, beside what there was before."""
    with torch.inference_mode(), torch.device("meta"), LiveBytes() as counter:
        work()
    return counter.peak


def no_products(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **_: Any) -> torch.Tensor:
    """Attention as a GPU's kernels do it: no matrix of scores is ever in memory."""
    return torch.empty_like(query)


@pytest.fixture(scope="module")
def diffusers() -> Any:
    tiny_wan.use_worker_site()
    import diffusers

    return diffusers


@pytest.mark.parametrize("config", [WAN_1B, WAN_14B], ids=["1.3B", "14B"])
def test_a_transformers_activations(diffusers: Any, monkeypatch: pytest.MonkeyPatch, config: Mapping[str, Any]) -> None:
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", no_products)
    with torch.device("meta"):
        network = diffusers.WanTransformer3DModel(**config).to(BF16)
    for name, parameter in network.named_parameters():
        if "time_embedder" in name or "scale_shift_table" in name or "norm2" in name:
            parameter.data = parameter.data.float()
    text = torch.empty(1, 512, 4096, dtype=BF16, device="meta")
    peak = peak_of(lambda: network(torch.empty(SHAPE, dtype=BF16), torch.empty(1), text, return_dict=False))
    expected = estimate.denoising(config, GEOMETRY, SHAPE, ranks=1, value=2)
    assert 0.9 * peak < expected < 1.1 * peak


def test_two_ranks_halve_it_and_pay_for_the_exchange() -> None:
    one, two = (estimate.denoising(WAN_1B, GEOMETRY, SHAPE, ranks, value=2) for ranks in (1, 2))
    assert 0.5 < two / one < 0.52, "1.3B is widest in its feed-forward"
    wide = {**WAN_14B, "ffn_dim": 5120}
    one, two = (estimate.denoising(wide, GEOMETRY, SHAPE, ranks, value=2) for ranks in (1, 2))
    assert 0.6 < two / one < 0.7, "28 bytes in the exchange instead of 22 in the norms"


@pytest.mark.parametrize(("config", "geometry", "shape"), [
    (VAE_21, GEOMETRY, (1, 16, 3, 60, 104)), (VAE_21, GEOMETRY, (1, 16, 3, 30, 52)),
    (VAE_22, GEOMETRY_22, (1, 48, 3, 30, 52)),
], ids=["2.1", "2.1 small", "2.2"])
def test_a_decodes_activations(diffusers: Any, config: dict[str, Any], geometry: Geometry,
                               shape: tuple[int, ...]) -> None:
    from comfyui_pipedit.models import wan_vae

    with torch.device("meta"):
        vae = diffusers.AutoencoderKLWan(**config).to(BF16)
    peak = peak_of(lambda: [wan_vae.to_frames(samples) for samples in wan_vae.stream(vae, torch.empty(shape))])
    expected = estimate.decoding(config, geometry, shape, None, value=2)
    assert 0.9 * peak < expected < 1.1 * peak


def test_a_tile_takes_its_own_pixels_and_its_frames() -> None:
    whole = estimate.decoding(VAE_21, GEOMETRY, SHAPE, None, value=2)
    tiled = estimate.decoding(VAE_21, GEOMETRY, SHAPE, Tiling(tile=256), value=2)
    assert tiled - 2 * 3 * 2 * 256 * 256 * 64 == pytest.approx(whole * 256 * 256 / (480 * 832))


def test_an_encodes_activations(diffusers: Any) -> None:
    from comfyui_pipedit.models import wan_vae

    with torch.device("meta"):
        vae = diffusers.AutoencoderKLWan(**VAE_21).to(BF16)
    for frames in ((9, 240, 416, 3), (33, 240, 416, 3)):
        peak = peak_of(lambda frames=frames: wan_vae.vae_encode(vae, torch.empty(frames), None, GEOMETRY))
        assert 0.9 * peak < estimate.encoding(VAE_21, frames, None, value=2) < 1.1 * peak


def test_a_tiled_encode_takes_one_tile() -> None:
    tile = estimate.encoding(VAE_21, (16, 256, 200, 3), None, value=2)
    assert estimate.encoding(VAE_21, (81, 480, 200, 3), Tiling(tile=256, temporal_tile=16), value=2) == tile


def test_weights_of_a_file_as_a_gpu_holds_them(tmp_path: Path) -> None:
    tiny_wan.use_worker_site()
    files = loaders.inspect(tiny_wan.write_model(tmp_path / "model"))
    values = sum(parameter.numel() for parameter in tiny_wan.transformer().parameters())
    assert estimate.weight_bytes(files.transformer) == 4 * values
    half = Weights("wan", "transformer", files.transformer.path, "bf16", files.transformer.stamp)
    assert 2 * values < estimate.weight_bytes(half) < 2.5 * values, "norms and tables stay in float32"
    assert estimate.weight_bytes(Weights("toy", "transformer", "")) == 0


def test_work_is_named_by_what_a_person_chose_and_equal_work_is_one_key(tmp_path: Path) -> None:
    weights = Weights("wan", "transformer", "")
    work = Work("denoise", weights, GEOMETRY, SHAPE, ranks=2)
    assert work.label == "832x480x81" and work == Work("denoise", weights, GEOMETRY, SHAPE, ranks=2)
    assert work.of_length(17).label == "832x480x65"
    assert Work("encode", weights, GEOMETRY, (33, 240, 416, 3)).label == "416x240x33"
    assert Work("encode", Weights("wan", "text", "")).label == "a text"
    assert estimate.activation_bytes(work) == 0, "no file tells"


def test_the_longest_clip_that_fits(tmp_path: Path) -> None:
    tiny_wan.use_worker_site()
    files = loaders.inspect(tiny_wan.write_model(tmp_path / "model"))
    work = Work("denoise", files.transformer, files.geometry, (1, 16, 21, 60, 104))
    most = estimate.activation_bytes(work)
    assert estimate.longest(work, most) == 81
    assert estimate.longest(work, most - 1) == 77
    assert estimate.longest(work, most // 2) == 37
    assert estimate.longest(work, 0) == 0
