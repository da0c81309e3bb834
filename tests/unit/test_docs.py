"""The docs name files and tests that exist, and the map names every package."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])


def functions_of(file: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)", page.read_text())
    local = [link for link in links if "://" not in link]
    assert [link for link in local if not (page.parent / link).exists()] == []


def test_every_invariant_names_tests_that_exist() -> None:
    text = (ROOT / "docs" / "invariants.md").read_text()
    rows = re.findall(r"^\d+\. ", text, flags=re.MULTILINE)
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", text)
    assert rows and len(re.split(r"^\d+\. ", text, flags=re.MULTILINE)) - 1 == len(rows)
    for block in re.split(r"^\d+\. ", text, flags=re.MULTILINE)[1:]:
        assert "`tests/" in block, f"no test is named for: {block[:80]}"
    cases = re.findall(r"^\| B\d+ .*$", text, flags=re.MULTILINE)
    assert len(cases) == 22 and all("`tests/" in case for case in cases)
    for file, function in named:
        assert (ROOT / file).exists(), file
        assert not function or function in functions_of(ROOT / file), f"{file}::{function}"


def test_the_map_names_every_part_of_the_engine() -> None:
    text = (ROOT / "docs" / "structures.md").read_text()
    parts = [path for path in (ROOT / "comfyui_pipedit").iterdir()
             if (path.is_dir() or path.suffix == ".py") and path.name not in {"__init__.py", "__pycache__"}]
    assert len(parts) > 10
    assert [path.name for path in parts if not re.search(rf"\b{re.escape(path.stem)}\b", text)] == []


@pytest.mark.parametrize("package", ["loaders", "models", "sampling"])
def test_the_map_names_every_file_of_a_package(package: str) -> None:
    text = (ROOT / "docs" / "structures.md").read_text()
    files = [path.name for path in (ROOT / "comfyui_pipedit" / package).glob("[a-z]*.py")]
    assert files and [name for name in sorted(files) if f"`{name}`" not in text] == []


def test_the_map_names_only_files_that_exist() -> None:
    text = (ROOT / "docs" / "structures.md").read_text()
    names = {name for name in re.findall(r"`([\w/]+\.py)`", text) if "NAME" not in name}
    places = (ROOT, ROOT / "comfyui_pipedit", ROOT / "nodes", ROOT / "scripts", *(ROOT / "comfyui_pipedit").glob("*/"))
    assert names and [name for name in sorted(names) if not any((place / name).exists() for place in places)] == []
