"""The shared-memory cache on a real server: updates and queries, and the bounds that hold."""

from __future__ import annotations

import gc
import subprocess
import sys
import time

import numpy as np
import pytest

from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.namespace import Namespace
from kvtier.client.client import CacheClient
from kvtier.errors import ConfigError, LeaseError
from kvtier.vineyard import KVTensor
from kvtier.vineyard.recency import SharedRecency
from tests.support.vineyard_servers import ROOT, server_count, tokens_there
from tests.support.vineyard_tensors import LAYERS, Source, empty, expect, found, open_cache, store
from tests.support.waiting import wait_until

_SLOT_BYTES = 4096  # two layers of two tensors of 1,000 bytes


class _CountedTable(SharedRecency):
    num_connects = 0

    def _connect(self, memory_bytes: int) -> CacheClient:
        self.num_connects += 1
        return super()._connect(memory_bytes)


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
        assert tokens_there(server) == 6
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
        wait_until(lambda: server_count(server, "leases") == 13)  # and none of a program that was killed before
        assert store(cache, [1], [*tokens, 5]) == 0
        cache.release()
        assert server_count(server, "leases") == 0
        with pytest.raises(LeaseError):
            _ = kv[99][0][0].address


def test_who_appends_token_by_token_does_not_have_the_whole_prefix_looked_for_each_time(server):
    with open_cache(server.unix, capacity=1000) as cache:
        tokens = list(range(400))
        store(cache, tokens)
        num_before = server_count(server, "hit_blocks")
        begun_at = time.monotonic()
        for token in range(400, 430):
            assert store(cache, [token], tokens) == 1
            tokens.append(token)
        num_whole_looks = int(time.monotonic() - begun_at) + 1

        assert server_count(server, "hit_blocks") - num_before <= 30 * 2 + num_whole_looks * len(tokens)
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
        assert server_count(server, "leases") == 0


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


# --- bounds ---------------------------------------------------------------------------------------------------------


def test_the_capacity_holds_and_the_least_recently_used_ends_go_first(server):
    with open_cache(server.unix, capacity=8) as cache, open_cache(server.unix, capacity=8) as other:
        store(cache, [1, 2, 3, 4])
        store(cache, [5, 6, 7])
        assert found(other, [1, 2, 3]) == 3  # another process's use counts as well
        store(cache, [8, 9, 10])

        assert tokens_there(server) == 8
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
        assert server_count(server, "used_bytes") <= 4 << 20


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
