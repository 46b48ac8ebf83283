"""Checksums of blocks that were just committed, made behind the clients' backs.

Processes of this host can write to a block after its commit, by mistake: from when it has a checksum, that shows before
it leaves the host's memory. No client waits for it, nor for the memory's bandwidth: a burst of commits is summed when
it is over, or after a second, and what is written until then is not noticed. Where the disk's writers get every block
at once, they make the checksum (`disk_threads`), and what they have not come to after a second is summed here: the disk
may be slow, or down.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from kvtier.blocks.layout import SLOT_ALIGN_BYTES
from kvtier.blocks.pool import Block
from kvtier.cacheserver.namespaces import MemoryBlock, MemorySpace
from kvtier.memory.checksum import checksum_of
from kvtier.memory.mapped import MappedArena

_MAX_QUEUED = 1 << 18
"""Of more blocks, the oldest get their checksum when they are first read."""
_QUIET_S = 0.02
LATEST_S = 1.0


class Sealer:
    """A thread. It holds no block: the checksum of a block that leaves meanwhile is dropped.

    A burst of commits is over when there was none for `quiet_s`.
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
        """Blocks that are READY, of one commit."""
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
        """Blocks of one commit, once nothing was committed for a moment, or they have waited long enough."""
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
        if block.checksum is None:  # no client has read it meanwhile
            block.checksum = found


class NoSealer:
    """Where blocks stay in this host's memory; see `Sealer`."""

    num_queued = 0

    def queue(self, space: MemorySpace, blocks: Sequence[Block]) -> None: ...

    def close(self) -> None: ...


NO_SEALER = NoSealer()
