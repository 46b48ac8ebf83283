"""The disk tier through the shipped contract suite, and what only a disk can promise."""

from __future__ import annotations

import contextlib
import errno
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.errors import ConfigError, TierUnavailable
from kvtier.stores.folder import MIN_FILE_BYTES
from kvtier.testing.tier_contract import (
    CAPACITY_BLOCKS,
    LAYOUT,
    NAMESPACE,
    MakeTier,
    TierContract,
    chain,
    empty_buffers,
    fetch_all,
    payloads,
)
from kvtier.tiers.disk import DiskTier
from kvtier.tiers.tier import Tier
from tests.support.faulty_files import FaultyFiles

_UNIT_BYTES = 4096
_FILE_BYTES = MIN_FILE_BYTES - _UNIT_BYTES + CAPACITY_BLOCKS * LAYOUT.slot_bytes


def _open(folder: Path, files: FaultyFiles | None = None) -> DiskTier:
    return DiskTier(folder, _FILE_BYTES, layout=LAYOUT, namespace=NAMESPACE, files=files)


class TestDiskTier(TierContract):
    @pytest.fixture
    def make_tier(self, tmp_path: Path) -> Iterator[MakeTier]:
        numbers = itertools.count()
        with contextlib.ExitStack() as stack:

            def make() -> Tier:
                return stack.enter_context(contextlib.closing(_open(tmp_path / str(next(numbers)))))

            yield make


class TestDiskTierWithoutDirectIo(TierContract):
    @pytest.fixture
    def make_tier(self, tmp_path: Path) -> Iterator[MakeTier]:
        with contextlib.ExitStack() as stack:

            def make() -> Tier:
                files = FaultyFiles()
                files.refuses_direct = True
                return stack.enter_context(contextlib.closing(_open(tmp_path, files)))

            yield make


def test_blocks_survive_closing_and_opening_again(tmp_path: Path) -> None:
    hashes = chain(1, CAPACITY_BLOCKS)
    with contextlib.closing(_open(tmp_path)) as tier:
        assert tier.offer(hashes, payloads(hashes)) == CAPACITY_BLOCKS

    with contextlib.closing(_open(tmp_path)) as tier:
        assert fetch_all(tier, hashes) == payloads(hashes)
        assert tier.offer(hashes, payloads(hashes)) == 0


def test_dropped_blocks_do_not_come_back(tmp_path: Path) -> None:
    hashes = chain(1, 8)
    with contextlib.closing(_open(tmp_path)) as tier:
        tier.offer(hashes, payloads(hashes))
        tier.drop(hashes[3:5])

    with contextlib.closing(_open(tmp_path)) as tier:
        assert tier.contains(hashes) == [True] * 3 + [False] * 2 + [True] * 3


def test_a_second_tier_on_the_folder_is_refused_while_the_first_is_open(tmp_path: Path) -> None:
    with contextlib.closing(_open(tmp_path)), pytest.raises(ConfigError, match="in use by another process"):
        _open(tmp_path)
    _open(tmp_path).close()


def test_a_corrupt_block_ends_a_fetch_and_is_counted(tmp_path: Path) -> None:
    hashes = chain(1, 6)
    with contextlib.closing(_open(tmp_path)) as tier:
        tier.offer(hashes, payloads(hashes))
        with tier.match(hashes) as lease:
            start = tier.store.match(tier.store.spaces()[0], hashes)[4].start
            tier.store.free(tier.store.match(tier.store.spaces()[0], hashes))
            with (tmp_path / "blocks.kvtier").open("r+b") as file:
                file.seek(start * _UNIT_BYTES)
                file.write(b"damage")
            into = empty_buffers(6)
            assert lease.fetch(into) == 4
        assert [bytes(buffer) for buffer in into[:4]] == payloads(hashes)[:4]
        assert tier.contains(hashes) == [True] * 4 + [False, True]
        assert tier.store.losses == {"corrupt": 1}


def test_a_disk_that_fails_is_an_unavailable_tier_and_works_again_when_it_can(tmp_path: Path) -> None:
    files = FaultyFiles()
    hashes = chain(1, 4)
    with contextlib.closing(_open(tmp_path, files)) as tier:
        files.fail("write", errno.EIO)
        with pytest.raises(TierUnavailable, match="Input/output error"):
            tier.offer(hashes, payloads(hashes))
        assert not any(tier.contains(hashes))
        files.heal()
        assert tier.offer(hashes, payloads(hashes)) == 4
        assert fetch_all(tier, hashes) == payloads(hashes)
