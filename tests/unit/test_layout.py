"""The schedule of an exchange is a pure function of the layout, equal on all ranks; what is refused before sending."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import pytest
import torch

from comfyui_pipedit.errors import InvalidJob, OutOfStep
from comfyui_pipedit.parallel.exchange import Exchange
from comfyui_pipedit.parallel.kernels import attention_by, heads_are_independent, local_attention, pick_attention
from comfyui_pipedit.parallel.layout import Layout, Move, inward, outward
from comfyui_pipedit.plan import Group, HeadTable, Segments

ACO = Layout(Segments(Group((3, 1)), ((0, 5), (5, 9)), replicated=2),
             HeadTable(Group((1, 0, 3)), ((0, 2), (2, 3), (3, 6))), chunks=2)
LAYOUTS = [ACO, Layout.even(Group((3, 1, 0)), 13, 8, chunks=2), Layout.even(Group((2,)), 7, 3, chunks=4)]


class NoFabric:
    """Fails a test in which anything is sent."""

    def post(self, sends: Sequence[Any], receives: Sequence[Any]) -> Any:
        raise AssertionError(f"{len(sends)} messages were sent")


def cells(move: Move, rows: tuple[int, int]) -> list[tuple[int, int]]:
    return list(product(range(*rows), range(*move.heads)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_owner_gets_every_row_of_its_heads_once(layout: Layout):
    for owner, (start, stop) in zip(layout.heads.owners.ranks, layout.heads.spans, strict=True):
        moves = [move for chunk in range(layout.chunks) for move in inward(layout, chunk) if move.target == owner]
        got = sorted(cell for move in moves for cell in cells(move, move.target_rows))
        assert got == list(product(range(layout.num_rows), range(start, stop)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_holder_gets_every_head_of_its_rows_once(layout: Layout):
    for holder in layout.segments.holders.ranks:
        moves = [move for chunk in range(layout.chunks) for move in outward(layout, chunk) if move.target == holder]
        got = sorted(cell for move in moves for cell in cells(move, move.target_rows))
        assert got == list(product(range(layout.rows_of(holder)), range(layout.heads.num_heads)))


def test_replicated_rows_go_to_a_helper_from_the_lowest_holder_and_never_between_holders():
    text = [move for chunk in (0, 1) for move in inward(ACO, chunk) if move.target_rows == (9, 11)]
    assert {(move.source, move.target) for move in text} == {(1, 1), (3, 3), (1, 0)}
    back = [move for chunk in (0, 1) for move in outward(ACO, chunk) if move.source_rows == (9, 11)]
    assert {(move.source, move.target) for move in back} == set(product((1, 0, 3), (3, 1)))


@pytest.mark.parametrize(("heads", "denoise", "helpers", "counts"), [
    (5, 1, 1, (3, 2)), (5, 2, 1, (2, 2, 1)), (5, 3, 1, (2, 1, 1, 1)), (5, 2, 2, (2, 1, 1, 1)), (8, 1, 1, (4, 4)),
    (8, 2, 1, (3, 3, 2)), (8, 3, 1, (2, 2, 2, 2)), (8, 2, 2, (2, 2, 2, 2)), (12, 2, 1, (4, 4, 4)), (40, 1, 1, (20, 20)),
    (40, 2, 1, (14, 13, 13)), (40, 3, 1, (10, 10, 10, 10)), (40, 2, 2, (10, 10, 10, 10))])
def test_helpers_own_whole_heads_and_no_tokens(heads: int, denoise: int, helpers: int, counts: tuple[int, ...]):
    group, more = Group(tuple(range(denoise))), tuple(range(denoise, denoise + helpers))
    layout = Layout.even(group, 45, heads, chunks=2, helpers=more)
    assert tuple(stop - start for start, stop in layout.heads.spans) == counts
    assert layout.heads.owners.ranks == (*group.ranks, *more) and layout.segments == Segments.even(group, 45)
    assert {move.target for chunk in (0, 1) for move in outward(layout, chunk)} == set(group.ranks)


def test_a_rank_outside_holds_no_tokens():
    with pytest.raises(OutOfStep, match=r"rank 0 holds no tokens; the holders are \(3, 1\)"):
        ACO.rows_of(0)


@pytest.mark.parametrize("spans", [((0, 3), (4, 6)), ((1, 3), (3, 6)), ((0, 4), (4, 2)), ((0, 6),)])
def test_spans_with_gaps_or_overlaps_are_refused(spans: tuple[tuple[int, int], ...]):
    pair, good = Group((0, 1)), ((0, 3), (3, 6))
    with pytest.raises(InvalidJob, match="spans of tokens"):
        Layout(Segments(pair, spans), HeadTable(pair, good))
    with pytest.raises(InvalidJob, match="spans of heads"):
        Layout(Segments(pair, good), HeadTable(pair, spans))


def test_no_chunks_are_refused():
    with pytest.raises(InvalidJob, match="chunks must be 1 or more, not 0"):
        Layout.even(Group((0, 1)), 8, 4, chunks=0)


@pytest.mark.parametrize("shape", [(1, 7, 8, 4), (1, 9, 4, 4)])
def test_wrong_rows_or_heads_are_refused_before_anything_is_sent(shape: tuple[int, ...]):
    layout = Layout.even(Group((0, 1)), 17, 8)
    right, wrong = torch.zeros(1, 9, 8, 4), torch.zeros(shape)
    for tensors in ((wrong, right, right), (right, wrong, right), (right, right, wrong)):
        with pytest.raises(OutOfStep, match=r"layout says \(9, 8\)"):
            Exchange(0, NoFabric()).attend(*tensors, layout)


def test_one_rank_sends_nothing():
    q, k, v = torch.randn(3, 1, 9, 4, 8).unbind(0)
    exchange = Exchange(2, NoFabric())
    layout = Layout.even(Group((2,)), 9, 4, chunks=2)
    assert torch.equal(exchange.attend(q, k, v, layout), local_attention(q, k, v))
    assert exchange.gather(q, layout.segments, dim=1) is q


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As a rank on the CPU has it; with more, a lone head of 5 rows is rounded in another way than one of many."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("rows", [5, 9, 45, 300, 800])
def test_a_head_has_the_same_bits_alone_and_in_company(rows: int, one_thread: None):
    q, k, v = torch.randn(3, 1, rows, 6, 32).unbind(0)
    assert heads_are_independent(local_attention, q, k, v)


def test_the_probe_sees_heads_that_depend_on_each_other(one_thread: None):
    def blurred(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return local_attention(query, key, value) + query.shape[2] * 1e-6

    q, k, v = torch.randn(3, 1, 20, 4, 8).unbind(0)
    assert not heads_are_independent(blurred, q, k, v)


def test_a_kernel_is_picked_that_runs_here(one_thread: None):
    picked = pick_attention(torch.device("cpu"), torch.float32, head_dim=16, num_heads=3, tokens=(40,))
    q, k, v = torch.randn(3, 1, 40, 3, 16).unbind(0)
    assert torch.equal(picked(q, k, v), local_attention(q, k, v))
    with pytest.raises(RuntimeError):
        attention_by(torch.nn.attention.SDPBackend.CUDNN_ATTENTION)(q, k, v)
