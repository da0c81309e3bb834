"""Buffers of exchanges: used again by the same layout, forgotten with it."""

from __future__ import annotations

import torch

from comfyui_pipedit.parallel.scratch import Scratch

LIKE = torch.zeros(1, dtype=torch.bfloat16)


def test_a_buffer_is_given_out_to_one_at_a_time() -> None:
    scratch = Scratch()
    scratch.enter("a layout")
    first, second = scratch.take(LIKE, (2, 3)), scratch.take(LIKE, (2, 3))
    assert first.data_ptr() != second.data_ptr() and first.dtype == torch.bfloat16
    scratch.give(first)
    assert scratch.take(LIKE, [2, 3]) is first
    assert scratch.take(LIKE, (2, 3)) is not first
    scratch.give(second)
    assert scratch.take(LIKE, (3, 2)) is not second
    assert scratch.take(torch.zeros(1), (2, 3)) is not second


def test_another_layout_starts_with_nothing() -> None:
    scratch = Scratch()
    scratch.enter(("layout", 1))
    buffer = scratch.take(LIKE, (4,))
    scratch.give(buffer)
    scratch.enter(("layout", 1))
    assert scratch.take(LIKE, (4,)) is buffer
    scratch.give(buffer)
    scratch.enter(("layout", 2))
    assert scratch.take(LIKE, (4,)) is not buffer
