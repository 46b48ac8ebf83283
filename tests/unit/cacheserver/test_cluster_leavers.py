"""What a disk is about to evict is passed on as fast as the cluster takes it, whose failures stay its own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import cast

import pytest

from kvtier.blocks.hashing import BlockHash
from kvtier.cacheserver import cluster_leavers
from kvtier.cacheserver.bandwidth import Bandwidth
from kvtier.cacheserver.cluster_leavers import DiskLeavers
from kvtier.cacheserver.cluster_spaces import ClusterSpaces
from kvtier.cacheserver.persistence import Disk
from kvtier.stores.disk import DiskStore
from kvtier.stores.stored_block import StoredBlock
from kvtier.testing.tier_contract import chain
from tests.support.waiting import FOR_EVER_S, wait_until

BLOCK_BYTES = 1 << 20
HASHES = chain(1, 16)


class FullDisk:
    """It would evict all of its blocks next, and notes what fails inside of `leaving`."""

    def __init__(self) -> None:
        space = SimpleNamespace(block_bytes=BLOCK_BYTES)
        self.blocks = [
            cast(StoredBlock, SimpleNamespace(hash=each, space=space, sequence=number, used_at=0))
            for number, each in enumerate(HASHES)
        ]
        self.failures: list[Exception] = []

    @contextlib.contextmanager
    def leaving(self, count: int) -> Iterator[tuple[DiskStore, list[StoredBlock]]]:
        try:
            yield cast(DiskStore, self), self.blocks[:count]
        except Exception as error:
            self.failures.append(error)
            raise

    def read(self, blocks: Sequence[StoredBlock], into: Sequence[memoryview]) -> list[None]:
        for block, view in zip(blocks, into, strict=True):
            view[:32] = block.hash
        return [None] * len(blocks)


class TakingCluster:
    """Lacks everything, knows every place, and fails as often as it is told to."""

    def __init__(self, num_failures: int = 0) -> None:
        self.config = SimpleNamespace(timeout_s=1.0)
        self.places = dict.fromkeys(HASHES, "known")
        self.taken: list[BlockHash] = []
        self.losses: list[str] = []
        self._num_failures = num_failures

    def of(self, space: object) -> TakingCluster:
        return self

    def note_loss(self, kind: str, times: int) -> None:
        self.losses.append(kind)

    def contains(self, hashes: Sequence[BlockHash], timeout_s: float) -> list[bool]:
        if self._num_failures:
            self._num_failures -= 1
            raise RuntimeError("a bug")
        return [False] * len(hashes)

    def put(self, hashes: Sequence[BlockHash], blocks: Sequence[memoryview], timeout_s: float) -> list[bool]:
        assert [bytes(block[:32]) for block in blocks] == list(hashes)
        self.taken += hashes
        return [True] * len(hashes)


def leavers_to(cluster: TakingCluster) -> contextlib.closing[DiskLeavers]:
    return contextlib.closing(DiskLeavers(cast(ClusterSpaces, cluster), Bandwidth(None)))


def test_all_that_leaves_is_passed_on_without_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pause after each batch would be a limit of 16 MB/s, whatever the rate says."""
    monkeypatch.setattr(cluster_leavers, "_LOOK_S", FOR_EVER_S)
    cluster, disk = TakingCluster(), FullDisk()
    with leavers_to(cluster) as leavers:
        leavers.start(cast(Disk, disk))
        wait_until(lambda: cluster.taken == HASHES)


def test_a_failure_of_the_cluster_is_not_the_disks_and_the_next_blocks_are_passed_on() -> None:
    cluster, disk = TakingCluster(num_failures=1), FullDisk()
    with leavers_to(cluster) as leavers:
        leavers.start(cast(Disk, disk))
        wait_until(lambda: cluster.taken == HASHES[4:])
    assert disk.failures == []
    assert cluster.losses == ["not written"]
