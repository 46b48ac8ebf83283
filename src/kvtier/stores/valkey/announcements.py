"""Blocks that are being computed, announced in a cluster: other hosts wait for them and compute nothing twice.

An announcement is a key beside the block's own, on the same node, with a short time to live. A thread renews it while
the block is under way and deletes it afterwards; of a process that died it expires. Everything is best effort: an
announcement that is lost or late costs a host some computing, and no host waits beyond its own deadline. Thread-safe.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.namespace import Namespace
from kvtier.errors import KvtierError
from kvtier.observe.log_limit import LogLimit
from kvtier.stores.valkey.blocks import ClusterBlocks

logger = logging.getLogger(__name__)

ANNOUNCED_S = 3.0
"""Longest wait for a host that died."""
_RENEWAL_S = 1.0
_TICK_S = 0.25
_CALL_S = 1.0
_MAX_ANNOUNCED = 1 << 14
_ASK_AGAIN_S = 0.02
_MAX_REMEMBERED = 1024

IsUnderWay: TypeAlias = Callable[[int], bool]
"""Whether the block at this position of an announcement is still under way."""


class _Batch(NamedTuple):
    """Blocks that were announced together."""

    blocks: ClusterBlocks
    hashes: Sequence[BlockHash]
    is_under_way: IsUnderWay


@dataclass(eq=False, slots=True)
class _Announcement:
    batch: _Batch
    position: int
    announced_at: float = -math.inf
    has_ended: bool = False

    @property
    def hash(self) -> BlockHash:
        return self.batch.hashes[self.position]

    @property
    def key(self) -> tuple[Namespace, BlockHash]:
        return self.batch.blocks.namespace, self.hash

    @property
    def is_over(self) -> bool:
        return self.has_ended or not self.batch.is_under_way(self.position)


class Announcer:
    """The announcements of one process. Its thread starts with the first one and ends with `close`."""

    def __init__(self, delay_s: float = 0.0) -> None:
        """A block is announced only if it is still under way after `delay_s`."""
        self._delay_s = delay_s
        self._lock = threading.Lock()
        self._new: list[_Batch] = []
        self._known: dict[tuple[Namespace, BlockHash], _Announcement] = {}
        self._wakes = threading.Event()
        self._is_closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._log = LogLimit(logger)

    def announce(
        self, blocks: ClusterBlocks, hashes: Sequence[BlockHash], is_under_way: IsUnderWay = lambda position: True
    ) -> None:
        """These are being computed, as long as they are `is_under_way`, and until `end`. Never waits."""
        with self._lock:
            if self._is_closing.is_set() or not hashes:
                return
            self._new.append(_Batch(blocks, hashes, is_under_way))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kvtier-announcer", daemon=True)
                self._thread.start()
        self._wakes.set()

    def end(self, blocks: ClusterBlocks, hashes: Sequence[BlockHash]) -> None:
        """The blocks were stored, or will not be: other hosts stop waiting. Never waits."""
        with self._lock:
            self._add_new()
            for block_hash in hashes:
                known = self._known.get((blocks.namespace, block_hash))
                if known is not None:
                    known.has_ended = True

    def has(self, blocks: ClusterBlocks, block_hash: BlockHash) -> bool:
        """This process announces it itself."""
        return (blocks.namespace, block_hash) in self._known

    def close(self) -> None:
        with self._lock:
            self._is_closing.set()
            thread = self._thread
        self._wakes.set()
        if thread is not None:
            thread.join()

    def _add_new(self) -> None:
        """Under the lock. What is too much is not announced."""
        for batch in self._new:
            for position in range(min(len(batch.hashes), _MAX_ANNOUNCED - len(self._known))):
                announcement = _Announcement(batch, position)
                before = self._known.get(announcement.key)
                if before is not None:
                    announcement.announced_at = before.announced_at
                self._known[announcement.key] = announcement
        self._new.clear()

    # --- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        looked_at = -math.inf
        while not self._is_closing.is_set():
            self._wakes.wait(_TICK_S if self._known else None)
            self._wakes.clear()
            if self._delay_s:
                self._is_closing.wait(self._delay_s)
            with self._lock:
                num_before = len(self._known)
                self._add_new()
                known = list(self._known.values())
            if self._is_closing.is_set() or time.monotonic() - looked_at >= _TICK_S:
                looked_at = time.monotonic()
                self._look(known, is_last=self._is_closing.is_set())
            else:
                self._look(known[num_before:], is_last=False)

    def _look(self, known: Sequence[_Announcement], *, is_last: bool) -> None:
        """Announce what is new, renew what is under way, and delete what has ended: all of it, if this `is_last`."""
        due_before = time.monotonic() - _RENEWAL_S
        over: list[_Announcement] = []
        due: list[_Announcement] = []
        for each in known:
            if is_last or each.is_over:
                over.append(each)
            elif each.announced_at < due_before:
                due.append(each)
        self._each_space([each for each in over if each.announced_at > -math.inf], _withdraw)
        with self._lock:
            for each in over:
                if self._known.get(each.key) is each:
                    del self._known[each.key]
        self._each_space(due, _announce)
        now = time.monotonic()
        for each in due:
            each.announced_at = now

    def _each_space(
        self,
        announcements: Sequence[_Announcement],
        act: Callable[[ClusterBlocks, Sequence[BlockHash], float], None],
    ) -> None:
        spaces: dict[int, tuple[ClusterBlocks, list[BlockHash]]] = {}
        for each in announcements:
            blocks = each.batch.blocks
            spaces.setdefault(id(blocks), (blocks, []))[1].append(each.hash)
        for blocks, hashes in spaces.values():
            # A block without a known place is not stored either, so no host should wait for it.
            placed = [block_hash for block_hash in hashes if blocks.places.get(block_hash) is not None]
            try:
                if placed:
                    act(blocks, placed, _CALL_S)
            except KvtierError as error:
                self._log.warning("announcing", "cluster: %s", str(error))


def _announce(blocks: ClusterBlocks, hashes: Sequence[BlockHash], timeout_s: float) -> None:
    blocks.announce(hashes, ANNOUNCED_S, timeout_s)


def _withdraw(blocks: ClusterBlocks, hashes: Sequence[BlockHash], timeout_s: float) -> None:
    blocks.withdraw(hashes, timeout_s)


class ComputedElsewhere:
    """The blocks that other hosts are computing. Callers poll; the cluster is asked every 20 ms at most."""

    def __init__(self, announcer: Announcer, clock: Callable[[], float] = time.monotonic) -> None:
        self._announcer = announcer
        self._clock = clock
        self._lock = threading.Lock()
        self._answers: dict[BlockHash, tuple[int, BlockHash, float]] = {}
        """By the first block of a match: where it ended, at which block, and until when that answer holds."""

    def recall(self, hashes: Sequence[BlockHash]) -> int | None:
        """Where a match of `hashes` ended a moment ago, at a block that is computed elsewhere."""
        answer = self._answers.get(hashes[0])
        if answer is None:
            return None
        position, block_hash, until = answer
        is_valid = self._clock() < until and position < len(hashes) and hashes[position] == block_hash
        return position if is_valid else None

    def ask(self, blocks: ClusterBlocks, hashes: Sequence[BlockHash], position: int, timeout_s: float) -> bool:
        """Whether the block at `position`, which the cluster lacks, is being computed by another host."""
        block_hash = hashes[position]
        if self._announcer.has(blocks, block_hash) or not blocks.is_announced(block_hash, timeout_s):
            return False
        with self._lock:
            if len(self._answers) >= _MAX_REMEMBERED:
                self._answers.clear()
            self._answers[hashes[0]] = position, block_hash, self._clock() + _ASK_AGAIN_S
        return True
