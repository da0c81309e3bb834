"""Messages and file descriptors over one stream socket, between any two of host, launcher and rank.

A frame is a header (length of the JSON, number of descriptors) and the JSON of wire.messages. Descriptors travel with
the frame's first bytes (SCM_RIGHTS), so they are there when the frame is whole. End of file means that the other
process is gone: the same socket is control path, readiness signal and death notice.
"""

from __future__ import annotations

import array
import os
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence

from ..errors import OutOfStep, WorkerDied, WorkerStuck
from .messages import Message, decode, encode

MAX_FRAME = 1 << 20
"""Bytes of one frame; more than that belongs into a mapped buffer."""
MAX_DESCRIPTORS = 253
"""Linux takes no more with one sendmsg."""
HEADER = struct.Struct("!II")
READ_SIZE = 1 << 16

Received = tuple[Message, list[int]]


def close_all(descriptors: Iterable[int]) -> None:
    """Closes descriptors that nobody will use."""
    for descriptor in descriptors:
        os.close(descriptor)


class Channel:
    """One end of a stream socket. `send` may be called by any thread; `receive` and `drain` by one thread.

    timeout: seconds that `send` waits for a reader that has stopped reading.
    """

    def __init__(self, sock: socket.socket, timeout: float = 60.0) -> None:
        sock.setblocking(False)
        self.closed = False
        self._socket = sock
        self._timeout = timeout
        self._lock = threading.Lock()
        self._buffer = bytearray()
        self._descriptors: deque[int] = deque()

    def fileno(self) -> int:
        """The socket's descriptor, -1 once closed."""
        return self._socket.fileno()

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Sends one message; the caller keeps its `fds`, the other end gets duplicates.

        OutOfStep if the frame is too large, WorkerStuck if the other end does not read for `timeout` seconds (the
        channel is unusable then), WorkerDied if it is gone.
        """
        body = encode(message)
        if len(body) > MAX_FRAME or len(fds) > MAX_DESCRIPTORS:
            raise OutOfStep(f"a {type(message).__name__} of {len(body)} bytes with {len(fds)} descriptors is too "
                            f"large; at most {MAX_FRAME} bytes and {MAX_DESCRIPTORS} descriptors: put tensors "
                            f"into buffers")
        frame = memoryview(HEADER.pack(len(body), len(fds)) + body)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        with self._lock:
            self._send_all(frame, rights, type(message).__name__)

    def _send_all(self, frame: memoryview, rights: list[tuple[int, int, array.array[int]]], name: str) -> None:
        deadline = time.monotonic() + self._timeout
        while frame:
            try:
                sent = self._socket.sendmsg([frame], rights)
            except BlockingIOError:
                self._await_room(deadline, name)
                continue
            except OSError as error:
                raise WorkerDied(f"{name} could not be sent: the process at the other end is gone ({error})") from error
            frame, rights = frame[sent:], []

    def _await_room(self, deadline: float, name: str) -> None:
        poller = select.poll()
        poller.register(self._socket, select.POLLOUT)
        if not poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise WorkerStuck(f"{name} could not be sent: the process at the other end reads nothing since "
                              f"{self._timeout:g} s")

    def receive(self) -> Received | None:
        """The next message and its descriptors (now the caller's), waiting as long as it takes; None at end of file."""
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        while True:
            received = self._next_frame()
            if received or self.closed:
                return received
            poller.poll()
            self._read()

    def drain(self) -> list[Received]:
        """All messages that have arrived, without waiting. `closed` is True once the other end is gone."""
        while self._read():
            pass
        messages = []
        while received := self._next_frame():
            messages.append(received)
        return messages

    def close(self) -> None:
        """Closes the socket and descriptors that nobody took; the other end sees end of file."""
        self.closed = True
        self._socket.close()
        close_all(self._descriptors)
        self._descriptors.clear()

    def _read(self) -> bool:
        """Takes one piece from the socket into the buffer; False if there is nothing now or no more."""
        if self.closed:
            return False
        try:
            data, ancillary, flags, _ = self._socket.recvmsg(
                READ_SIZE, socket.CMSG_SPACE(MAX_DESCRIPTORS * 4), socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return False
        except ConnectionResetError:
            data, ancillary, flags = b"", [], 0
        for level, kind, rights in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                self._descriptors.extend(array.array("i", rights[:len(rights) // 4 * 4]))
        if flags & socket.MSG_CTRUNC:
            raise OutOfStep("file descriptors were lost on the way: this process has too many open files (ulimit -n)")
        self._buffer += data
        self.closed = not data
        return bool(data)

    def _next_frame(self) -> Received | None:
        if len(self._buffer) < HEADER.size:
            return None
        length, count = HEADER.unpack_from(self._buffer)
        if length > MAX_FRAME or count > MAX_DESCRIPTORS:
            raise OutOfStep(f"a frame of {length} bytes with {count} descriptors came in; the limits are "
                            f"{MAX_FRAME} and {MAX_DESCRIPTORS}")
        end = HEADER.size + length
        if len(self._buffer) < end:
            return None
        message = decode(bytes(self._buffer[HEADER.size:end]))
        del self._buffer[:end]
        return message, [self._descriptors.popleft() for _ in range(count)]
