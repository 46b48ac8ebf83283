"""The connections of one client to one server: some idle, the others used by one thread each. Thread-safe."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from kvtier.client.server_connection import ServerConnection
from kvtier.errors import TierTimeout, TierUnavailable


class AllBusy(TierTimeout):
    """No connection became free in time."""


class ConnectionPool:
    """At most `max_open` connections, made by `connect`, which gets a deadline."""

    def __init__(self, connect: Callable[[float], ServerConnection], max_open: int) -> None:
        self._connect = connect
        self._max_open = max_open
        self._changed = threading.Condition()
        self._idle: list[ServerConnection] = []
        self._num_open = 0
        self._is_closed = False

    def take(self, deadline: float) -> ServerConnection:
        """A connection for this thread alone, until `give_back`. Raises `AllBusy`, or what `connect` raises."""
        with self._changed:
            while True:
                if self._is_closed:
                    raise TierUnavailable("this client is closed")
                while self._idle:
                    connection = self._idle.pop()
                    if not connection.has_ended():
                        return connection
                    self._discard(connection)
                if self._num_open < self._max_open:
                    self._num_open += 1
                    break
                if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    raise AllBusy("all connections of this client are busy")
        return self._connect_counted(deadline)

    def give_back(self, connection: ServerConnection, is_usable: bool) -> None:
        with self._changed:
            if is_usable and not self._is_closed:
                self._idle.append(connection)
            else:
                self._discard(connection)
            self._changed.notify()

    def add(self, deadline: float) -> None:
        """Make an idle connection, if need be beyond the limit. Raises what `connect` raises."""
        with self._changed:
            self._num_open += 1
        self.give_back(self._connect_counted(deadline), is_usable=True)

    def close_idle(self) -> None:
        with self._changed:
            while self._idle:
                self._discard(self._idle.pop())

    def close(self) -> None:
        """Connections in use are closed when they are given back."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self.close_idle()

    def forget_parent(self) -> None:
        """In a forked child: the parent's connections and locks are not ours."""
        self._changed = threading.Condition()
        self.close_idle()
        self._num_open = 0

    def _discard(self, connection: ServerConnection) -> None:
        connection.close()
        self._num_open -= 1

    def _connect_counted(self, deadline: float) -> ServerConnection:
        """Connect for a caller that has already counted the connection."""
        try:
            return self._connect(deadline)
        except BaseException:
            with self._changed:
                self._num_open -= 1
                self._changed.notify()
            raise
