"""The driver of `make demo` reads its graph rightly and fails when what it should show is not there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    """scripts/demo.py as a module."""
    path, sys.path[:] = list(sys.path), [str(ROOT / "scripts"), *sys.path]
    try:
        import demo
    finally:
        sys.path[:] = path
    return demo


@pytest.fixture
def graph() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((ROOT / "workflows" / "api" / "demo.json").read_text())
    return loaded


class ScriptedClient:
    """Answers GET by path."""

    def __init__(self, answers: dict[str, Any]) -> None:
        self.answers = answers

    def get(self, path: str) -> Any:
        return self.answers[path]


def test_the_graph_has_four_branches_with_prompts_of_their_own(demo: ModuleType, graph: dict[str, Any]) -> None:
    found = demo.branches(graph)
    assert len(found) == 4
    assert len({branch.prompt for branch in found}) == len({branch.sampler for branch in found}) == 4
    assert all(branch.prompt in {node["inputs"].get("text") for node in graph.values()} for branch in found)


def test_something_else_than_comfyui_is_refused(demo: ModuleType) -> None:
    nodes = {name: {} for name in ("KSampler", "SaveVideo", "PipeDiTLoader", "PipeDiTSampler")}
    comfyui = {"/system_stats": {"system": {"comfyui_version": "0.3.75"}}, "/object_info": nodes}
    assert demo.check_comfyui(ScriptedClient(comfyui)) == "0.3.75"
    with pytest.raises(demo.DemoFailed, match="not a ComfyUI"):
        demo.check_comfyui(ScriptedClient({**comfyui, "/system_stats": {}}))
    without = {**comfyui, "/object_info": {name: {} for name in nodes if name != "KSampler"}}
    with pytest.raises(demo.DemoFailed, match=r"missing nodes \['KSampler'\]"):
        demo.check_comfyui(ScriptedClient(without))


def test_a_process_left_behind_fails_the_demo_and_is_ended(demo: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "PATIENCE", 0.2)
    left = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with pytest.raises(demo.DemoFailed, match=f"left running: .{left.pid}"):
        demo.check_nothing_left([psutil.Process(left.pid)], port=0)
    assert left.wait(10) != 0


def test_a_taken_port_fails_the_demo(demo: ModuleType) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(demo.DemoFailed, match="port"):
        demo.check_nothing_left([], listener.getsockname()[1])


def test_a_branch_without_a_video_fails_the_demo(demo: ModuleType, graph: dict[str, Any], tmp_path: Path) -> None:
    outcome = demo.Outcome("id", "success", (), {})
    with pytest.raises(demo.DemoFailed, match="saved 0 files"):
        demo.save_clips(ScriptedClient({}), outcome, graph, tmp_path)


def test_no_spans_fail_the_demo(demo: ModuleType, graph: dict[str, Any], tmp_path: Path) -> None:
    outcome = demo.Outcome("id", "success", (), {})
    with pytest.raises(demo.DemoFailed, match="no spans"):
        demo.save_timeline(ScriptedClient({"/pipedit/spans?since=0": []}), outcome, graph, tmp_path)


def test_clips_are_named_by_the_jobs_that_the_samplers_report(demo: ModuleType, graph: dict[str, Any]) -> None:
    outputs = {branch.sampler: {"pipedit": [{"job": f"clip-{i}"}]} for i, branch in enumerate(demo.branches(graph))}
    labels = demo.labels_of(demo.Outcome("id", "success", (), outputs), graph)
    assert labels == {f"clip-{i}": branch.prompt for i, branch in enumerate(demo.branches(graph))}
