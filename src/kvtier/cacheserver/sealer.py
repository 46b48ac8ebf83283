"""Computes checksums of committed blocks in the background.

Processes of this host may write to a block after its commit, by mistake. Once the block has a checksum, such a change
is noticed before the block leaves the host's memory. No client waits for a checksum, nor for the memory bandwidth that
it takes: the blocks of a burst of commits are summed when the burst is over, or after a second. Changes made before
that go unnoticed. If every block is queued for the disk at its commit, the disk's writers compute the checksum
(`disk_threads`); this thread sums the blocks they have not reached after a second, since the disk may be slow or down.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from kvtier.blocks.block import Block
from kvtier.blocks.layout import SLOT_ALIGN_BYTES
from kvtier.cacheserver.namespaces import MemoryBlock, MemorySpace
from kvtier.memory.checksum import checksum_of
from kvtier.memory.mapped import MappedArena

_MAX_QUEUED = 1 << 18
"""Past this many blocks, the oldest leave the queue and get their checksum when they are first read."""
_QUIET_S = 0.02
LATEST_S = 1.0


class Sealer:
    """Owns its thread. Queued blocks may be evicted meanwhile; their checksums are dropped.

    A burst of commits is over once none has come for `quiet_s`.
    """

    def __init__(
        self, arena: MappedArena, clock: Callable[[], float] = time.monotonic, quiet_s: float = _QUIET_S
    ) -> None:
        self._arena = arena
        self._quiet_s = quiet_s
        self._clock = clock
        self._queue: deque[tuple[float, MemorySpace, Sequence[Block]]] = deque()
        self._num_queued = 0
        self._is_closing = False
        self._condition = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="kvtier-sealer", daemon=True)
        self._thread.start()

    def queue(self, space: MemorySpace, blocks: Sequence[Block]) -> None:
        """Queue the READY blocks of one commit."""
        if not blocks:
            return
        with self._condition:
            self._queue.append((self._clock(), space, blocks))
            self._num_queued += len(blocks)
            while self._num_queued > _MAX_QUEUED:
                self._num_queued -= len(self._queue.popleft()[2])
            if len(self._queue) == 1:
                self._condition.notify()

    @property
    def num_queued(self) -> int:
        with self._condition:
            return self._num_queued

    def close(self) -> None:
        with self._condition:
            self._is_closing = True
            self._condition.notify()
        self._thread.join()

    def _run(self) -> None:
        while (next_one := self._next()) is not None:
            space, blocks = next_one
            for block in blocks:
                self._seal(space, block)
            with self._condition:
                self._num_queued -= len(blocks)

    def _next(self) -> tuple[MemorySpace, Sequence[Block]] | None:
        """The blocks of the oldest commit, once the burst is over or they have waited long enough; None on close."""
        with self._condition:
            while not self._is_closing:
                if not self._queue:
                    self._condition.wait()
                    continue
                wait_s = min(self._queue[-1][0] + self._quiet_s, self._queue[0][0] + LATEST_S) - self._clock()
                if wait_s <= 0:
                    return self._queue.popleft()[1:]
                self._condition.wait(wait_s)
        return None

    def _seal(self, space: MemorySpace, block: Block) -> None:
        assert isinstance(block, MemoryBlock)
        if block.checksum is not None or not block.is_ready or space.is_table(block):
            return
        view = self._arena.view(block.start * SLOT_ALIGN_BYTES, space.block_bytes)
        found = checksum_of(space.namespace, block.hash, view)
        if block.checksum is None:  # otherwise a reader has computed it meanwhile
            block.checksum = found


class NoSealer:
    """For a server whose blocks never leave this host's memory; see `Sealer`."""

    num_queued = 0

    def queue(self, space: MemorySpace, blocks: Sequence[Block]) -> None: ...

    def close(self) -> None: ...


NO_SEALER = NoSealer()
