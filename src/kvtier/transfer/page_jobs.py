"""Jobs that move another engine's pages between its host memory and a cache server. No torch.

A page is opaque bytes under the engine's own key. One thread, that of the engine's scheduler, submits jobs and takes
those that have ended; it waits only in `drain` and `close`. One thread loads, another stores. Every job ends exactly
once, with a verdict on each of its pages, even if the server is killed or hangs: all calls to it have deadlines.
"""

from __future__ import annotations

import hashlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.match_end import MatchEnd
from kvtier.errors import KvtierError
from kvtier.memory.copying import Buffer
from kvtier.memory.lease import Lease
from kvtier.observe.log_limit import LogLimit

logger = logging.getLogger(__name__)

_PIECE_BYTES = 64 << 20
"""Pages are committed, and so become visible to others, whenever this many bytes are written."""
_MAX_GAPS = 8
"""Missing pages after which the rest of a load is abandoned: each costs a call."""


class PageClient(Protocol):
    """The part of a cache server's client that is needed. No call raises if the server is dead, slow or hung."""

    def match(self, hashes: Sequence[BlockHash], *, timeout_s: float | None = None) -> Lease: ...

    def store(self, hashes: Sequence[BlockHash], blocks: Sequence[Buffer]) -> list[int]: ...

    def contains(self, hashes: Sequence[BlockHash], *, timeout_s: float | None = None) -> list[bool]: ...


@dataclass(frozen=True, slots=True)
class PageJob:
    """Pages with these keys, in these rows of the engine's memory. `owner` is the request they are moved for."""

    number: int
    owner: str
    keys: Sequence[bytes]
    rows: Sequence[int]


@dataclass(frozen=True, slots=True)
class EndedJob:
    """`is_there` says for each page whether it has arrived, or, for a store, whether the server has it."""

    job: PageJob
    is_load: bool
    is_there: Sequence[bool]
    seconds: float

    @property
    def is_done(self) -> bool:
        return all(self.is_there)

    @property
    def missing_keys(self) -> list[bytes]:
        return [key for key, there in zip(self.job.keys, self.is_there, strict=True) if not there]


def page_hashes(keys: Iterable[bytes]) -> list[BlockHash]:
    """The server's names for pages. Keys may be of any length."""
    return [BlockHash(hashlib.sha256(key).digest()) for key in keys]


class PageJobs:
    """The jobs of one engine's memory, in rows of `page_bytes`."""

    def __init__(self, server: PageClient, memory: memoryview, page_bytes: int) -> None:
        """`memory` is flat. At most half of its rows may wait to be stored; more are not stored."""
        self._server = server
        self._memory = memory
        self._page_bytes = page_bytes
        self._num_rows = memory.nbytes // page_bytes
        self._condition = threading.Condition()
        self._num_open = 0
        self._num_to_store = 0
        self._num_to_load = 0
        self._ended: list[EndedJob] = []
        self.is_closing = False
        self._log = LogLimit(logger)
        self._loads: queue.SimpleQueue[PageJob | None] = queue.SimpleQueue()
        self._stores: queue.SimpleQueue[PageJob | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, args=arguments, name=f"kvtier-page-{name}", daemon=True)
            for name, *arguments in (("load", self._loads, self._load), ("store", self._stores, self._store_counted))
        ]
        for thread in self._threads:
            thread.start()

    # --- the scheduler's thread ------------------------------------------------------------------------------------

    def load(self, job: PageJob) -> None:
        """Fill the job's rows from the server."""
        with self._condition:
            self._num_open += 1
            self._num_to_load += 1
        self._loads.put(job)

    def store(self, job: PageJob) -> None:
        """Store the job's rows in the server."""
        with self._condition:
            self._num_open += 1
            has_room = not self._num_to_store or self._num_to_store + len(job.keys) <= self._num_rows // 2
            self._num_to_store += len(job.keys) if has_room else 0
        if has_room:
            self._stores.put(job)
        else:
            self._log.warning("backlog", "pages are not kept: too many wait for the cache server")
            self._end(EndedJob(job, False, [False] * len(job.keys), 0.0))

    @property
    def is_loading(self) -> bool:
        """A load is in progress."""
        return self._num_to_load > 0

    def take_ended(self) -> list[EndedJob]:
        """The jobs that have ended since the last call."""
        if not self._ended:
            return []
        with self._condition:
            ended, self._ended = self._ended, []
        return ended

    def drain(self) -> None:
        """Wait until every job has ended: then nothing reads or writes the engine's memory."""
        with self._condition:
            self._condition.wait_for(lambda: not self._num_open)

    def close(self) -> None:
        """Finish the jobs that have begun; the waiting ones fail. Nothing touches the engine's memory afterwards."""
        self.is_closing = True
        for jobs in (self._loads, self._stores):
            jobs.put(None)
        for thread in self._threads:
            thread.join()

    # --- the threads -----------------------------------------------------------------------------------------------

    def _run(self, jobs: queue.SimpleQueue[PageJob | None], act: Callable[[PageJob, list[bool]], None]) -> None:
        while (job := jobs.get()) is not None:
            is_there = [False] * len(job.keys)
            started_at = time.monotonic()
            try:
                if not self.is_closing:
                    act(job, is_there)
            except KvtierError as error:
                self._log.warning("job", "pages are not moved: %s", str(error))
            except Exception:
                logger.exception("pages are not moved")
            self._end(EndedJob(job, jobs is self._loads, is_there, time.monotonic() - started_at))

    def _end(self, ended: EndedJob) -> None:
        with self._condition:
            self._ended.append(ended)
            self._num_open -= 1
            self._num_to_load -= ended.is_load
            self._condition.notify_all()

    def _load(self, job: PageJob, is_there: list[bool]) -> None:
        """A page that is missing leaves a gap; the pages after it are still tried."""
        hashes = page_hashes(job.keys)
        position = num_gaps = 0
        while position < len(hashes) and num_gaps <= _MAX_GAPS:
            with self._server.match(hashes[position:]) as lease:
                if not lease.num_blocks and lease.ended is MatchEnd.TIER_DOWN:
                    return
                count = lease.fetch(self._views(job.rows[position : position + lease.num_blocks]))
            is_there[position : position + count] = [True] * count
            position += count
            if not count:
                position += 1
                num_gaps += 1

    def _store_counted(self, job: PageJob, is_there: list[bool]) -> None:
        try:
            self._store(job, is_there)
        finally:
            with self._condition:
                self._num_to_store -= len(job.keys)

    def _store(self, job: PageJob, is_there: list[bool]) -> None:
        """Store piece by piece; after a piece of which nothing was taken, stop."""
        at_once = max(1, _PIECE_BYTES // self._page_bytes)
        for first in range(0, len(job.keys), at_once):
            part = slice(first, first + at_once)
            hashes = page_hashes(job.keys[part])
            written = set(self._server.store(hashes, self._views(job.rows[part])))
            others = [position for position in range(len(hashes)) if position not in written]
            held = self._server.contains([hashes[position] for position in others]) if others else []
            for position in [*written, *(one for one, there in zip(others, held, strict=True) if there)]:
                is_there[first + position] = True
            if not any(is_there[part]):
                return

    def _views(self, rows: Sequence[int]) -> list[memoryview]:
        assert all(0 <= row < self._num_rows for row in rows), "a row outside the engine's memory"
        return [self._memory[row * self._page_bytes : (row + 1) * self._page_bytes] for row in rows]
