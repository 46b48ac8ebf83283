"""Stores of an engine with several ranks, each of which holds some of a block's heads. No torch.

The scheduler reserves the slots, on a thread; every rank writes its heads into them; once all have, the scheduler
commits. So no client sees a partial block, and a slot that a rank failed to write is given back.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import queue
import threading
from collections.abc import Callable, Mapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvtier.blocks.hashing import BlockHash
from kvtier.client.client import CacheClient
from kvtier.errors import KvtierError, TierError, TierUnavailable
from kvtier.memory.lease import Reservation
from kvtier.memory.mapped import MappedArena
from kvtier.observe.log_limit import LogLimit
from kvtier.transfer.copier import Copier, Mark

logger = logging.getLogger(__name__)

StoreT = TypeVar("StoreT")
"""What the scheduler tells the ranks about a store, besides its slots."""


@dataclass(frozen=True, slots=True)
class ReservedRoom:
    """Room that the scheduler has reserved: `offsets[i]`, in the arena with `arena_inode`, is for `positions[i]`.

    The scheduler's process, `holder_pid`, holds the reservation: when the process ends, so does the room. Picklable.
    """

    job: int
    holder_pid: int
    arena_inode: int
    positions: list[int]
    offsets: list[int]


@dataclass(slots=True)
class _Job:
    """A store being written by the ranks."""

    reservation: Reservation
    num_written: int = 0
    is_failed: bool = False


class SharedStores(Generic[StoreT]):
    """The scheduler's half. Called by its thread; `threads` do whatever waits for the server."""

    def __init__(self, client: CacheClient, num_ranks: int, threads: ThreadPoolExecutor) -> None:
        self._client = client
        self._num_ranks = num_ranks
        self._threads = threads
        self._reserving: dict[str, list[tuple[StoreT, Future[Reservation | None]]]] = {}
        self._jobs: dict[int, _Job] = {}
        self._numbers = itertools.count(1)
        self._log = LogLimit(logger)

    def begin(self, key: str, hashes: Sequence[BlockHash], store: StoreT) -> None:
        """Reserve room for `hashes`."""
        self._reserving.setdefault(key, []).append((store, self._threads.submit(self._reserve, hashes)))

    def take_ready(self) -> list[tuple[StoreT, ReservedRoom]]:
        """The stores that now have room, to be written by every rank."""
        ready = []
        for key, waiting in list(self._reserving.items()):
            while waiting and waiting[0][1].done():
                store, reserving = waiting.pop(0)
                reservation = reserving.result()
                if reservation is not None:
                    ready.append((store, self._assign(reservation)))
            if not waiting:
                del self._reserving[key]
        return ready

    def is_waiting(self, key: str) -> bool:
        """Whether some of its stores have not been handed to the ranks yet."""
        return key in self._reserving

    def drop(self, key: str) -> bool:
        """Its pages are gone: parts that the ranks do not have yet are not stored. Whether there were any."""
        waiting = self._reserving.pop(key, [])
        for _, reserving in waiting:
            reserving.add_done_callback(self._close_result)
        return bool(waiting)

    def note(self, written: Mapping[int, int], unwritten: Set[int]) -> None:
        """For each job, how many more ranks are done with it; and the jobs that a rank could not write."""
        for number, count in written.items():
            job = self._jobs[number]
            job.is_failed |= number in unwritten
            job.num_written += count
            if job.num_written >= self._num_ranks:
                del self._jobs[number]
                self._threads.submit(self._end, job)

    def close(self) -> None:
        """Give back whatever is not committed."""
        for key in list(self._reserving):
            self.drop(key)
        for job in self._jobs.values():
            self._quietly(job.reservation.close)
        self._jobs.clear()

    def _assign(self, reservation: Reservation) -> ReservedRoom:
        number = next(self._numbers)
        self._jobs[number] = _Job(reservation)
        assert reservation.arena is not None
        inode = reservation.arena.inode
        return ReservedRoom(number, os.getpid(), inode, list(reservation.positions), list(reservation.offsets))

    # --- threads ------------------------------------------------------------------------------------------------------

    def _reserve(self, hashes: Sequence[BlockHash]) -> Reservation | None:
        """None if everything is stored already, or there is no room."""
        try:
            reservation = self._client.reserve(hashes)
        except KvtierError as error:
            self._log.warning("reserve", "blocks are not kept: %s", error)
            return None
        if not reservation.num_blocks:
            self._quietly(reservation.close)
            return None
        return reservation

    def _end(self, job: _Job) -> None:
        if not job.is_failed:
            self._quietly(job.reservation.commit)
        self._quietly(job.reservation.close)

    def _close_result(self, reserving: Future[Reservation | None]) -> None:
        reservation = None if reserving.cancelled() else reserving.result()
        if reservation is not None:
            self._quietly(reservation.close)

    def _quietly(self, act: Callable[[], object]) -> None:
        try:
            act()
        except KvtierError as error:
            self._log.warning("commit", "blocks are not kept: %s", error)


@dataclass(eq=False, slots=True)
class _Share:
    """One rank's heads of some blocks, to be written once the device is past `after`."""

    key: str
    places: Sequence[int]
    slots: ReservedRoom
    after: Mark
    is_copying: bool = False
    is_dropped: bool = False


class ShareWriter:
    """A rank's half: writes its heads into slots that the scheduler has reserved. One thread copies."""

    def __init__(self, client: CacheClient, copier: Copier) -> None:
        self._client = client
        self._copier = copier
        self._condition = threading.Condition()
        self._shares: set[_Share] = set()
        self._ended: list[tuple[ReservedRoom, bool]] = []
        self.num_refused = 0
        self._log = LogLimit(logger)
        self._jobs: queue.SimpleQueue[_Share | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kvtier-share", daemon=True)
        self._thread.start()

    def write(self, key: str, places: Sequence[int], slots: ReservedRoom, after: Mark) -> None:
        """`places` are those of the blocks for all of `slots.offsets`."""
        share = _Share(key, places, slots, after)
        with self._condition:
            self._shares.add(share)
        self._jobs.put(share)

    def drop(self, keys: Set[str]) -> None:
        """Wait until nothing for these keys is being copied; nothing will be from now on."""
        with self._condition:
            for share in self._shares:
                share.is_dropped |= share.key in keys and not share.is_copying
            self._condition.wait_for(lambda: not any(share.is_copying and share.key in keys for share in self._shares))

    def keys(self) -> set[str]:
        """The keys with unfinished shares."""
        with self._condition:
            return {share.key for share in self._shares}

    def take_ended(self) -> list[tuple[ReservedRoom, bool]]:
        """The shares that have ended since the last call, and whether each was written."""
        with self._condition:
            ended, self._ended = self._ended, []
        return ended

    def close(self) -> None:
        """Write the outstanding shares first."""
        self._jobs.put(None)
        self._thread.join()

    # --- its thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (share := self._jobs.get()) is not None:
            is_written = False
            try:
                is_written = self._write(share)
            except TierError as error:
                self._log.warning("share", "blocks are not kept: %s", error)
                self.num_refused += len(share.slots.offsets)
            except Exception:
                logger.exception("blocks are not kept")
            finally:
                with self._condition:
                    share.is_copying = False
                    self._shares.discard(share)
                    self._ended.append((share.slots, is_written))
                    self._condition.notify_all()

    def _write(self, share: _Share) -> bool:
        """False if it was dropped: its blocks belong to another prompt."""
        slots = share.slots
        arena = self._arena_with(slots.arena_inode)
        os.kill(slots.holder_pid, 0)  # raises if it is gone; its slots stay as they are for some moments after that
        with self._condition:
            if share.is_dropped:
                return False
            share.is_copying = True
        self._copier.adopt(arena)
        with arena.in_use():
            self._copier.store(share.places, arena, slots.offsets, share.after).wait()
        return True

    def _arena_with(self, inode: int) -> MappedArena:
        """The arena in which the scheduler has reserved slots. Raises `TierUnavailable` if the server has another."""
        with contextlib.suppress(TierUnavailable):
            if self._client.arena.inode == inode:
                return self._client.arena
        self._client.ping()
        if self._client.arena.inode != inode:
            raise TierUnavailable("the cache server was replaced by another one")
        return self._client.arena
