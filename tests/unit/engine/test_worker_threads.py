"""Threads that take jobs in their order, and end when they are told to."""

from __future__ import annotations

import threading
import weakref

from kvtier.engine.worker_threads import WorkerThreads


def test_one_thread_does_jobs_in_their_order() -> None:
    done: list[int] = []
    threads = WorkerThreads(1, "test-worker")
    for number in range(100):
        threads.submit(lambda number=number: done.append(number))  # type: ignore[misc]
    threads.close()
    assert done == list(range(100))


def test_as_many_jobs_run_at_once_as_there_are_threads() -> None:
    barrier = threading.Barrier(4)
    threads = WorkerThreads(3, "test-worker")
    for _ in range(3):
        threads.submit(lambda: barrier.wait(10))
    barrier.wait(10)
    threads.close()
    assert not barrier.broken


def test_closing_waits_for_all_jobs_and_ends_the_threads() -> None:
    may_go, done = threading.Event(), []
    threads = WorkerThreads(2, "test-closing")
    for number in range(8):
        threads.submit(lambda number=number: (may_go.wait(10), done.append(number)))  # type: ignore[misc]
    threading.Timer(0.05, may_go.set).start()
    threads.close()
    assert sorted(done) == list(range(8))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("test-closing")]


def test_nothing_of_a_job_is_kept_once_it_is_done() -> None:
    class Load:
        pass

    load = Load()
    reference, is_over = weakref.ref(load), threading.Event()
    threads = WorkerThreads(1, "test-worker")
    threads.submit(lambda load=load: None)  # type: ignore[misc]
    del load
    threads.submit(is_over.set)
    assert is_over.wait(10)
    assert reference() is None
    threads.close()
