"""A text that was encoded is not encoded again, until its encoder is another one or the memory is asked for."""

from __future__ import annotations

from dataclasses import replace

import torch
import toy
from torch import Tensor

from comfyui_pipedit.host.engine import Engine
from comfyui_pipedit.host.texts import Texts
from comfyui_pipedit.job import TextRequest


def encoded(engine: Engine, request: TextRequest) -> list[Tensor]:
    ticket = engine.submit(request)
    assert ticket.wait(20)
    result: list[Tensor] = ticket.result()
    return result


def encodes(engine: Engine) -> int:
    """How often a rank encoded."""
    return sum(span.name == "encode" for span in engine.spans())


def test_the_pool_encodes_a_text_once(engine: Engine) -> None:
    first, before = encoded(engine, toy.text_request("red", "blue")), encodes(engine)
    again = encoded(engine, toy.text_request("blue"))
    assert encodes(engine) == before and torch.equal(again[0], first[1])
    again[0].zero_()
    assert torch.equal(encoded(engine, toy.text_request("blue"))[0], first[1]), "the caller got the kept one itself"
    encoded(engine, toy.text_request("blue", "green"))
    assert encodes(engine) == before + 1
    engine.free()
    encoded(engine, toy.text_request("blue"))
    assert encodes(engine) == before + 2


def test_another_encoder_is_another_text() -> None:
    texts, request = Texts(), toy.text_request("red")
    texts.keep(request, [torch.ones(1, 1, 8)])
    assert texts.find(request) is not None
    assert texts.find(replace(request, weights=replace(request.weights, stamp="later"))) is None


def test_what_was_not_asked_for_longest_is_forgotten_first() -> None:
    texts = Texts(room=2 * 32)
    requests = [toy.text_request(text) for text in ("a", "b", "c")]
    for i, request in enumerate(requests):
        texts.keep(request, [torch.full((1, 1, 8), float(i))])
        texts.find(requests[0])
    assert [texts.find(request) is not None for request in requests] == [True, False, True]
