"""Threads for work beside the caller's. Started when first needed; a forked child starts its own."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

from kvtier.errors import TierUnavailable
from kvtier.latency_guard import current_guard, yield_to

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class Workers:
    """At most `count` threads. Thread-safe. Raises `TierUnavailable` once it is closed."""

    def __init__(self, count: int, name: str) -> None:
        self.count = count
        self._name = name
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._pid = 0
        self._is_closed = False

    def map(self, act: Callable[[_Item], _Result], items: Iterable[_Item]) -> list[_Result]:
        """The results in order, or the first failure, once all are over: nothing continues in the background.

        Meanwhile, the threads yield to the same guard as the caller.
        """
        threads = self._threads()
        works = [threads.submit(_do, act, item, current_guard()) for item in items]
        try:
            wait(works)
        except BaseException:  # an interrupt: the threads still use the caller's buffers
            for work in works:
                work.cancel()
            wait(works)
            raise
        results: list[_Result] = []
        try:
            while works:
                results.append(works.pop(0).result())
        finally:
            works.clear()  # a failure refers to this frame: it must not find itself here
        return results

    def close(self) -> None:
        self._is_closed = True
        if self._pool is not None and self._pid == os.getpid():
            self._pool.shutdown()

    def _threads(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._is_closed:
                raise TierUnavailable("this client is closed")
            if self._pool is None or self._pid != os.getpid():
                self._pool, self._pid = ThreadPoolExecutor(self.count, self._name), os.getpid()
            return self._pool


def _do(act: Callable[[_Item], _Result], item: _Item, let_pass: Callable[[], None] | None) -> _Result:
    yield_to(let_pass)
    try:
        return act(item)
    finally:
        yield_to(None)
