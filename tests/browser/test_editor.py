"""The pack in ComfyUI's editor: nodes are found and placed, workflows open and run, errors are shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from editor import Editor
    from server import ComfyServer

FOLDER = Path(__file__).resolve().parents[2] / "workflows"
NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))


def load(name: str) -> dict[str, Any]:
    """A workflow in the editor's format; "api/NAME" is its twin."""
    found: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return found


def test_a_search_finds_the_samplers_and_places_one(editor: Editor) -> None:
    editor.clear()
    assert "Multi-GPU Sampler (Advanced)" in editor.search("multi gpu", first="Multi-GPU Sampler")
    editor.page.keyboard.press("Enter")
    assert [node["type"] for node in editor.wait_nodes(1)] == ["PipeDiTSampler"]


def test_a_node_is_dragged_out_of_the_library(editor: Editor) -> None:
    editor.clear()
    editor.drag("Decoupled VAE Decode", 900, 500)
    (node,) = editor.wait_nodes(1)
    assert node["type"] == "PipeDiTVAEDecode" and abs(node["x"] - 900) < 60 and abs(node["y"] - 500) < 60


@pytest.mark.parametrize("name", NAMES)
def test_a_workflow_opens_from_the_templates_without_a_warning(shared_editor: Editor, name: str) -> None:
    assert shared_editor.template(name) == []
    assert shared_editor.dialogs() == []
    twin = {node: {"class_type": entry["class_type"], "inputs": entry["inputs"]}
            for node, entry in load(f"api/{name}").items()}
    assert shared_editor.sent() == twin


def test_a_node_that_is_not_installed_is_a_warning(editor: Editor) -> None:
    graph = load("demo")
    graph["nodes"][0]["type"] = "NoSuchNode"
    assert len(editor.load(graph)) == 1
    assert "NoSuchNode" in "".join(editor.dialogs())


def test_a_file_that_is_missing_is_offered(editor_server: ComfyServer, editor: Editor, tmp_path: Path) -> None:
    graph = load("wan21_vace")
    (entry,) = next(node["properties"]["models"] for node in graph["nodes"] if node["type"] == "PipeDiTLoRA")
    file = editor_server.base / "models" / entry["directory"] / entry["name"]
    kept = file.rename(tmp_path / file.name)
    try:
        assert editor.load(graph) == []
        (text,) = editor.dialogs()
    finally:
        kept.rename(file)
    assert entry["name"] in text and text.count(".safetensors") == 1


def test_the_demo_runs_with_progress_and_videos_on_its_nodes(editor: Editor) -> None:
    editor.template("demo")
    samplers = [node["id"] for node in load("demo")["nodes"] if node["type"] == "PipeDiTSampler"]
    for sampler in samplers:
        editor.set_widget(sampler, "steps", 6)
    editor.run()
    editor.wait_progress(samplers)
    assert editor.wait_end() == "execution_success"
    assert all("pipedit" in source and source.endswith(".mp4") for source in map(video_name, editor.videos(2)))


def video_name(address: str) -> str:
    """Folder and file of a /view address."""
    from urllib.parse import parse_qs, urlsplit

    query = parse_qs(urlsplit(address).query)
    return f"{query['subfolder'][0]}/{query['filename'][0]}"


def test_a_word_that_the_demo_does_not_know_is_an_error_on_its_node(editor: Editor) -> None:
    editor.template("demo")
    editor.set_widget(10, "text", "a purple elephant")
    editor.run()
    assert editor.wait_end() == "execution_error"
    assert editor.marked() == ["10"]
    (text,) = editor.dialogs()
    assert "does not know 'elephant'" in text and "its words are" in text


def test_a_latent_of_another_size_is_an_error_on_the_sampler(editor: Editor) -> None:
    graph = load("demo")
    latent = next(node for node in graph["nodes"] if node["type"] == "EmptyHunyuanLatentVideo")
    latent |= {"type": "EmptyLatentImage", "widgets_values": [96, 96, 1]}
    editor.load(graph)
    editor.run()
    assert editor.wait_end() == "execution_error"
    (text,) = editor.dialogs()
    assert "Multi-GPU Sampler" in text and "[1, 4, 12, 12]" in text and "needs 5" in text


def test_devices_that_are_not_here_are_an_error_on_the_loader(editor: Editor) -> None:
    editor.template("demo")
    editor.set_widget(1, "devices", "gpu:99")
    editor.run()
    editor.page.get_by_role("dialog").first.wait_for()
    assert editor.marked() == ["1"]
    (text,) = editor.dialogs()
    assert "gpu:99" in text
