"""The shared-memory cache on a real server: what a query found is held until it is released."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from kvtier.errors import ConfigError, LeaseError, TierUnavailable
from kvtier.vineyard import KVTensor
from tests.support.vineyard_servers import server_count
from tests.support.vineyard_tensors import empty, expect, found, open_cache, store
from tests.support.waiting import LIMIT_S, wait_until


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
        assert server_count(server, "leases") == 1
        del array
        gc.collect()
        found(cache, [4])

        assert server_count(server, "leases") == 0
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
        assert server_count(server, "leases") == 0


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
    assert server_count(server, "leases") == 0


def test_a_cache_that_nobody_closed_gives_everything_back_with_its_last_tensor(server):
    for capacity in (1 << 30, 100):  # without and with a table of times
        cache = open_cache(server.unix, capacity=capacity)
        store(cache, [1, 2, 3])
        kv = empty(3)
        cache.query([1, 2, 3], kv)
        del cache
        gc.collect()
        with open_cache(server.unix) as other:
            assert server_count(server, "leases") >= 1
            expect([1, 2, 3], kv)
            del kv
            gc.collect()
            found(other, [4])
            assert server_count(server, "leases") == 0


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
