"""Pools beside ComfyUI's models on one GPU of numbers, through ComfyUI's own memory manager (core_memory.py)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import inprocess
import pytest

Found = dict[str, Any]


@pytest.fixture(scope="module")
def found(comfy_folder: Path) -> Found:
    lines = inprocess.run("core_memory.py", comfy_folder).splitlines()
    return {line["case"]: line["found"] for line in map(json.loads, filter(lambda text: text[:1] == "{", lines))}


def test_core_nodes_with_room_leave_the_pool_alone(found: Found) -> None:
    assert found["core_with_room"] == {"asked": [], "listed": 1, "loaded": 5}


def test_core_nodes_without_room_get_what_is_missing_from_the_pool(found: Found) -> None:
    """ComfyUI wants a model's size and a tenth of it, and 1.19 GiB that it keeps free: 3.99 GiB more than the 6 that
    are free for one of 8 GiB, and then 0.3 for one of 1."""
    core = found["core_without_room"]
    assert core["asked"] == [3.99, 0.3] and core["held"] == pytest.approx(18 - 4.29, abs=0.01)
    assert core["listed"] == 1 and core["loaded"] == [8, 1]


def test_a_pool_at_work_keeps_what_it_uses_and_is_listed_again_later(found: Found) -> None:
    assert found["a_pool_at_work"] == {"held": 18, "listed": [0, 1]}


def test_unloading_all_models_unloads_the_pools(found: Found) -> None:
    assert found["unload_all"] == {"held": 0.0, "listed": 0}


def test_one_entry_a_gpu_that_a_pool_holds_memory_of(found: Found) -> None:
    assert (found["twice_announced"], found["nothing_held"], found["cpu_ranks"]) == (1, 0, 0)
    assert found["announced_after_a_wait"] == 1


def test_nothing_is_unloaded_where_the_allocators_rest_is_enough(found: Found) -> None:
    assert found["the_allocators_rest_is_enough"] == {"loaded": 6, "emptied": 1, "asked": []}
    assert found["there_is_room_by_now"] == {"loaded": 6, "emptied": 0}


def test_a_core_model_gives_what_a_pool_lacks_and_no_more(found: Found) -> None:
    assert found["a_model_gives_what_is_missing"] == {
        "freed": 3.0, "loaded": 5.0, "asked": [], "left": [["Module", 5.0]], "listed": 1,
    }  # fmt: skip


def test_a_model_without_memory_of_its_own_stays_loaded(found: Found) -> None:
    assert found["a_model_that_holds_nothing_stays"] is True


def test_the_idle_weights_of_another_pool_go_before_comfyuis(found: Found) -> None:
    assert found["another_pools_idle_weights_first"] == {"asked": [], "other": [4.0], "loaded": 8}


def test_a_gpu_that_comfyui_does_not_use_is_not_touched(found: Found) -> None:
    assert found["a_gpu_that_comfyui_does_not_use"] == {"asked": [], "loaded": 8}


def test_whoever_waits_for_the_pool_answers_it(found: Found) -> None:
    assert found["waiting_answers"] == [["done", 5.0], ["done", 5.0]]
