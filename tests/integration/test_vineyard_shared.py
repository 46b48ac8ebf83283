"""The shared-memory cache with real servers and processes: what is shared, what is evicted, what dies."""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import kvtier
from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.namespace import Namespace
from kvtier.client.client import CacheClient
from kvtier.errors import ConfigError, LeaseError, TierRefused, TierUnavailable
from kvtier.testing.servers import ServerProcess, cache_server, start_cache_server
from kvtier.vineyard import KVCache, KVTensor, VineyardCacheConfig
from kvtier.vineyard.recency import SharedRecency
from kvtier.vineyard.shared_cache import SharedCache
from tests.support.vineyard_tensors import LAYERS, TENSOR_BYTES, Source, empty, expect, found, open_cache, store
from tests.support.waiting import CALL_S, LIMIT_S, wait_until

ROOT = Path(__file__).parents[2]
_SLOT_BYTES = 4096  # two layers of two tensors of 1,000 bytes


@pytest.fixture(scope="module")
def running_server() -> Iterator[ServerProcess]:
    with cache_server(memory="4MiB") as running:
        yield running


@pytest.fixture
def server(running_server: ServerProcess) -> ServerProcess:
    """One with an empty tree."""
    with open_cache(running_server.unix) as cache:
        cache._writer.drop()
    return running_server


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


class _CountedTable(SharedRecency):
    num_connects = 0

    def _connect(self, memory_bytes: int) -> CacheClient:
        self.num_connects += 1
        return super()._connect(memory_bytes)


def _stat(server: ServerProcess, name: str) -> int:
    with kvtier.connect(server.unix, timeout_s=CALL_S) as client:
        return int(str(client.stats()[name]))


def _tokens_there(server: ServerProcess) -> int:
    with kvtier.connect(server.unix, timeout_s=CALL_S) as client:
        spaces = client.info()["namespaces"]
    assert isinstance(spaces, list)
    return sum(space["blocks"] for space in spaces if space["name"] == "tree")


# --- update and query -----------------------------------------------------------------------------------------------


def test_the_seeds_program_runs_once_on_a_server_and_then_says_why_not(running_server):
    program = (ROOT / "examples" / "vineyard" / "shared_memory.py").read_text()
    assert "/tmp/vineyard_test.sock" in program
    program = program.replace("/tmp/vineyard_test.sock", running_server.unix.removeprefix("unix:"))

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    again = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "by an earlier run" in again.stderr


def test_any_length_matches_and_what_is_there_counts(server):
    with open_cache(server.unix) as cache:
        assert store(cache, [1, 2, 3]) == 3
        assert store(cache, [1, 2, 3, 4]) == 4
        assert store(cache, [5, 6], prefix=[1, 2]) == 2
        assert store(cache, [7], prefix=[1, 9]) == 0
        assert store(cache, []) == 0

        assert [found(cache, tokens) for tokens in ([1, 2, 3, 4, 5], [1, 2, 5, 6], [1, 9, 7], [2], [])] == [
            4,
            4,
            1,
            0,
            0,
        ]
        assert _tokens_there(server) == 6
        assert cache.stats()["stored_tokens"] == 6


def test_a_sequence_of_more_tokens_than_one_request_may_name_is_stored_and_found_whole(server, monkeypatch):
    monkeypatch.setattr("kvtier.vineyard.shared_cache._PART_TOKENS", 8)
    with open_cache(server.unix) as cache:
        tokens = list(range(100))
        assert store(cache, tokens[:50]) == 50
        assert store(cache, tokens[50:], tokens[:50]) == 50
        kv = empty(110)
        assert cache.query([*tokens, *range(200, 210)], kv) == 100
        expect(tokens, kv[:100])
        wait_until(lambda: _stat(server, "leases") == 13)  # and none of a program that was killed before
        assert store(cache, [1], [*tokens, 5]) == 0
        cache.release()
        assert _stat(server, "leases") == 0
        with pytest.raises(LeaseError):
            _ = kv[99][0][0].address


def test_who_appends_token_by_token_does_not_have_the_whole_prefix_looked_for_each_time(server):
    with open_cache(server.unix, capacity=1000) as cache:
        tokens = list(range(400))
        store(cache, tokens)
        num_before = _stat(server, "hit_blocks")
        begun_at = time.monotonic()
        for token in range(400, 430):
            assert store(cache, [token], tokens) == 1
            tokens.append(token)
        num_whole_looks = int(time.monotonic() - begun_at) + 1

        assert _stat(server, "hit_blocks") - num_before <= 30 * 2 + num_whole_looks * len(tokens)
        assert found(cache, tokens) == 430


def test_a_prefix_whose_end_is_gone_is_not_taken_for_there(server):
    with open_cache(server.unix) as cache:
        tokens = list(range(400))
        store(cache, tokens)
        cache._writer.drop(cache._chain.hashes(tokens)[-1:])

        assert store(cache, [7], tokens) == 0
        assert store(cache, [7], tokens[:-1]) == 1


def test_a_sequence_that_grew_token_by_token_loses_its_end_first(server):
    with open_cache(server.unix, capacity=400) as cache:
        tokens = list(range(300))
        store(cache, tokens)
        for token in range(300, 320):
            store(cache, [token], tokens)
            tokens.append(token)
        store(cache, range(1000, 1100))

        assert found(cache, tokens) == 300
        assert found(cache, range(1000, 1100)) == 100


def test_kv_of_a_wrong_shape_stores_nothing(server):
    with open_cache(server.unix) as cache:
        source = Source([], [1, 2])
        kv = source.kv
        for tokens, wrong in (([1], kv), ([1, 2, 3], kv), ([1, 2], [kv[0], kv[1][:1]]), ([1, 2], empty(2))):
            with pytest.raises(ConfigError):
                cache.update(None, tokens, wrong)
        for wrong in (empty(1), empty(3), empty(2, layers=1)):
            with pytest.raises(ConfigError):
                cache.query([1, 2], wrong)
        for tokens in ([-1, 2], [1, 1 << 32], [1.0, 2], "ab", None, iter([1, 2])):
            with pytest.raises(ConfigError):
                cache.update(None, tokens, kv)
        for prefix in (5, [-1], "a"):
            with pytest.raises(ConfigError):
                cache.update(prefix, [1, 2], kv)
        for wrong in (None, 5, [None, None], iter(kv), [[(None, None)] * LAYERS] * 2):
            with pytest.raises(ConfigError):
                cache.update(None, [1, 2], wrong)

        assert found(cache, [1, 2]) == 0


def test_tokens_without_an_order_are_refused(server):
    with open_cache(server.unix) as cache:
        source = Source([], [1, 2])
        for wrong in ({1, 2}, frozenset({1, 2}), {1: 0, 2: 0}, {1: 0, 2: 0}.values(), np.array(3)):
            with pytest.raises(ConfigError):
                cache.update(None, wrong, source.kv)
            with pytest.raises(ConfigError):
                cache.update(wrong, [1, 2], source.kv)
            with pytest.raises(ConfigError):
                cache.query(wrong, empty(2))
            with pytest.raises(ConfigError):
                cache.query_addresses(wrong)
        for right in ([1, 2], (1, 2), range(1, 3), np.array([1, 2]), b"\1\2"):
            assert cache.update(None, right, source.kv) == 2


def test_a_query_for_what_are_no_tensors_points_none_of_them_whether_there_is_a_hit_or_not(server):
    with open_cache(server.unix) as cache:
        store(cache, [1, 2])
        for tokens in ([1, 2], [8, 9]):
            for wrong in (
                [(KVTensor(0, 0), None)],
                [(KVTensor(0, 0), 5)],
                [(KVTensor(0, 0),)],
                [(KVTensor(0, 0),) * 3],
                [None],
                [KVTensor(0, 0)],
            ):
                kv = [*empty(1), [*empty(1, layers=LAYERS - 1)[0], *wrong]]
                with pytest.raises(ConfigError):
                    cache.query(tokens, kv)
                assert [tensor.nbytes for pair in kv[0] for tensor in pair] == [0] * 2 * LAYERS
        assert _stat(server, "leases") == 0


def test_tensors_are_pointed_at_the_servers_memory_and_aligned(server):
    with open_cache(server.unix) as cache:
        store(cache, [1, 2])
        one, other = empty(2), empty(2)
        cache.query([1, 2], one)
        cache.query([1, 2], other)

        addresses = [tensor.address for of_token in one for pair in of_token for tensor in pair]
        assert addresses == [tensor.address for of_token in other for pair in of_token for tensor in pair]
        assert all(address % 64 == 0 for address in addresses)


def test_addresses_without_objects_are_those_of_the_tensors(server):
    with open_cache(server.unix) as cache:
        store(cache, [1, 2, 3])
        kv = empty(4)
        assert cache.query([1, 2, 3, 4], kv) == 3
        with cache.query_addresses([1, 2, 3, 4]) as tokens:
            assert tokens.num_tokens == 3
            for token in range(3):
                for layer, (key, value) in enumerate(kv[token]):
                    assert key.address == tokens.addresses[token] + tokens.offsets[2 * layer]
                    assert value.address == tokens.addresses[token] + tokens.offsets[2 * layer + 1]
            expect([1, 2, 3], [tokens.tensors(token) for token in range(3)])
            gc.collect()
        assert cache.query_addresses([8]).num_tokens == 0


# --- holding and releasing ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_what_a_query_found_is_not_evicted_and_comes_back_with_its_last_array(server):
    with open_cache(server.unix) as cache:
        store(cache, [1, 2, 3])
        kv = empty(3)
        cache.query([1, 2, 3], kv)
        array = np.frombuffer(kv[2][0][0], dtype=np.uint8)
        for start in range(1000, 3000):
            store(cache, [start])  # twice the server's memory
        expect([1, 2, 3], kv)
        before = array.copy()
        del kv
        assert np.array_equal(array, before)
        assert _stat(server, "leases") == 1
        del array
        gc.collect()
        found(cache, [4])

        assert _stat(server, "leases") == 0
        for start in range(4000, 6000):
            store(cache, [start])
        assert found(cache, [1, 2, 3]) == 0


def test_release_refuses_while_an_array_is_in_use_and_ends_the_others(server):
    with open_cache(server.unix) as cache:
        store(cache, [1, 2])
        one, other = empty(2), empty(2)
        cache.query([1, 2], one)
        cache.query([1, 2], other)
        array = np.frombuffer(one[0][0][0], dtype=np.uint8)

        with pytest.raises(LeaseError):
            cache.release()
        with pytest.raises(LeaseError):
            cache.close()
        expect([1, 2], one)
        with pytest.raises(LeaseError):
            _ = other[0][0][0].address
        assert array[0] == bytes(memoryview(one[0][0][0]))[0]
        assert found(cache, [1, 2]) == 2
        del array
        cache.release()
        with pytest.raises(LeaseError):
            _ = one[0][0][0].address
        assert _stat(server, "leases") == 0


def test_a_closed_cache_is_over_and_so_are_its_tensors(server):
    cache = open_cache(server.unix)
    store(cache, [1])
    kv = empty(1)
    cache.query([1], kv)
    cache.close()
    cache.close()

    for use in (lambda: store(cache, [1]), lambda: found(cache, [1]), lambda: cache.query_addresses([1])):
        with pytest.raises(TierUnavailable):
            use()
    with pytest.raises(LeaseError):
        _ = kv[0][0][0].address
    with pytest.raises((BufferError, SystemError)):
        memoryview(kv[0][0][0])


def test_a_cache_that_is_closed_while_others_use_it_waits_for_their_calls(server):
    """Afterwards nothing that a query gave out can be read any more, and no call failed but for that it came late."""
    cache = open_cache(server.unix)
    tokens = list(range(40))
    store(cache, tokens)
    last_given: dict[int, KVTensor] = {}
    num_calls = [0] * 4

    def ask(thread: int) -> None:
        while True:
            kv = empty(len(tokens))
            try:
                assert cache.query(tokens, kv) == len(tokens)
            except TierUnavailable:
                return
            last_given[thread] = kv[0][0][0]
            num_calls[thread] += 1

    with ThreadPoolExecutor(4) as threads:
        asking = [threads.submit(ask, thread) for thread in range(4)]
        try:
            wait_until(lambda: min(num_calls) > 3)
        finally:
            cache.close()
        for one in asking:
            one.result(timeout=LIMIT_S)

    for tensor in last_given.values():
        with pytest.raises(LeaseError):
            _ = tensor.address
    assert _stat(server, "leases") == 0


def test_a_cache_that_nobody_closed_gives_everything_back_with_its_last_tensor(server):
    for capacity in (1 << 30, 100):  # without and with a table of times
        cache = open_cache(server.unix, capacity=capacity)
        store(cache, [1, 2, 3])
        kv = empty(3)
        cache.query([1, 2, 3], kv)
        del cache
        gc.collect()
        with open_cache(server.unix) as other:
            assert _stat(server, "leases") >= 1
            expect([1, 2, 3], kv)
            del kv
            gc.collect()
            found(other, [4])
            assert _stat(server, "leases") == 0


def test_updates_go_on_while_queries_hold_all_that_they_may(server):
    with open_cache(server.unix) as cache:
        tokens = list(range(600))  # more than half of the 1,024 that fit
        held = []
        for first in range(0, 600, 100):
            store(cache, tokens[first : first + 100], tokens[:first])
        kv = empty(600)
        count = cache.query(tokens, kv)
        held.append(kv)

        assert count == 512
        assert cache.query([0], empty(1)) == 0
        assert store(cache, [7, 8]) == 2
        held.clear()
        del kv
        gc.collect()
        assert found(cache, [7, 8]) == 2


def test_tensors_of_a_query_are_held_while_an_update_copies_from_them(server):
    with open_cache(server.unix) as cache, open_cache(server.unix, name="another tree") as other:
        store(cache, [1, 2, 3])
        kv = empty(3)
        cache.query([1, 2, 3], kv)
        copy = other._copy

        def release_first(targets: Sequence[int], sources: Sequence[int]) -> None:
            with pytest.raises(LeaseError):
                cache.release()
            copy(targets, sources)

        other._copy = release_first
        assert other.update(None, [1, 2, 3], kv) == 3
        cache.release()

        assert found(other, [1, 2, 3]) == 3
        with pytest.raises(ConfigError, match="released"):
            other.update(None, [4, 5, 6], kv)


# --- bounds ---------------------------------------------------------------------------------------------------------


def test_the_capacity_holds_and_the_least_recently_used_ends_go_first(server):
    with open_cache(server.unix, capacity=8) as cache, open_cache(server.unix, capacity=8) as other:
        store(cache, [1, 2, 3, 4])
        store(cache, [5, 6, 7])
        assert found(other, [1, 2, 3]) == 3  # another process's use counts as well
        store(cache, [8, 9, 10])

        assert _tokens_there(server) == 8
        assert [found(cache, tokens) for tokens in ([1, 2, 3, 4], [5, 6, 7], [8, 9, 10])] == [3, 2, 3]


def test_a_sequence_longer_than_the_capacity_keeps_its_beginning(server):
    with open_cache(server.unix, capacity=4) as cache:
        assert store(cache, [1, 2, 3, 4, 5, 6]) == 4
        assert found(cache, [1, 2, 3, 4, 5, 6]) == 4
        assert store(cache, [7], prefix=[1, 2, 3, 4]) == 0
        assert cache.stats()["refused_tokens"] == 3


def test_a_pruned_token_that_is_held_elsewhere_stays_readable(server):
    with open_cache(server.unix, capacity=4) as cache:
        store(cache, [1, 2, 3, 4])
        kv = empty(4)
        cache.query([1, 2, 3, 4], kv)
        store(cache, [5, 6, 7, 8])

        assert found(cache, [1]) == 0
        expect([1, 2, 3, 4], kv)


def test_a_sequence_that_exceeds_the_servers_memory_is_cut(server):
    with open_cache(server.unix) as cache:
        tokens = list(range(3000))
        stored = store(cache, tokens)

        assert 0 < stored <= 1024
        assert found(cache, tokens) == stored


def test_a_capacity_beyond_the_servers_memory_is_the_servers_to_keep(server):
    with open_cache(server.unix, capacity=1 << 20) as cache:
        for start in range(0, 3000, 10):
            assert store(cache, range(start, start + 10)) == 10
        assert found(cache, range(2990, 3000)) == 10
        assert _stat(server, "used_bytes") <= 4 << 20


def test_a_table_of_times_that_finds_no_room_is_not_looked_for_with_every_use(server):
    with open_cache(server.unix) as one, open_cache(server.unix) as other:
        for cache, start in ((one, 0), (other, 600)):
            for first in range(start, start + 512, 128):
                store(cache, range(first, first + 128), range(start, first))
        held = [one.query_addresses(range(512)), other.query_addresses(range(600, 1112))]
        assert [each.num_tokens for each in held] == [512, 512]  # all of the server's memory
        times = _CountedTable(server.unix, Namespace(bytes(32)), _SLOT_BYTES, 1.0)
        arena = one._reader.arena
        for _ in range(5):
            times.follow(arena)
            times.touch([BlockHash(bytes(32))], 1)
        assert times.num_connects == 1
        times.follow(other._reader.arena)  # as after a restart of the server

        assert times.num_connects == 2
        times.close()
        for each in held:
            each.release()


# --- processes ------------------------------------------------------------------------------------------------------


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
            assert _stat(server, "leases") == 1
        finally:
            _end(reader)
        wait_until(lambda: _stat(server, "leases") == 0)


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
        wait_until(lambda: _stat(server, "reservations") == 0)
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
        assert _tokens_there(server) <= 40
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
        assert _stat(server, "leases") == 1
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


# --- servers --------------------------------------------------------------------------------------------------------


def test_without_a_server_construction_fails_and_says_where(tmp_path):
    with pytest.raises(TierUnavailable, match="nobody"):
        open_cache(str(tmp_path / "nobody.sock"))


def test_a_server_that_hangs_fails_construction_like_none_and_says_where(tmp_path):
    with cache_server(memory="4MiB", folder=tmp_path) as server:
        server.send_signal(signal.SIGSTOP)
        try:
            with pytest.raises(TierUnavailable, match=r"kvtier\.sock"):
                open_cache(server.unix, timeout_s=0.2)
        finally:
            server.send_signal(signal.SIGCONT)


def test_a_refused_construction_does_not_say_that_the_server_is_down_because_it_was_closed(server, caplog):
    config = VineyardCacheConfig(socket=server.unix, timeout_s=CALL_S)
    with caplog.at_level(logging.DEBUG):
        for _ in range(10):
            with pytest.raises(TierRefused):
                SharedCache(config, tensor_bytes=64 << 20, cache_capacity=4, layer=1)
        wait_until(lambda: not any(thread.name == "kvtier-client" for thread in threading.enumerate()))
    assert "client is closed" not in caplog.text


def test_sizes_that_cannot_work_are_refused(server):
    config = VineyardCacheConfig(socket=server.unix, timeout_s=CALL_S)
    for sizes in (
        {"tensor_bytes": 0},
        {"tensor_bytes": 1 << 41},
        {"tensor_bytes": 1 << 30, "layer": 1 << 16},
        {"tensor_bytes": 1.5},
        {"cache_capacity": -1},
        {"layer": 0},
        {"layer": True},
        {"layer": 1 << 40},
        {"layer": np.bool_(True)},
        {"cache_capacity": np.float64(4)},
    ):
        sizes = {"tensor_bytes": 16, "cache_capacity": 4, "layer": 1, **sizes}
        with pytest.raises(ConfigError):
            KVCache(config, **sizes)
        with pytest.raises(ConfigError):
            SharedCache(config, **sizes)
    with pytest.raises(TierRefused):
        KVCache(config, tensor_bytes=64 << 20, cache_capacity=4, layer=1)


def test_a_server_that_dies_makes_misses_and_its_successor_is_used(tmp_path):
    server = start_cache_server(tmp_path, memory="4MiB", tcp=False)
    try:
        with open_cache(server.unix, capacity=20) as cache:
            store(cache, [1, 2, 3])
            kv = empty(3)
            assert cache.query([1, 2, 3], kv) == 3
            server.kill()

            assert found(cache, [1, 2, 3]) == 0
            assert store(cache, [1, 2, 3]) == 0
            expect([1, 2, 3], kv)  # its memory lives as long as somebody looks at it
            server.process.stdout.close()
            server = start_cache_server(tmp_path, memory="4MiB", tcp=False)
            wait_until(lambda: store(cache, [4, 5]) == 2)
            wait_until(lambda: found(cache, [4, 5]) == 2)  # reads have a client of their own
            assert found(cache, [1, 2, 3]) == 0
            expect([1, 2, 3], kv)
            for start in range(100, 200, 5):
                assert store(cache, range(start, start + 5)) == 5
            assert _tokens_there(server) == 20
            del kv
            gc.collect()
    finally:
        server.stop()
        server.process.stdout.close()


def test_a_server_of_another_host_is_read_by_copies():
    with cache_server(memory="4MiB", tcp=True) as server:
        with open_cache(server.tcp, token=server.token, capacity=10) as cache, open_cache(server.unix) as beside:
            assert store(cache, [1, 2, 3]) == 3
            kv = empty(3)
            assert cache.query([1, 2, 3], kv) == 3
            assert found(beside, [1, 2, 3]) == 3
            store(cache, range(10, 18))
            assert found(cache, [1, 2, 3]) == 2
            expect([1, 2, 3], kv)
            cache.release()
            with pytest.raises(LeaseError):
                _ = kv[0][0][0].address


def test_a_server_with_a_disk_finds_what_it_had_before_it_was_restarted(tmp_path):
    options = ("--folder", str(tmp_path / "kv"), "--disk", "64MiB")
    with cache_server(*options, memory="4MiB", folder=tmp_path) as server, open_cache(server.unix) as cache:
        assert store(cache, range(100)) == 100
        cache._writer.flush()
    with cache_server(*options, memory="4MiB", folder=tmp_path) as server, open_cache(server.unix) as cache:
        assert found(cache, range(100)) == 100


def test_the_capacity_holds_on_a_server_whose_memory_is_less_but_that_has_a_disk(tmp_path):
    options = ("--folder", str(tmp_path / "kv"), "--disk", "64MiB")
    with cache_server(*options, memory="4MiB", folder=tmp_path) as server:
        with (
            open_cache(server.unix, capacity=2000, timeout_s=60) as cache,
            open_cache(server.unix, capacity=2000, timeout_s=60) as other,
        ):
            starts = range(0, 10_000, 1000)
            for start, by in zip(starts, itertools.cycle((cache, cache, other)), strict=False):
                assert store(by, range(start, start + 400)) == 400
                assert len(cache._writer.list_blocks()) <= 2000

            lengths = [found(cache, range(start, start + 400)) for start in starts]
            pruned = cache.stats()["pruned_tokens"] + other.stats()["pruned_tokens"]
            assert 1800 <= sum(lengths) <= 2000
            assert lengths[-4:] == [400] * 4
            assert sum(lengths) == 4000 - pruned


def test_with_a_disk_the_tree_is_not_listed_for_every_token_that_is_stored(tmp_path, monkeypatch):
    num_listings = 0
    list_blocks = CacheClient.list_blocks

    def counted(client: CacheClient) -> list[tuple[BlockHash, int]]:
        nonlocal num_listings
        num_listings += 1
        return list_blocks(client)

    monkeypatch.setattr(CacheClient, "list_blocks", counted)
    options = ("--folder", str(tmp_path / "kv"), "--disk", "64MiB")
    with cache_server(*options, memory="4MiB", folder=tmp_path) as server:
        with open_cache(server.unix, capacity=640, timeout_s=60) as cache:
            for start in range(0, 4000, 8):
                assert store(cache, range(start, start + 8)) == 8
            assert num_listings <= 4000 // 40 + 1
            assert len(list_blocks(cache._writer)) <= 640
            assert found(cache, range(3992, 4000)) == 8


def test_kvcache_picks_this_half_and_other_tensor_sizes_are_other_trees(server):
    config = VineyardCacheConfig(socket=server.unix, timeout_s=CALL_S)
    with KVCache(config, tensor_bytes=TENSOR_BYTES, cache_capacity=100, layer=LAYERS) as cache:
        source = Source([], [1, 2])
        assert cache.update(None, [1, 2], source.kv) == 2
        kv = empty(2)
        assert cache.query([1, 2], kv) == 2
        expect([1, 2], kv)
    sizes = {"tensor_bytes": np.int64(16), "cache_capacity": np.uint32(100), "layer": np.int8(LAYERS)}
    with KVCache(config, **sizes) as cache:
        assert all(type(getattr(cache, name)) is int for name in sizes)
        assert cache.query([1, 2], [[(KVTensor(0, 0), KVTensor(0, 0))] * LAYERS] * 2) == 0
