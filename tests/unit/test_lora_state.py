"""LoRA as a state of resident weights: the merged bits, the way there and back, and what a failure leaves."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from pathlib import Path

import lora_files
import pytest
import tiny_wan
import torch
from torch import Tensor, nn

from comfyui_pipedit.errors import LoadError
from comfyui_pipedit.loaders.lora import LoraFile, read_lora
from comfyui_pipedit.models import fp8, lora
from comfyui_pipedit.models.lora import LoraState

FP8 = torch.float8_e4m3fn


class Rank:
    """A rank's network. shared: as on the CPU, its parameters are the mapped originals themselves; else, as on a GPU,
    copies of its own."""

    def __init__(self, dtype: torch.dtype = torch.float32, shared: bool = True) -> None:
        tiny_wan.use_worker_site()
        source = tiny_wan.transformer().to(dtype).requires_grad_(False)
        self.originals = {name: tensor.detach() for name, tensor in source.state_dict().items()}
        self.pristine = {name: tensor.clone() for name, tensor in self.originals.items()}
        self.network: nn.Module = tiny_wan.transformer().to(dtype).requires_grad_(False)
        self.network.load_state_dict(self.originals, assign=shared)
        self.places = {name: tensor.data_ptr() for name, tensor in self.network.state_dict().items()}
        self.asked: list[str] = []
        self.fail_at = ""
        self.state = LoraState(self.network, self.read, shared=shared, compute=torch.float32)

    def read(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        self.asked = list(names)
        for name in names:
            if name == self.fail_at:
                raise torch.OutOfMemoryError("no memory for the next weight")
            yield name, self.originals[name]

    def weights(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in self.network.state_dict().items()}

    @property
    def untouched(self) -> bool:
        """Whether nobody wrote to the mapping that all ranks share."""
        return all(torch.equal(self.originals[name], self.pristine[name]) for name in self.pristine)

    @property
    def in_place(self) -> bool:
        """Whether every parameter lies where it lay when it was loaded."""
        return self.places == {name: tensor.data_ptr() for name, tensor in self.network.state_dict().items()}


def shapes_of(rank: Rank) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in rank.originals.items()}


@pytest.fixture
def rank() -> Rank:
    return Rank()


@pytest.fixture
def folder(tmp_path: Path, rank: Rank) -> Path:
    """a (with differences), b, and small, which changes one module."""
    shapes = shapes_of(rank)
    lora_files.write(tmp_path / "a", lora_files.state("comfy", shapes, seed=1, differences=True))
    lora_files.write(tmp_path / "b", lora_files.state("musubi", shapes, seed=2, rank=6, alpha=None))
    small = {name: tensor for name, tensor in lora_files.state("comfy", shapes, seed=3).items() if "s.1.ffn.2" in name}
    lora_files.write(tmp_path / "small", small)
    return tmp_path


def tensors_alive() -> int:
    gc.collect()
    return sum(issubclass(type(item), Tensor) for item in gc.get_objects())


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def expected(rank: Rank, chain: Sequence[tuple[int, float, int, float | None, bool]]) -> dict[str, Tensor]:
    """The formula, by hand. chain: (seed, strength, rank, alpha, differences)."""
    sums = {name: tensor.float() for name, tensor in rank.pristine.items()}
    for seed, strength, rank_, alpha, differences in chain:
        for original, (down, up) in lora_files.low_rank(shapes_of(rank), seed, rank_).items():
            name = f"{lora_files.MODULES[original]}.weight"
            scale = strength * (1.0 if alpha is None else alpha / rank_)
            sums[name] = sums[name] + scale * (up.flatten(1) @ down.flatten(1)).view_as(sums[name])
        for key, tensor in lora_files.state("diffusers", shapes_of(rank), seed, differences=differences).items():
            module, _, kind = key.removeprefix("transformer.").rpartition(".")
            if kind in ("diff", "diff_b"):
                name = f"{module}.{'weight' if kind == 'diff' else 'bias'}"
                sums[name] = sums[name] + strength * tensor
    return {name: tensor.to(rank.pristine[name].dtype) for name, tensor in sums.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "own"])
@pytest.mark.parametrize("style", lora_files.STYLES)
def test_every_style_gives_the_formulas_bits(style: str, shared: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    rank = Rank(dtype, shared)
    path = lora_files.write(tmp_path / "a", lora_files.state(style, shapes_of(rank), seed=1, differences=True))
    (report,) = rank.state.go([(read_lora(path), 0.7)])
    assert report.complete and len(report.matched) == 30
    assert same(rank.weights(), expected(rank, [(1, 0.7, 4, 3.0, True)]))
    assert rank.untouched


def test_a_chain_is_summed_in_order_and_rounded_once(folder: Path) -> None:
    rank = Rank(torch.bfloat16)
    a, b = read_lora(folder / "a"), read_lora(folder / "b")
    rank.state.go([(a, 0.5), (b, -0.7)])
    assert same(rank.weights(), expected(rank, [(1, 0.5, 4, 3.0, True), (2, -0.7, 6, None, False)]))
    assert rank.state.key == (a.use(0.5), b.use(-0.7))
    rank.state.go([(a, 0.25), (b, -0.7)])
    assert same(rank.weights(), expected(rank, [(1, 0.25, 4, 3.0, True), (2, -0.7, 6, None, False)]))


def test_rows_in_pieces_give_the_same(rank: Rank, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rank.state.go([(read_lora(folder / "a"), 1.0)])
    whole, other = rank.weights(), Rank()
    monkeypatch.setattr(lora, "CHUNK_VALUES", 1000)
    other.state.go([(read_lora(folder / "a"), 1.0)])
    for name, tensor in other.weights().items():
        torch.testing.assert_close(tensor, whole[name], rtol=0, atol=1e-6)


def test_strength_zero_is_off(rank: Rank, folder: Path) -> None:
    assert rank.state.go([(read_lora(folder / "a"), 0.0)]) == ()
    assert rank.state.key == () and rank.in_place and not rank.asked


def test_only_what_changes_is_written(rank: Rank, folder: Path) -> None:
    a, b, small = (read_lora(folder / name) for name in ("a", "b", "small"))
    rank.state.go([(a, 1.0)])
    assert len(rank.asked) == 30
    rank.asked = []
    assert len(rank.state.go([(read_lora(folder / "a"), 1.0)])) == 1 and rank.asked == []
    with_a = rank.weights()
    rank.state.go([(a, 1.0), (small, 0.5)])
    assert rank.asked == ["blocks.1.ffn.net.2.weight"]
    rank.state.go([(a, 1.0)])
    assert same(rank.weights(), with_a)
    rank.state.go([(b, 1.0)])
    assert same(rank.weights(), expected(rank, [(2, 1.0, 6, None, False)]))


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "own"])
def test_on_and_off_fifty_times(shared: bool, folder: Path) -> None:
    rank, a, b = Rank(shared=shared), read_lora(folder / "a"), read_lora(folder / "b")
    rank.state.go([(a, 1.0)])
    with_a, before = rank.weights(), tensors_alive()
    for turn in range(50):
        rank.state.go([(b, 0.1 * turn)])
        rank.state.go([])
        assert rank.in_place and same(rank.weights(), rank.pristine)
        rank.state.go([(a, 1.0)])
        assert same(rank.weights(), with_a) and rank.in_place != shared
    assert tensors_alive() == before and rank.untouched


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "own"])
def test_a_failure_midway_is_mended_from_the_originals(shared: bool, folder: Path) -> None:
    rank, a, b = Rank(shared=shared), read_lora(folder / "a"), read_lora(folder / "b")
    rank.state.go([(a, 1.0)])
    with_a = rank.weights()
    rank.fail_at = "blocks.1.attn1.to_q.weight"
    with pytest.raises(torch.OutOfMemoryError):
        rank.state.go([(b, 1.0)])
    assert rank.state.key is None and not same(rank.weights(), with_a)
    rank.fail_at = ""
    rank.state.go([(a, 1.0)])
    assert same(rank.weights(), with_a)
    assert rank.state.key == (a.use(1.0),)


def test_a_file_that_does_not_fit_leaves_all_as_it_was(rank: Rank, folder: Path) -> None:
    a = read_lora(folder / "a")
    rank.state.go([(a, 1.0)])
    before = rank.weights()
    other = read_lora(lora_files.write(folder / "x", {"transformer_blocks.0.attn1.to_q.lora_A.weight": torch.ones(2, 2),
                                                      "transformer_blocks.0.attn1.to_q.lora_B.weight":
                                                          torch.ones(2, 2)}))
    lora_files.write(folder / "b", {"something": torch.ones(3)})
    gone = LoraFile(str(folder / "b"), "0" * 16, a.adapters)
    for wrong, message in ((other, "changes nothing"), (gone, "was changed after")):
        with pytest.raises(LoadError, match=message):
            rank.state.go([(a, 1.0), (wrong, 1.0)])
        assert same(rank.weights(), before) and rank.state.key == (a.use(1.0),)


def test_originals_that_are_missing_are_said(rank: Rank, folder: Path) -> None:
    state = LoraState(rank.network, lambda names: list(rank.read(names))[1:], shared=True)
    with pytest.raises(LoadError, match="29 of 30 original weights could be read"):
        state.go([(read_lora(folder / "a"), 1.0)])
    assert state.key is None


def in_fp8(rank: Rank) -> None:
    """Puts the linear layers of the blocks in fp8, with scales."""
    scales = {}
    for name, module in rank.network.named_modules():
        if name.startswith("blocks.") and isinstance(module, nn.Linear):
            scales[f"{name}.weight"] = scale = (module.weight.abs().max() / 448.0).reshape(1)
            module.weight = nn.Parameter((module.weight / scale).to(FP8), requires_grad=False)
    fp8.install(rank.network, scales, fast=False)


def run(network: nn.Module) -> Tensor:
    draw = torch.Generator().manual_seed(5)
    x, text = torch.randn(1, 16, 2, 8, 8, generator=draw), torch.randn(1, 16, 32, generator=draw)
    with torch.inference_mode():
        output: Tensor = network(x, torch.tensor([500.0]), text, return_dict=False)[0]
    return output


def miss(left: Tensor, right: Tensor) -> float:
    return float((left - right).abs().max() / right.abs().max())


def test_a_side_path_is_what_merging_into_the_fp8_weight_would_be(rank: Rank, folder: Path) -> None:
    chain = [(read_lora(folder / "a"), 0.8), (read_lora(folder / "b"), -0.5)]
    in_fp8(rank)
    plain = run(rank.network)
    merged = Rank()
    merged.originals |= {name: getattr(rank.network.get_submodule(name.removesuffix(".weight")), "scale", 1.0) *
                         tensor.float() for name, tensor in rank.network.state_dict().items() if tensor.dtype == FP8}
    merged.network.load_state_dict(merged.originals, assign=True)
    merged.state.go(chain)
    rank.state.go(chain)
    assert rank.state.side_ranks == {name: 16 for name in lora_files.MODULES.values() if name.startswith("blocks.")}
    assert miss(run(rank.network), run(merged.network)) < 1e-5
    assert miss(run(rank.network), plain) > 0.05
    assert {tensor.dtype for name, tensor in rank.network.state_dict().items() if ".ffn.net.2.w" in name} == {FP8}
    rank.state.go([])
    assert torch.equal(run(rank.network), plain) and rank.state.side_ranks == {}


def test_side_paths_keep_their_storage_within_a_bucket(rank: Rank, folder: Path) -> None:
    in_fp8(rank)
    a, b = read_lora(folder / "a"), read_lora(folder / "b")
    rank.state.go([(a, 1.0)])
    layout, with_a = rank.state.layout, run(rank.network)
    rank.state.go([(b, 0.5), (a, 1.0)])
    rank.state.go([(a, 1.0)])
    assert rank.state.layout == layout and torch.equal(run(rank.network), with_a)
    rank.state.go([(a, 1.0), (b, 0.5), (b, 0.25)])
    assert rank.state.layout == layout
    rank.state.go([(b, 1.0), (b, 0.5), (b, 0.25)])
    assert rank.state.layout > layout and set(rank.state.side_ranks.values()) == {32}
    rank.state.go([(a, 1.0)])
    assert torch.equal(run(rank.network), with_a)
    hooks = [len(module._forward_hooks) for module in rank.network.modules() if isinstance(module, fp8.Fp8Linear)]
    assert set(hooks) == {1}
