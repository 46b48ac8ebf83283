"""An hour of an open page, on a clock of its own: a thousand requests a minute, and no more memory at its end."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc

import pytest

from kvtier.api.config import PageConfig
from kvtier.api.page.board import Board
from kvtier.api.request_log import LoggedRequest
from kvtier.api.token_history import TokenHistory
from tests.unit.api.page.test_hub import FakeView

_TICKS = 1800
_TICK_S = 2.0
_REQUESTS_PER_TICK = 34
_DAY_S = 86_400
_NOISE_BYTES = 64 << 10
"""Less than two bytes for each request of half an hour: a request that stays takes some hundreds."""


class Hour:
    """A page's board over a day that has been, and then an hour, tick by tick."""

    def __init__(self) -> None:
        self.now = 1_000_000.0
        self.view = FakeView()
        self.view.history = TokenHistory(lambda: self.now)
        self.board = Board(self.view, PageConfig(gpu_hour_price=2.5), lambda: self.now)
        self.last = 0
        for _ in range(0, _DAY_S, 10):
            self.now += 10.0
            self.view.history.add(8000, {"device": 1000, "server": 4000})

    async def tick(self) -> int:
        """The number of bytes sent to a reader."""
        self.now += _TICK_S
        self.view.moved += 1000.0
        for _ in range(_REQUESTS_PER_TICK):
            self._end_request()
        told, self.last = await self.board.events(self.last)
        return sum(map(len, told))

    def _end_request(self) -> None:
        log = self.view.log
        number = log.next_number()
        cached = {"device": 1000, "server": 4000, "disk": 2000}
        self.view.history.add(8000, cached)
        request = LoggedRequest(
            number=number, request_id=f"req-{number}", at=self.now, model=f"model-{number % 3}", cached_tokens=cached
        )
        log.add(request)


@pytest.mark.slow
def test_an_hour_of_a_thousand_requests_a_minute_takes_no_more_memory_at_its_end() -> None:
    async def run() -> tuple[int, int, int]:
        hour = Hour()
        tracemalloc.start()
        try:
            for _ in range(_TICKS // 2):
                await hour.tick()
            gc.collect()
            half, _ = tracemalloc.get_traced_memory()
            for _ in range(_TICKS // 2):
                await hour.tick()
            gc.collect()
            whole, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        return half, whole, hour.last

    half, whole, num_told = asyncio.run(run())
    assert num_told == _TICKS * _REQUESTS_PER_TICK
    assert whole - half < _NOISE_BYTES
