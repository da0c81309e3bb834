"""ComfyUI's single files: what is told from their headers, the names of their tensors, and files that go together."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny_wan
import torch
import wan_files
from safetensors.torch import load_file, save_file
from torch import Tensor

from comfyui_pipedit import loaders, models
from comfyui_pipedit.errors import LoadError
from comfyui_pipedit.job import Branch, Weights
from comfyui_pipedit.loaders import wan_names
from comfyui_pipedit.loaders.wan_vae_file import STATISTICS
from comfyui_pipedit.parallel.sequence import Context
from comfyui_pipedit.worker.device import Device
from comfyui_pipedit.worker.residency import Residency

CPU = Device.parse("cpu:0")
State = dict[str, Tensor]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of each variant and layout, as tests/wan_files.py names them."""
    tiny_wan.use_worker_site()
    root = tmp_path_factory.mktemp("models")
    wan_files.write_all(root)
    return root


def model_file(folder: Path, name: str) -> Path:
    return folder / "diffusion_models" / f"wan-{name}.safetensors"


def vae_file(folder: Path, name: str) -> Path:
    return folder / "vae" / f"wan_{name}_vae.safetensors"


def opened(path: Path, part: str) -> loaders.WeightFiles:
    return loaders.open_weights(Weights("wan", part, str(path)))


# -- names -----------------------------------------------------------------------------------------

def diffusers_names(convert: str, state: State) -> dict[str, str]:
    """Original name -> the name that a conversion of diffusers gives it; tensors are told apart by their address."""
    from diffusers.loaders import single_file_utils

    converted = getattr(single_file_utils, convert)(dict(state))
    originals = {tensor.data_ptr(): name for name, tensor in state.items()}
    return {originals[tensor.data_ptr()]: name for name, tensor in converted.items()}


@pytest.mark.parametrize("variant", list(wan_files.VARIANTS))
def test_transformer_names_are_those_of_diffusers_conversion(folder: Path, variant: str) -> None:
    state = load_file(model_file(folder, variant))
    theirs = diffusers_names("convert_wan_transformer_to_diffusers", state)
    if variant == "flf2v":  # their conversion leaves this one as it is, though their class has it
        theirs["img_emb.emb_pos"] = "condition_embedder.image_embedder.pos_embed"
    table = wan_names.IMAGE_BLOCKS + wan_names.IMAGE_EMBEDDING + wan_names.IMAGE_POSITIONS + wan_names.VACE_OUTSIDE
    table += wan_names.VACE_BLOCKS
    assert {name: table.ours(name) for name in state} == theirs
    assert {ours: table.original(ours) for ours in theirs.values()} == {ours: name for name, ours in theirs.items()}


def test_vae_names_are_those_of_diffusers_conversion(folder: Path) -> None:
    state = load_file(vae_file(folder, "2.1"))
    assert {name: wan_names.vae(2, 4, nested=False).ours(name) for name in state} == diffusers_names(
        "convert_wan_vae_to_diffusers", state)


def test_names_that_no_wan_has() -> None:
    for name in ("blocks.0.attn.q.weight", "blocks.x.self_attn.q.weight", "q.weight", "blocks.0.self_attn.q.scale", ""):
        assert wan_names.TRANSFORMER.ours(name) is None
    assert wan_names.TRANSFORMER.ours("blocks.0.cross_attn.k_img.weight") is None
    assert wan_names.VACE_OUTSIDE.ours("vace_blocks.1.before_proj.weight") is None, "only the first one has it"


# -- configs ---------------------------------------------------------------------------------------

@pytest.mark.parametrize("variant", list(wan_files.VARIANTS))
def test_a_transformers_config_is_that_of_the_network_it_was_made_of(folder: Path, variant: str) -> None:
    found = opened(model_file(folder, variant), "transformer")
    network = wan_files.transformer(variant)
    expected = {key: value for key, value in network.config.items()
                if not key.startswith("_") and key != "rope_max_seq_len"}
    assert {key: found.config[key] for key in expected} == {
        key: list(value) if isinstance(value, tuple) else value for key, value in expected.items()}
    assert found.config["_class_name"] == type(network).__name__
    assert {name: entry.shape for name, entry in found.entries.items()} == {
        name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}


@pytest.mark.parametrize("kind", list(wan_files.VAES))
def test_a_vaes_config_makes_a_network_that_decodes_the_same(folder: Path, kind: str) -> None:
    from diffusers import AutoencoderKLWan

    found, made_of = opened(vae_file(folder, kind), "vae"), wan_files.vae(kind)
    network = AutoencoderKLWan.from_config(found.config).eval()
    network.load_state_dict(dict(found.mapped()), strict=True, assign=True)
    assert network.config.scale_factor_spatial == (16 if kind == "2.2" else 8)
    latent = torch.randn(1, made_of.config.z_dim, 2, 2, 3, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = made_of.decode(latent).sample
        assert expected.std() > 0.05 and torch.equal(network.decode(latent).sample, expected)
        assert torch.equal(network.encode(expected).latent_dist.mode(), made_of.encode(expected).latent_dist.mode())


def test_a_text_encoders_config_is_that_of_the_network_it_was_made_of(folder: Path) -> None:
    found = opened(folder / "text_encoders" / "umt5-fp32.safetensors", "text").config
    expected = wan_files.text_encoder(found["vocab_size"]).config.to_dict()
    assert {key: found[key] for key in found if key != "_class_name"} == {key: expected[key] for key in found
                                                                         if key != "_class_name"}


def test_a_link_into_a_cache_is_the_file_that_it_is_called(folder: Path, tmp_path: Path) -> None:
    """As a download cache has it: the file itself is called by its hash."""
    (tmp_path / "1f3a").write_bytes(model_file(folder, "t2v").read_bytes())
    (tmp_path / "wan.safetensors").symlink_to("1f3a")
    files = loaders.inspect(tmp_path / "wan.safetensors")
    assert files.name == "wan.safetensors" and files.transformer.path == str(tmp_path / "wan.safetensors")
    assert len(dict(loaders.open_weights(files.transformer).mapped())) == 69


def test_what_comfyui_saves_beside_a_text_encoder_is_left_alone(folder: Path, tmp_path: Path) -> None:
    state = load_file(folder / "text_encoders" / "umt5-fp32.safetensors")
    save_file({**state, "logit_scale": torch.tensor(4.6)}, tmp_path / "saved.safetensors")
    assert loaders.place(tmp_path / "saved.safetensors").unused == ("logit_scale",)
    assert opened(tmp_path / "saved.safetensors", "text").entries.keys() == state.keys() - {"spiece_model"}


def test_released_models_have_heads_of_128(folder: Path, tmp_path: Path) -> None:
    state = load_file(model_file(folder, "t2v"))
    save_file(state, tmp_path / "plain.safetensors")
    with pytest.raises(LoadError, match="width 64 is not a multiple of the head size 128 that all released Wan models"):
        loaders.inspect(tmp_path / "plain.safetensors")
    save_file(state, tmp_path / "odd.safetensors", {"head_dim": "48"})
    with pytest.raises(LoadError, match=r"width 64 is not a multiple of the head size 48$"):
        loaders.inspect(tmp_path / "odd.safetensors")


# -- tensors ---------------------------------------------------------------------------------------

@pytest.mark.parametrize("prefixed", [False, True])
def test_tensors_are_views_of_the_mapped_file(folder: Path, prefixed: bool) -> None:
    file = model_file(folder, "t2v-bf16" if prefixed else "t2v")
    tensors = dict(opened(file, "transformer").mapped())
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(file))]
    mapped = [range(*(int(end, 16) for end in line[0].split("-"))) for line in lines]
    assert len(tensors) == 69
    assert all(any(tensor.data_ptr() in span for span in mapped) for tensor in tensors.values())


def velocity(weights: Weights, text: Tensor) -> Tensor:
    """One evaluation by a rank."""
    residency = Residency(CPU, Context(0, SimpleNamespace()), lambda phase: None)
    residency.load(weights)
    wan, network = models.family("wan"), residency.get(weights)
    geometry = loaders.inspect(weights.path).geometry
    x = torch.randn(1, 16, 3, 7, 9, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        branch = wan.prepare(network, Branch(text), tuple(x.shape), None, geometry)
        return wan.velocity(network, x, 0.7, branch)


def test_a_single_file_and_a_folder_give_the_same_bits(folder: Path, tmp_path: Path) -> None:
    text = torch.randn(1, 16, 32, generator=torch.Generator().manual_seed(1))
    pipeline = loaders.inspect(tiny_wan.write_model(tmp_path / "tiny"))
    expected = velocity(pipeline.transformer, text)
    assert 0.3 < expected.std() < 5.0
    for file in (model_file(folder, "t2v"), model_file(folder, "t2v-fp32")):
        assert torch.equal(velocity(loaders.inspect(file).transformer, text), expected)
    found = velocity(loaders.inspect(folder / "checkpoints" / "wan.safetensors").transformer, text)
    assert torch.allclose(found, expected, atol=1e-5), "matrix products depend on where in memory a mapped tensor lies"


def test_a_single_file_tells_a_text_as_its_network_does(folder: Path) -> None:
    import sentencepiece

    pieces = sentencepiece.SentencePieceProcessor(model_proto=wan_files.pieces())
    ids = [*pieces.encode("a red circle (moving) left"), 1]
    with torch.inference_mode():
        expected = wan_files.text_encoder(pieces.get_piece_size())(torch.tensor([ids])).last_hidden_state
    for file in (folder / "text_encoders" / "umt5-fp32.safetensors", folder / "checkpoints" / "wan.safetensors"):
        weights = Weights("wan", "text", str(file))
        residency = Residency(CPU, Context(0, SimpleNamespace()), lambda phase: None)
        residency.load(weights)
        with torch.inference_mode():
            found = residency.get(weights).encode(r"a red circle \(moving\) left")
        assert found.shape == (1, 512, 32) and not found[0, len(ids):].any()
        assert torch.allclose(found[:, :len(ids)], expected, atol=1e-5)


def test_a_checkpoints_parts_are_taken_and_the_rest_is_named(folder: Path) -> None:
    files = loaders.inspect(folder / "checkpoints" / "wan.safetensors")
    assert files.vae is not None and files.text is not None
    assert files.transformer.path == files.vae.path == files.text.path
    assert loaders.place(files.transformer.path).unused == ("text_encoders.umt5xxl.logit_scale",)
    assert {name.split(".")[0] for name in opened(Path(files.vae.path), "vae").entries} == {
        "encoder", "decoder", "quant_conv", "post_quant_conv"}


# -- what the host knows ---------------------------------------------------------------------------

@pytest.mark.parametrize(("variant", "channels", "spatial", "boundary"), [
    ("t2v", 16, 8, 0.875), ("i2v-2.1", 16, 8, 0.9), ("flf2v", 16, 8, 0.9), ("i2v-2.2", 16, 8, 0.9),
    ("ti2v-5b", 48, 16, 0.875), ("vace", 16, 8, 0.875),
])
def test_inspect_tells_a_transformers_geometry(folder: Path, variant: str, channels: int, spatial: int,
                                               boundary: float) -> None:
    files = loaders.inspect(model_file(folder, variant))
    geometry = files.geometry
    assert (geometry.channels, geometry.spatial, geometry.temporal, geometry.patch) == (channels, spatial, 4, (1, 2, 2))
    assert (geometry.text_width, geometry.text_tokens, geometry.num_heads) == (32, 512, 4)
    assert (geometry.mean, geometry.std) == STATISTICS[channels]
    assert files.vae is None and files.text is None and files.shift == 8.0 and files.boundary == boundary
    assert files.name == f"wan-{variant}.safetensors" and files.vocabulary == ()


def test_statistics_are_diffusers_and_have_a_value_a_channel() -> None:
    from diffusers import AutoencoderKLWan

    config = AutoencoderKLWan(base_dim=4).config
    assert STATISTICS[16] == (tuple(config.latents_mean), tuple(config.latents_std))
    assert all(len(values) == channels for channels, pair in STATISTICS.items() for values in pair)


def test_separate_files_make_a_model(folder: Path) -> None:
    text = folder / "text_encoders" / "umt5-scaled_fp8.safetensors"
    files = loaders.combine(model_file(folder, "ti2v-5b"), vae_file(folder, "2.2"), text, "mine")
    assert files.name == "mine" and files.geometry == loaders.inspect(model_file(folder, "ti2v-5b")).geometry
    decoder = vae_file(folder, "2.2")
    assert files.vae == Weights("wan", "vae", str(decoder), stamp=loaders.stamp(decoder, "vae"))
    assert files.text is not None and files.text.path == str(text) and files.text.stamp
    part = loaders.combine(model_file(folder, "t2v"), folder / "checkpoints" / "wan.safetensors", None, "mine")
    assert part.vae is not None and part.text is None


def test_files_that_do_not_fit_together_are_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"wan_2\.1_vae.safetensors: the VAE's z_dim 16, .* 48 channels \(wan-ti2v-5b"):
        loaders.combine(model_file(folder, "ti2v-5b"), vae_file(folder, "2.1"), None, "mine")
    with pytest.raises(LoadError, match=r"umt5-fp32.safetensors is a UMT5 text encoder; it has no VAE"):
        loaders.combine(model_file(folder, "t2v"), folder / "text_encoders" / "umt5-fp32.safetensors", None, "mine")
    wide = wan_files.original_transformer(wan_files.transformer("t2v", text_dim=64))
    wan_files.write(tmp_path / "wide.safetensors", wide, wan_files.plain("float32"))
    with pytest.raises(LoadError, match=r"its d_model 32 is not the transformer's text_dim 64"):
        loaders.combine(tmp_path / "wide.safetensors", None, folder / "text_encoders" / "umt5-fp32.safetensors", "mine")


def test_two_experts(folder: Path) -> None:
    high, low = model_file(folder, "t2v-fp32"), model_file(folder, "t2v-scaled_fp8")
    files = loaders.combine(high, None, None, "mine", low=low)
    assert files.transformer_low is not None and files.transformer_low.path == str(low) and files.boundary == 0.875
    with pytest.raises(LoadError, match="no two experts of one model: in_channels is 16 and 36"):
        loaders.combine(high, None, None, "mine", low=model_file(folder, "i2v-2.2"))
    with pytest.raises(LoadError, match="no two experts of one model: image_dim is 24 and None"):
        loaders.combine(model_file(folder, "i2v-2.1"), None, None, "mine", low=model_file(folder, "i2v-2.2"))


def test_a_folder_with_two_experts(tmp_path: Path) -> None:
    root = tiny_wan.write_model(tmp_path / "a14b")
    tiny_wan.randomise(tiny_wan.transformer(), seed=1).save_pretrained(root / "transformer_2")
    index = json.loads((root / "model_index.json").read_text())
    index |= {"transformer_2": ["diffusers", "WanTransformer3DModel"], "boundary_ratio": 0.9}
    (root / "model_index.json").write_text(json.dumps(index))
    files = loaders.inspect(root)
    assert files.boundary == 0.9 and files.transformer_low is not None
    assert loaders.combine(root, root, None, "a14b").transformer_low == files.transformer_low, "it is not lost"
    high, low = (dict(loaders.open_weights(weights).mapped()) for weights in (files.transformer, files.transformer_low))
    assert high.keys() == low.keys() and not torch.equal(high["proj_out.weight"], low["proj_out.weight"])
    (root / "transformer_2" / "config.json").touch()
    with pytest.raises(LoadError, match="transformer_2 was changed after the graph had read it"):
        loaders.open_weights(files.transformer_low)


def test_a_replaced_file_is_another_network(folder: Path, tmp_path: Path) -> None:
    file = wan_files.write(tmp_path / "x.safetensors", load_file(model_file(folder, "t2v")), wan_files.plain("float32"))
    weights = loaders.inspect(file).transformer
    loaders.open_weights(weights)
    wan_files.write(file, load_file(model_file(folder, "t2v")), wan_files.plain("float16"))
    with pytest.raises(LoadError, match="was changed after the graph had read it"):
        loaders.open_weights(weights)
    loaders.open_weights(replace(weights, stamp=""))


def test_companions_are_found_by_name_and_checked_by_header(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "wan2.2_vae_a.safetensors").write_bytes(b"damaged")
    vaes = {"sd/vae-ft-mse.safetensors": tmp_path / "wan2.2_vae_a.safetensors",
            "a/wan2.2_vae_a.safetensors": tmp_path / "wan2.2_vae_a.safetensors",
            "wan_2.1_vae.safetensors": vae_file(folder, "2.1"),
            "Wan2_1_VAE_fp32.safetensors": vae_file(folder, "2.1-short"),
            "video/wan2.2_vae.safetensors": vae_file(folder, "2.2"), "mine.safetensors": vae_file(folder, "2.2")}
    texts = {"t5xxl_fp16.safetensors": folder / "text_encoders" / "umt5-fp16.safetensors",
             "umt5_xxl_fp16.safetensors": folder / "text_encoders" / "umt5-fp16.safetensors",
             "umt5_xxl_a.safetensors": vae_file(folder, "2.1")}

    def found(variant: str, vaes: dict[str, Path]) -> tuple[str | None, str | None]:
        companions = loaders.find_companions(loaders.inspect(model_file(folder, variant)), vaes, texts)
        return companions.vae, companions.text

    assert found("t2v", vaes) == ("Wan2_1_VAE_fp32.safetensors", "umt5_xxl_fp16.safetensors")
    assert found("ti2v-5b", vaes) == ("video/wan2.2_vae.safetensors", "umt5_xxl_fp16.safetensors")
    assert found("ti2v-5b", {"wan_2.1_vae.safetensors": vae_file(folder, "2.1")})[0] is None
    assert found("ti2v-5b", {"mine.safetensors": vae_file(folder, "2.2")})[0] is None, "a name that says nothing"


def test_inspect_imports_no_model_code(folder: Path) -> None:
    code = (f"import sys; sys.path.insert(0, {str(tiny_wan.ROOT)!r}); from comfyui_pipedit import loaders; "
            f"files = loaders.inspect({str(folder / 'checkpoints' / 'wan.safetensors')!r}); "
            "[loaders.converted_bytes(part, on_gpu=False) for part in (files.transformer, files.vae, files.text)]; "
            "print(sorted({'diffusers', 'transformers', 'tokenizers', 'sentencepiece'} & set(sys.modules)))")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
