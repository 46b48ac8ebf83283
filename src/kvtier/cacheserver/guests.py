"""Limits on connections, separate for strangers and clients, so that no peer can shut out another.

A stranger is a peer that has not yet authenticated. Strangers have a small share of the places, one over TCP and one
on this host. When a share is full, a new stranger replaces the oldest one of the address that has the most. TCP clients
leave some places to processes of this host, and each tenant has its own limit.
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
_MIN_STAY_S = {True: 1.0, False: 0.05}
"""How long a stranger on this host (True) or over TCP (False) keeps its place, however many follow from its address.

A handshake takes a few milliseconds. A longer time would let one address that keeps connecting hold all places.
"""
_LAST_WORDS_S = 0.5
_MAX_LEAVING = 64


class Guest(Protocol):
    """A connection. `address` is the address of the peer's host or network; empty on this host."""

    is_unix: bool
    address: str

    def shut_down(self) -> None: ...


class Guests:
    """The connected peers. Thread-safe. Each connection calls `arrive`, `let_in` and `leave` once, in this order."""

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
        """Seconds since the last client left, or since the start if none came; 0 while a client is connected."""
        with self._lock:
            is_used = self._clients or any(guest.is_unix for guest in self._strangers)
            return 0.0 if is_used else self._clock() - self._unused_since

    def connected(self) -> list[Guest]:
        with self._lock:
            return [*self._strangers, *self._clients]

    def arrive(self, guest: Guest) -> str | None:
        """Give a new stranger a place. Returns a sentence if there is none.

        If all places are taken, the oldest stranger of the most crowded address is shut down: at once if that address
        has more strangers than the newcomer's, else if its time is up. An honest client authenticates within that time.
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
                if not is_crowd and now - self._strangers[oldest] < _MIN_STAY_S[guest.is_unix]:
                    return f"{limit} connections have not authenticated yet, which is the limit: try again"
                del self._strangers[oldest]
                oldest.shut_down()
            sentence = self._why_full(guest)
            if sentence is None:
                self._strangers[guest] = now
            return sentence

    def let_in(self, guest: Guest, tenant: Tenant) -> None:
        """The stranger has authenticated as a client of `tenant`. Raises `TierRefused` if there is no place for it."""
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
    """Sends a few bytes to peers that are turned away, and closes their sockets a moment later, in the background."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._leaving: deque[tuple[float, socket.socket]] = deque()

    def say(self, sock: socket.socket, words: bytes) -> None:
        """Send `words` without waiting, at best effort. Takes over `sock`."""
        with contextlib.suppress(OSError, ValueError):
            sock.setblocking(False)
            sock.send(words)
            sock.shutdown(socket.SHUT_WR)
        with self._lock:
            self._leaving.append((self._clock() + _LAST_WORDS_S, sock))
        self.close_late(keep=_MAX_LEAVING)

    def close_late(self, keep: int = 0) -> None:
        """Close the sockets whose time is up and, if `keep` is given, the oldest beyond that many."""
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
