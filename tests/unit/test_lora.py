"""What is known of a LoRA file from its header, in every naming style, and what is said when it does not fit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import lora_files
import pytest
import tiny_wan
import torch
from torch import Tensor

from comfyui_pipedit.errors import LoadError
from comfyui_pipedit.loaders.lora import LoraFile, fit, read_lora
from comfyui_pipedit.loaders.lora_keys import diffusers_name

Shapes = dict[str, tuple[int, ...]]
ORIGINAL_NAMES = [
    "patch_embedding.weight", "time_embedding.0.weight", "time_embedding.2.bias", "time_projection.1.weight",
    "text_embedding.0.bias", "text_embedding.2.weight", "head.head.weight", "head.modulation", "img_emb.proj.0.weight",
    "img_emb.proj.1.weight", "img_emb.proj.3.bias", "img_emb.proj.4.weight", "vace_patch_embedding.weight",
    "vace_blocks.0.before_proj.weight", "vace_blocks.7.after_proj.bias", "vace_blocks.3.self_attn.q.weight",
    *[f"blocks.17.{part}" for part in (
        "modulation", "norm3.weight", "norm3.bias", "ffn.0.weight", "ffn.2.bias", "self_attn.q.weight",
        "self_attn.k.bias", "self_attn.v.weight", "self_attn.o.weight", "self_attn.norm_q.weight",
        "cross_attn.norm_k.weight", "cross_attn.k_img.weight", "cross_attn.v_img.bias",
        "cross_attn.norm_k_img.weight", "cross_attn.q.weight", "cross_attn.o.bias")]]


@pytest.fixture(scope="module")
def shapes() -> Shapes:
    tiny_wan.use_worker_site()
    return {name: tuple(tensor.shape) for name, tensor in tiny_wan.transformer().state_dict().items()}


def half(name: str) -> str:
    """Renames block 1."""
    return name.replace("blocks.1.", "blokcs.1.")


def everything(name: str) -> str:
    return name.replace("diffusion_model.", "other.x.")


@pytest.mark.parametrize("name", ORIGINAL_NAMES)
def test_names_are_renamed_as_diffusers_renames_them(name: str) -> None:
    tiny_wan.use_worker_site()
    from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers

    (theirs,) = convert_wan_transformer_to_diffusers({name: torch.zeros(1)})
    assert diffusers_name(f"diffusion_model.{name}") == theirs
    assert diffusers_name(theirs) == theirs


@pytest.mark.parametrize("style", lora_files.STYLES)
def test_every_style_says_the_same(style: str, shapes: Shapes, tmp_path: Path) -> None:
    tensors = lora_files.state(style, shapes, differences=True)
    file = read_lora(lora_files.write(tmp_path / "a.safetensors", tensors))
    low = {adapter.module: adapter for adapter in file.adapters if adapter.low_rank}
    assert set(low) == set(lora_files.MODULES.values())
    assert {(adapter.rank, adapter.alpha, adapter.scale) for adapter in low.values()} == {(4, 3.0, 0.75)}
    assert all(tensors[adapter.tensors[0]].shape == adapter.shapes[0] for adapter in low.values())
    whole = {adapter.parameter for adapter in file.adapters if not adapter.low_rank}
    assert whole == {"blocks.1.norm2.weight", "blocks.0.attn1.norm_q.weight", "blocks.0.ffn.net.0.proj.bias",
                     "blocks.1.attn2.to_v.bias", "proj_out.bias"}
    report = fit(file, shapes)
    assert report.complete and len(report.matched) == len(file.adapters) and not file.strange
    assert report.text == "a.safetensors: 30 weights take effect"


def test_without_alpha_the_scale_is_one(shapes: Shapes, tmp_path: Path) -> None:
    file = read_lora(lora_files.write(tmp_path / "a.safetensors", lora_files.state("comfy", shapes, alpha=None)))
    assert {(adapter.alpha, adapter.scale) for adapter in file.adapters} == {(None, 1.0)}


def test_half_of_the_names_unknown_is_reported(shapes: Shapes, tmp_path: Path) -> None:
    file = read_lora(lora_files.write(tmp_path / "a.safetensors", lora_files.state("comfy", shapes), half))
    report = fit(file, shapes)
    assert {adapter.parameter.startswith("blocks.1.") for adapter in report.matched} == {False}
    assert len(report.matched) == 15 and len(report.unmatched) == 10 and not report.complete
    assert "15 weights take effect, 10 have no place in this model (diffusion_model.blokcs.1." in report.text


def test_all_names_unknown_is_an_error(shapes: Shapes, tmp_path: Path) -> None:
    file = read_lora(lora_files.write(tmp_path / "a.safetensors", lora_files.state("comfy", shapes), everything))
    with pytest.raises(LoadError, match=r"a.safetensors changes nothing in this model: 25 of its names have no place"):
        fit(file, shapes)


@pytest.mark.parametrize(("key", "guess"), [
    ("lora_unet_double_blocks_0_img_attn_proj.lora_down.weight", "Flux"),
    ("transformer.single_transformer_blocks.3.attn.to_q.lora_A.weight", "Flux"),
    ("diffusion_model.double_blocks.0.img_mod.linear.lora_A.weight", "HunyuanVideo"),
    ("lora_unet_input_blocks_4_1_transformer_blocks_7_attn1_to_q.lora_down.weight", "SDXL"),
    ("lora_unet_mid_block_attentions_0_proj_in.lora_down.weight", "Stable Diffusion 1.5"),
    ("transformer.transformer_blocks.0.attn1.to_q.lora_A.weight", "LTX-Video"),
    ("transformer_blocks.0.img_mlp.net.2.lora_A.weight", "Qwen-Image"),
    ("diffusion_model.blocks.0.self_attn.q.weight", "the weights of a whole model"),
    ("blocks.99.self_attn.q.lora_A.weight", "another Wan"),
])
def test_a_file_for_something_else_is_named(key: str, guess: str, shapes: Shapes, tmp_path: Path) -> None:
    tensors = {key: torch.zeros(2, 64), key.replace("_A.", "_B.").replace("_down.", "_up."): torch.zeros(64, 2)}
    file = read_lora(lora_files.write(tmp_path / "a.safetensors", tensors))
    with pytest.raises(LoadError, match=f"changes nothing in this model.*it looks like.*{guess}"):
        fit(file, shapes)


@pytest.mark.parametrize(("suffixes", "kind"), [
    (("lora_A.weight", "lora_B.weight", "dora_scale"), "DoRA"),
    (("lora_A.weight", "lora_B.weight", "lora_magnitude_vector"), "DoRA"),
    (("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b", "alpha"), "LoHa"), (("lokr_w1", "lokr_w2"), "LoKr"),
    (("oft_blocks",), "OFT"), (("lora_down.weight", "lora_up.weight", "lora_mid.weight"), "LoCon"),
    (("set_weight",), "a replaced weight"),
])
def test_kinds_that_are_not_handled_are_counted(suffixes: tuple[str, ...], kind: str, shapes: Shapes,
                                                tmp_path: Path) -> None:
    odd = {f"diffusion_model.blocks.{block}.ffn.0.{suffix}": torch.ones(1) for block in (0, 1) for suffix in suffixes}
    only = read_lora(lora_files.write(tmp_path / "only.safetensors", odd))
    with pytest.raises(LoadError, match=f"changes nothing.*: 2 of its weights use {kind}"):
        fit(only, shapes)
    good = {f"diffusion_model.blocks.0.ffn.2.{name}": tensor for name, tensor in (
        ("lora_A.weight", torch.ones(2, 128)), ("lora_B.weight", torch.ones(64, 2)))}
    mixed = fit(read_lora(lora_files.write(tmp_path / "mixed.safetensors", {**odd, **good})), shapes)
    assert [adapter.module for adapter in mixed.matched] == ["blocks.0.ffn.net.2"] and not mixed.complete
    assert f"2 use {kind}" in mixed.text and "which is not supported" in mixed.text


def image_keys() -> dict[str, Tensor]:
    module = "diffusion_model.blocks.0.cross_attn.k_img"
    return {f"{module}.lora_A.weight": torch.ones(2, 64), f"{module}.lora_B.weight": torch.ones(64, 2),
            "diffusion_model.img_emb.proj.4.diff": torch.ones(64)}


def test_image_keys_are_harmless_on_a_model_without_them(shapes: Shapes, tmp_path: Path) -> None:
    tensors = {**lora_files.state("comfy", shapes), **image_keys()}
    file = read_lora(lora_files.write(tmp_path / "a.safetensors", tensors))
    report = fit(file, shapes)
    assert report.complete and len(report.harmless) == 2
    assert report.text == "a.safetensors: 25 weights take effect, 2 image weights are not needed"
    images = {**shapes, "blocks.0.attn2.add_k_proj.weight": (64, 64)}
    with_images = fit(file, images)
    assert len(with_images.matched) == 26
    assert with_images.unmatched == ("condition_embedder.image_embedder.norm2.weight",)


def test_another_size_is_an_error_with_both_shapes(shapes: Shapes, tmp_path: Path) -> None:
    wide = {name: (shape[0] * 2, *shape[1:]) for name, shape in shapes.items()}
    file = read_lora(lora_files.write(tmp_path / "a.safetensors", lora_files.state("comfy", wide)))
    with pytest.raises(LoadError, match=r"another size: .*attn2.to_\w\S* is \[64, 64\] in the model and \[128, 64\]"):
        fit(file, shapes)


def test_an_input_layer_of_another_size_is_left_alone(shapes: Shapes, tmp_path: Path) -> None:
    variant = {**shapes, "patch_embedding.weight": (64, 36, 1, 2, 2)}
    report = fit(read_lora(lora_files.write(tmp_path / "a.safetensors", lora_files.state("comfy", shapes))), variant)
    assert len(report.matched) == 24 and not report.complete
    assert "patch_embedding.weight is [64, 36, 1, 2, 2] in the model and [64, 16, 1, 2, 2] in the LoRA" in report.text


def test_whole_differences_do_not_go_onto_fp8(shapes: Shapes, tmp_path: Path) -> None:
    tensors = {**lora_files.state("comfy", shapes), "diffusion_model.blocks.0.ffn.0.diff_b": torch.ones(128)}
    tensors = {name: tensor for name, tensor in tensors.items() if ".blocks.1.ffn.2." not in name}
    tensors["diffusion_model.blocks.1.ffn.2.diff"] = torch.ones(64, 128)
    file = read_lora(lora_files.write(tmp_path / "a.safetensors", tensors))
    weights = {name for name in shapes if name.startswith("blocks.") and name.endswith(".weight")}
    report = fit(file, shapes, weights)
    assert len(report.matched) == 25 and "1 use a whole difference on an fp8 weight" in report.text
    assert fit(file, shapes).complete


def orphan(shapes: Shapes) -> dict[str, Tensor]:
    tensors = lora_files.state("comfy", shapes)
    del tensors["diffusion_model.blocks.0.ffn.0.lora_down.weight"]
    return {**tensors, "diffusion_model.something": torch.ones(1)}


def test_tensors_of_no_adapter_are_named(shapes: Shapes, tmp_path: Path) -> None:
    report = fit(read_lora(lora_files.write(tmp_path / "a.safetensors", orphan(shapes))), shapes)
    assert sorted(report.unmatched) == ["diffusion_model.blocks.0.ffn.0", "diffusion_model.something"]


def twice(path: Path) -> None:
    module = "blocks.0.ffn.2.lora_%s.weight"
    lora_files.write(path, {f"{prefix}{module % part}": torch.ones(2, 2) for prefix in ("", "diffusion_model.")
                            for part in "AB"})


def unequal_ranks(path: Path) -> None:
    lora_files.write(path, {"blocks.0.ffn.2.lora_A.weight": torch.ones(2, 128),
                            "blocks.0.ffn.2.lora_B.weight": torch.ones(64, 3)})


def cut_off(path: Path) -> None:
    unequal_ranks(path)
    path.write_bytes(path.read_bytes()[:-8])


@pytest.mark.parametrize(("damage", "message"), [
    (lambda path: None, "cannot be read: No such file"), (twice, "changes blocks.0.ffn.net.2.weight twice"),
    (unequal_ranks, r"is \[2, 128\] and .* is \[64, 3\]: no rank fits both"), (cut_off, "cut off"),
    (lambda path: path.write_text("<html>not found</html>"), "not a safetensors file"),
], ids=["missing", "twice", "ranks", "cut", "html"])
def test_damaged_files_are_refused(damage: Callable[[Path], None], message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    damage(path)
    with pytest.raises(LoadError, match=message):
        read_lora(path)


def test_a_file_is_opened_only_as_it_was_read(shapes: Shapes, tmp_path: Path) -> None:
    path = lora_files.write(tmp_path / "a.safetensors", lora_files.state("comfy", shapes))
    file: LoraFile = read_lora(path)
    with file.open() as read:
        assert read("diffusion_model.blocks.0.ffn.0.lora_up.weight").shape == (128, 4)
    lora_files.write(path, lora_files.state("comfy", shapes, rank=5))
    with pytest.raises(LoadError, match="was changed after the graph had read it"), file.open():
        pass
    assert read_lora(path).use(0.5) != file.use(0.5)
