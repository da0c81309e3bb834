"""Core's Wan nodes with our vae against core's, and Multi-GPU Sampler on two ranks against KSampler behind them, in one
graph of real ComfyUI with the same weights in their two file forms."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import tiny_wan
import wan_models
from graphs import LOADER, SAMPLER, Graph, node
from server import Client, ComfyServer
from torch import Tensor

PACK = Path(__file__).resolve().parent / "wan_pack"
LIMIT, TOLERANCE, SHIFT = 120.0, 1e-4, 8.0
SIZE = {"width": 48, "height": 32, "length": 9}
WIDE = {"width": 64, "height": 32, "length": 9}
BATCH = {**SIZE, "batch_size": 1}


@pytest.fixture(scope="module")
def wan_server(comfy_folder: Path, repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComfyServer]:
    """ComfyUI with all variants in both file forms."""
    base = tmp_path_factory.mktemp("wan")
    tiny_wan.use_worker_site()
    for variant in tiny_wan.VARIANTS:
        wan_models.write_variant(base / "models", variant)
    with ComfyServer.start(comfy_folder, base, packs=[repository, PACK]) as server:
        yield server


@pytest.fixture
def wan(wan_server: ComfyServer) -> Iterator[Client]:
    with wan_server.client() as client:
        yield client


# Each builder: (vae link, prefix) -> nodes; the one named PREFIX + "made" puts out positive, negative, latent.
Links = dict[str, list[Any]]
TEXTS: Links = {"positive": ["red", 0], "negative": ["blue", 0]}


def image_to_video(vae: list[Any], prefix: str) -> Graph:
    return {"made": node("WanImageToVideo", vae=vae, start_image=["red", 1], **TEXTS, **BATCH)}


def with_vision(vae: list[Any], prefix: str) -> Graph:
    return {"made": node("WanImageToVideo", vae=vae, start_image=["red", 1], clip_vision_output=["red", 3], **TEXTS,
                         **{**BATCH, "batch_size": 2})}


def ends(vae: list[Any], prefix: str) -> Graph:
    return {"made": node("WanFirstLastFrameToVideo", vae=vae, start_image=["red", 1], end_image=["blue", 1],
                         clip_vision_start_image=["red", 3], clip_vision_end_image=["blue", 3], **TEXTS, **BATCH)}


def inpaint(vae: list[Any], prefix: str) -> Graph:
    return {"made": node("WanFunInpaintToVideo", vae=vae, end_image=["red", 1], **TEXTS, **BATCH)}


def control(vae: list[Any], prefix: str) -> Graph:
    return {"made": node("WanFunControlToVideo", vae=vae, start_image=["red", 1], control_video=["blue", 1],
                         clip_vision_output=["red", 3], **TEXTS, **BATCH)}


def control_with_mask(vae: list[Any], prefix: str) -> Graph:
    return {"made": node("Wan22FunControlToVideo", vae=vae, ref_image=["red", 1], control_video=["blue", 1], **TEXTS,
                         **BATCH)}


def guided(vae: list[Any], prefix: str) -> Graph:
    """Two guides, one after the other, with a reference image each."""
    return {"first": node("WanVaceToVideo", vae=vae, control_video=["red", 1], control_masks=["red", 2],
                          reference_image=["blue", 1], strength=0.7, **TEXTS, **WIDE, batch_size=1),
            "made": node("WanVaceToVideo", vae=vae, control_video=["blue", 1], reference_image=["red", 1], strength=1.4,
                         positive=[f"{prefix}first", 0], negative=[f"{prefix}first", 1], **WIDE, batch_size=1)}


def from_image(vae: list[Any], prefix: str) -> Graph:
    size = {"width": 64, "height": 96, "length": 9, "batch_size": 2}
    return {"made": node("Wan22ImageToVideoLatent", vae=vae, start_image=["red", 1], **size)}


def masked(vae: list[Any], prefix: str) -> Graph:
    """A video that is painted over where a mask of its frames says so."""
    return {"encoded": node("VAEEncode", pixels=["red", 1], vae=vae),
            "made": node("SetLatentNoiseMask", samples=[f"{prefix}encoded", 0], mask=["red", 2])}


CASES: dict[str, tuple[str, Any, bool]] = {
    "image-2.1": ("i2v-2.1", with_vision, True), "image-2.2": ("i2v-2.2", image_to_video, True),
    "ends": ("flf-2.1", ends, True), "inpaint": ("i2v-2.2", inpaint, True), "control": ("control-2.1", control, True),
    "control-2.2": ("i2v-2.2", control_with_mask, False),
    "vace": ("vace", guided, True), "ti2v": ("ti2v", from_image, True), "mask": ("t2v", masked, True),
}
"""Variant, builder, and whether the variant can make a clip of it; LATENT alone where the texts are not led through."""
LATENT_ALONE = (from_image, masked)


def graph(variant: str, build: Any, sample: bool) -> Graph:
    """Nodes "core" and "pool" save what the builder's node gave, "core-clip" and "pool-clip" the sampled latents."""
    inputs = {"frames": 5, "height": 40, "width": 56}
    both: Graph = {
        "unet": node("UNETLoader", unet_name=wan_models.file_of(variant), weight_dtype="default"),
        "shifted": node("ModelSamplingSD3", model=["unet", 0], shift=SHIFT),
        "vae": node("VAELoader", vae_name=wan_models.vae_file_of(variant)),
        "loader": node("PipeDiTLoader", **{**LOADER, "unet_name": f"diffusers/wan-{variant}", "devices": "cpu:2"}),
        "red": node("WanInputs", seed=1, **inputs), "blue": node("WanInputs", seed=2, **inputs),
    }
    samplers = {"core": ("KSampler", {"model": ["shifted", 0]}),
                "pool": ("PipeDiTSampler", {"model": ["loader", 0], "shift": SHIFT})}
    for side, vae in (("core", ["vae", 0]), ("pool", ["loader", 2])):
        both |= {f"{side}-{name}": made for name, made in build(vae, f"{side}-").items()}
        made = f"{side}-made"
        alone = build in LATENT_ALONE
        links: Links = TEXTS if alone else {"positive": [made, 0], "negative": [made, 1]}
        latent = [made, 0 if alone else 2]
        both[side] = node("WanSave", name=f"{side}-{build.__name__}", latent=latent, **links)
        if sample:
            kind, model = samplers[side]
            both[f"{side}-sampler"] = node(kind, latent_image=latent, **links, **model, **{**SAMPLER, "steps": 2})
            both[f"{side}-clip"] = node("WanSave", name=f"{side}-{build.__name__}-clip", latent=[f"{side}-sampler", 0])
    return both


def run(client: Client, made: Graph) -> dict[str, dict[str, Tensor]]:
    """What each WanSave wrote, by its node."""
    outcome = client.run(made, LIMIT)
    assert outcome.status == "success", f"{outcome.error.get('node_type')}: {outcome.error.get('exception_message')}"
    names = [name for name, entry in made.items() if entry["class_type"] == "WanSave"]
    return {name: safetensors.torch.load(client.view(**outcome.files(name)[0])) for name in names}


def worst(ours: dict[str, Tensor], core: dict[str, Tensor]) -> float:
    """The largest max|a - b| / max|b| of tensors of the same name."""
    assert ours.keys() == core.keys() and all(ours[name].shape == core[name].shape for name in core)
    return max(float((ours[name] - core[name]).abs().max() / core[name].abs().max().clamp(min=1e-9)) for name in core)


@pytest.mark.parametrize("name", CASES)
def test_nodes_of_core_work_on_our_vae_and_lead_to_the_same_clip(wan: Client, name: str) -> None:
    variant, build, sample = CASES[name]
    found = run(wan, graph(variant, build, sample))
    assert worst(found["pool"], found["core"]) < TOLERANCE
    if sample:
        assert worst(found["pool-clip"], found["core-clip"]) < TOLERANCE
        assert found["core-clip"]["latent.samples"].std() > 0.1


def test_the_frames_of_reference_images_are_cut_off_the_latent(wan: Client) -> None:
    made = graph("vace", guided, True)
    for side in ("core", "pool"):
        made[f"{side}-cut"] = node("TrimVideoLatent", samples=[f"{side}-sampler", 0], trim_amount=[f"{side}-made", 3])
        made[f"{side}-clip"] = node("WanSave", name=f"{side}-cut", latent=[f"{side}-cut", 0])
    found = run(wan, made)
    assert found["pool-clip"]["latent.samples"].shape == (1, 16, 3, 4, 8)
    assert worst(found["pool-clip"], found["core-clip"]) < TOLERANCE


@pytest.mark.parametrize("tiles", [None, {"tile_size": 64, "overlap": 32, "temporal_size": 8, "temporal_overlap": 4}])
def test_decode_of_wan_2_2s_vae(wan: Client, tiles: dict[str, int] | None) -> None:
    made = graph("ti2v", from_image, False)
    for side, vae in (("core", ["vae", 0]), ("pool", ["loader", 2])):
        kind, options = ("VAEDecode", {}) if tiles is None else ("VAEDecodeTiled", tiles)
        made[f"{side}-frames"] = node(kind, samples=["core-made", 0], vae=vae, **options)
        made[f"{side}-image"] = node("WanSave", name=f"{side}-image", image=[f"{side}-frames", 0])
    found = run(wan, made)
    assert found["pool-image"]["image"].shape == (18, 96, 64, 3)
    assert worst(found["pool-image"], found["core-image"]) < TOLERANCE


@pytest.mark.parametrize("variant", ["ti2v", "t2v"])
def test_tiled_encode_of_both_vaes(wan: Client, variant: str) -> None:
    made = graph(variant, masked, False)
    made["red"] = node("WanInputs", seed=1, frames=15, height=70, width=133)
    for side in ("core", "pool"):
        encoded = made[f"{side}-encoded"]
        encoded["class_type"] = "VAEEncodeTiled"
        encoded["inputs"] |= {"tile_size": 64, "overlap": 32, "temporal_size": 8, "temporal_overlap": 4}
    found = run(wan, made)
    shape = {"ti2v": (1, 48, 4, 4, 8), "t2v": (1, 16, 4, 8, 16)}[variant]
    assert found["pool"]["latent.samples"].shape == shape and found["core"]["latent.samples"].std() > 0.05
    assert worst(found["pool"], found["core"]) < TOLERANCE


def test_an_image_of_another_length_is_an_error_with_both_sizes(wan: Client) -> None:
    made = graph("i2v-2.2", image_to_video, True)
    made["longer"] = node("EmptyHunyuanLatentVideo", **{**SIZE, "length": 13}, batch_size=1)
    made = {name: entry for name, entry in made.items() if not name.startswith("core")}
    made["pool-sampler"]["inputs"]["latent_image"] = ["longer", 0]
    outcome = wan.run(made, LIMIT)
    message = outcome.error["exception_message"]
    assert outcome.error["node_type"] == "PipeDiTSampler" and message.startswith("Multi-GPU Sampler: ")
    assert "[1, 16, 3, 4, 6]" in message and "[1, 16, 4, 4, 6]" in message
