"""What loading the pack brings into a real ComfyUI (docs/benchmarks.md has the seconds; scripts/import_cost.py)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest


def test_the_entry_point_brings_only_our_own_light_modules(
    comfy_folder: Path, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(repository / "scripts"), *sys.path])
    import import_cost

    loaded = import_cost.measure(comfy_folder)
    assert loaded["nodes"] == ["PipeDiTLoader", "PipeDiTLoRA", "PipeDiTSampler", "PipeDiTSamplerAdvanced",
                               "PipeDiTVAEDecode", "PipeDiTModelBridge"]
    strangers = [name for name in loaded["modules"] if not name.startswith((str(repository), "comfyui_pipedit"))]
    assert [name for name in strangers if name.split(".")[0] in {"diffusers", "transformers", "xfuser"}] == []
    assert [name for name in strangers if name.startswith("torch.")] == []
    assert loaded["cuda"] is False
