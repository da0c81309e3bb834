"""What is known of a model folder without loading it, and what is said of a damaged one."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import tiny_wan
import torch

from comfyui_pipedit import loaders
from comfyui_pipedit.errors import InvalidJob, LoadError
from comfyui_pipedit.job import ModelFiles, Weights
from comfyui_pipedit.loaders.precision import Rules, Slot, converted_layout, layout_bytes
from comfyui_pipedit.loaders.safetensors_file import Entry, read_header

INDEX = "diffusion_pytorch_model.safetensors.index.json"
Damage = Callable[[Path], None]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tiny_wan.use_worker_site()
    return tiny_wan.write_model(tmp_path_factory.mktemp("models") / "tiny", "float16", shards=True)


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(whole, tmp_path / "tiny"))


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_inspect_reads_geometry_shift_and_vocabulary(whole: Path) -> None:
    files = loaders.inspect(whole)
    geometry = files.geometry
    assert (geometry.channels, geometry.spatial, geometry.temporal, geometry.patch) == (16, 8, 4, (1, 2, 2))
    assert (geometry.text_width, geometry.text_tokens, geometry.num_heads) == (32, 16, 4)
    assert len(geometry.mean) == len(geometry.std) == 16 and geometry.mean[0] == -0.7571 and geometry.std[-1] == 1.916
    assert files.shift == 3.0 and files.vocabulary == tiny_wan.WORDS and files.name == "tiny"
    assert files.text is not None and files.vae is not None
    assert {files.transformer.part, files.vae.part, files.text.part} == {"transformer", "vae", "text"}
    assert files.transformer.path == str(whole)


def test_inspect_imports_no_model_code(whole: Path) -> None:
    code = (f"import sys; sys.path.insert(0, {str(tiny_wan.ROOT)!r}); from comfyui_pipedit import loaders; "
            f"files = loaders.inspect({str(whole)!r}); loaders.converted_bytes(files.transformer, on_gpu=False); "
            "print(sorted({'diffusers', 'transformers', 'torch.distributed.fsdp', 'tokenizers'} & set(sys.modules)))")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(("name", "parts"), [
    ("transformer/*-00001-of-*.safetensors", ["transformer"]), ("transformer/config.json", ["transformer"]),
    ("vae/diffusion_pytorch_model.safetensors", ["vae"]), ("text_encoder/model.safetensors", ["text"]),
    ("tokenizer/tokenizer.json", ["text"]), ("model_index.json", [])])
def test_a_replaced_file_is_another_network(name: str, parts: list[str], folder: Path) -> None:
    before, path = loaders.inspect(folder), next(folder.glob(name))
    assert loaders.inspect(folder) == before
    newer = path.with_name("newer")
    shutil.copyfile(path, newer)  # of the same size
    newer.replace(path)
    after = loaders.inspect(folder)
    changed = [old.part for old, new in zip(networks(before), networks(after), strict=True) if old != new]
    assert changed == parts
    assert all(loaders.open_weights(weights).entries for weights in networks(after))
    for weights in networks(before):
        if weights.part in changed:
            with pytest.raises(LoadError, match="was changed after the graph had read it; queue again"):
                loaders.open_weights(weights)
            assert loaders.open_weights(replace(weights, stamp="")).entries


def networks(files: ModelFiles) -> list[Weights]:
    assert files.vae is not None and files.text is not None
    return [files.transformer, files.vae, files.text]


def test_a_folder_without_a_text_encoder(folder: Path) -> None:
    index = folder / "model_index.json"
    edit(index, text_encoder=[None, None])
    files = loaders.inspect(folder)
    assert files.text is None and files.vocabulary == ()


def test_shift_and_text_length_defaults(folder: Path) -> None:
    (folder / "scheduler" / "scheduler_config.json").unlink()
    edit(folder / "tokenizer" / "tokenizer_config.json", model_max_length=10**30)
    files = loaders.inspect(folder)
    assert files.shift == 8.0 and files.geometry.text_tokens == 512


def test_an_open_vocabulary_is_not_listed(folder: Path) -> None:
    edit(folder / "tokenizer" / "tokenizer.json", model={"type": "Unigram", "vocab": [["a", 0.0]]})
    assert loaders.inspect(folder).vocabulary == ()


@pytest.mark.parametrize(("damage", "said"), [
    (lambda f: shutil.rmtree(f), "is missing: neither a folder nor a file"),
    (lambda f: (f / "model_index.json").unlink(), r"model_index.json is missing"),
    (lambda f: (f / "model_index.json").write_text("{"), r"model_index.json cannot be read as JSON"),
    (lambda f: (f / "model_index.json").write_text("[]"), "should hold a JSON object, not a list"),
    (lambda f: (f / "transformer" / "config.json").unlink(), r"transformer/config.json is missing"),
    (lambda f: edit(f / "model_index.json", transformer=["diffusers", "FluxTransformer2DModel"]),
     "FluxTransformer2DModel; only WanTransformer3DModel and WanVACETransformer3DModel"),
    (lambda f: edit(f / "model_index.json", vae=[None, None]), "names no vae"),
    (lambda f: edit(f / "transformer" / "config.json", in_channels=32), "32 input and 16 output channels; handled are"),
    (lambda f: edit(f / "vae" / "config.json", latents_mean=[0.0] * 4), "4 means and 16 stds do not fit"),
    (lambda f: edit(f / "vae" / "config.json", latents_std=None), "has no 'latents_std'"),
    (lambda f: edit(f / "text_encoder" / "config.json", d_model=64), "d_model 64 is not the transformer's text_dim 32"),
    (lambda f: (f / "tokenizer" / "tokenizer.json").unlink(), "tokenizer.json is missing"),
    (lambda f: edit(f / "scheduler" / "scheduler_config.json", flow_shift=-1), "must be a number above 0, not -1"),
])
def test_inspect_names_the_file_and_what_is_wrong(folder: Path, damage: Damage, said: str) -> None:
    damage(folder)
    with pytest.raises(LoadError, match=said):
        loaders.inspect(folder)


def first_shard(folder: Path) -> Path:
    return sorted((folder / "transformer").glob("*.safetensors"))[0]


@pytest.mark.parametrize(("damage", "said"), [
    (lambda f: first_shard(f).unlink(), r"00001-of-.* is missing: shard 1 of"),
    (lambda f: first_shard(f).write_bytes(b"not a file of tensors at all"), "not a safetensors file, or it is cut off"),
    (lambda f: first_shard(f).write_bytes(first_shard(f).read_bytes()[:-100]), "cut off: tensor .* download it again"),
    (lambda f: [shard.unlink() for shard in (f / "transformer").glob("*.safetensors*")],
     "has no diffusion_pytorch_model.safetensors .*found: config.json"),
    (lambda f: (f / "transformer" / INDEX).write_text("{}"), "has no weight_map"),
    (lambda f: (f / "transformer" / INDEX).write_text(json.dumps({"weight_map": {"x": "../vae/x"}})), "a file beside"),
])
def test_damaged_weights_are_named(folder: Path, damage: Damage, said: str) -> None:
    files = loaders.inspect(folder)
    damage(folder)
    with pytest.raises(LoadError, match=said):
        loaders.open_weights(files.transformer)


def test_shards_are_read_whole_and_as_stored(whole: Path) -> None:
    weights = loaders.open_weights(loaders.inspect(whole).transformer)
    assert len({entry.file for entry in weights.entries.values()}) > 2 and weights.stored_dtype == torch.float16
    expected = {name: value.half() for name, value in tiny_wan.transformer().state_dict().items()}
    found = dict(weights.mapped())
    assert found.keys() == expected.keys() == weights.entries.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert all(weights.entries[name].shape == tuple(found[name].shape) for name in found)


def test_converted_bytes_are_needed_only_where_the_dtype_changes(whole: Path, tmp_path: Path) -> None:
    weights = loaders.inspect(whole).transformer
    values = sum(parameter.numel() for parameter in tiny_wan.transformer().parameters())
    assert values * 4 <= loaders.converted_bytes(weights, on_gpu=False) < values * 4 + 64 * 200
    assert loaders.converted_bytes(weights, on_gpu=True) == 0
    assert loaders.converted_bytes(replace(weights, path=""), on_gpu=False) == 0
    halves = loaders.converted_bytes(replace(weights, dtype="fp16"), on_gpu=False)
    assert 0 < halves < values, "only the modules that stay float32 are converted"
    single = tiny_wan.write_model(tmp_path / "single")
    assert loaders.converted_bytes(loaders.inspect(single).transformer, on_gpu=False) == 0


def test_layout_slots_do_not_overlap() -> None:
    shapes = {"b": (3, 5), "a": (7,), "c": ()}
    entries = {name: Entry(name, torch.float16, shape, Path("f")) for name, shape in shapes.items()}
    layout = converted_layout({**entries, "kept": Entry("kept", torch.float32, (4,), Path("f"))}, (),
                              Rules(torch.float32))
    assert list(layout) == ["a", "b", "c"]
    ends = [slot.offset + slot.num_bytes for slot in layout.values()]
    assert all(slot.offset % 64 == 0 for slot in layout.values())
    assert all(end <= slot.offset for end, slot in zip(ends, list(layout.values())[1:], strict=False))
    assert layout_bytes(layout) == ends[-1] and layout_bytes({}) == 0
    buffer = torch.zeros(layout_bytes(layout), dtype=torch.uint8)
    for value, slot in enumerate(layout.values(), start=1):
        slot.view(buffer).fill_(value)
    assert [slot.view(buffer).sum().item() for slot in layout.values()] == [7, 30, 3]


def test_slot_is_a_view_of_the_buffer() -> None:
    buffer = torch.zeros(256, dtype=torch.uint8)
    slot = Slot(torch.float32, (2, 3), 64)
    slot.view(buffer)[1, 2] = math.pi
    assert buffer[64:88].view(torch.float32)[5].item() == pytest.approx(math.pi)


@pytest.mark.parametrize(("name", "stored", "expected"), [
    ("blocks.0.attn1.to_q.weight", torch.float16, torch.bfloat16),
    ("blocks.0.norm2.weight", torch.float16, torch.float32),
    ("blocks.0.attn1.norm_q.weight", torch.float16, torch.bfloat16),
    ("step", torch.int64, torch.int64),
])
def test_named_modules_stay_float32(name: str, stored: torch.dtype, expected: torch.dtype) -> None:
    assert Rules(torch.bfloat16, keep_fp32=("norm1", "norm2")).target(name, stored) is expected


@pytest.mark.parametrize("text", ["", "a red circle moving right", "red circle on black background"])
def test_known_words_pass(whole: Path, text: str) -> None:
    loaders.check_text(loaders.inspect(whole), text)


def test_unknown_words_are_named_with_the_nearest_and_the_vocabulary(whole: Path) -> None:
    with pytest.raises(InvalidJob) as caught:
        loaders.check_text(loaders.inspect(whole), "a purple circel moving right , purple")
    text = str(caught.value)
    assert "'purple', 'circel' (nearest: circle), ','" in text and text.count("'purple'") == 1
    assert ", ".join(tiny_wan.WORDS) in text


@pytest.mark.parametrize(("prompt", "expected"), [
    ("a red circle", [("a red circle", 1.0)]),
    ("a (red:1.3) circle", [("a ", 1.0), ("red", 1.3), (" circle", 1.0)]),
    ("(red) and ((blue))", [("red", 1.1), (" and ", 1.0), ("blue", 1.1 * 1.1)]),
    ("(a (red:0.5) circle)", [("a ", 1.1), ("red", 0.5), (" circle", 1.1)]),
    (r"a circle \(red\)", [("a circle (red)", 1.0)]),
    ("(red:much)", [("red:much", 1.1)]),
    ("(:1.2)", [(":1.2", 1.1)]),
    ("a (red circle", [("a ", 1.0), ("(red circle", 1.0)]),
    ("a red) circle", [("a red) circle", 1.0)]),
    ("(red:-1)", [("red", -1.0)]),
    ("", []),
])
def test_prompt_weights(prompt: str, expected: list[tuple[str, float]]) -> None:
    assert [(piece.text, piece.weight) for piece in loaders.segments(prompt)] == expected


def test_weighted_words_are_checked_as_words(whole: Path) -> None:
    loaders.check_text(loaders.inspect(whole), "a (red:1.3) circle")
    with pytest.raises(InvalidJob, match="'purple'"):
        loaders.check_text(loaders.inspect(whole), "a (purple:1.3) circle")


def test_an_embedding_is_refused_by_name() -> None:
    with pytest.raises(InvalidJob, match="names an embedding"):
        loaders.segments("a red circle embedding:nice")


def test_weight_dtypes_that_do_not_exist_are_refused_by_name() -> None:
    for name in ("default", "bf16", "fp16", "fp32", "fp8_e4m3fn", "fp8_e4m3fn_fast", "fp8_e5m2"):
        assert loaders.check_dtype(name) == name
    with pytest.raises(InvalidJob, match=r"'fp8' is not available here; allowed: default, bf16, .*nearest: "):
        loaders.check_dtype("fp8")


def test_bytes_behind_the_last_tensor_are_named(whole: Path, tmp_path: Path) -> None:
    """safetensors' own reader refuses such a file, but only in the rank that maps it."""
    source = next((whole / "transformer").glob("*.safetensors"))
    longer = tmp_path / "longer.safetensors"
    longer.write_bytes(source.read_bytes() + b"xxxx")
    with pytest.raises(LoadError, match=r"longer\.safetensors has 4 bytes more than its header says"):
        read_header(longer)
