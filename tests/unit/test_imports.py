"""The rule of import direction (docs/structures.md), by reading every import statement of the pack.

nodes -> host -> wire <- worker -> parallel -> models, the nouns beneath all.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ENGINE = ROOT / "comfyui_pipedit"
NOUNS = {"errors", "job", "plan", "config", "sampling"}
HEAVY = {"diffusers", "transformers", "torch.distributed"}
COMFY = {"comfy", "comfy_api", "comfy_execution", "comfy_extras", "nodes", "server", "execution", "folder_paths", "app"}

# package of the engine -> the packages of the engine that it may import, beside itself and the nouns
MAY_IMPORT: dict[str, set[str]] = {
    **{noun: set() for noun in NOUNS},
    "wire": set(),
    "models": {"loaders"},
    "loaders": set(),
    "parallel": {"models"},
    "host": {"wire", "loaders"},
    "worker": {"wire", "parallel", "models", "loaders"},
    "timeline": set(),
    "contact_sheet": set(),
    "demo": {"host", "contact_sheet", "requests"},
    "requests": {"host", "loaders"},
    "generate": {"host", "loaders", "requests", "timeline", "contact_sheet"},
    "tiny": set(),
    "bench": {"host", "loaders", "requests"},
    "verify_tiny": {"loaders", "requests", "tiny"},
    "verify": {"host", "requests", "verify_tiny"},
    "inspect_file": {"loaders"},
    "__main__": {"generate", "verify", "inspect_file"},
    "__init__": {"host"},
}
# what third-party code a package must not name, beside ComfyUI's, which the engine never does
MUST_NOT_NAME: dict[str, set[str]] = {
    "errors": {"torch", *HEAVY},
    "job": {"torch", *HEAVY},
    "plan": {"torch", *HEAVY},
    "config": {"torch", *HEAVY},
    "sampling": HEAVY,
    "timeline": {"torch", *HEAVY},
    "contact_sheet": {"torch", *HEAVY},
    "wire": HEAVY,
    "host": HEAVY,
    "__main__": HEAVY,
    "__init__": HEAVY,
    "requests": HEAVY,
    "generate": HEAVY,
    "verify": HEAVY,
    "verify_tiny": HEAVY,
    "inspect_file": HEAVY,
    "models": {"torch.distributed"},
    "loaders": HEAVY,
    "parallel": {"transformers"},
}


@dataclass(frozen=True)
class Import:
    """One imported name: `module` is dotted and absolute; `relative` tells how it was written."""

    file: Path
    line: int
    module: str
    relative: bool
    typing_only: bool

    def __str__(self) -> str:
        return f"{self.file.relative_to(ROOT)}:{self.line} imports {self.module}"


def sources(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


def package_of(module: str) -> str:
    """`comfyui_pipedit.host.pool` -> `host`; the root package itself -> `__init__`."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def dotted(file: Path) -> list[str]:
    """Names of the package that `file` lies in, for relative imports."""
    return list(file.relative_to(ROOT).parent.parts)


def absolute(node: ast.ImportFrom, file: Path) -> str:
    """The dotted module that a `from ... import` names."""
    if not node.level:
        return node.module or ""
    base = dotted(file)[: len(dotted(file)) - node.level + 1]
    return ".".join([*base, *([node.module] if node.module else [])])


def is_typing_guard(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)


def typing_only_nodes(tree: ast.AST) -> set[ast.AST]:
    guards = [node for node in ast.walk(tree) if is_typing_guard(node)]
    return {inner for guard in guards for inner in ast.walk(guard)}


def imported_names(node: ast.ImportFrom, module: str) -> list[str]:
    """`from . import a, b` names the modules a and b; `from .x import y` names x (and x.y where that is a module)."""
    names = [f"{module}.{alias.name}" for alias in node.names]
    modules = [name for name in names if (ROOT / (name.replace(".", "/") + ".py")).exists()
               or (ROOT / name.replace(".", "/")).is_dir()]
    third_party = names if module.split(".")[0] == "torch" else []
    return [*(modules or [module]), *third_party]


def imports(file: Path) -> Iterator[Import]:
    """Every import statement of a file, those inside functions too."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    guarded = typing_only_nodes(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(file, node.lineno, alias.name, False, node in guarded)
        elif isinstance(node, ast.ImportFrom):
            for name in imported_names(node, absolute(node, file)):
                yield Import(file, node.lineno, name, node.level > 0, node in guarded)


def engine_imports() -> list[Import]:
    return [item for file in sources(ENGINE) for item in imports(file)]


def owner(item: Import) -> str:
    """The engine package that an import statement stands in."""
    parts = item.file.relative_to(ENGINE).with_suffix("").parts
    return package_of(".".join(["comfyui_pipedit", *parts]))


def names(item: Import, forbidden: set[str]) -> bool:
    return any(item.module == name or item.module.startswith(name + ".") for name in forbidden)


def wrong_direction(item: Import) -> bool:
    if item.module.split(".")[0] != "comfyui_pipedit" or item.typing_only:
        return False
    source, target = owner(item), package_of(item.module)
    return target not in {source, *NOUNS, *MAY_IMPORT[source]}


def test_every_package_has_a_rule():
    packages = {package_of(".".join(["comfyui_pipedit", *file.relative_to(ENGINE).with_suffix("").parts]))
                for file in sources(ENGINE)}
    assert packages <= set(MAY_IMPORT), f"add a row to MAY_IMPORT for {sorted(packages - set(MAY_IMPORT))}"


def test_imports_go_in_one_direction():
    assert [str(item) for item in engine_imports() if wrong_direction(item)] == []


def test_the_engine_is_imported_relatively_inside_itself():
    wrong = [str(item) for item in engine_imports() if item.module.startswith("comfyui_pipedit") and not item.relative]
    assert wrong == []


def test_the_engine_names_nothing_of_comfyui():
    assert [str(item) for item in engine_imports() if not item.relative and names(item, COMFY)] == []


def test_packages_stay_off_what_is_not_theirs():
    wrong = [str(item) for item in engine_imports()
             if not item.typing_only and names(item, MUST_NOT_NAME.get(owner(item), set()))]
    assert wrong == []


def test_nodes_know_neither_workers_nor_torch_distributed():
    inside = {f"comfyui_pipedit.{name}" for name in ("worker", "parallel", "models", "wire")}
    items = [item for file in [ROOT / "__init__.py", *sources(ROOT / "nodes")] for item in imports(file)]
    assert items, "the pack has no nodes"
    assert [str(item) for item in items if names(item, HEAVY | inside)] == []


def test_no_pickle_anywhere():
    pickles = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "multiprocessing"}
    files = [*sources(ENGINE), *sources(ROOT / "nodes")]
    assert [str(item) for file in files for item in imports(file) if names(item, pickles)] == []


def compares_cuda(node: ast.AST) -> bool:
    """`x == "cuda"`, `x in ("cuda", ...)`, `x.startswith("cuda")` or a match case on it."""
    if isinstance(node, ast.Compare):
        operands: list[ast.AST] = [node.left, *node.comparators]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "startswith":
        operands = list(node.args)
    elif isinstance(node, ast.MatchValue):
        operands = [node.value]
    else:
        return False
    constants = [leaf.value for operand in operands for leaf in ast.walk(operand) if isinstance(leaf, ast.Constant)]
    return any(isinstance(value, str) and re.match("cuda(:|$)", value) for value in constants)


def test_one_file_asks_for_the_kind_of_device():
    found = {str(file.relative_to(ENGINE)) for file in sources(ENGINE) if file.parent.name != "demo"
             for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))) if compares_cuda(node)}
    assert found <= {"worker/device.py"}


def test_no_process_group_but_the_world():
    calls = [f"{file.relative_to(ROOT)}:{node.lineno}" for file in sources(ENGINE)
             for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
             if isinstance(node, ast.Attribute) and node.attr in {"new_group", "new_subgroups", "split_group"}]
    assert calls == []


@pytest.mark.parametrize(("text", "expected"), [
    ("import pickle", "pickle"), ("from ..worker import runtime", "comfyui_pipedit.worker"),
    ("from torch import distributed", "torch.distributed"), ("def f():\n    import diffusers", "diffusers"),
])
def test_the_reader_sees_all_forms(text: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "comfyui_pipedit" / "host" / "example.py"
    file.parent.mkdir(parents=True)
    file.write_text(text)
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    assert expected in {item.module for item in imports(file)}


LOAD = """
import asyncio, importlib.util, json, sys
import torch
before = set(sys.modules)
spec = importlib.util.spec_from_file_location("/packs/PipeDiT", sys.argv[1] + "/__init__.py",
                                              submodule_search_locations=[sys.argv[1]])
pack = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = pack
spec.loader.exec_module(pack)
pack.register_engine(pack.ENGINE)
import comfyui_pipedit.host.engine
print(json.dumps({"new": sorted(set(sys.modules) - before), "cuda": torch.cuda.is_initialized()}))
"""


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """What loading the pack under a path-like name, as ComfyUI does, and its engine adds to a process with torch."""
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    command = [sys.executable, "-c", LOAD, str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=elsewhere)
    assert done.returncode == 0, done.stderr
    answer: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return answer


def test_loading_the_pack_imports_nothing_heavy(loaded: dict[str, object]):
    new = loaded["new"]
    assert isinstance(new, list) and "comfyui_pipedit.host.engine" in new
    assert [name for name in new if name.split(".")[0] in {"diffusers", "transformers", "xfuser"}] == []
    assert [name for name in new if name.startswith("torch.distributed")] == []


def test_loading_the_pack_makes_no_cuda_context(loaded: dict[str, object]):
    assert loaded["cuda"] is False
