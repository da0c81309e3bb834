"""The host's memory is asked before a clip takes it."""

from __future__ import annotations

import pytest

from comfyui_pipedit.errors import OutOfMemory
from comfyui_pipedit.host import room
from comfyui_pipedit.job import Geometry

WAN = Geometry(16, 8, 4, (1, 2, 2), 4096, 512, 12, (0.0,) * 16, (1.0,) * 16)
SHAPE = (1, 16, 21, 60, 104)


def test_a_clips_bytes_are_its_latents_and_its_frames() -> None:
    latents = room.clip_bytes(SHAPE, WAN, decode=False)
    assert latents == 10 * 4 * 16 * 21 * 60 * 104
    assert room.clip_bytes(SHAPE, WAN, decode=True) - latents == 81 * 480 * 832 * 3 * 4


def test_too_large_a_clip_is_named_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "available_bytes", lambda: 1 << 28)
    with pytest.raises(OutOfMemory, match=r"832x480x81 takes 0\.4 GiB .* 0\.2 GiB are available"):
        room.check_room(SHAPE, WAN, decode=True)
    room.check_room(SHAPE, WAN, decode=False)


def test_a_machine_that_does_not_say_refuses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "available_bytes", lambda: None)
    room.check_room((1, 16, 10**6, 10**3, 10**3), WAN, decode=True)


def test_this_machine_says() -> None:
    assert (room.available_bytes() or 0) > 1 << 20
