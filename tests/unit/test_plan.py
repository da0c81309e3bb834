"""Groups, segments, head tables and plans are values: cutting, checking and shrinking them needs no ranks."""

from __future__ import annotations

import pytest

from comfyui_pipedit.errors import InvalidJob, Unplannable
from comfyui_pipedit.plan import Group, HeadTable, Plan, Segments, cut, shrink, split_groups


@pytest.mark.parametrize(("total", "parts", "sizes"), [
    (8, 3, [3, 3, 2]), (6, 4, [2, 2, 1, 1]), (5, 2, [3, 2]), (2, 4, [1, 1, 0, 0]), (7, 1, [7]), (0, 2, [0, 0])])
def test_cut_gives_neighbours_whose_sizes_differ_by_one_at_most(total: int, parts: int, sizes: list[int]):
    spans = cut(total, parts)
    assert [stop - start for start, stop in spans] == sizes
    assert [spans[0][0], *(stop for _, stop in spans)] == [0, *(start for start, _ in spans[1:]), total]


def test_a_group_is_ordered():
    assert Group((0, 1)) != Group((1, 0))
    group = Group((3, 1, 0))
    assert (group.size, group.leader, group.index(1), group.index(2)) == (3, 0, 1, -1)


@pytest.mark.parametrize("ranks", [(), (0, 0), (-1, 2)])
def test_a_group_of_no_or_equal_or_negative_ranks_is_refused(ranks: tuple[int, ...]):
    with pytest.raises(InvalidJob, match="different ranks from 0"):
        Group(ranks)


def test_segments_follow_the_order_of_the_group():
    segments = Segments.even(Group((3, 1, 0)), 10)
    assert [segments.of(rank) for rank in (3, 1, 0)] == [(0, 4), (4, 7), (7, 10)]
    assert segments.num_tokens == 10


@pytest.mark.parametrize("chunks", [1, 2, 3, 4, 5])
def test_chunks_of_a_head_table_cover_each_owners_heads_once(chunks: int):
    table = HeadTable.even(Group((0, 2, 1)), 8)
    for owner, (start, stop) in enumerate(table.spans):
        heads = [head for chunk in range(chunks) for head in range(*table.chunk(chunk, chunks)[owner])]
        assert heads == list(range(start, stop))


def test_an_owner_with_fewer_heads_than_chunks_gets_empty_last_chunks():
    table = HeadTable(Group((0, 1)), ((0, 3), (3, 4)))
    assert [table.chunk(chunk, 3) for chunk in range(3)] == [((0, 1), (3, 4)), ((1, 2), (4, 4)), ((2, 3), (4, 4))]


def test_a_plan_knows_its_ranks_and_whether_a_rank_does_both():
    apart, both = Plan(Group((2, 0)), Group((1,))), Plan(Group((0, 1)), Group((1,)))
    assert (apart.ranks, apart.shared) == ((0, 1, 2), False)
    assert (both.ranks, both.shared) == ((0, 1), True)
    with pytest.raises(InvalidJob, match="chunks must be 1 or more, not 0"):
        Plan(Group((0,)), Group((0,)), chunks=0)


@pytest.mark.parametrize(("ranks", "tokens", "heads", "largest"), [
    (8, 9, 12, 2), (2, 7, 8, 1), (4, 1000, 3, 3), (5, 16, 8, 4)])
def test_too_many_ranks_are_refused_with_the_largest_legal_number(ranks: int, tokens: int, heads: int, largest: int):
    """Trial case B6: few tokens on many ranks."""
    plan = Plan(Group(tuple(range(ranks))), Group((0,)))
    with pytest.raises(Unplannable, match=f"{ranks} denoise ranks are too many for {tokens} tokens and {heads} heads .*"
                                          f"at most {largest}$"):
        plan.check(tokens, heads)
    small = shrink(plan, tokens, heads)
    assert small.denoise.ranks == tuple(range(largest))
    small.check(tokens, heads)


def test_one_rank_takes_any_clip():
    Plan(Group((0,)), Group((0,))).check(num_tokens=1, num_heads=1)


@pytest.mark.parametrize(("split", "world", "denoise", "decode"), [
    ("auto", 1, (0,), (0,)), ("auto", 2, (0, 1), (1,)), ("auto", 3, (0, 1), (2,)), ("auto", 4, (0, 1, 2), (3,)),
    ("2", 3, (0, 1), (1,)), ("1+1", 2, (0,), (1,)), ("2 + 2", 4, (0, 1), (2, 3))])
def test_splits(split: str, world: int, denoise: tuple[int, ...], decode: tuple[int, ...]):
    assert split_groups(split, world) == (Group(denoise), Group(decode))


@pytest.mark.parametrize("split", ["", "0", "0+1", "1+0", "two", "1+1+1", "-1", "1.5"])
def test_a_split_that_is_none_is_named(split: str):
    with pytest.raises(InvalidJob, match="N\\+M"):
        split_groups(split, 4)


@pytest.mark.parametrize(("split", "world", "nearest"), [("3+1", 3, "2\\+1"), ("4", 3, "2\\+1"), ("2", 1, "'1'")])
def test_a_split_for_more_ranks_than_there_are_names_the_nearest(split: str, world: int, nearest: str):
    with pytest.raises(Unplannable, match=nearest):
        split_groups(split, world)


def test_the_sentence_of_a_plan():
    apart = Plan(Group((0, 1)), Group((2,)), chunks=2)
    assert apart.sentence() == "ranks 0, 1 denoise together in 2 chunks, rank 2 decodes"
    assert Plan(Group((0, 1)), Group((1,))).sentence().endswith("(it takes turns)")
