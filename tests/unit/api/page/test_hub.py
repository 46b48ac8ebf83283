"""The stream of the page: one look for everybody, none for nobody, and nobody holds it up."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable

import pytest

from kvtier.api.config import PageConfig
from kvtier.api.http_error import HttpError
from kvtier.api.limits import MAX_LOGGED_REQUESTS, MAX_PAGE_EVENTS_UNREAD, MAX_PAGE_READERS, MAX_TOLD_REQUESTS
from kvtier.api.page.board import Board
from kvtier.api.page.hub import Hub
from kvtier.api.page.moved_blocks import Move
from kvtier.api.page.view import Reading, ShownWarning, TierLevel
from kvtier.api.request_log import LoggedRequest, RequestLog
from kvtier.api.token_history import TokenHistory
from tests.support.waiting import LIMIT_S


class FakeView:
    """Counts looks; `moved` grows as a test says."""

    kind = "deployment"
    num_requests: int | None = 0
    prefix_changes: int | None = None

    def __init__(self) -> None:
        self.log = RequestLog()
        self.history = TokenHistory()
        self.num_looks = 0
        self.num_rests = 0
        self.moved: float | None = 0.0
        self.saved_s = 7200.0
        self.unvalued_tokens = 0

    async def read(self) -> Reading:
        self.num_looks += 1
        await asyncio.sleep(0)
        tiers = [TierLevel(name="memory", owner="cache", room_bytes=10)]
        return Reading(
            status="ready",
            tiers=tiers,
            moved={} if self.moved is None else {Move("in", "server"): self.moved, Move("out", "disk"): 0.0},
            saved_s=self.saved_s,
            unvalued_tokens=self.unvalued_tokens,
        )

    async def warnings(self) -> list[ShownWarning]:
        return []

    async def explain(self, request_id: str, *, with_text: bool) -> dict[str, object] | None:
        return None

    def rest(self) -> None:
        self.num_rests += 1

    def close(self) -> None:
        pass

    def end_request(self) -> None:
        self.log.add(LoggedRequest(number=self.log.next_number(), request_id="r", model="m"))


def always() -> bool:
    return True


async def opened(hub: Hub, is_allowed: Callable[[], bool] = always) -> AsyncGenerator[bytes, None]:
    """A reader that has its place, and knows how long to wait before it asks again."""
    reader = hub.events(is_allowed)
    assert await told(reader) == b""
    assert await told(reader) == b"retry: 3000\n\n"
    return reader


async def told(events: AsyncGenerator[bytes, None]) -> bytes:
    async with asyncio.timeout(LIMIT_S):
        return await anext(events)


def test_all_readers_share_one_look_and_the_same_bytes() -> None:
    async def run() -> None:
        view = FakeView()
        hub = Hub(Board(view, PageConfig()), view.rest, tick_s=3600)
        readers = [await opened(hub) for _ in range(5)]
        first, *others = [await told(reader) for reader in readers]
        assert all(other is first for other in others)
        assert view.num_looks == 1
        hub.close()

    asyncio.run(run())


def test_a_new_reading_begins_after_it_was_asked_for() -> None:
    async def run() -> None:
        view = FakeView()
        board = Board(view, PageConfig())
        await board.reading()
        await board.reading()
        assert view.num_looks == 1
        looking = asyncio.ensure_future(board.new_reading())
        while view.num_looks < 2:
            await asyncio.sleep(0)
        await board.new_reading()
        assert view.num_looks == 3
        await looking

    asyncio.run(run())


def test_a_reader_that_comes_between_two_ticks_is_told_the_state_at_once() -> None:
    async def run() -> None:
        view = FakeView()
        hub = Hub(Board(view, PageConfig()), view.rest, tick_s=3600)
        first = await opened(hub)
        state = await told(first)
        second = await opened(hub)
        assert await told(second) == state
        await first.aclose()
        await second.aclose()
        hub.close()

    asyncio.run(run())


def test_nothing_runs_once_the_last_reader_has_gone() -> None:
    async def run() -> None:
        view = FakeView()
        hub = Hub(Board(view, PageConfig()), view.rest, tick_s=0.001)
        reader = await opened(hub)
        await told(reader)
        await reader.aclose()
        async with asyncio.timeout(LIMIT_S):
            while not view.num_rests:
                await asyncio.sleep(0.001)
        num_looks = view.num_looks
        await asyncio.sleep(0.02)
        assert (view.num_looks, view.num_rests, hub.num_readers) == (num_looks, 1, 0)

    asyncio.run(run())


def test_a_reader_that_does_not_read_is_dropped_and_others_go_on() -> None:
    async def run() -> None:
        view = FakeView()
        hub = Hub(Board(view, PageConfig()), view.rest, tick_s=0.001)
        slow, quick = await opened(hub), await opened(hub)
        for _ in range(3 * MAX_PAGE_EVENTS_UNREAD):
            await told(quick)
        assert hub.num_readers == 1
        with pytest.raises(StopAsyncIteration):
            await told(slow)
        await quick.aclose()
        hub.close()

    asyncio.run(run())


def test_a_reader_whose_session_ends_is_told_no_more() -> None:
    async def run() -> None:
        view, is_in = FakeView(), True
        hub = Hub(Board(view, PageConfig()), view.rest, tick_s=0.001)
        reader = await opened(hub, lambda: is_in)
        await told(reader)
        is_in = False
        num_told = 0
        with contextlib.suppress(StopAsyncIteration):
            while num_told < 10 * MAX_PAGE_EVENTS_UNREAD:
                await told(reader)
                num_told += 1
        assert num_told <= MAX_PAGE_EVENTS_UNREAD

    asyncio.run(run())


def test_there_are_so_many_readers_at_most_and_none_after_the_end() -> None:
    async def run() -> None:
        view = FakeView()
        hub = Hub(Board(view, PageConfig()), view.rest, tick_s=3600)
        readers = [await opened(hub) for _ in range(MAX_PAGE_READERS - 1)]
        late = [hub.events(always) for _ in range(3)]  # at the same time
        found = await asyncio.gather(*(anext(reader) for reader in late), return_exceptions=True)
        assert found[0] == b""
        refused = [one.status for one in found[1:] if isinstance(one, HttpError)]
        assert refused == [429, 429]
        hub.close()
        with pytest.raises(HttpError):
            await told(hub.events(always))
        readers.append(late[0])
        for reader in readers:
            with contextlib.suppress(StopAsyncIteration):
                while True:
                    await told(reader)
        assert hub.num_readers == 0

    asyncio.run(run())


def test_requests_are_told_once_and_of_too_many_the_newest() -> None:
    async def run() -> None:
        view = FakeView()
        board = Board(view, PageConfig())
        view.end_request()
        told_first, last = await board.events(0)
        assert (len(told_first), last) == (2, 1)
        assert len((await board.events(last))[0]) == 1

        for _ in range(MAX_TOLD_REQUESTS + 20):
            view.end_request()
        _, requests = (await board.events(last))[0]
        assert b'"skipped":20' in requests
        assert requests.count(b'"number"') == MAX_TOLD_REQUESTS

    asyncio.run(run())


def test_savings_are_unknown_and_not_zero_while_no_engine_knows_its_speed() -> None:
    async def run() -> None:
        view = FakeView()
        view.unvalued_tokens = 5000
        board = Board(view, PageConfig(gpu_hour_price=2.5))
        saved = (await board.state()).saved
        assert (saved.gpu_s, saved.unvalued_tokens, saved.money) == (7200.0, 5000, 5.0)

        view = FakeView()
        view.saved_s, view.unvalued_tokens = 0.0, 5000
        saved = (await Board(view, PageConfig(gpu_hour_price=2.5)).state()).saved
        assert (saved.gpu_s, saved.unvalued_tokens, saved.money) == (None, 5000, None)

    asyncio.run(run())


def test_rates_are_bytes_between_two_looks() -> None:
    async def run() -> None:
        now = 0.0
        view = FakeView()
        board = Board(view, PageConfig(gpu_hour_price=2.5, currency="EUR"), lambda: now)
        assert (await board.state()).tiers[0].in_bytes_per_s is None
        now, view.moved = 2.0, 1000.0
        state = await board.state()
        assert state.tiers[0].in_bytes_per_s == 500.0
        assert [(tier.name, tier.out_bytes_per_s) for tier in state.tiers[1:]] == [("disk", 0.0)]
        assert (state.saved.gpu_s, state.saved.money, state.saved.currency) == (7200.0, 5.0, "EUR")
        now, view.moved = 100.0, 5000.0
        assert (await board.state()).tiers[0].in_bytes_per_s is None
        now, view.moved = 102.0, 0.0  # an engine has started again
        assert (await board.state()).tiers[0].in_bytes_per_s == 0.0

    asyncio.run(run())


def test_what_was_moved_before_a_server_was_away_is_no_rate_when_it_is_back() -> None:
    async def run() -> None:
        view, now = FakeView(), 0.0
        board = Board(view, PageConfig(), clock=lambda: now)
        rates = []
        for moved in (1000.0, None, 2000.0, 2600.0):
            view.moved = moved
            rates.append((await board.state()).tiers[0].in_bytes_per_s)
            now += 2.0
        assert rates == [None, None, None, 300.0]

    asyncio.run(run())


def test_the_log_of_requests_is_bounded() -> None:
    view = FakeView()
    for _ in range(2 * MAX_LOGGED_REQUESTS):
        view.end_request()
    assert len(view.log) == MAX_LOGGED_REQUESTS
    assert [one.number for one in view.log.newest(2)] == [2 * MAX_LOGGED_REQUESTS, 2 * MAX_LOGGED_REQUESTS - 1]
