"""Hooks by a SequencePlan on a toy: arguments by name or position, names that don't exist, tokens that don't fit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from comfyui_pipedit.errors import InvalidJob, LoadError, OutOfStep
from comfyui_pipedit.models.family import SequencePlan, Split
from comfyui_pipedit.parallel import attention
from comfyui_pipedit.parallel.kernels import local_attention
from comfyui_pipedit.parallel.layout import Layout
from comfyui_pipedit.parallel.sequence import Context, own_tokens
from comfyui_pipedit.parallel.sequence import install as install_on
from comfyui_pipedit.plan import Group, HeadTable, Segments

LAYOUT = Layout(Segments(Group((1, 0)), ((0, 5), (5, 9)), replicated=2), HeadTable.even(Group((1, 0)), 4))


class Toy(nn.Module):
    """Gives back what its inner module was given."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Echo()

    def forward(self, x: Tensor, times: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        return self.inner(x, times=times)


class Echo(nn.Module):
    def forward(self, x: Tensor, times: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return x, times


def run(split: Split, x: Tensor, times: Tensor | None = None,
        layout: Layout | None = LAYOUT) -> tuple[Tensor, Tensor | None]:
    """The toy's output on rank 0 with one split installed."""
    toy, context = Toy(), Context(0, fabric=None)
    install_on(toy, SequencePlan((split,), (), ()), context)
    with context.using(layout):
        return toy(x, times)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As a rank on the CPU has it; with more, small products are rounded in another way."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def no_diffusers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A toy without attention needs no dispatch to wrap."""
    monkeypatch.setattr(attention, "install", lambda: None)


@pytest.mark.parametrize("split", [Split("inner", "x"), Split("inner", 0), Split("", "x"),
                                   Split("inner", 0, output=True)])
def test_a_rank_keeps_its_span_wherever_the_tensor_is_cut(split: Split):
    x = torch.arange(9.0).reshape(1, 9, 1)
    own, _ = run(split, x)
    assert own.flatten().tolist() == [5, 6, 7, 8]
    whole, _ = run(split, x, layout=None)
    assert whole is x


def test_a_keyword_argument_is_cut_too():
    _, times = run(Split("inner", "times"), torch.zeros(1, 9, 1), torch.arange(9.0)[None])
    assert times.tolist() == [[5, 6, 7, 8]]


def test_replicated_tokens_stay_with_everyone():
    own, _ = run(Split("inner", "x"), torch.arange(11.0).reshape(1, 11, 1))
    assert own.flatten().tolist() == [5, 6, 7, 8, 9, 10]


def test_what_the_plan_does_not_mean_stays_whole():
    x, times = run(Split("inner", "times", num_dims=2), torch.zeros(1, 9, 1), torch.arange(9.0))
    assert (x.shape[1], times.shape[0]) == (9, 9)
    _, times = run(Split("inner", "times"), torch.zeros(1, 9, 1))
    assert times is None


def test_a_wrong_number_of_tokens_is_named():
    with pytest.raises(OutOfStep, match="inner has 10 tokens in 'x' and the plan cuts 9"):
        run(Split("inner", "x"), torch.zeros(1, 10, 1))


def test_cut_tensors_own_their_memory():
    context = Context(0, fabric=None)
    with context.using(LAYOUT):
        own = own_tokens(torch.zeros(9, 3).t(), Split("", "x", dim=1), context)
    assert own.is_contiguous() and own.storage_offset() == 0


def test_names_that_the_model_lacks_are_refused_before_anything_is_hooked():
    toy, context = Toy(), Context(0, fabric=None)
    with pytest.raises(LoadError, match="Toy has no module 'outer'"):
        install_on(toy, SequencePlan((Split("inner", "x"), Split("outer", "x")), (), ()), context)
    with pytest.raises(LoadError, match="Toy has no attention module 'blocks"):
        install_on(toy, SequencePlan((Split("inner", "x"),), (), ("blocks.*.attn1",)), context)
    with context.using(LAYOUT):
        assert toy(torch.zeros(1, 9, 1))[0].shape[1] == 9


def test_a_layout_lasts_as_long_as_its_block_of_code():
    context = Context(1, fabric=None)
    with context.using(LAYOUT):
        with context.using(None):
            assert context.layout is None and attention.CURRENT.get() == (context.exchange, None)
        assert context.layout is LAYOUT
    assert context.layout is None and attention.CURRENT.get() is None


@pytest.mark.parametrize("refused", [{"attn_mask": torch.ones(1)}, {"dropout_p": 0.1}, {"enable_gqa": True}])
def test_what_the_exchange_can_not_do_is_refused(refused: dict[str, object]):
    q = torch.zeros(1, 4, 2, 8)
    dispatch = attention._wrap(lambda **arguments: None)
    with pytest.raises(InvalidJob, match="no mask, no dropout"):
        dispatch(query=q, key=q, value=q, _parallel_config=attention.MARKER, **refused)


@pytest.mark.parametrize("mask", [None, torch.ones(1)])
def test_a_module_without_the_marker_runs_diffusers_own_attention(mask: Tensor | None):
    q = torch.randn(1, 5, 2, 8)
    dispatch = attention._wrap(lambda query, attn_mask, _parallel_config: query * (2 if attn_mask is mask else 0))
    assert torch.equal(dispatch(query=q, attn_mask=mask, _parallel_config=None), 2 * q)


def test_local_rows_have_the_same_bits_wherever_a_sequence_is_cut(one_thread: None):
    """Text attention is not exchanged: 33 rows of 65 must give what they give among all 65."""
    q, (k, v) = torch.randn(1, 65, 4, 32), torch.randn(2, 1, 12, 4, 32).unbind(0)
    dispatch = attention._wrap(lambda query, key, value: local_attention(query, key, value))
    whole = dispatch(query=q, key=k, value=v)
    parts = [dispatch(query=part, key=k, value=v) for part in q.split([33, 30, 2], dim=1)]
    assert torch.equal(torch.cat(parts, dim=1), whole)
