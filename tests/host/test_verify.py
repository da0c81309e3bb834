"""The command `verify` on a pool of four ranks: every split and chunk count passes, and one that is off fails."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import pytest
import tiny_wan
import torch

from comfyui_pipedit import verify, verify_tiny
from comfyui_pipedit.errors import InvalidJob
from comfyui_pipedit.requests import Clip

SIZES = (Clip(64, 64, 5), Clip(80, 48, 5))
"""32 and 30 tokens: the second divides by neither 4 nor 2 ranks' chunks."""
PLANS = {"1": 4, "2": 2, "1+1": 4, "3": 2, "2+1": 2, "4": 1, "2+2": 2, "3+1": 2}
"""Split -> chunk counts, up to a head a chunk."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tiny_wan.use_worker_site()
    return tiny_wan.write_model(tmp_path_factory.mktemp("model") / "tiny")


def options(model: Path, *arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    verify.add_arguments(parser)
    words = ["--model", str(model), "--devices", "cpu:4", "--prompt", "a red circle", "--json"]
    return parser.parse_args([*words, *arguments])


def test_every_plan_of_four_ranks_passes(model: Path, monkeypatch: pytest.MonkeyPatch,
                                         capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(verify, "SIZES", SIZES)
    assert verify.run(options(model, "--ranks", "1,2,3,4")) == 0
    rows = [verify.Row(**json.loads(line)) for line in capsys.readouterr().out.splitlines()]
    expected = {(split, chunks + 1) for split, count in PLANS.items() for chunks in range(count)}
    assert {(row.split, row.chunks) for row in rows} == expected and len(rows) == 2 * len(expected)
    assert {row.tokens for row in rows} == {32, 30}
    assert all(row.passed and row.max_error == row.frames_error == 0 for row in rows)


def test_a_plan_that_is_off_fails_and_so_does_the_command(model: Path, monkeypatch: pytest.MonkeyPatch,
                                                          capsys: pytest.CaptureFixture[str]) -> None:
    what, ones = ("tiny", "2", 1, 30), torch.ones(3)
    exact = verify.compare(what, (ones, ones), (ones, ones), 0.0)
    off = verify.compare(what, (ones + 1e-6, ones), (ones, ones), 0.0)
    assert exact.passed and not off.passed and off.max_error > 0
    monkeypatch.setattr(verify, "SIZES", SIZES[:1])
    monkeypatch.setattr(verify, "rows", lambda *_: iter([exact, replace(off, split="1+1")]))
    assert verify.run(options(model, "--ranks", "1,2")) == 1
    assert [json.loads(line)["passed"] for line in capsys.readouterr().out.splitlines()] == [True, False]
    assert verify.sentence(off).startswith("FAIL  tiny         split    2")


@pytest.mark.parametrize("text", ["", "1,x", "0", "-1"])
def test_a_list_of_ranks_that_is_none_is_named(text: str) -> None:
    with pytest.raises(InvalidJob, match="is not a list of numbers"):
        verify.parse_counts(text)


def test_tiny_models_of_every_variant_pass(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_tiny, "SIZES", verify_tiny.SIZES[1:])
    parser = argparse.ArgumentParser()
    verify.add_arguments(parser)
    assert verify.run(parser.parse_args(["--tiny", "--ranks", "2", "--devices", "cpu:2", "--json"])) == 0
    rows = [verify.Row(**json.loads(line)) for line in capsys.readouterr().out.splitlines()]
    assert {row.model for row in rows} == {*tiny_wan.VARIANTS, "two-experts", "t2v in fp8"}
    assert all(row.passed and row.max_error == row.frames_error == 0 for row in rows)


def test_what_a_variant_is_told_changes_its_clip() -> None:
    """So that the rows above compare what they say they do."""
    for name, config in tiny_wan.VARIANTS.items():
        told = verify_tiny.extras(name, (1, 9, 14))
        assert bool(told) == bool(config and name != "ti2v"), name


def test_a_family_without_tiny_models_is_named() -> None:
    with pytest.raises(InvalidJob, match=r"--families 'hunyuan'.*wan"):
        verify_tiny.check_families("wan,hunyuan")
