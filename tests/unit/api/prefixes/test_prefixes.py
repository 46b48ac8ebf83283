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
from kvtier.api.prefixes.record import PrefixContent, PrefixRecord
from kvtier.blocks.hashing import BlockHash, split_hashes
from kvtier.blocks.namespace import Namespace
from kvtier.client.known_namespace import KnownNamespace
from kvtier.errors import KvtierError, RemoteProtocolError, TierRefused, TierUnavailable
from tests.unit.api.prefixes.test_book import a_full_disk, content_of, record_of


class FakeCache(PrefixCache):
    """All blocks are there. `error` is raised by what changes pins; `on_drop` is called in the middle of a drop."""

    def __init__(self) -> None:
        super().__init__(CacheAddress(address="unix:/none"))
        self.pinned: set[BlockHash] = set()
        self.dropped: list[BlockHash] = []
        self.error: KvtierError | None = None
        self.on_drop: Callable[[], None] = lambda: None
        self.num_asked: list[int] = []

    def namespaces(self) -> list[KnownNamespace]:
        return []

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
        self.pinned -= set(hashes)
        self.dropped += hashes
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


def test_a_dropped_prefix_takes_its_pin_with_it_though_another_name_has_its_blocks(tmp_path: Path) -> None:
    async def act(kept: Kept) -> None:
        pinned = await kept.add("pinned", is_pinned=True)
        await kept.add("plain")
        assert await kept.prefixes.drop(pinned) == 0
        assert not kept.cache.pinned
        assert not kept.cache.dropped

    with_prefixes(tmp_path, act)


def test_a_dropped_prefix_leaves_the_pin_of_another_with_its_blocks(tmp_path: Path) -> None:
    async def act(kept: Kept) -> None:
        one = await kept.add("one", is_pinned=True)
        await kept.add("two", is_pinned=True)
        assert await kept.prefixes.drop(one) == 0
        assert kept.cache.pinned

    with_prefixes(tmp_path, act)


def test_a_prefix_that_cannot_be_written_leaves_no_pin(tmp_path: Path) -> None:
    async def act(kept: Kept) -> None:
        kept.book.max_all_bytes = 1
        with pytest.raises(HttpError, match="too large"):
            await kept.add("handbook", is_pinned=True)
        assert not kept.cache.pinned

    with_prefixes(tmp_path, act)


def test_a_prefix_that_cannot_be_replaced_keeps_its_pin(tmp_path: Path) -> None:
    async def act(kept: Kept) -> None:
        before = await kept.add("handbook", is_pinned=True)
        pinned = set(kept.cache.pinned)
        kept.book.max_all_bytes = 1
        with pytest.raises(HttpError, match="too large"):
            await kept.prefixes.add(
                record_of("handbook", is_pinned=True, first="ef" * 32), PrefixContent(b"\2" * 64, None)
            )
        assert list(kept.book) == [before]
        assert kept.cache.pinned == pinned

    with_prefixes(tmp_path, act)


def test_an_import_over_a_pinned_name_keeps_its_pin_and_its_hits(tmp_path: Path) -> None:
    async def act(kept: Kept) -> None:
        before = await kept.add("handbook", is_pinned=True)
        kept.book.note_hits(before, 1, 1001.0)
        added = await kept.prefixes.add(record_of("handbook", first="02" * 32), PrefixContent(b"\2" * 64, None))
        assert (added.is_pinned, added.hits, added.last_used) == (True, 1, 1001.0)
        assert kept.cache.pinned == set(split_hashes(b"\2" * 64))

    with_prefixes(tmp_path, act)


def test_a_name_whose_time_is_over_hands_on_no_pin(tmp_path: Path) -> None:
    async def act(kept: Kept) -> None:
        await kept.add("handbook", is_pinned=True, expires_at=1010.0)
        kept.clock.now = 1010.0
        assert not (await kept.prefixes.add(record_of("handbook"), content_of())).is_pinned
        assert not kept.cache.pinned

    with_prefixes(tmp_path, act)


@pytest.mark.parametrize("is_pinned", [False, True])
def test_a_pin_that_cannot_be_written_is_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_pinned: bool
) -> None:
    async def act(kept: Kept) -> None:
        record = await kept.add("handbook", is_pinned=is_pinned)
        pinned = set(kept.cache.pinned)
        with a_full_disk(monkeypatch, lambda name: True), pytest.raises(HttpError, match="No space left on device"):
            await kept.prefixes.pin(record, keep=not is_pinned)
        assert kept.cache.pinned == pinned
        assert bool(pinned) == is_pinned
        [now] = kept.book
        assert now.is_pinned == is_pinned

    with_prefixes(tmp_path, act)


def test_a_client_that_leaves_while_its_prefix_is_pinned_leaves_no_pin_without_a_name(tmp_path: Path) -> None:
    async def act(kept: Kept) -> None:
        is_pinning, may_go_on = threading.Event(), threading.Event()
        pin = kept.cache.pin

        def slowly(namespace: Namespace, hashes: Sequence[BlockHash], *, keep: bool) -> int:
            is_pinning.set()
            may_go_on.wait()
            return pin(namespace, hashes, keep=keep)

        kept.cache.pin = slowly  # type: ignore[method-assign]
        adding = asyncio.create_task(kept.add("handbook", is_pinned=True))
        await asyncio.to_thread(is_pinning.wait)
        adding.cancel()
        await asyncio.sleep(0)
        may_go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await adding
        assert kept.cache.pinned
        assert kept.names() == ["handbook"]

    with_prefixes(tmp_path, act)


def test_an_expired_prefix_is_gone_at_once(tmp_path: Path) -> None:
    admin = Access([]).tenant_named("")
    assert admin is not None

    async def act(kept: Kept) -> None:
        await kept.add("short", expires_at=1010.0)
        assert kept.prefixes.find("short", admin).name == "short"
        kept.clock.now = 1010.0
        with pytest.raises(HttpError, match="there is no prefix called 'short'"):
            kept.prefixes.find("short", admin)
        assert (await kept.prefixes.listed(admin, 10))[0] == []

    with_prefixes(tmp_path, act)


def test_a_change_of_a_prefix_that_was_dropped_meanwhile_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def act(kept: Kept) -> None:
        record = await kept.add("handbook")
        found = await asyncio.gather(
            kept.prefixes.drop(record), kept.prefixes.pin(record, keep=True), return_exceptions=True
        )
        assert found[0] == 2
        assert "the prefix handbook has been dropped" in str(found[1])
        assert not kept.cache.pinned

    with_prefixes(tmp_path, act)
    assert not caplog.records


def test_a_listing_after_a_change_has_the_change(tmp_path: Path) -> None:
    admin = Access([]).tenant_named("")
    assert admin is not None

    async def act(kept: Kept) -> None:
        await kept.add("handbook")
        is_asked, may_go_on = threading.Event(), threading.Event()
        places = kept.cache.places

        def slowly(prefixes: Sequence[tuple[Namespace, Sequence[BlockHash]]]) -> list[Placed]:
            found = places(prefixes)
            is_asked.set()
            may_go_on.wait()
            return found

        kept.cache.places = slowly  # type: ignore[method-assign]
        kept.prefixes._forget_places()
        listing = asyncio.create_task(kept.prefixes.listed(admin, 10))
        await asyncio.to_thread(is_asked.wait)
        record = kept.prefixes.find("handbook", admin)
        pinning = asyncio.create_task(kept.prefixes.pin(record, keep=True))
        while not kept.cache.pinned or not next(iter(kept.book)).is_pinned:
            await asyncio.sleep(0.001)
        may_go_on.set()
        await listing
        assert (await pinning).is_pinned
        assert (await kept.prefixes.listed(admin, 10))[0][0].is_pinned

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
        kept.prefixes._forget_places()
        kept.cache.num_asked.clear()
        kept.cache.error = TierUnavailable("it is away")
        listed, _ = await kept.prefixes.listed(admin, 90)
        assert [one.pinned_blocks for one in listed] == [None] * 90
        assert len(kept.cache.num_asked) == 1

    with_prefixes(tmp_path, act)
