"""A few threads for work beside the engine's own. No torch."""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import Callable
from queue import SimpleQueue

from kvtier.latency_guard import yield_to

logger = logging.getLogger(__name__)


class WorkerThreads:
    """Threads that take jobs in order. Handing over a job costs a microsecond and never waits."""

    def __init__(
        self,
        count: int,
        name: str,
        let_pass: Callable[[], None] | None = None,
        done: Callable[[], None] | None = None,
    ) -> None:
        """They call `let_pass` at safe points (see `latency_guard`), and `done` after each job, even a failed one."""
        self._jobs: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._is_closed = False
        self._pid = os.getpid()
        atexit.register(self.close)  # a copy in flight ends before its memory does
        try:
            for number in range(count):
                arguments = (self._jobs, let_pass, done)
                thread = threading.Thread(target=_work, args=arguments, name=f"{name}_{number}", daemon=True)
                thread.start()
                self._threads.append(thread)
        except BaseException:
            self.close()
            raise

    def submit(self, job: Callable[[], object]) -> None:
        """Raises `RuntimeError` once the threads are closed. An exception of `job` is logged."""
        if self._is_closed:
            raise RuntimeError("these threads have ended")
        self._jobs.put(job)

    def close(self) -> None:
        """Wait until all jobs so far are done, and end the threads. Safe to call twice, and in a forked child."""
        self._is_closed = True
        atexit.unregister(self.close)
        if os.getpid() != self._pid:
            return
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()


def _work(
    jobs: SimpleQueue[Callable[[], object] | None],
    let_pass: Callable[[], None] | None,
    done: Callable[[], None] | None,
) -> None:
    yield_to(let_pass)
    while (job := jobs.get()) is not None:
        try:
            job()
        except BaseException:
            logger.exception("a job failed")
        if done is not None:
            done()
        del job  # while waiting for the next job, keep nothing that it refers to
