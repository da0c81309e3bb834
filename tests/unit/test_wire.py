"""Messages survive the codec, frames the channel, descriptors the trip; a dead, deaf or odd other end is an error."""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import pytest

from comfyui_pipedit import sampling
from comfyui_pipedit.errors import OutOfStep, WorkerDied, WorkerStuck
from comfyui_pipedit.job import Weights
from comfyui_pipedit.plan import Group, Plan
from comfyui_pipedit.wire.channel import HEADER, MAX_DESCRIPTORS, MAX_FRAME, Channel
from comfyui_pipedit.wire.messages import MESSAGES, Encode, Opened, Ping, Pong, Refused, decode, encode

ROOT = Path(__file__).resolve().parents[2]
SIMPLE: dict[Any, Any] = {int: 7, str: "ä \"quoted\" \n", float: 0.1 + 0.2, bool: True}


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    """Both ends of a channel; sends give up after 0.2 s."""
    left, right = socket.socketpair()
    channels = Channel(left, timeout=0.2), Channel(right, timeout=0.2)
    yield channels
    for channel in channels:
        channel.close()


def example(hint: Any) -> Any:
    """A value of a field's type; every tuple has two entries, every optional is there."""
    if hint in SIMPLE:
        return SIMPLE[hint]
    if get_origin(hint) in (types.UnionType, typing.Union):
        return example(next(arg for arg in get_args(hint) if arg is not type(None)))
    if get_origin(hint) is tuple:
        args = get_args(hint)
        return tuple(example(arg) for arg in ((args[0], args[0]) if args[-1] is Ellipsis else args))
    if hint is Group:
        return Group((2, 0))
    if hint is Plan:
        return Plan(Group((1, 0)), Group((2,)), chunks=3)
    if hint is sampling.SolverTable:
        return sampling.solver_table("uni_pc", sampling.sigmas("simple", 4, shift=3.0, sampler="uni_pc"))
    return hint(**{field.name: example(get_type_hints(hint)[field.name]) for field in dataclasses.fields(hint)})


@pytest.mark.parametrize("name", MESSAGES)
def test_every_message_survives_the_codec(name: str) -> None:
    message = example(MESSAGES[name])
    assert decode(encode(message)) == message
    bare = {field.name: None for field in dataclasses.fields(message)
            if type(None) in get_args(get_type_hints(type(message))[field.name])}
    without = dataclasses.replace(message, **bare)
    assert decode(encode(without)) == without


def test_a_foreign_class_is_refused() -> None:
    with pytest.raises(OutOfStep, match="Popen"):
        decode(b'{"type": "Popen", "body": {}}')


def test_messages_arrive_in_order_both_ways(ends: tuple[Channel, Channel]) -> None:
    left, right = ends
    for number in range(50):
        left.send(Ping(number))
        right.send(Pong(1, number))
    assert [message for message, _ in right.drain()] == [Ping(number) for number in range(50)]
    assert [message for message, _ in left.drain()] == [Pong(1, number) for number in range(50)]
    assert right.drain() == [] and not right.closed


def test_descriptors_go_with_their_message(ends: tuple[Channel, Channel]) -> None:
    left, right = ends
    pipes = [os.pipe() for _ in range(3)]
    for (reader, writer), count in zip(pipes, (1, 0, 2), strict=True):
        left.send(Ping(count), [writer] * count)
        os.write(writer, b"before ")
        os.close(writer)
        os.set_blocking(reader, False)
    received = right.drain()
    assert [(message, len(fds)) for message, fds in received] == [(Ping(1), 1), (Ping(0), 0), (Ping(2), 2)]
    for (reader, _), (_, fds) in zip(pipes, received, strict=True):
        for fd in fds:
            assert not os.get_inheritable(fd), "a child of this process must not hold it"
            os.write(fd, b"x")
            os.close(fd)
        assert os.read(reader, 100) == b"before " + b"x" * len(fds)
        os.close(reader)


def test_a_frame_may_come_in_pieces(ends: tuple[Channel, Channel]) -> None:
    left, right = ends
    body = encode(Refused(0, "job", "InvalidJob", "ü" * 1000))
    frame = HEADER.pack(len(body), 0) + body
    for start in range(0, len(frame), 700):
        assert right.drain() == []
        left._socket.send(frame[start:start + 700])
    assert right.drain() == [(Refused(0, "job", "InvalidJob", "ü" * 1000), [])]


def test_a_large_frame_from_several_threads(ends: tuple[Channel, Channel]) -> None:
    left, right = ends
    left._timeout = 10.0
    texts = tuple("x" * 1000 for _ in range(400))
    messages = [Encode(number, "job", Weights("toy", "text", ""), texts) for number in range(8)]
    threads = [threading.Thread(target=left.send, args=(message,)) for message in messages]
    for thread in threads:
        thread.start()
    received = [right.receive() for _ in messages]
    for thread in threads:
        thread.join()
    assert sorted(message.seq for message, _ in received) == list(range(8))


def test_too_large_is_refused_before_anything_is_sent(ends: tuple[Channel, Channel]) -> None:
    left, right = ends
    with pytest.raises(OutOfStep, match="too large"):
        left.send(Encode(1, "job", Weights("toy", "text", ""), ("x" * MAX_FRAME,)))
    with pytest.raises(OutOfStep, match=f"{MAX_DESCRIPTORS + 1} descriptors"):
        left.send(Ping(1), [0] * (MAX_DESCRIPTORS + 1))
    left.send(Ping(2))
    assert right.drain() == [(Ping(2), [])]


def test_as_many_descriptors_as_linux_takes(ends: tuple[Channel, Channel]) -> None:
    left, right = ends
    left.send(Ping(1), [0] * MAX_DESCRIPTORS)
    (_, fds), = right.drain()
    assert len(fds) == MAX_DESCRIPTORS
    for fd in fds:
        os.close(fd)


def test_a_header_that_promises_too_much(ends: tuple[Channel, Channel]) -> None:
    left, right = ends
    left._socket.send(struct.pack("!II", MAX_FRAME + 1, 0))
    with pytest.raises(OutOfStep, match=str(MAX_FRAME + 1)):
        right.drain()


def test_end_of_file_after_the_last_message(ends: tuple[Channel, Channel]) -> None:
    left, right = ends
    left.send(Opened(0, "job", 4))
    left.close()
    assert right.drain() == [(Opened(0, "job", 4), [])]
    assert right.closed and right.receive() is None
    with pytest.raises(WorkerDied, match="Ping could not be sent"):
        right.send(Ping(1))


def test_a_reader_that_does_not_read(ends: tuple[Channel, Channel]) -> None:
    left, _ = ends
    texts = ("x" * (MAX_FRAME // 2),)
    with pytest.raises(WorkerStuck, match=r"reads nothing since 0\.2 s"):
        for number in range(100):
            left.send(Encode(number, "job", Weights("toy", "text", ""), texts))


def test_close_lets_go_of_descriptors_that_nobody_took(ends: tuple[Channel, Channel]) -> None:
    left, right = ends
    reader, writer = os.pipe()
    left.send(Ping(1), [writer])
    os.close(writer)
    right._read()
    right.close()
    assert os.read(reader, 1) == b"", "all writers are closed"
    os.close(reader)


SLEEPER = """
import os, socket, sys, threading
sys.path.insert(0, sys.argv[2])
from comfyui_pipedit.wire.channel import Channel
from comfyui_pipedit.worker.control import Control
control = Control(Channel(socket.socket(fileno=int(sys.argv[1]))), 3)
message, _ = control.inbox.get()
print("got", message.job, flush=True)
os.read(0, 1)  # the main thread is blocked, as in an exchange that never completes
"""


def test_a_rank_answers_pings_and_ends_with_its_host_while_its_main_thread_is_blocked() -> None:
    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    command = [sys.executable, "-c", SLEEPER, str(theirs.fileno()), str(ROOT)]
    with subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as rank:
        theirs.close()
        channel.send(Opened(3, "a job", 1))
        assert rank.stdout is not None and rank.stdout.readline() == b"got a job\n"
        channel.send(Ping(17))
        assert channel.receive() == (Pong(3, 17), [])
        channel.close()
        assert rank.wait(timeout=10) == 0
    assert rank.returncode != -signal.SIGKILL
