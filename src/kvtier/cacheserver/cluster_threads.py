"""The threads between the arena and a cluster, and the interface they need of the blocks' owner.

Readers fill slots of the arena that a match has reserved. A writer (`cluster_writer`) stores blocks in the background.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Generic, Protocol, TypeVar

from kvtier.blocks.layout import SLOT_ALIGN_BYTES
from kvtier.cacheserver.cluster_spaces import ClusterSpaces
from kvtier.cacheserver.namespaces import MemoryBlock, MemorySpace
from kvtier.memory.mapped import MappedArena
from kvtier.observe.log_limit import LogLimit

logger = logging.getLogger(__name__)

_NUM_READERS = 4
_BATCH_BYTES = 8 << 20
_READ_S = 0.35
SLOWEST_BYTES_PER_S = 25e6
"""The bandwidth of the network that deadlines assume, with several batches in flight."""

_Task = TypeVar("_Task")


class SharedBlockOwner(Protocol):
    """The owner of the arena's blocks. Each method takes the catalog's lock for a moment."""

    def end_fetching(self, space: MemorySpace, blocks: Sequence[MemoryBlock], arrived: Sequence[bool]) -> None: ...

    def begin_sharing(self, blocks: Sequence[MemoryBlock]) -> list[MemoryBlock]:
        """Hold the blocks' slots while they are written. Returns the blocks that are still in memory."""

    def end_sharing(self, blocks: Sequence[MemoryBlock], shared: Sequence[bool]) -> None:
        """Let go of the blocks; those `shared` are in the cluster now."""

    def share_what_leaves(self) -> None:
        """Queue the blocks that memory would evict next, if it is nearly full."""


class TaskThreads(Generic[_Task]):
    """Threads that `carry_out` queued tasks, from construction to `close`."""

    def __init__(self, name: str, count: int, carry_out: Callable[[_Task], None]) -> None:
        self._carry_out = carry_out
        self._queue: SimpleQueue[_Task | None] = SimpleQueue()
        self._log = LogLimit(logger)
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{number}", daemon=True) for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def put(self, task: _Task) -> None:
        self._queue.put(task)

    def close(self) -> None:
        """Carry out the queued tasks, then end the threads."""
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (task := self._queue.get()) is not None:
            try:
                self._carry_out(task)
            except Exception as error:  # if the threads ended, the queue would never be served
                self._log.warning("failed", "cluster: %s", str(error))


@dataclass(frozen=True, slots=True, eq=False)
class _Read:
    """Slots of the arena to be filled."""

    space: MemorySpace
    blocks: Sequence[MemoryBlock]


class ClusterReader:
    """Loads blocks into slots of the arena that a match has reserved."""

    def __init__(self, spaces: ClusterSpaces, arena: MappedArena, owner: SharedBlockOwner) -> None:
        self._spaces = spaces
        self._arena = arena
        self._owner = owner
        self.num_read = 0
        self._lock = threading.Lock()
        self._threads = TaskThreads[_Read]("kvtier-cluster-reader", _NUM_READERS, self._read)

    def queue(self, space: MemorySpace, blocks: Sequence[MemoryBlock]) -> None:
        """Queue slots to fill, some megabytes at a time: the first are usable while the next are in flight."""
        step = max(1, _BATCH_BYTES // space.block_bytes)
        for first in range(0, len(blocks), step):
            self._threads.put(_Read(space, blocks[first : first + step]))

    def close(self) -> None:
        self._threads.close()

    def _read(self, read: _Read) -> None:
        space, blocks = read.space, read.blocks
        arrived = [False] * len(blocks)
        try:
            for block in blocks:
                self._arena.populate(block.start * SLOT_ALIGN_BYTES, block.size * SLOT_ALIGN_BYTES)
            views = [self._arena.view(block.start * SLOT_ALIGN_BYTES, space.block_bytes) for block in blocks]
            timeout_s = self._spaces.config.timeout_s + _READ_S
            timeout_s += len(blocks) * space.block_bytes / SLOWEST_BYTES_PER_S
            arrived = self._spaces.of(space).get([block.hash for block in blocks], views, timeout_s)
            with self._lock:
                self.num_read += sum(arrived)
            if not all(arrived):
                self._spaces.note_loss("lost", arrived.count(False))
        finally:
            self._owner.end_fetching(space, blocks, arrived)
