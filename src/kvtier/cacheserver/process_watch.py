"""The thread that sees clients' processes end, and that ends leases of remote clients that were idle too long.

A process is watched through its pidfd, which cannot be confused with a later process of the same pid. The blocks of a
dead client are left alone for a moment: a GPU may still be copying.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections.abc import Callable

from kvtier.cacheserver.catalog import Catalog
from kvtier.cacheserver.served_client import ServedClient

logger = logging.getLogger(__name__)

_EXPIRY_INTERVAL_S = 1.0


class ProcessWatch:
    """Owns the pidfds passed to it, and one thread."""

    def __init__(self, catalog: Catalog, gone_grace_s: float, each_second: Callable[[], None] = lambda: None) -> None:
        """`each_second` is called about once a second, too."""
        self._catalog = catalog
        self._each_second = each_second
        self._gone_grace_s = gone_grace_s
        self._lock = threading.Lock()
        self._watched: dict[int, ServedClient] = {}
        self._is_closing = False
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll = select.poll()
        self._poll.register(self._wake_fd, select.POLLIN)
        self._thread = threading.Thread(target=self._run, name="kvtier-process-watch", daemon=True)
        self._thread.start()

    def watch(self, client: ServedClient, pidfd: int) -> None:
        """Watch the process behind `client`; takes over `pidfd`. A second pidfd of the same client is not needed."""
        with self._lock:
            if self._is_closing or client in self._watched.values():
                os.close(pidfd)
                return
            self._watched[pidfd] = client
            self._poll.register(pidfd, select.POLLIN)
        os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        with self._lock:
            self._is_closing = True
        os.eventfd_write(self._wake_fd, 1)
        self._thread.join()
        for pidfd in self._watched:
            os.close(pidfd)
        os.close(self._wake_fd)

    def _run(self) -> None:
        gone: list[tuple[float, ServedClient]] = []
        expire_at = time.monotonic() + _EXPIRY_INTERVAL_S
        while not self._is_closing:
            next_at = min([expire_at, *(due_at for due_at, _ in gone)])
            for fd, _ in self._poll.poll(max(0.0, next_at - time.monotonic()) * 1000):
                if fd == self._wake_fd:
                    os.eventfd_read(self._wake_fd)
                    continue
                gone.append((time.monotonic() + self._gone_grace_s, self._unwatch(fd)))
            now = time.monotonic()
            for due_at, client in list(gone):
                if due_at <= now:
                    gone.remove((due_at, client))
                    self._end(client)
            if expire_at <= now:
                expire_at = now + _EXPIRY_INTERVAL_S
                self._catalog.expire()
                self._unwatch_left()
                try:
                    self._each_second()
                except Exception:
                    logger.exception("a bug in the cache server's periodic work; the server goes on")

    def _end(self, client: ServedClient) -> None:
        if client.leases or client.reservations:
            num_leases, num_reservations = len(client.leases), len(client.reservations)
            logger.info("client gone pid=%s leases=%d reservations=%d", client.pid, num_leases, num_reservations)
        self._catalog.end(client)

    def _unwatch(self, pidfd: int) -> ServedClient:
        with self._lock:
            self._poll.unregister(pidfd)
            client = self._watched.pop(pidfd)
        os.close(pidfd)
        return client

    def _unwatch_left(self) -> None:
        """Stop watching clients that said goodbye and therefore hold no more blocks."""
        with self._lock:
            left = [pidfd for pidfd, client in self._watched.items() if client.is_gone]
        for pidfd in left:
            self._unwatch(pidfd)
