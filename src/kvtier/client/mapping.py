"""The memory of a server on this host, as this process maps it. Thread-safe."""

from __future__ import annotations

import contextlib
import os
import threading

from kvtier.client.server_connection import ServerConnection
from kvtier.errors import LeaseError, TierUnavailable
from kvtier.memory.mapped import MappedArena
from kvtier.transport.address import Address


class ArenaMapping:
    """The arena of the server that answered last on `address`."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._lock = threading.Lock()
        self._mapped: tuple[bytes, MappedArena] | None = None  # with the id of its server
        self._is_closed = False

    @property
    def arena(self) -> MappedArena:
        if self._mapped is None:
            raise TierUnavailable(f"{self._address} has no memory that this process has mapped")
        return self._mapped[1]

    def arena_of(self, connection: ServerConnection) -> MappedArena:
        """The arena of the server behind `connection`."""
        mapped = self._mapped
        if mapped is None or mapped[0] != connection.welcome.server_id:
            raise TierUnavailable("the cache server was replaced by another one")
        return mapped[1]

    def attach(self, connection: ServerConnection) -> bool:
        """Map the arena that came with a new connection. True if the server is not the same as before.

        The previous arena stays mapped as long as leases on it keep their views.
        """
        fd = connection.take_arena_fd()
        with self._lock:
            if self._is_closed:
                os.close(fd)
                raise TierUnavailable("this client is closed")
            if self._mapped is not None and self._mapped[0] == connection.welcome.server_id:
                os.close(fd)
                return False
            self._mapped = connection.welcome.server_id, MappedArena.attach(fd, connection.welcome.arena_bytes)
            return True

    def stop_use(self, timeout_s: float) -> bool:
        """True once no copy reads or writes the arena, and none ever will."""
        return self._mapped is None or self._mapped[1].stop_use(timeout_s)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
        if self._mapped is not None:
            with contextlib.suppress(LeaseError):  # views in use keep the mapping; the process's end unmaps it
                self._mapped[1].close()

    def forget_parent(self) -> None:
        """In a forked child, which also has the mapping: the parent's lock is not ours."""
        self._lock = threading.Lock()
