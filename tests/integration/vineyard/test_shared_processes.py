"""The shared-memory cache of several processes: what they share, and what dies with them."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from kvtier.errors import LeaseError, TierUnavailable
from kvtier.vineyard.shared_cache import SharedCache
from tests.support.vineyard_servers import ROOT, server_count, tokens_there
from tests.support.vineyard_tensors import empty, expect, found, open_cache, store
from tests.support.waiting import LIMIT_S, wait_until


def _actor(act: str, socket: str, *numbers: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.support.vineyard_tensors", act, socket, *map(str, numbers)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def test_an_update_in_one_process_is_a_hit_in_another_at_once(server):
    with open_cache(server.unix) as cache:
        for start in (0, 100):
            writer = _actor("store", server.unix, *range(start, start + 50))
            try:
                assert _line(writer) == "50"
                assert found(cache, range(start, start + 60)) == 50
            finally:
                _end(writer)


def test_a_killed_reader_gives_back_what_it_held(server):
    with open_cache(server.unix) as cache:
        store(cache, [1, 2, 3])
        reader = _actor("hold", server.unix, 1, 2, 3)
        try:
            assert _line(reader) == "3"
            assert server_count(server, "leases") == 1
        finally:
            _end(reader)
        wait_until(lambda: server_count(server, "leases") == 0)


def test_killed_writers_leave_right_bytes_or_none(server):
    with open_cache(server.unix) as cache:
        for start in (0, 1_000_000, 2_000_000):
            writer = _actor("store for ever", server.unix, start)
            try:
                assert _line(writer) == "begun"
                wait_until(lambda first=start: found(cache, range(first, first + 50)) > 0)
            finally:
                _end(writer)
            for first in range(start, start + 20_000, 1000):
                assert found(cache, range(first, first + 50)) in range(51)
        wait_until(lambda: server_count(server, "reservations") == 0)
        assert store(cache, range(50)) == 50
        assert found(cache, range(50)) == 50


def test_a_write_that_another_process_broke_off_is_taken_over(server):
    with open_cache(server.unix) as cache, open_cache(server.unix) as other:
        hashes = other._chain.hashes([1, 2, 3])
        with other._writer.reserve(hashes[1:2]):  # PENDING, and never committed
            assert store(cache, [1, 2, 3]) == 1
        assert store(cache, [1, 2, 3]) == 3
        assert found(cache, [1, 2, 3]) == 3


def test_threads_and_objects_at_once_find_right_bytes_within_the_bound(server):
    def work(cache: SharedCache, seed: int) -> None:
        dice = random.Random(seed)
        for _ in range(60):
            tokens = [dice.randrange(2) for _ in range(dice.randrange(1, 12))]
            if dice.random() < 0.5:
                cut = dice.randrange(len(tokens))
                assert store(cache, tokens[cut:], tokens[:cut]) <= len(tokens) - cut
            elif dice.random() < 0.9:
                with contextlib.suppress(BufferError, SystemError):  # another thread released it
                    assert found(cache, tokens) <= len(tokens)
            else:
                with contextlib.suppress(LeaseError):  # another thread is reading
                    cache.release()

    # However slow the machine: a call that times out is a miss, and prunes nothing.
    def opened() -> SharedCache:
        return open_cache(server.unix, capacity=40, timeout_s=60)

    with opened() as one, opened() as other:
        with ThreadPoolExecutor(6) as threads:
            works = [threads.submit(work, one if seed % 2 else other, seed) for seed in range(6)]
            for each in works:
                each.result()
        assert store(one, [5]) == 1
        assert tokens_there(server) <= 40
        assert one.stats()["pruned_tokens"] + other.stats()["pruned_tokens"] > 0


def _in_a_child(act: Callable[[], bool]) -> int:
    """The exit status of a forked child: 0 when `act` says True, that of a signal when it does not end."""
    child = os.fork()
    if not child:
        status = 1
        try:
            signal.alarm(20)
            status = 0 if act() else 2
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _refuses_a_child(call: Callable[[], object]) -> bool:
    try:
        call()
    except TierUnavailable as error:
        return "after the fork" in str(error)
    return False


def test_a_child_forked_while_a_thread_is_in_a_call_closes_at_once_and_leaves_all_to_its_parent(server):
    with open_cache(server.unix) as cache:
        store(cache, [1, 2])
        kv = empty(2)
        cache.query([1, 2], kv)
        is_within, may_end = threading.Event(), threading.Event()
        copy = cache._copy

        def copy_late(targets: Sequence[int], sources: Sequence[int]) -> None:
            is_within.set()
            assert may_end.wait(LIMIT_S)
            copy(targets, sources)

        def use() -> bool:
            with cache:
                return _refuses_a_child(lambda: found(cache, [1, 2])) and cache.stats()["stored_tokens"] == 2

        cache._copy = copy_late
        with ThreadPoolExecutor(1) as threads:
            storing = threads.submit(store, cache, [3])
            try:
                assert is_within.wait(LIMIT_S)
                assert _in_a_child(use) == 0
            finally:
                may_end.set()
            assert storing.result() == 1
        assert server_count(server, "leases") == 1
        expect([1, 2], kv)
        assert found(cache, [3]) == 1


def test_a_child_waits_for_no_lock_that_was_held_at_the_fork_and_has_a_cache_of_its_own(server):
    with open_cache(server.unix, capacity=100) as cache:
        store(cache, [1, 2])
        found_tokens = cache.query_addresses([1, 2])
        abandoned = open_cache(server.unix, name="another tree")
        abandoned_lock = abandoned._bound._recency._lock
        locks = [cache._lock, cache._chain._lock, cache._seen._lock, cache._bound._lock, cache._bound._recency._lock]

        def use() -> bool:
            nonlocal abandoned
            found_tokens.release()
            cache.release()
            cache.close()
            del abandoned
            gc.collect()
            with open_cache(server.unix) as own:
                return _refuses_a_child(lambda: cache.query_addresses([1])) and found(own, [1, 2]) == 2

        with contextlib.ExitStack() as held:
            for lock in (*locks, abandoned_lock):
                held.enter_context(lock)
            status = _in_a_child(use)
        assert status == 0
        assert found_tokens.num_tokens == len(found_tokens.addresses) == 2
        assert found(cache, [1, 2]) == 2
        found_tokens.release()
        abandoned.close()
