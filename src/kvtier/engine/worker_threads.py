"""A few threads for work beside the engine's own. No torch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue


class WorkerThreads:
    """They take jobs in their order. To hand one over costs a microsecond and never waits, whatever they are doing."""

    def __init__(self, count: int, name: str) -> None:
        self._jobs: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=_work, args=(self._jobs,), name=f"{name}_{number}", daemon=True)
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Callable[[], object]) -> None:
        """`job` raises nothing."""
        self._jobs.put(job)

    def close(self) -> None:
        """Wait until all jobs so far are done, and end the threads. Nothing is submitted any more."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()


def _work(jobs: SimpleQueue[Callable[[], object] | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # while the next one is waited for, nothing that it refers to is kept
