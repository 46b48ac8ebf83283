"""Threads that take jobs in their order, and end when they are told to."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import weakref

import pytest

from kvtier.transfer.worker_threads import WorkerThreads
from tests.support.waiting import LIMIT_S, wait_until


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
        threads.submit(lambda: barrier.wait(LIMIT_S))
    barrier.wait(LIMIT_S)
    threads.close()
    assert not barrier.broken


def test_closing_waits_for_all_jobs_and_ends_the_threads() -> None:
    may_go, done = threading.Event(), []
    threads = WorkerThreads(2, "test-closing")
    for number in range(8):
        threads.submit(lambda number=number: (may_go.wait(LIMIT_S), done.append(number)))  # type: ignore[misc]
    threading.Timer(0.05, may_go.set).start()
    threads.close()
    assert sorted(done) == list(range(8))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("test-closing")]


def test_closed_threads_take_no_jobs_and_may_be_closed_again() -> None:
    threads = WorkerThreads(2, "test-worker")
    threads.close()
    threads.close()
    with pytest.raises(RuntimeError, match="these threads have ended"):
        threads.submit(lambda: None)


@pytest.mark.parametrize("error", [ValueError("wrong"), SystemExit(3)])
def test_a_job_that_fails_is_logged_and_the_next_is_done(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise error

    done: list[int] = []
    threads = WorkerThreads(1, "test-worker")
    threads.submit(fail)
    threads.submit(lambda: done.append(1))
    threads.close()
    assert done == [1]
    assert "a job failed" in caplog.text


def test_a_process_that_ends_waits_for_the_job_under_way() -> None:
    script = """
import time
from kvtier.transfer.worker_threads import WorkerThreads

def work():
    time.sleep(0.5)
    print("done", flush=True)

WorkerThreads(2, "worker").submit(work)
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=LIMIT_S, check=True)
    assert ended.stdout.split() == ["done"]


def test_a_forked_child_that_ends_waits_for_nothing() -> None:
    threads = WorkerThreads(1, "test-worker")
    pid = os.fork()
    if not pid:
        try:
            threads.close()
        finally:
            os._exit(0)
    wait_until(lambda: os.waitpid(pid, os.WNOHANG) != (0, 0))
    threads.submit(lambda: None)
    threads.close()


def test_nothing_of_a_job_is_kept_once_it_is_done() -> None:
    class Load:
        pass

    load = Load()
    reference, is_over = weakref.ref(load), threading.Event()
    threads = WorkerThreads(1, "test-worker")
    threads.submit(lambda load=load: None)  # type: ignore[misc]
    del load
    threads.submit(is_over.set)
    assert is_over.wait(LIMIT_S)
    assert reference() is None
    threads.close()
