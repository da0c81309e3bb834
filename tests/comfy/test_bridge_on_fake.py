"""What the samplers ask of the pool, over a scripted engine: decodes ahead, evaluations, and the end of a bad pool."""

from __future__ import annotations

import time
from typing import Any

import pytest
from graphs import Graph, change, node
from server import Client
from test_nodes_on_fake import (  # noqa: F401
    asked,
    await_asked,
    await_cancelled,
    fake,
    fake_server,
    message,
    paper,
    run,
    script,
)

ADVANCED = {
    "add_noise": "enable", "noise_seed": 3, "steps": 4, "cfg": 5.0, "sampler_name": "euler", "scheduler": "simple",
    "start_at_step": 0, "end_at_step": 10_000, "return_with_leftover_noise": "disable",
}  # fmt: skip


def advanced(**widgets: Any) -> Graph:
    """The paper graph with the other sampler in its place."""
    graph = paper()
    links = {name: graph["5"]["inputs"][name] for name in ("model", "positive", "negative", "latent_image")}
    return graph | {
        "5": node("PipeDiTSamplerAdvanced", **links, **{**ADVANCED, "noise_seed": time.monotonic_ns(), **widgets})
    }


@pytest.mark.parametrize(
    ("widgets", "ahead"),
    [
        ({}, True),
        ({"end_at_step": 2}, True),
        ({"start_at_step": 1, "add_noise": "disable"}, True),
        ({"end_at_step": 2, "return_with_leftover_noise": "enable"}, False),
        ({"sampler_name": "uni_pc"}, True),
    ],
)
def test_a_run_that_ends_without_noise_is_decoded_right_after(
    fake: Client,  # noqa: F811
    widgets: dict[str, Any],
    ahead: bool,
) -> None:
    outcome = run(fake, advanced(**widgets))
    assert outcome.status == "success" and len(outcome.files("7")) == 9
    (clip,) = asked(fake, "clip")
    assert clip["decode"] is ahead and len(asked(fake, "decode")) == (not ahead)


def test_noise_is_added_or_not(fake: Client) -> None:  # noqa: F811
    run(fake, advanced(add_noise="disable", start_at_step=2))
    run(fake, advanced(start_at_step=2))
    without, with_noise = asked(fake, "clip")
    assert without["noise"] == 0.0 and with_noise["noise"] != 0.0
    assert without["steps"] == with_noise["steps"] == 2


def test_nothing_to_do_asks_for_nothing(fake: Client) -> None:  # noqa: F811
    assert run(fake, advanced(start_at_step=9)).status == "success"
    assert not asked(fake, "clip") and len(asked(fake, "decode")) == 1


def test_comfyuis_sampler_asks_for_evaluations_and_decodes_right_after(fake: Client) -> None:  # noqa: F811
    outcome = run(fake, paper(sampler_name="dpmpp_2m_sde", batch=2))
    assert outcome.status == "success" and not asked(fake, "clip")
    calls = asked(fake, "evaluate")
    assert len(calls) == 2 * 4 and all(call["branches"] == 2 and call["shape"] == [1, 16, 3, 8, 8] for call in calls)
    assert [call["sigma"] for call in calls[::2]] == [call["sigma"] for call in calls[1::2]]
    assert len(asked(fake, "decode")) == 2, "the Decode takes over the decodes that the sampler began"


def test_one_branch_at_cfg_1(fake: Client) -> None:  # noqa: F811
    run(fake, paper(sampler_name="dpmpp_2m_sde", cfg=1.0))
    assert {call["branches"] for call in asked(fake, "evaluate")} == {1}


def test_an_error_of_the_pool_keeps_its_class_under_comfyuis_sampler(fake: Client) -> None:  # noqa: F811
    script(fake, fail={"evaluate": "rank 1 (gpu:1, pid 7) was killed"})
    outcome = run(fake, paper(sampler_name="dpmpp_2m_sde"))
    assert message(outcome).startswith("Multi-GPU Sampler: rank 1 (gpu:1, pid 7) was killed")
    assert outcome.error["exception_type"] == "comfyui_pipedit.errors.WorkerDied"


def test_a_cancel_reaches_the_evaluation(fake: Client) -> None:  # noqa: F811
    script(fake, hold=["evaluate"])
    prompt = fake.queue(change(paper(sampler_name="dpmpp_2m_sde"), "5", steps=2))
    waiting = await_asked(fake, "evaluate")
    fake.interrupt()
    assert fake.wait(prompt, 20).status == "interrupted"
    assert await_cancelled(fake) == [waiting[0]["id"]]
