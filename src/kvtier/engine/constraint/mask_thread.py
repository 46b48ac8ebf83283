"""A thread that runs one call at a time without Python's lock, while its owner's thread does other work."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable


class MaskThread:
    """`begin`, then `wait`. One thread owns it; the thread starts with the first call, and ends with `close`."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._call: _Call | None = None
        self._is_idle = True

    def begin(self, act: Callable[[], None]) -> None:
        """Run `act` on the thread. Returns once it has begun: otherwise it might wait long for Python's lock."""
        self.drain()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kvtier-masks", daemon=True)
            self._thread.start()
        self._is_idle = False
        self._call = _Call(act)
        self._calls.put(self._call)
        self._call.begun.acquire()

    def wait(self) -> None:
        """Wait until the call has ended. Raises what it raised."""
        call = self._call
        assert call is not None, "a call was begun"
        call.over.acquire()
        self._is_idle = True
        if call.error is not None:
            raise call.error

    def drain(self) -> None:
        """Wait until no call is running. After an error, a call may have begun without a `wait`."""
        if not self._is_idle:
            last = _Call(_nothing)
            self._calls.put(last)
            last.over.acquire()
            self._is_idle = True

    def close(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self._calls.put(None)
            self._thread.join()
            self._thread = None
            self._is_idle = True

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call.begun.release()
            try:
                call.act()
            except BaseException as error:
                call.error = error
            call.act = _nothing  # what it holds is not needed while the thread waits
            call.over.release()


class _Call:
    """`begun` and `over` are released when the call begins and ends."""

    __slots__ = ("act", "begun", "error", "over")

    def __init__(self, act: Callable[[], None]) -> None:
        self.act = act
        self.error: BaseException | None = None
        self.begun = threading.Lock()
        self.over = threading.Lock()
        self.begun.acquire()
        self.over.acquire()


def _nothing() -> None:
    pass
