"""The connections of one cache object, closed even if a program forgets to.

A cache and the holds of its queries refer to them. When the last of those is gone and the cache was not closed, they
are put aside, and the next cache or call of this process closes them: the garbage collector must not wait for a server.
A forked child closes nothing of its parent's: another thread may have held its locks.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections import deque
from typing import TypeAlias

from kvtier.client.client import CacheClient
from kvtier.errors import KvtierError
from kvtier.memory.lease import Lease
from kvtier.vineyard.token_bound import TokenBound

logger = logging.getLogger(__name__)


class TreeClients:
    """Two clients, since what queries hold must not count against what updates may hold, and the bound over the tree.

    `forgotten` are leases of queries whose tensors are all gone.
    """

    def __init__(self, reader: CacheClient, writer: CacheClient, bound: TokenBound) -> None:
        self._open = (reader, writer, bound)
        self._is_closed = False
        self._pid = os.getpid()
        self.forgotten: deque[Lease] = deque()

    def release_forgotten(self) -> None:
        _release(self.forgotten)

    def close(self) -> None:
        """The caller has released everything else."""
        self._is_closed = True
        _close(self._open, self.forgotten)

    def __del__(self) -> None:
        if not self._is_closed:
            _abandoned.append((self._pid, self._open, self.forgotten))


_Open: TypeAlias = tuple[CacheClient, CacheClient, TokenBound]

_abandoned: deque[tuple[int, _Open, deque[Lease]]] = deque()
_left_to_parent: list[object] = []
"""Kept forever: leases that are garbage-collected would end."""


def close_abandoned() -> None:
    """Close what caches of this process have left open."""
    while _abandoned:
        with contextlib.suppress(IndexError):  # another thread took the last
            pid, clients, forgotten = _abandoned.popleft()
            if pid != os.getpid():
                _left_to_parent.append((clients, forgotten))
                continue
            try:
                _close(clients, forgotten)
            except KvtierError as error:
                logger.debug("a cache that was not closed: %s", error)


def _close(clients: _Open, forgotten: deque[Lease]) -> None:
    _release(forgotten)
    reader, writer, bound = clients
    bound.close()
    reader.close()
    writer.close()


def _release(forgotten: deque[Lease]) -> None:
    while forgotten:
        with contextlib.suppress(IndexError):
            forgotten.popleft().release()
