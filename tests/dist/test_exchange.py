"""The exchange on gloo, 1 to 4 ranks: every element arrives where it belongs, whatever the groups and tables.

Making a process group raises in every rank (ranks.py). Trial cases B1, B3, B21, B24.
"""

from __future__ import annotations

from itertools import product

import exchange_cases as cases
import pytest
from ranks import Ranks

from comfyui_pipedit.parallel.layout import Layout
from comfyui_pipedit.plan import Group, HeadTable, Segments

GROUPS = {1: [(0,)], 2: [(0, 1), (1, 0), (1,)], 3: [(0, 1, 2), (2, 0, 1), (0, 2), (2, 1)],
          4: [(0, 1, 2, 3), (3, 1, 0), (0, 2), (1, 3), (3, 2, 0, 1)]}


def even_layouts(world: int) -> list[Layout]:
    """Every group x tokens (4k and 4k + 1, few, odd) x heads x chunks, up to one more than a rank's heads."""
    return [Layout.even(Group(ranks), tokens, heads, chunks)
            for ranks, tokens, heads in product(GROUPS[world], (16, 37, 45), (5, 6, 8))
            for chunks in range(1, -(-heads // len(ranks)) + 2)]


def table(owners: tuple[int, ...], counts: tuple[int, ...]) -> HeadTable:
    edges = [sum(counts[:i]) for i in range(len(counts) + 1)]
    return HeadTable(Group(owners), tuple(zip(edges[:-1], edges[1:], strict=True)))


def spans(holders: tuple[int, ...], counts: tuple[int, ...], replicated: int = 0) -> Segments:
    return Segments(Group(holders), table(holders, counts).spans, replicated)


AWKWARD = {
    "Aco: one holder, two helpers": (spans((1,), (21,)), table((1, 0, 2), (4, 2, 2))),
    "Aco: helpers first, uneven heads": (spans((3, 1), (9, 12)), table((0, 1, 3, 2), (1, 3, 2, 2))),
    "Aco: a helper without heads": (spans((0, 2), (8, 5)), table((0, 2, 3), (3, 2, 0))),
    "a holder without heads": (spans((2, 0, 1), (6, 4, 7)), table((0, 1, 2), (3, 0, 2))),
    "a holder that owns nothing and is no owner": (spans((0, 1, 3), (5, 6, 4)), table((3, 0), (4, 2))),
    "owners apart from holders": (spans((0, 3), (7, 4)), table((2, 1), (3, 3))),
    "spans of very different sizes": (spans((1, 2, 0), (1, 30, 9)), table((0, 1, 2), (1, 6, 1))),
    "a holder of no tokens": (spans((0, 1, 2), (12, 0, 5)), table((0, 1, 2), (2, 2, 2))),
    "joint text on holders": (spans((1, 0, 3), (9, 8, 8), replicated=5), table((0, 1, 3), (3, 3, 2))),
    "joint text and helpers": (spans((3, 1), (10, 11), replicated=7), table((1, 3, 0, 2), (2, 2, 1, 1))),
    "joint text, one holder": (spans((2,), (10,), replicated=3), table((2, 0), (3, 3))),
}


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_all_groups_tokens_heads_and_chunks(world: Ranks, size: int):
    layouts = even_layouts(size)
    taken = world.run(size, cases.exchange_coded, layouts=layouts, batch=1)
    assert sum(taken) == sum(len(layout.ranks) for layout in layouts) > 0


@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_buffers_are_used_again_and_nothing_of_before_is_seen(world: Ranks, chunks: int):
    layout = Layout.even(Group((2, 0, 1)), 37, 8, chunks)
    for held in world.run(3, cases.again_and_again, layout=layout, batch=1):
        assert held[0] > 0 and held == [held[0]] * 3


def test_tables_that_differ_from_the_holders(world: Ranks):
    layouts = [Layout(segments, heads, chunks) for segments, heads in AWKWARD.values() for chunks in (1, 2, 4)]
    taken = world.run(4, cases.exchange_coded, layouts=layouts, batch=1)
    assert sum(taken) == sum(len(layout.ranks) for layout in layouts)


def test_batch_of_two(world: Ranks):
    layouts = [Layout.even(Group((1, 0)), 11, 5, chunks) for chunks in (1, 3)]
    assert world.run(2, cases.exchange_coded, layouts=layouts, batch=2) == [2, 2]


def test_gather_of_uneven_strided_slices(world: Ranks):
    segments = [Segments.even(Group(ranks), tokens) for ranks in GROUPS[4] for tokens in (16, 37)]
    segments.append(spans((2, 0, 1), (3, 1, 6), replicated=4))
    right = world.run(4, cases.gather_coded, segments=segments, batch=2)
    assert sum(right) == 4 * sum(each.holders.size for each in segments)


def test_chunks_overlap_in_both_directions(world: Ranks):
    layout = Layout.even(Group((0, 1)), 9, 8, chunks=4)
    ins, outs = [0, 1, 3, 5], [2, 4, 6, 7]
    for log, _ in world.run(2, cases.pipeline_log, layout=layout):
        assert log == [f"post {ins[0]}", f"post {ins[1]}", f"wait {ins[0]}", "attend", f"post {outs[0]}",
                       f"post {ins[2]}", f"wait {ins[1]}", "attend", f"post {outs[1]}",
                       f"post {ins[3]}", f"wait {ins[2]}", "attend", f"post {outs[2]}",
                       f"wait {ins[3]}", "attend", f"post {outs[3]}", *(f"wait {number}" for number in outs)]


def test_data_arrives_while_a_chunk_is_attended(world: Ranks):
    layout = Layout.even(Group((1, 0)), 64, 8, chunks=4)
    for arrived in world.run(2, cases.lands_while_attending, layout=layout):
        assert arrived == [[1], [2, 3], [2, 4, 5], [2, 4, 6]]


def test_one_message_per_peer_chunk_and_direction(world: Ranks):
    layout = Layout.even(Group((2, 0, 1)), 17, 6, chunks=2)
    for _, messages in world.run(3, cases.pipeline_log, layout=layout):
        assert messages == [(2, 2)] * 4


def test_the_phase_board_says_what_a_rank_waits_for(world: Ranks):
    first, _ = world.run(2, cases.phases, layout=Layout.even(Group((0, 1)), 8, 4, chunks=2))
    assert first == ["Q, K, V of chunk 1/2 with ranks 1", "", "Q, K, V of chunk 2/2 with ranks 1", "",
                     "outputs of chunk 1/2 with ranks 1", "", "outputs of chunk 2/2 with ranks 1", ""]


@pytest.mark.parametrize("early", [False, True], ids=["while waited for", "before anything is posted"])
def test_a_peer_that_goes_away_is_named_at_once(world: Ranks, early: bool):
    layout = Layout.even(Group((0, 1)), 8, 4)
    (text, seconds), _ = world.run(2, cases.peer_goes_away, layout=layout, early=early)
    assert text.startswith("an exchange with ranks 1 broke: ")
    assert seconds < 10
