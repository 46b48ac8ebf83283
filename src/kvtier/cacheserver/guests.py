"""Connections: how many there may be, strangers apart from clients, so that none shuts out another.

A stranger is a peer that has not yet authenticated. Strangers have a small share of their own, over TCP and on this
host each, and one that arrives when it is full takes the place of the oldest at the address that has the most; TCP
clients leave a part of all places to processes of this host; a tenant has no more than its own.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Protocol

from kvtier.cacheserver.tenants import Tenant
from kvtier.errors import TierRefused

MAX_TCP_STRANGERS = 32
_SHORTEST_S = {True: 1.0, False: 0.05}
"""For which a stranger on this host, or over TCP, keeps its place, however many come after it from its own address.

A handshake takes a few milliseconds. Longer, and one address that connects all the time would keep all places taken.
"""
_LAST_WORDS_S = 0.5
_MAX_LEAVING = 64


class Guest(Protocol):
    """A connection. `address` is that of its peer's host, or of its network; empty on this host."""

    is_unix: bool
    address: str

    def shut_down(self) -> None: ...


class Guests:
    """Thread-safe. `arrive`, `let_in` and `leave` are called once for each connection, in this order."""

    def __init__(self, max_connections: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_connections = max_connections
        self._max_tcp = max(1, max_connections - max_connections // 4)
        self._max_of_tenant = max(1, max_connections // 4)
        self._max_strangers = {True: max(1, max_connections // 2), False: MAX_TCP_STRANGERS}
        self._clock = clock
        self._lock = threading.Lock()
        self._strangers: dict[Guest, float] = {}
        self._clients: dict[Guest, Tenant] = {}
        self._unused_since = clock()

    @property
    def num_clients(self) -> int:
        return len(self._clients)

    @property
    def unused_s(self) -> float:
        """For how long no client has been connected, from when one could: 0 while one is."""
        with self._lock:
            is_used = self._clients or any(guest.is_unix for guest in self._strangers)
            return 0.0 if is_used else self._clock() - self._unused_since

    def everybody(self) -> list[Guest]:
        with self._lock:
            return [*self._strangers, *self._clients]

    def arrive(self, guest: Guest) -> str | None:
        """A stranger has connected. Returns a sentence if there is no place for it.

        One that has been silent for a while makes room for it: an honest client is done in an instant. One at an
        address with more strangers than this one's makes room at once.
        """
        with self._lock:
            now = self._clock()
            limit = self._max_strangers[guest.is_unix]
            others = [other for other in self._strangers if other.is_unix == guest.is_unix]
            if len(others) >= limit:
                counts = Counter(other.address for other in others)
                most = max(counts.values())
                oldest = next(other for other in others if counts[other.address] == most)
                is_crowd = most > counts[guest.address] + 1
                if not is_crowd and now - self._strangers[oldest] < _SHORTEST_S[guest.is_unix]:
                    return f"{limit} connections have not said yet who they are, which is the limit: try again"
                del self._strangers[oldest]
                oldest.shut_down()
            sentence = self._why_full(guest)
            if sentence is None:
                self._strangers[guest] = now
            return sentence

    def let_in(self, guest: Guest, tenant: Tenant) -> None:
        """The stranger is a client of `tenant`. Raises `TierRefused` when there is no place for it."""
        with self._lock:
            self._strangers.pop(guest, None)
            sentence = self._why_full(guest)
            if sentence is not None:
                raise TierRefused(sentence)
            limit = tenant.max_connections or self._max_of_tenant
            if tenant.name and tenant.num_connections >= limit:
                raise TierRefused(f"{limit} connections of the tenant {tenant.name} are open, which is the limit")
            tenant.num_connections += 1
            self._clients[guest] = tenant

    def leave(self, guest: Guest) -> None:
        with self._lock:
            self._strangers.pop(guest, None)
            tenant = self._clients.pop(guest, None)
            if tenant is not None:
                tenant.num_connections -= 1
            self._unused_since = self._clock()

    def _why_full(self, guest: Guest) -> str | None:
        if len(self._clients) >= self._max_connections:
            return f"{self._max_connections} connections are open, which is the limit"
        if not guest.is_unix and sum(not client.is_unix for client in self._clients) >= self._max_tcp:
            return f"{self._max_tcp} TCP connections are open, which is the limit"
        return None


class LastWords:
    """Says a few bytes to peers that are not let in, and closes their sockets a moment later, in the background."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._leaving: deque[tuple[float, socket.socket]] = deque()

    def say(self, sock: socket.socket, words: bytes) -> None:
        """Takes over `sock`. A peer that does not listen misses the words."""
        with contextlib.suppress(OSError, ValueError):
            sock.setblocking(False)
            sock.send(words)
            sock.shutdown(socket.SHUT_WR)
        with self._lock:
            self._leaving.append((self._clock() + _LAST_WORDS_S, sock))
        self.close_late(keep=_MAX_LEAVING)

    def close_late(self, keep: int = 0) -> None:
        """Close those whose time is up, and the oldest of more than `keep`, if given."""
        with self._lock:
            now = self._clock()
            gone = []
            while self._leaving and (self._leaving[0][0] <= now or (keep and len(self._leaving) > keep)):
                gone.append(self._leaving.popleft()[1])
        for sock in gone:
            sock.close()

    def close(self) -> None:
        with self._lock:
            gone, self._leaving = self._leaving, deque()
        for _, sock in gone:
            sock.close()
