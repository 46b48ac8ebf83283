"""With `store_on: worth`, what is used twice or is about to leave a host's disk or memory goes to the cluster."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.blocks.hashing import BlockHash
from kvtier.client.client import CacheClient
from kvtier.testing.tier_contract import LAYOUT, chain, empty_buffers, payloads
from tests.support.clustered_servers import client_above, num_stored
from tests.support.valkey import ValkeyCluster, valkey_cluster
from tests.support.waiting import wait_until

WORTH = ("--cluster-store-on", "worth")


@pytest.fixture(scope="module")
def running() -> Iterator[ValkeyCluster]:
    with valkey_cluster(1) as cluster:
        yield cluster


@pytest.fixture
def cluster(running: ValkeyCluster) -> ValkeyCluster:
    """One node, and empty."""
    running.call(running.primaries[0], b"FLUSHALL", b"SYNC")
    return running


def got(client: CacheClient, hashes: list[BlockHash]) -> list[bytes]:
    into = empty_buffers(len(hashes))
    return [bytes(buffer) for buffer in into[: client.get(hashes, into)]]


def store(client: CacheClient, hashes: list[BlockHash]) -> None:
    client.learn(hashes)
    client.set(hashes, payloads(hashes))


def disk_level(client: CacheClient, name: str) -> int:
    level = client.stats()[f"disk_{name}"]
    assert isinstance(level, float | int)
    return int(level)


def fill(client: CacheClient, seed: int) -> None:
    """Two blocks more. A disk that is nearly full has time to be looked at before it evicts."""
    store(client, chain(seed, 2))
    client.flush()
    if disk_level(client, "used_bytes") > 6 << 20:
        time.sleep(0.1)


def disk(folder: Path) -> tuple[str, ...]:
    """The smallest one, for some hundred blocks."""
    return ("--folder", str(folder), "--disk", "8MiB")


@pytest.mark.slow
def test_what_leaves_a_disk_is_a_hit_from_the_cluster(cluster: ValkeyCluster, tmp_path: Path) -> None:
    """Here and on another host. A disk that has room passes nothing on."""
    first = chain(1, 8)
    memory = str(24 * LAYOUT.slot_bytes)
    with client_above(cluster, *WORTH, *disk(tmp_path), memory=memory) as client, client_above(cluster) as other:
        store(client, first)
        client.flush()
        assert num_stored(cluster) == 0
        seeds = iter(range(100, 2000))
        while num_stored(cluster) < 8:
            fill(client, next(seeds))
        while disk_level(client, "evicted_blocks") < 16:
            fill(client, next(seeds))
        assert got(client, first) == payloads(first)
        assert got(other, first) == payloads(first)
        assert client.stats()["cluster_written_blocks"] >= 8
        assert client.stats()["cluster_losses"] == {}


@pytest.mark.slow
def test_what_is_used_again_and_what_memory_loses_goes_to_the_cluster(cluster: ValkeyCluster) -> None:
    used, unused = chain(2, 8), chain(3, 8)
    with client_above(cluster, *WORTH, memory=str(64 * LAYOUT.slot_bytes)) as client:
        store(client, used)
        store(client, unused)
        assert num_stored(cluster) == 0
        assert got(client, used) == payloads(used)
        wait_until(lambda: num_stored(cluster) == 8)
        for seed in range(600, 605):
            store(client, chain(seed, 8))
        assert client.stats()["evicted_blocks"] == 0
        wait_until(lambda: num_stored(cluster) >= 16, "memory is nearly full")
        for seed in range(605, 615):
            store(client, chain(seed, 8))
        assert got(client, unused) == payloads(unused)


@pytest.mark.slow
def test_what_is_used_again_from_disk_goes_to_the_cluster(cluster: ValkeyCluster, tmp_path: Path) -> None:
    used = chain(4, 8)
    folder = ("--folder", str(tmp_path), "--disk", "64MiB")
    with client_above(cluster, *WORTH, *folder, memory=str(24 * LAYOUT.slot_bytes)) as client:
        store(client, used)
        client.flush()
        for seed in range(700, 705):  # memory loses it
            store(client, chain(seed, 8))
            client.flush()
        assert num_stored(cluster) == 0
        assert got(client, used) == payloads(used)
        wait_until(lambda: num_stored(cluster) == 8)
