"""Each workflow in the editor's format and its API twin say the same, value by value."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from server import Client

FOLDER = Path(__file__).resolve().parents[2] / "workflows"
NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))
NOTES = ("MarkdownNote", "Note")
BYPASSED = 4
MODEL_FOLDERS = {"diffusion_models", "text_encoders", "vae", "loras", "clip_vision"}
WIDGET_TYPES = ("INT", "FLOAT", "STRING", "BOOLEAN", "COMBO")


def load(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def widget_names(info: dict[str, Any]) -> list[str]:
    """A node's widgets in the editor's order; a seed or an upload brings a second one, which the API does not have."""
    names = []
    for name in (*info["input_order"].get("required", []), *info["input_order"].get("optional", [])):
        kind, *options = (info["input"].get("required", {}) | info["input"].get("optional", {}))[name]
        if isinstance(kind, list) or kind in WIDGET_TYPES:
            names.append(name)
            if options and (options[0].get("control_after_generate") or options[0].get("image_upload")):
                names.append("")
    return names


def as_api(editor: dict[str, Any], describe: Any) -> dict[str, dict[str, Any]]:
    """What the editor would send for its graph: class and inputs of each node. Bypassed nodes have no inputs here."""
    graph: dict[str, dict[str, Any]] = {}
    sent = [node for node in editor["nodes"] if node["type"] not in NOTES and node["mode"] != BYPASSED]
    alive = {node["id"] for node in sent}
    sources = {link[0]: [str(link[1]), link[2]] for link in editor["links"] if link[1] in alive}
    for node in sent:
        names = widget_names(describe(node["type"]))
        assert len(names) == len(node["widgets_values"]), f"{node['type']} has the widgets {names}"
        inputs = {name: value for name, value in zip(names, node["widgets_values"], strict=True) if name}
        inputs |= {slot["name"]: sources[slot["link"]] for slot in node["inputs"] if slot["link"] in sources}
        graph[str(node["id"])] = {"class_type": node["type"], "inputs": inputs}
    return graph


@pytest.mark.parametrize("name", NAMES)
def test_editor_file_and_twin_are_the_same_graph(name: str, comfy: Client) -> None:
    twin = load(FOLDER / "api" / f"{name}.json")
    plain = {node: {"class_type": entry["class_type"], "inputs": entry["inputs"]} for node, entry in twin.items()}
    assert as_api(load(FOLDER / f"{name}.json"), comfy.object_info) == plain


@pytest.mark.parametrize("name", NAMES)
def test_links_are_listed_at_both_ends(name: str) -> None:
    editor = load(FOLDER / f"{name}.json")
    nodes = {node["id"]: node for node in editor["nodes"]}
    for number, source, slot, target, place, kind in editor["links"]:
        assert number in nodes[source]["outputs"][slot]["links"] and nodes[source]["outputs"][slot]["type"] == kind
        assert nodes[target]["inputs"][place]["link"] == number and nodes[target]["inputs"][place]["type"] == kind


@pytest.mark.parametrize("name", NAMES)
def test_the_editor_can_offer_every_model_file(name: str) -> None:
    for node in load(FOLDER / f"{name}.json")["nodes"]:
        files = {value for value in node.get("widgets_values", []) if str(value).endswith(".safetensors")}
        offered = {entry["name"]: entry for entry in node["properties"].get("models", [])}
        assert offered.keys() == files
        for file, entry in offered.items():
            assert entry["url"].startswith("https://huggingface.co/") and entry["url"].endswith(f"/{file}")
            assert entry["directory"] in MODEL_FOLDERS


def test_every_workflow_has_a_twin() -> None:
    assert NAMES and sorted(path.stem for path in (FOLDER / "api").glob("*.json")) == NAMES


def test_editors_template_list_shows_them(comfy: Client) -> None:
    listed = {pack: names for pack, names in comfy.get("/workflow_templates").items() if "demo" in names}
    assert [sorted(names) for names in listed.values()] == [NAMES]
    for pack in listed:
        for name in NAMES:
            picture = comfy.request(f"/api/workflow_templates/{pack}/{name}.jpg")
            assert picture.startswith(b"\xff\xd8") and len(picture) < 60_000
