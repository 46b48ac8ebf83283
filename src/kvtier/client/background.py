"""A client's own thread for one server: reconnects after an outage, and does work that callers deferred.

Thread-safe. The thread starts with the first need.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from kvtier.client.breaker import Breaker
from kvtier.errors import ProtocolError, TierError, TierFull, TierTimeout, TierUnavailable
from kvtier.observe.log_limit import LogLimit
from kvtier.transport.address import Address

logger = logging.getLogger(__name__)

_FIRST_RETRY_S = 0.05
_LAST_RETRY_S = 2.0
_CHORE_LOOK_S = 0.05  # how soon a thread that waits for chores notices that the server is down
_ENDING_S = 0.5


class Background:
    """`reconnect` raises a `TierError` or `ProtocolError` while the server is down. `failed` counts failed chores."""

    def __init__(
        self, address: Address, breaker: Breaker, reconnect: Callable[[], None], failed: Callable[[Exception], None]
    ) -> None:
        self.num_returns = 0
        self.is_closed = False
        self.chores: deque[Callable[[], object]] = deque()
        self._address = address
        self._breaker = breaker
        self._reconnect = reconnect
        self._failed = failed
        self._log = LogLimit(logger)
        self._condition = threading.Condition()
        self._thread: threading.Thread | None = None

    def check(self) -> None:
        """Raises `TierUnavailable` if this client is closed or its server is down."""
        if self.is_closed:
            raise TierUnavailable("this client is closed")
        if self._breaker.is_open:
            raise TierUnavailable(f"cache server {self._address} is down; it is tried again in the background")

    def do_later(self, chore: Callable[[], object]) -> None:
        """Run `chore` on this thread. A chore that raises `TierUnavailable` or `TierTimeout` is retried."""
        with self._condition:
            if not self.is_closed:
                self.chores.append(chore)
                self.wake()

    def forget(self, chore: Callable[[], object]) -> None:
        """Like `do_later`, for the garbage collector: takes no lock; the chore is done along with the next one."""
        self.chores.append(chore)

    def wake(self) -> None:
        with self._condition:
            if self._thread is None and not self.is_closed:
                self._thread = threading.Thread(target=self._run, name="kvtier-client", daemon=True)
                self._thread.start()
            self._condition.notify_all()

    def wait_for_chores(self, deadline: float) -> None:
        """Wait until earlier chores are done. Raises `TierTimeout`, or `TierUnavailable` once the server is down."""
        self.check()
        if not self.chores:
            return
        done = threading.Event()
        self.do_later(done.set)
        while not done.wait(max(0.0, min(deadline - time.monotonic(), _CHORE_LOOK_S))):
            self.check()
            if time.monotonic() >= deadline:
                raise TierTimeout("deferred work is not done within the deadline")

    def close(self) -> None:
        """Deferred chores are tried once more, then dropped."""
        with self._condition:
            self.is_closed = True
            self._condition.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            # If it is trying to reach a server that is down, it ends by itself once that fails.
            thread.join(_ENDING_S if self._breaker.is_open else None)

    def forget_parent(self) -> None:
        """In a forked child: the parent's thread, chores and locks are not ours."""
        self._condition = threading.Condition()
        self.chores = deque()
        self._thread = None

    def _run(self) -> None:
        retry_s = _FIRST_RETRY_S
        while True:
            with self._condition:
                while not self.is_closed and not self._breaker.is_open and not self.chores:
                    self._condition.wait()
                if self.is_closed and (not self.chores or self._breaker.is_open):
                    return
            if not self._breaker.is_open:
                self._do_chore()
            elif self._come_back():
                retry_s = _FIRST_RETRY_S
            else:
                with self._condition:
                    self._condition.wait_for(lambda: self.is_closed, retry_s)
                retry_s = min(2 * retry_s, _LAST_RETRY_S)

    def _come_back(self) -> bool:
        try:
            self._reconnect()
        except (TierError, ProtocolError) as error:
            if not self.is_closed:
                self._log.warning("down", "cache server %s is still down: %s", self._address, str(error))
            return False
        self._breaker.close()
        self.num_returns += 1
        logger.info("cache server up address=%s", self._address)
        return True

    def _do_chore(self) -> None:
        chore = self.chores[0]
        try:
            chore()
        except (TierTimeout, TierUnavailable):
            if self.is_closed:
                self.chores.popleft()
            return
        except (TierError, ProtocolError, TierFull) as error:
            self._failed(error)
        except Exception:
            logger.exception("deferred work failed")
        self.chores.popleft()
