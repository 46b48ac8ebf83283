"""Saves of an engine with several ranks, each of which has some of a block's heads.

The scheduler reserves the slots, on a thread; every rank writes its heads into them; when all have, the scheduler
commits. So nobody sees a block before it is whole, and one that a rank failed to write is given back.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

from kvtier.blocks.hashing import BlockHash
from kvtier.client.client import SingleClient
from kvtier.errors import KvtierError
from kvtier.memory.lease import Reservation
from kvtier.observe.log_limit import LogLimit
from kvtier.plugins.vllm.plan import Save, Slots, WorkerNews

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Job:
    """Being written by the ranks."""

    reservation: Reservation
    num_written: int = 0
    is_failed: bool = False


class SharedSaves:
    """Called by the scheduler's thread; what waits for the server is done by `threads`."""

    def __init__(self, client: SingleClient, num_ranks: int, threads: ThreadPoolExecutor) -> None:
        self._client = client
        self._num_ranks = num_ranks
        self._threads = threads
        self._reserving: dict[str, list[tuple[Save, Future[Reservation | None]]]] = {}
        self._jobs: dict[int, _Job] = {}
        self._numbers = itertools.count(1)
        self._log = LogLimit(logger)

    def begin(self, save: Save) -> None:
        """Find room for a save."""
        self._reserving.setdefault(save.request_id, []).append((save, self._threads.submit(self._reserve, save)))

    def take_ready(self) -> list[Save]:
        """Saves for which there is room now: to be written by every rank."""
        ready = []
        for request_id, waiting in list(self._reserving.items()):
            while waiting and waiting[0][1].done():
                save, reserving = waiting.pop(0)
                reservation = reserving.result()
                if reservation is not None:
                    ready.append(self._assign(save, reservation))
            if not waiting:
                del self._reserving[request_id]
        return ready

    def is_waiting(self, request_id: str) -> bool:
        """Some of its saves have not been handed to the ranks yet."""
        return request_id in self._reserving

    def drop(self, request_id: str) -> bool:
        """Its pages are gone: what the ranks do not have yet is not saved. Whether there was something."""
        waiting = self._reserving.pop(request_id, [])
        for _, reserving in waiting:
            reserving.add_done_callback(self._close_result)
        return bool(waiting)

    def note(self, news: WorkerNews) -> None:
        """Ranks have written, or failed to."""
        for number, count in news.written.items():
            job = self._jobs[number]
            job.is_failed |= number in news.unwritten
            job.num_written += count
            if job.num_written >= self._num_ranks:
                del self._jobs[number]
                self._threads.submit(self._end, job)

    def close(self) -> None:
        """What is not committed is given back."""
        for request_id in list(self._reserving):
            self.drop(request_id)
        for job in self._jobs.values():
            self._quietly(job.reservation.close)
        self._jobs.clear()

    def _assign(self, save: Save, reservation: Reservation) -> Save:
        number = next(self._numbers)
        self._jobs[number] = _Job(reservation)
        assert reservation.arena is not None
        positions, offsets = list(reservation.positions), list(reservation.offsets)
        return replace(save, slots=Slots(number, os.getpid(), reservation.arena.inode, positions, offsets))

    # --- threads ------------------------------------------------------------------------------------------------------

    def _reserve(self, save: Save) -> Reservation | None:
        """None when all of it is there already, or there is no room."""
        try:
            reservation = self._client.reserve([BlockHash(one) for one in save.hashes])
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
