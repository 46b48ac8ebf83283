"""The shared-memory cache and its server: absent, hanging, dying, of another host, with a disk."""

from __future__ import annotations

import gc
import itertools
import logging
import signal
import threading

import numpy as np
import pytest

from kvtier.blocks.hashing import BlockHash
from kvtier.client.client import CacheClient
from kvtier.errors import ConfigError, LeaseError, TierRefused, TierUnavailable
from kvtier.testing.servers import cache_server, start_cache_server
from kvtier.vineyard import KVCache, KVTensor, VineyardCacheConfig
from kvtier.vineyard.shared_cache import SharedCache
from tests.support.vineyard_servers import tokens_there
from tests.support.vineyard_tensors import LAYERS, TENSOR_BYTES, Source, empty, expect, found, open_cache, store
from tests.support.waiting import CALL_S, wait_until


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
            assert tokens_there(server) == 20
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
