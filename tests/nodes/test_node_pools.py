"""Engines by devices, decodes that run ahead, model lists, and keywords that an older ComfyUI does not know."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from comfyui_pipedit.errors import InvalidJob, SetupError
from comfyui_pipedit.host.ticket import Ticket
from comfyui_pipedit.job import Tiling, Weights
from nodes.catalog import Catalog, Choice, check_loader, complaint, diffusers_folders, fingerprint
from nodes.compat import make
from nodes.pools import Ahead, Pools

VAE = Weights("wan", "vae", "/toy")


class Closing:
    def __init__(self, devices: str) -> None:
        self.devices, self.closed = devices, False

    def close(self) -> None:
        self.closed = True


def test_one_engine_for_one_list_of_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    pools = Pools(Closing)
    first = pools.get("auto")
    assert pools.get("cpu:3") is first and pools.get(" CPU:3") is first and pools.get("cpu:2") is not first
    assert list(pools.all()) == ["cpu:0,cpu:1,cpu:2", "cpu:0,cpu:1"]
    pools.close()
    assert first.closed and not pools.all()


def test_devices_of_the_settings_file_stand_for_auto(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "pipedit.yaml").write_text("devices: cpu:2\n")
    monkeypatch.setenv("PIPEDIT_CONFIG", str(tmp_path / "pipedit.yaml"))
    assert Pools(Closing).get("auto").devices == "cpu:2"


@pytest.mark.parametrize("text", [None, "devices: [cpu:2"], ids=["missing", "damaged"])
def test_a_settings_file_that_cannot_be_read_is_named_with_its_variable(
    text: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "pipedit.yaml"
    if text is not None:
        path.write_text(text)
    monkeypatch.setenv("PIPEDIT_CONFIG", str(path))
    with pytest.raises(SetupError, match=r"PIPEDIT_CONFIG names .*pipedit.yaml, which cannot be read: "):
        Pools(Closing).get("auto")


def ticket(error: Exception | None = None) -> Ticket:
    made = Ticket("frames", lambda job: None)
    if error is not None:
        made.fail(error)
    return made


def test_a_decode_ahead_is_taken_once_by_the_very_tensor() -> None:
    pools, samples, tickets = Pools(Closing), torch.ones(1, 2), (ticket(),)
    pools.remember(samples, Ahead(tickets, VAE, None))
    assert pools.take(torch.ones(1, 2), VAE, None) is None
    assert pools.take(samples, VAE, None) is tickets
    assert pools.take(samples, VAE, None) is None


@pytest.mark.parametrize(
    ("vae", "tiling", "error"),
    [
        (Weights("wan", "vae", "/other"), None, None),
        (VAE, Tiling(), None),
        (VAE, None, InvalidJob("lost")),
    ],
)
def test_a_decode_that_differs_or_failed_is_not_taken(vae: Weights, tiling: Tiling | None, error: Any) -> None:
    pools, samples = Pools(Closing), torch.ones(1, 2)
    pools.remember(samples, Ahead((ticket(error),), VAE, None))
    assert pools.take(samples, vae, tiling) is None


def test_a_decode_ahead_is_cancelled_and_forgotten_with_its_latent() -> None:
    pools, cancelled = Pools(Closing), []
    pools.remember(torch.ones(1, 2), Ahead((Ticket("frames", cancelled.append),), VAE, None))
    gc.collect()
    assert len(pools.ahead) == 0 and cancelled == ["frames"]


def test_a_refused_request_cancels_those_before_it() -> None:
    class Refusing(Closing):
        def submit(self, request: Any) -> Ticket:
            if request == "bad":
                raise InvalidJob("no")
            return Ticket(request, cancelled.append)

    cancelled: list[str] = []
    with pytest.raises(InvalidJob):
        Pools(Refusing).submit("cpu:2", ["first", "second", "bad"])
    assert cancelled == ["first", "second"]


class Folders:
    """ComfyUI's folder_paths over one folder."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def get_filename_list(self, folder_name: str) -> list[str]:
        return sorted(path.name for path in (self.root / folder_name).glob("*.safetensors"))

    def get_folder_paths(self, folder_name: str) -> list[str]:
        return [str(self.root / folder_name)]

    def get_full_path(self, folder_name: str, filename: str) -> str | None:
        path = self.root / folder_name / filename
        return str(path) if path.is_file() else None


@pytest.fixture
def catalog(tmp_path: Path) -> Catalog:
    for name in ("diffusers/org/wan/transformer", "diffusers/other", "diffusion_models", "checkpoints", "vae"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "diffusers/org/wan/model_index.json").write_text("{}")
    (tmp_path / "diffusers/org/wan/transformer/model_index.json").write_text("{}")
    (tmp_path / "diffusion_models/a.safetensors").write_bytes(b"")
    (tmp_path / "checkpoints/a.safetensors").write_bytes(b"")
    return Catalog.read(Folders(tmp_path))


def test_names_and_what_they_stand_for(catalog: Catalog, tmp_path: Path) -> None:
    assert list(catalog.models) == ["demo", "diffusers/org/wan", "a.safetensors", "checkpoints/a.safetensors"]
    assert catalog.path("diffusers/org/wan") == tmp_path / "diffusers/org/wan"
    assert catalog.path("checkpoints/a.safetensors") == tmp_path / "checkpoints/a.safetensors"


@pytest.mark.parametrize("name", ["../secret", "diffusers/../../secret", "/etc", "diffusers/other", ""])
def test_only_listed_names_become_paths(catalog: Catalog, name: str) -> None:
    with pytest.raises(InvalidJob, match="unet_name"):
        catalog.path(name)


def test_values_over_links_are_checked_when_they_are_known(catalog: Catalog) -> None:
    assert complaint(catalog, Choice(None, None, None, None, None, None), None) is None
    check_loader(catalog, Choice("demo", weight_dtype="bf16"), "cpu:4")


def test_fingerprint_sees_a_replaced_and_an_added_file(catalog: Catalog, tmp_path: Path) -> None:
    choice = Choice("a.safetensors")
    before = fingerprint(catalog, choice)
    (tmp_path / "diffusion_models/a.safetensors").write_text("other")
    replaced = fingerprint(catalog, choice)
    (tmp_path / "vae/wan_vae.safetensors").write_text("new")
    assert len({before, replaced, fingerprint(Catalog.read(Folders(tmp_path)), choice)}) == 3


def test_absent_folders_hold_nothing(tmp_path: Path) -> None:
    assert list(diffusers_folders(tmp_path / "none")) == []


def test_links_that_lead_nowhere_or_round_take_no_other_model_away(catalog: Catalog, tmp_path: Path) -> None:
    (tmp_path / "diffusion_models/b.safetensors").symlink_to(tmp_path / "gone.safetensors")
    (tmp_path / "diffusers/loop").symlink_to(tmp_path / "diffusers/loop")
    (tmp_path / "diffusers/org/up").symlink_to(tmp_path / "diffusers")
    found = Catalog.read(Folders(tmp_path)).models
    assert set(catalog.models) <= set(found) and "b.safetensors" not in found


def test_only_cosmetic_keywords_are_dropped() -> None:
    def older(name: str, default: int = 0) -> tuple[str, int]:
        return name, default

    assert make(older, "a", default=2, advanced=True, search_aliases=["b"]) == ("a", 2)
    with pytest.raises(TypeError):
        make(older, "a", optionl=True)
