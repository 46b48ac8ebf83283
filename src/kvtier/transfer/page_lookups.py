"""What a cache server has of another engine's pages, for a scheduler that asks page by page and cannot wait. No torch.

The scheduler's thread asks for an owner (a request); the answer is "not known yet" at first. At the end of its step,
the questions go to a thread, which asks the server for all of an owner's pages at once and leases the hits, so that
they are not evicted before they are loaded. The server begins to read those on its disk.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvtier.blocks.hashing import BlockHash
from kvtier.errors import KvtierError
from kvtier.memory.lease import Lease
from kvtier.observe.log_limit import LogLimit
from kvtier.transfer.page_jobs import page_hashes
from kvtier.wire.messages import LISTED_CACHED

logger = logging.getLogger(__name__)

_HELD_S = 10.0
"""Longest life of a lease, whether it was used or not: a request may wait forever."""


class PresenceServer(Protocol):
    """The part of a cache server's client that is needed. No call raises if the server is dead, slow or hung."""

    def look(self, hashes: Sequence[BlockHash], *, timeout_s: float | None = None) -> list[int]: ...

    def match(self, hashes: Sequence[BlockHash], *, timeout_s: float | None = None) -> Lease: ...


@dataclass(slots=True)
class _Owner:
    """The pages that a request has asked for; None while unknown."""

    asked_at: float
    found: dict[bytes, bool | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Question:
    owner: str
    keys: list[bytes]
    asked_at: float


@dataclass(frozen=True, slots=True)
class _Answer:
    owner: str
    keys: list[bytes]
    found: list[bool]


@dataclass(frozen=True, slots=True)
class _Release:
    """The owner loads these pages no more, or no page at all if `keys` is None."""

    owner: str
    keys: frozenset[bytes] | None


@dataclass(frozen=True, eq=False, slots=True)
class _Held:
    """`waiting` are the pages that are not loaded yet: the lease lasts until none is left."""

    owner: str
    lease: Lease
    waiting: set[bytes]
    until: float


class PageLookups:
    """The lookups of one engine. Its thread owns all leases."""

    def __init__(
        self,
        server: PresenceServer,
        *,
        max_held: Callable[[], int],
        patience_s: float,
        held_s: float = _HELD_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Leases cover at most `max_held` pages; the thread calls it once, and it may raise. A page that is still
        unknown after `patience_s` is a miss.
        """
        self._server = server
        self._max_held = max_held
        self._most: int | None = None
        self._patience_s = patience_s
        self._held_s = held_s
        self._clock = clock
        self._owners: dict[str, _Owner] = {}
        self._unsent: dict[str, list[bytes]] = {}
        self._num_open = 0
        self._answers: deque[_Answer] = deque()
        self._log = LogLimit(logger)
        self._orders: queue.SimpleQueue[_Question | _Release | None] = queue.SimpleQueue()
        self._held: list[_Held] = []
        self._thread = threading.Thread(target=self._run, name="kvtier-page-lookup", daemon=True)
        self._thread.start()

    # --- the scheduler's thread ------------------------------------------------------------------------------------

    def find(self, key: bytes, owner: str) -> bool | None:
        """Whether the server has a page; None while that is unknown."""
        self._take_answers()
        asked = self._owners.get(owner)
        if asked is None:
            asked = self._owners[owner] = _Owner(self._clock())
        if key not in asked.found:
            asked.found[key] = None
            asked.asked_at = self._clock()
            self._unsent.setdefault(owner, []).append(key)
            return None
        found = asked.found[key]
        if found is None and self._clock() - asked.asked_at > self._patience_s:
            found = asked.found[key] = False
        return found

    def send(self) -> None:
        """The step is over: ask for the pages that were unknown."""
        self._take_answers()
        for owner, keys in self._unsent.items():
            self._orders.put(_Question(owner, keys, self._clock()))
            self._num_open += 1
        self._unsent = {}

    @property
    def is_asking(self) -> bool:
        """The server has not answered everything yet."""
        return self._num_open > 0

    def note_loaded(self, owner: str, keys: Iterable[bytes], missing_keys: Iterable[bytes]) -> None:
        """A load of `keys` for `owner` has ended. `missing_keys` are misses from now on, else vLLM retries forever."""
        asked = self._owners.get(owner)
        if asked is not None:
            asked.found |= dict.fromkeys(missing_keys, False)
        self._orders.put(_Release(owner, frozenset(keys)))

    def forget(self, owner: str) -> None:
        """The request is over."""
        self._unsent.pop(owner, None)
        if self._owners.pop(owner, None) is not None:
            self._orders.put(_Release(owner, None))

    def close(self) -> None:
        """Release all leases."""
        self._orders.put(None)
        self._thread.join()

    def _take_answers(self) -> None:
        while self._answers:
            answer = self._answers.popleft()
            self._num_open -= 1
            asked = self._owners.get(answer.owner)
            if asked is None:
                continue
            for key, found in zip(answer.keys, answer.found, strict=True):
                if asked.found.get(key) is None:
                    asked.found[key] = found

    # --- its thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            self._release([held for held in self._held if held.until <= self._clock()])
            try:
                order = self._orders.get(timeout=self._until_next_end())
            except queue.Empty:
                continue
            if order is None:
                break
            if isinstance(order, _Question):
                self._answers.append(_Answer(order.owner, order.keys, self._ask(order)))
            else:
                self._release(self._over(order))
        self._release(self._held)

    def _ask(self, question: _Question) -> list[bool]:
        missing = [False] * len(question.keys)
        if self._clock() - question.asked_at > self._patience_s:
            return missing  # its request is gone
        try:
            hashes = page_hashes(question.keys)
            flags = self._server.look(hashes)
            found = [bool(flag & LISTED_CACHED) for flag in flags]
            present = [number for number, is_present in enumerate(found) if is_present]
            self._hold(question.owner, [question.keys[one] for one in present], [hashes[one] for one in present])
            return found
        except KvtierError as error:
            self._log.warning("lookup", "pages are not looked up: %s", str(error))
        except Exception:
            logger.exception("pages are not looked up")
        return missing

    def _hold(self, owner: str, keys: Sequence[bytes], hashes: Sequence[BlockHash]) -> None:
        """Lease as many pages as allowed. Others may be evicted before they are loaded, and are then computed."""
        if not hashes:
            return
        try:
            self._most = self._max_held() if self._most is None else self._most
        except KvtierError as error:
            self._log.warning("held", "pages are not leased: %s", str(error))
            return
        room = self._most - sum(held.lease.num_blocks for held in self._held)
        wanted = hashes[: max(0, room)]
        if not wanted:
            return
        lease = self._server.match(wanted)
        if lease.num_blocks:
            self._held.append(_Held(owner, lease, set(keys[: lease.num_blocks]), self._clock() + self._held_s))

    def _over(self, release: _Release) -> list[_Held]:
        """The owner's leases of which no page is still to be loaded."""
        over: list[_Held] = []
        for held in self._held:
            if held.owner != release.owner:
                continue
            held.waiting.difference_update(held.waiting if release.keys is None else release.keys)
            if not held.waiting:
                over.append(held)
        return over

    def _until_next_end(self) -> float | None:
        if not self._held:
            return None
        return max(0.0, self._held[0].until - self._clock())

    def _release(self, over: Sequence[_Held]) -> None:
        self._held = [held for held in self._held if held not in over]
        for held in over:
            try:
                held.lease.release()
            except KvtierError as error:
                self._log.warning("release", "leases are not given back: %s", str(error))
