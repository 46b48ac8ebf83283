"""The end of a file cache: with calls under way, from within a call, in a forked child; and the memory it keeps."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from kvtier.errors import TierUnavailable
from kvtier.stores import staging
from kvtier.vineyard import chunk_files, file_cache
from tests.support.faulty_files import FaultyFiles
from tests.support.vineyard_files import CHUNK, TEMP, Tensors, chunk_paths, found, open_files, store
from tests.support.waiting import LIMIT_S, wait_until

_ROOT = Path(__file__).parents[3]
TOKENS = list(range(4 * CHUNK))


class _Callers:
    """Threads that call until the cache is closed. `failures` are what else they met."""

    def __init__(self, calls: list[Callable[[], object]]) -> None:
        self.num_done = [0] * len(calls)
        self.failures: list[BaseException] = []
        self._threads = [threading.Thread(target=self._work, args=(*each,)) for each in enumerate(calls)]
        for thread in self._threads:
            thread.start()

    def _work(self, number: int, call: Callable[[], object]) -> None:
        try:
            while True:
                call()
                self.num_done[number] += 1
        except TierUnavailable:
            pass
        except BaseException as error:
            self.failures.append(error)

    def join(self) -> None:
        for thread in self._threads:
            thread.join()


@pytest.mark.parametrize("turn", range(5))
def test_a_close_waits_for_calls_of_other_threads(tmp_path: Path, turn: int) -> None:
    files = FaultyFiles()
    files.delay_s = 0.001
    cache = open_files(tmp_path, files=files, capacity=8 * CHUNK)
    store(cache, TOKENS)
    numbers = iter(range(100, 1 << 30))

    callers = _Callers(
        [
            lambda: found(cache, TOKENS),
            lambda: store(cache, [next(numbers)] * CHUNK),
            lambda: store(cache, [next(numbers)] * 2 * CHUNK),
            cache.collect,
        ]
    )
    wait_until(lambda: min(callers.num_done) > 2)
    cache.close()
    in_temp = os.listdir(tmp_path / TEMP)
    callers.join()

    assert callers.failures == []
    assert in_temp == os.listdir(tmp_path / TEMP) == []
    for call in (lambda: found(cache, TOKENS), lambda: store(cache, TOKENS), cache.collect):
        with pytest.raises(TierUnavailable, match="this cache is closed"):
            call()
    cache.close()


def test_a_folder_that_was_removed_does_not_come_back_after_the_close(tmp_path: Path) -> None:
    root = tmp_path / "cache"
    files = FaultyFiles()
    cache = open_files(root, files=files)
    is_writing, may_write = threading.Event(), threading.Event()

    def wait(data: memoryview, offset: int) -> None:
        is_writing.set()
        may_write.wait(LIMIT_S)

    files.before_write = wait
    writer = threading.Thread(target=store, args=(cache, TOKENS))
    writer.start()
    is_writing.wait(LIMIT_S)
    closer = threading.Thread(target=cache.close)
    closer.start()
    time.sleep(0.05)
    assert closer.is_alive(), "a call is under way"
    may_write.set()
    writer.join()
    closer.join()
    shutil.rmtree(root)

    cache._room.account_for(written=0, unused=0)
    assert not root.exists()


def test_a_close_from_within_a_call_happens_when_the_call_ends(tmp_path: Path) -> None:
    cache = open_files(tmp_path)

    class ClosingTokens(list[int]):
        def __getitem__(self, key: object) -> object:  # type: ignore[override]
            if key != slice(0):
                cache.close()
            return super().__getitem__(key)  # type: ignore[index]

    tokens = ClosingTokens(TOKENS)
    assert cache.update(None, tokens, Tensors(len(TOKENS)).fill([], TOKENS)) == len(TOKENS)

    assert os.listdir(tmp_path / TEMP) == []
    with pytest.raises(TierUnavailable, match="closed"):
        found(cache, TOKENS)


def test_a_forked_child_has_no_use_of_the_cache_and_leaves_it_alone(tmp_path: Path) -> None:
    with closing(open_files(tmp_path)) as cache:
        store(cache, TOKENS)
        child = os.fork()
        if not child:
            status = 1
            try:
                try:
                    found(cache, TOKENS)
                except TierUnavailable as error:
                    status = 0 if "fork" in str(error) else 2
                cache.close()
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

        (left,) = os.listdir(tmp_path / TEMP)
        assert left.startswith(f"{cache._store.owner}-")
        assert left.endswith(".room")
        assert found(cache, TOKENS) == len(TOKENS)


def test_a_child_forked_within_a_call_reads_the_counts_and_waits_for_nobody(tmp_path: Path) -> None:
    with closing(open_files(tmp_path)) as cache:
        store(cache, TOKENS)
        with cache._lock:
            child = os.fork()
            if not child:
                status = 1
                try:
                    signal.alarm(10)  # ends a child that waits
                    threads = [threading.Thread(target=cache.stats)]  # the lock is another thread's
                    threads[0].start()
                    threads[0].join()
                    status = 0
                finally:
                    os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


_INTERRUPTED = """
import os, random, signal, sys, threading, time
from tests.support.vineyard_files import CHUNK, found, open_files, store

cache = open_files(sys.argv[1], capacity=40 * CHUNK)
enough = int(sys.argv[2])
number = num_interrupts = 0
is_in_calls = False

def handle(*_):
    global is_in_calls
    if is_in_calls:
        is_in_calls = False
        raise KeyboardInterrupt

def interrupt():
    dice = random.Random(2)
    while num_interrupts < enough:
        time.sleep(dice.random() * 0.004)
        os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, handle)
thread = threading.Thread(target=interrupt, daemon=True)  # an error below ends the process
thread.start()
while num_interrupts < enough:
    try:
        while True:
            is_in_calls = True  # again: where Python itself calls something, an interrupt gets lost
            number += 1
            store(cache, [number % 30] * 4 * CHUNK)
            found(cache, [number % 30] * 4 * CHUNK)
    except (KeyboardInterrupt, SystemError):  # what Python 3.11 makes of one while a tensor is asked for its buffer
        num_interrupts += 1
thread.join()
assert store(cache, [1] * 8 * CHUNK) == found(cache, [1] * 8 * CHUNK) == 8 * CHUNK
cache.close()
print(os.listdir(sys.argv[1] + "/__temp"))
"""


@pytest.mark.scaled
def test_ctrl_c_in_calls_leaves_a_cache_that_works_and_closes(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    num_interrupts = 40 if pytestconfig.getoption("cases") == "sample" else 150
    done = subprocess.run(
        [sys.executable, "-c", _INTERRUPTED, str(tmp_path), str(num_interrupts)],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        timeout=2 * LIMIT_S,
    )

    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


_INTERRUPTED_EVERYWHERE = """
import faulthandler, sys
from tests.support.interrupting import InterruptAt
from tests.support.vineyard_files import CHUNK, Tensors, found, open_files, store

faulthandler.dump_traceback_later(float(sys.argv[2]), exit=True)
cache = open_files(sys.argv[1], capacity=40 * CHUNK)
place = 0
while True:
    place += 1
    tokens = [place % 30] * 4 * CHUNK
    stored, read = Tensors(len(tokens)).fill([], tokens), Tensors(len(tokens))
    try:
        with InterruptAt(place):
            cache.update([], tokens, stored)
            cache.query(tokens, read)
            cache.stats()
        break
    except KeyboardInterrupt:
        assert store(cache, tokens) == found(cache, tokens) == len(tokens)
cache.close()
print(place > 20)
"""


def test_ctrl_c_at_every_place_of_a_call_leaves_a_cache_that_works_and_closes(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _INTERRUPTED_EVERYWHERE, str(tmp_path), str(LIMIT_S)],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        timeout=2 * LIMIT_S,
    )

    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
    assert os.listdir(tmp_path / TEMP) == []


# --- the memory of segments on their way ------------------------------------------------------------------------------


def test_many_threads_have_no_more_segments_on_their_way_than_three_for_each_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []

    class CountedStaging(staging.SegmentStaging):
        def __init__(self, nbytes: int) -> None:
            made.append(nbytes)
            super().__init__(nbytes)

    with closing(open_files(tmp_path, io_workers=2, files=(files := FaultyFiles()))) as cache:
        files.delay_s = 0.002
        monkeypatch.setattr(staging, "SegmentStaging", CountedStaging)
        threads = [
            threading.Thread(target=store, args=(cache, [number, *range(5 * CHUNK - 1)])) for number in range(16)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        assert len(chunk_paths(tmp_path)) == 16 * 5
        assert 0 < len(made) <= 3 * 2
        assert cache._store.staging.idle_bytes == sum(made)


def test_memory_that_is_idle_is_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_cache, "BEAT_S", 0.05)
    with closing(open_files(tmp_path)) as cache:
        assert store(cache, TOKENS) == len(TOKENS)
        wait_until(lambda: not cache._store.staging.idle_bytes)
        assert found(cache, TOKENS) == len(TOKENS)
    assert cache._store.staging.idle_bytes == 0


def test_reads_that_fail_leave_no_memory_behind(tmp_path: Path) -> None:
    with closing(open_files(tmp_path)) as cache:
        store(cache, TOKENS)
        for path in chunk_paths(tmp_path):
            os.truncate(path, chunk_files.SEGMENT_BYTES)
        for _ in range(20):
            assert found(cache, TOKENS) == 0
        assert cache._store.staging.idle_bytes <= 3 * 2 * chunk_files.PAGE_BYTES * 2
