"""Prefixes as they change and end: with their time, with what comes in between, and with a cache that is away."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import pytest

from kvtier.api.access import Access
from kvtier.api.config import CacheAddress
from kvtier.api.engines import Engines
from kvtier.api.http_error import HttpError
from kvtier.api.prefixes.book import PrefixBook
from kvtier.api.prefixes.cache import Placed, PrefixCache
from kvtier.api.prefixes.prefixes import Prefixes
from kvtier.api.prefixes.record import PrefixRecord
from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.namespace import Namespace
from kvtier.errors import KvtierError, RemoteProtocolError, TierRefused, TierUnavailable
from tests.unit.api.prefixes.test_book import content_of, record_of


class FakeCache(PrefixCache):
    """All blocks are there. `error` is raised by what changes pins; `on_drop` is called in the middle of a drop."""

    def __init__(self) -> None:
        super().__init__(CacheAddress(address="unix:/none"))
        self.pinned: set[BlockHash] = set()
        self.error: KvtierError | None = None
        self.on_drop: Callable[[], None] = lambda: None
        self.num_asked: list[int] = []

    def places(self, prefixes: Sequence[tuple[Namespace, Sequence[BlockHash]]]) -> list[Placed]:
        self.num_asked.append(len(prefixes))
        if self.error is not None:
            raise self.error
        return [
            Placed(
                len(hashes), sum(map(self.pinned.__contains__, hashes)), 10, {"server": 10 * len(hashes)}, len(hashes)
            )
            for _, hashes in prefixes
        ]

    def pin(self, namespace: Namespace, hashes: Sequence[BlockHash], *, keep: bool) -> int:
        if self.error is not None:
            raise self.error
        self.pinned = self.pinned | set(hashes) if keep else self.pinned - set(hashes)
        return len(hashes)

    def drop(self, namespace: Namespace, hashes: Sequence[BlockHash]) -> int:
        self.on_drop()
        return len(hashes)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Kept:
    """Prefixes over a folder, a cache and a clock."""

    def __init__(self, folder: Path) -> None:
        self.cache = FakeCache()
        self.clock = Clock()
        self.book = PrefixBook(folder)
        self.prefixes = Prefixes(Engines([]), self.book, {"tiny": self.cache}, clock=self.clock)

    def names(self) -> list[str]:
        return [record.name for record in self.book]

    async def add(self, name: str, **fields: object) -> PrefixRecord:
        record = record_of(name, **fields)
        await self.prefixes.add(record, content_of(name))
        return record


def with_prefixes(folder: Path, act: Callable[[Kept], Awaitable[None]]) -> None:
    async def run() -> None:
        kept = Kept(folder)
        try:
            await act(kept)
        finally:
            await kept.prefixes.close()

    asyncio.run(run())


def test_a_name_and_its_pin_end_with_their_time(tmp_path: Path) -> None:
    async def act(kept: Kept) -> None:
        await kept.add("short", is_pinned=True, expires_at=1010.0)
        await kept.add("long", expires_at=2000.0, first="ef" * 32)
        await kept.add("always", first="ab" * 32)
        kept.clock.now = 1009.9
        await kept.prefixes.end_expired()
        assert kept.names() == ["always", "long", "short"]
        assert kept.cache.pinned

        kept.clock.now = 1010.0
        await kept.prefixes.end_expired()
        assert kept.names() == ["always", "long"]
        assert not kept.cache.pinned

    with_prefixes(tmp_path, act)
    assert [record.name for record in PrefixBook(tmp_path)] == ["always", "long"]


@pytest.mark.parametrize("error", [TierUnavailable("it is away"), RemoteProtocolError("it says odd things")])
def test_a_prefix_whose_cache_fails_stays_until_it_can_be_unpinned(tmp_path: Path, error: KvtierError) -> None:
    async def act(kept: Kept) -> None:
        await kept.add("pinned", is_pinned=True, expires_at=1010.0)
        await kept.add("plain", expires_at=1010.0)
        kept.clock.now = 1020.0
        kept.cache.error = error
        await kept.prefixes.end_expired()
        assert kept.names() == ["pinned"]

        kept.cache.error = None
        await kept.prefixes.end_expired()
        assert kept.names() == []
        assert not kept.cache.pinned

    with_prefixes(tmp_path, act)


def test_a_prefix_whose_blocks_no_cache_has_any_more_ends_all_the_same(tmp_path: Path) -> None:
    async def act(kept: Kept) -> None:
        await kept.add("pinned", is_pinned=True, expires_at=1010.0)
        kept.clock.now = 1020.0
        kept.cache.error = TierRefused("the cache has no blocks of this model in its present form")
        await kept.prefixes.end_expired()
        assert kept.names() == []

    with_prefixes(tmp_path, act)


def test_a_prefix_that_gets_a_name_while_its_last_owner_is_dropped_keeps_it(tmp_path: Path) -> None:
    async def act(kept: Kept) -> None:
        before = await kept.add("handbook")
        is_dropping, may_go_on = threading.Event(), threading.Event()

        def wait() -> None:
            is_dropping.set()
            may_go_on.wait()

        kept.cache.on_drop = wait
        dropping = asyncio.create_task(kept.prefixes.drop(before))
        await asyncio.to_thread(is_dropping.wait)
        adding = asyncio.create_task(kept.add("handbook", first="ef" * 32))
        await asyncio.sleep(0)
        may_go_on.set()
        await dropping
        after = await adding
        assert list(kept.book) == [after]
        with pytest.raises(HttpError, match="has been dropped"):
            await kept.prefixes.drop(before)
        assert list(kept.book) == [after]

    with_prefixes(tmp_path, act)


def test_what_one_of_two_prefixes_has_alone_is_unpinned_with_it(tmp_path: Path) -> None:
    async def act(kept: Kept) -> None:
        await kept.add("one", is_pinned=True)
        two = await kept.add("two", is_pinned=True)
        await kept.prefixes.pin(two, keep=False)
        assert kept.cache.pinned  # both have the same blocks

    with_prefixes(tmp_path, act)


def test_many_prefixes_are_listed_with_a_few_questions_to_the_cache(tmp_path: Path) -> None:
    admin = Access([]).tenant_named("")
    assert admin is not None

    async def act(kept: Kept) -> None:
        for number in range(100):
            await kept.add(f"prefix-{number:03d}", first=f"{number:02x}" * 32)
        kept.cache.num_asked.clear()
        listed, is_cut = await kept.prefixes.listed(admin, 90)
        assert ([one.name for one in listed], is_cut) == ([f"prefix-{number:03d}" for number in range(90)], True)
        assert all(one.bytes == 10 * one.blocks for one in listed)
        assert len(kept.cache.num_asked) <= 2

    with_prefixes(tmp_path, act)


def test_prefixes_of_a_cache_that_is_away_are_listed_after_one_question(tmp_path: Path) -> None:
    admin = Access([]).tenant_named("")
    assert admin is not None

    async def act(kept: Kept) -> None:
        for number in range(100):
            await kept.add(f"prefix-{number:03d}", first=f"{number:02x}" * 32)
        kept.prefixes._placed.clear()
        kept.cache.num_asked.clear()
        kept.cache.error = TierUnavailable("it is away")
        listed, _ = await kept.prefixes.listed(admin, 90)
        assert [one.pinned_blocks for one in listed] == [None] * 90
        assert len(kept.cache.num_asked) == 1

    with_prefixes(tmp_path, act)
