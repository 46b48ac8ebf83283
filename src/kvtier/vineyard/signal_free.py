"""Runs calls of the main thread in a thread that no signal reaches.

Python raises Ctrl-C in the main thread between any two steps, even inside its own conditions, semaphores and thread
pools: a lock interrupted there stays locked, and every thread waits for it forever. So the main thread hands its call
over and waits for its end, with only a queue, a lock and attributes, none of which can be left half changed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic, TypeAlias, TypeVar

_Result = TypeVar("_Result")

IsWanted: TypeAlias = Callable[[], bool]
"""False once Ctrl-C, or another exception of a signal handler, came to the thread that waits for the call."""

_LOOK_S = 0.2
"""How often the main thread checks that the other thread still runs."""


class _Call(Generic[_Result]):
    """Runs at most once, however often it is in the queue."""

    def __init__(self, work: Callable[[IsWanted], _Result]) -> None:
        self.is_over = False
        self.is_wanted = True
        self.over = threading.Lock()
        self.over.acquire()
        self._work = work
        self._results: list[_Result] = []
        self._error: BaseException | None = None

    def make(self) -> None:
        try:
            self._results.append(self._work(lambda: self.is_wanted))
        except BaseException as error:
            self._error = error
        self.is_over = True
        self.over.release()

    def result(self) -> _Result:
        try:
            if self._error is not None:
                raise self._error
            return self._results[0]
        finally:
            self._error = None  # it refers to this frame


class SignalFreeThread:
    """One thread for the calls of the main thread; calls of other threads run where they are. Thread-safe."""

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[_Call[Any] | None] = SimpleQueue()
        self._has_ended = False
        threading.Thread(target=self._make_calls, name=name, daemon=True).start()

    def do(self, work: Callable[[IsWanted], _Result]) -> _Result:
        """Do `work`, and return or raise its result. Ctrl-C cancels it, and is raised once it has ended."""
        if threading.current_thread() is not threading.main_thread():
            return work(_always)
        call = _Call(work)
        came: BaseException | None = None
        while not call.is_over:
            try:
                self._calls.put(call)  # again after an interrupt, which may have come before the first
                while not call.over.acquire(timeout=_LOOK_S):
                    if self._has_ended and not call.is_over:
                        return work(_always)  # it was closed at the same moment
            except BaseException as error:
                call.is_wanted = False
                came = error
        if came is not None:
            raise came
        return call.result()

    def close(self) -> None:
        """The thread ends after the calls that were handed over before."""
        self._calls.put(None)

    def _make_calls(self) -> None:
        while (call := self._calls.get()) is not None:
            if not call.is_over:
                call.make()
            del call  # release what it refers to
        self._has_ended = True


def _always() -> bool:
    return True
