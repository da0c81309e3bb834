"""Which rank has which weights, and the shared buffers that hold converted copies of them.

A network whose stored dtype is not the one that it is computed in (16-bit files on the CPU) is converted once: a rank
writes the copy into a buffer that the host made, the others map it. Buffers outlive a rebuilt pool, so a restart
converts nothing again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

import torch

from ..job import Weights
from ..loaders import converted_bytes
from ..wire import buffer
from ..wire.messages import Load, Loaded, TensorRef, Unload
from .devices import on_gpu

if TYPE_CHECKING:
    from .pool import PoolLike


class Residence:
    """Loads on demand: `ensure` until it says True."""

    def __init__(self, pool: PoolLike, next_seq: Callable[[], int],
                 on_unload: Callable[[int], None] = lambda rank: None) -> None:
        """on_unload: hears of each rank that is told to unload, and so gives back what its allocator holds."""
        self._pool, self._next_seq, self._on_unload = pool, next_seq, on_unload
        self._loaded: dict[tuple[int, Weights], int] = {}
        self._sizes: dict[Weights, int] = {}
        self._loading: set[tuple[int, Weights]] = set()
        self._buffers: dict[Weights, tuple[int, TensorRef] | None] = {}
        self._filled: set[Weights] = set()
        self._held_back: set[tuple[int, Weights]] = set()

    def has(self, rank: int, weights: Weights) -> bool:
        return (rank, weights) in self._loaded

    def ensure(self, weights: Weights, ranks: tuple[int, ...]) -> bool:
        """Whether all ranks have the weights; asks the others, the buffer's writer first. LoadError, StorageFull."""
        missing = [rank for rank in ranks if not self.has(rank, weights)]
        if not missing:
            return True
        if self.is_held_back(weights, ranks):
            return False
        held = self._buffer(weights)
        if held is None or weights in self._filled:
            self._ask(weights, missing, held, writer=False)
        elif not any(key == weights for _, key in self._loading):
            self._ask(weights, missing[:1], held, writer=True)
        return False

    def loaded(self, rank: int, message: Loaded) -> None:
        """A rank reports; a buffer is complete with its first report."""
        self._loading.discard((rank, message.weights))
        self._loaded[rank, message.weights] = self._sizes[message.weights] = message.num_bytes
        self._filled.add(message.weights)

    def refused(self, rank: int) -> set[Weights]:
        """A rank could not load: what it was asked for."""
        asked = {weights for other, weights in self._loading if other == rank}
        self._loading = {entry for entry in self._loading if entry[0] != rank}
        return asked

    def forget(self) -> None:
        """The ranks were forked anew: nothing is resident, full buffers stay."""
        self._loaded.clear()
        self._loading.clear()
        self._held_back.clear()

    def unload(self) -> None:
        """Tells all ranks to drop everything, and drops the buffers."""
        self._drop({*self._buffers, *(weights for _, weights in self._loaded)})

    def make_room(self, rank: int, used: Collection[Weights]) -> bool:
        """Drops from a rank what was used longest ago of what nobody uses; False if there is nothing."""
        idle = self.idle(rank, used)
        if not idle:
            return False
        self.drop(rank, (idle[0][0],))
        return True

    def idle(self, rank: int, used: Collection[Weights]) -> list[tuple[Weights, int]]:
        """What a rank has and nobody uses, with its bytes; what was used longest ago comes first."""
        return [(weights, size) for (other, weights), size in self._loaded.items()
                if other == rank and weights not in used]

    def drop(self, rank: int, keys: Sequence[Weights]) -> None:
        """Takes networks, maybe none, from a rank, which gives back what its allocator holds as well."""
        self._pool.send(rank, Unload(self._next_seq(), tuple(keys)))
        self._on_unload(rank)
        for weights in keys:
            del self._loaded[rank, weights]

    def size(self, weights: Weights) -> int | None:
        """Bytes of a network that some rank has loaded once; None if none has."""
        return self._sizes.get(weights)

    def num_bytes(self, rank: int) -> int:
        """Bytes of what a rank has. Any thread."""
        return sum(size for (other, _), size in list(self._loaded.items()) if other == rank)

    def hold_back(self, rank: int, asked: Collection[Weights]) -> None:
        """Asks a rank for these no more until `release`: others work there, and the memory is theirs till then."""
        self._held_back.update((rank, weights) for weights in asked)

    def is_held_back(self, weights: Weights, ranks: tuple[int, ...]) -> bool:
        return any((rank, weights) in self._held_back for rank in ranks)

    def release(self) -> None:
        """Some work ended: there may be room now."""
        self._held_back.clear()

    def touch(self, weights: Weights, ranks: tuple[int, ...]) -> None:
        """Ranks use these weights now."""
        for rank in ranks:
            self._loaded[rank, weights] = self._loaded.pop((rank, weights))

    def drop_replaced(self, weights: Weights, used: Collection[Weights]) -> None:
        """Drops what the files of these weights were before they were replaced, unless a task still uses it."""
        known = {*self._buffers, *(other for _, other in self._loaded)}
        self._drop({other for other in known.difference(used) if other.stamp != weights.stamp and
                    (other.family, other.part, other.path) == (weights.family, weights.part, weights.path)})

    def _drop(self, keys: Collection[Weights]) -> None:
        for rank in sorted({rank for rank, weights in self._loaded if weights in keys}):
            held_there = tuple(weights for other, weights in self._loaded if other == rank and weights in keys)
            self._pool.send(rank, Unload(self._next_seq(), held_there))
            self._on_unload(rank)
        self._loaded = {entry: size for entry, size in self._loaded.items() if entry[1] not in keys}
        self._filled.difference_update(keys)
        for weights in keys:
            if held := self._buffers.pop(weights, None):
                os.close(held[0])

    def summary(self) -> dict[str, dict[str, int]]:
        """Bytes by rank and network, for the status."""
        table: dict[str, dict[str, int]] = {}
        for (rank, weights), size in list(self._loaded.items()):
            table.setdefault(str(rank), {})[f"{weights.part}:{weights.path}"] = size
        return table

    def _buffer(self, weights: Weights) -> tuple[int, TensorRef] | None:
        if weights not in self._buffers:
            size = converted_bytes(weights, on_gpu=on_gpu(self._pool.devices))
            self._buffers[weights] = buffer.allocate((size,), torch.uint8, "weights")[:2] if size else None
        return self._buffers[weights]

    def _ask(self, weights: Weights, ranks: list[int], held: tuple[int, TensorRef] | None, *, writer: bool) -> None:
        for rank in ranks:
            if (rank, weights) not in self._loading:
                self._loading.add((rank, weights))
                fds = () if held is None else (held[0],)
                ref = None if held is None else buffer.at(held[1], 0)
                self._pool.send(rank, Load(self._next_seq(), weights, ref, writer), fds)
