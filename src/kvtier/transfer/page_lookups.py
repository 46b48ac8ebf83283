"""What a cache server has of another engine's pages, for a scheduler that asks page by page and cannot wait. No torch.

The scheduler's thread asks for an owner (a request), and hears "not known yet" at first. With the end of its step the
questions go to a thread, which asks the server for all of an owner's pages at once and leases what is there, so that it
is still there when it is loaded. What the server has on disk is read from then on.
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
"""A lease is given back after that, loaded from or not: a request may wait for ever."""


class PresenceServer(Protocol):
    """What is needed of a cache server's client. No call raises for a server that is dead, slow or hung."""

    def look(self, hashes: Sequence[BlockHash], *, timeout_s: float | None = None) -> list[int]: ...

    def match(self, hashes: Sequence[BlockHash], *, timeout_s: float | None = None) -> Lease: ...


@dataclass(slots=True)
class _Owner:
    """What a request has asked for: None while it is not known."""

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
    """Nothing more is loaded for this owner."""

    owner: str


@dataclass(frozen=True, eq=False, slots=True)
class _Held:
    owner: str
    lease: Lease
    until: float


class PageLookups:
    """Of one engine. Its thread owns all leases."""

    def __init__(
        self,
        server: PresenceServer,
        *,
        max_held: Callable[[], int],
        patience_s: float,
        held_s: float = _HELD_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Leases are for at most `max_held` pages, which the thread asks for once, and may raise. What is not known
        after `patience_s` is a miss.
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
        """Whether the server has a page; None while that is being found out."""
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
        """The step is over: ask for what was not known."""
        self._take_answers()
        for owner, keys in self._unsent.items():
            self._orders.put(_Question(owner, keys, self._clock()))
            self._num_open += 1
        self._unsent = {}

    @property
    def is_asking(self) -> bool:
        """The server has not answered everything yet."""
        return self._num_open > 0

    def note_loaded(self, owner: str, missing_keys: Iterable[bytes]) -> None:
        """A load for `owner` has ended. What did not come is a miss from now on, or it would be tried for ever."""
        asked = self._owners.get(owner)
        if asked is not None:
            asked.found |= dict.fromkeys(missing_keys, False)
        self._orders.put(_Release(owner))

    def forget(self, owner: str) -> None:
        """The request is over."""
        self._unsent.pop(owner, None)
        if self._owners.pop(owner, None) is not None:
            self._orders.put(_Release(owner))

    def close(self) -> None:
        """Give all leases back."""
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
                self._release([held for held in self._held if held.owner == order.owner])
        self._release(self._held)

    def _ask(self, question: _Question) -> list[bool]:
        missing = [False] * len(question.keys)
        if self._clock() - question.asked_at > self._patience_s:
            return missing  # nobody waits for it any more
        try:
            hashes = page_hashes(question.keys)
            flags = self._server.look(hashes)
            found = [bool(flag & LISTED_CACHED) for flag in flags]
            self._hold(question.owner, [one for one, there in zip(hashes, found, strict=True) if there])
            return found
        except KvtierError as error:
            self._log.warning("lookup", "pages are not looked up: %s", str(error))
        except Exception:
            logger.exception("pages are not looked up")
        return missing

    def _hold(self, owner: str, hashes: Sequence[BlockHash]) -> None:
        """What is not leased may be evicted before it is loaded, and is computed then."""
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
            self._held.append(_Held(owner, lease, self._clock() + self._held_s))

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
