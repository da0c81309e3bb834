"""A batch of two clips with prompts of 5 and of 12 words, on the real Wan classes: each is what it is alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import tiny_wan
import torch
from torch import Tensor

from comfyui_pipedit import loaders, sampling
from comfyui_pipedit.config import EngineConfig
from comfyui_pipedit.host.engine import Engine
from comfyui_pipedit.host.ticket import Ticket
from comfyui_pipedit.job import ModelFiles, TextRequest
from nodes import convert

SECONDS = 60.0
SHORT, LONG = "a red circle moving left", "a green square moving right on a blue background on black circle"
LEVELS = sampling.sigmas("simple", 3, shift=3.0, sampler="uni_pc")
SETTINGS = convert.Settings(seed=3, cfg=3.0, sampler="uni_pc", levels=LEVELS)
Result = tuple[Tensor, Tensor]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    tiny_wan.use_worker_site()
    return loaders.inspect(tiny_wan.write_model(tmp_path_factory.mktemp("model") / "tiny"))


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    made = Engine(EngineConfig(devices="cpu:3", split="2+1"))
    yield made
    made.close()


def ended(ticket: Ticket | None) -> Any:
    assert ticket is not None and ticket.wait(SECONDS)
    return ticket.result()


def encode(engine: Engine, files: ModelFiles, *texts: str) -> list[Tensor]:
    assert files.text is not None
    return ended(engine.submit(TextRequest(files.text, texts)))


@pytest.fixture(scope="module")
def texts(engine: Engine, files: ModelFiles) -> list[Tensor]:
    return encode(engine, files, SHORT, LONG)


def clips(engine: Engine, files: ModelFiles, text: Tensor, negative: Tensor, places: list[int]) -> list[Result]:
    """(latent, frames) of one batch whose clips have the noises of these places; all are in the pool together."""
    latent = {"samples": torch.zeros(len(places), 16, 2, 6, 8), "batch_index": places}
    follow_up = convert.FollowUp(files.vae, None)
    jobs = convert.jobs(files, [[text, {}]], [[negative, {}]], latent, SETTINGS, follow_up)
    tickets = [engine.submit(job) for job in jobs]
    return [(ended(ticket), ended(ticket.frames)) for ticket in tickets]


def test_texts_of_different_lengths_are_encoded_as_each_alone(engine: Engine, files: ModelFiles,
                                                             texts: list[Tensor]) -> None:
    lengths = [int(text[0].abs().sum(-1).nonzero().max()) + 1 for text in texts]
    assert lengths == [len(SHORT.split()) + 1, len(LONG.split()) + 1], "words and an end token, zeros behind"
    for text, alone in zip(texts, (SHORT, LONG), strict=True):
        assert torch.equal(text, encode(engine, files, alone)[0])


def test_each_clip_of_a_batch_is_the_one_of_its_own_prompt(engine: Engine, files: ModelFiles,
                                                           texts: list[Tensor]) -> None:
    negative = encode(engine, files, "")[0]
    both = clips(engine, files, torch.cat(texts), negative, [0, 1])
    for place, text in enumerate(texts):
        (alone,) = clips(engine, files, text, negative, [place])
        assert torch.equal(both[place][0], alone[0]) and torch.equal(both[place][1], alone[1])
    (other,) = clips(engine, files, texts[0], negative, [1])
    assert (other[0] - both[1][0]).abs().max() > 0.01, "the prompts matter"
