"""Threads for work that runs beside a caller's. Started when first needed; a forked child starts its own."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from kvtier.errors import TierUnavailable

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class Workers:
    """At most `count` threads. Thread-safe. Raises `TierUnavailable` once it is closed."""

    def __init__(self, count: int, name: str) -> None:
        self._count = count
        self._name = name
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._pid = 0
        self._is_closed = False

    def map(self, act: Callable[[_Item], _Result], items: Iterable[_Item]) -> Iterator[_Result]:
        return self._threads().map(act, items)

    def close(self) -> None:
        self._is_closed = True
        if self._pool is not None and self._pid == os.getpid():
            self._pool.shutdown()

    def _threads(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._is_closed:
                raise TierUnavailable("this client is closed")
            if self._pool is None or self._pid != os.getpid():
                self._pool, self._pid = ThreadPoolExecutor(self._count, self._name), os.getpid()
            return self._pool
