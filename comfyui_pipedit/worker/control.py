"""A rank's ear: a thread that answers pings whatever the main thread does, and ends the process with the host."""

from __future__ import annotations

import os
import queue
import threading

from ..wire.channel import Channel, Received
from ..wire.messages import Ping, Pong


class Control:
    """Reads the rank's channel from now on. Everything but pings is put into `inbox`, in order.

    End of file means that the host closed the pool or died: the process ends at once, also while the main thread is
    inside an exchange that will never complete.
    """

    def __init__(self, channel: Channel, rank: int) -> None:
        self.inbox: queue.SimpleQueue[Received] = queue.SimpleQueue()
        self._channel, self._rank = channel, rank
        self._thread = threading.Thread(target=self._listen, name="pipedit-control", daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        try:
            while received := self._channel.receive():
                message, _ = received
                if isinstance(message, Ping):
                    self._channel.send(Pong(self._rank, message.number))
                else:
                    self.inbox.put(received)
        finally:
            # Without a host nobody can use this rank, and a thread that only returned would leave it running.
            os._exit(0)
