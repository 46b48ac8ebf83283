"""The state that the page shows: computed once for all readers, and only while there are any. One event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import msgspec

from kvtier.api.config import PageConfig
from kvtier.api.limits import MAX_TOLD_REQUESTS
from kvtier.api.page.moved_blocks import Move
from kvtier.api.page.view import Reading, Saved, State, TierLevel, View

_FRESH_S = 1.0
"""A reading younger than this is reused."""
_RATE_S = 30.0
"""Longest time between two readings from which a rate in bytes per second is computed."""
_SPANS = {"5m": 300.0, "1h": 3600.0, "24h": 86_400.0}
_TIER_OF = {"memory": "server"}
"""Engines' name for a tier by the cache server's own name."""


class Board:
    """The state of `view`. Many tasks may call `state` at once: they share one reading."""

    def __init__(self, view: View, config: PageConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._view = view
        self._config = config
        self._clock = clock
        self._started_at = clock()
        self._looking: asyncio.Task[Reading] | None = None
        self._reading: Reading | None = None
        self._read_at = float("-inf")
        self._rates: dict[Move, float] = {}
        self._rated: dict[Move, float] = {}
        self._rated_at = float("-inf")
        self.num_readings = 0

    async def state(self) -> State:
        reading = await self.reading()
        history = self._view.history
        tokens = {name: history.over(seconds) for name, seconds in _SPANS.items()}
        return State(
            at=time.time(),
            kind=self._view.kind,
            status=reading.status,
            uptime_s=self._clock() - self._started_at,
            tiers=self._with_rates(reading.tiers),
            tokens={**tokens, "all": history.total},
            saved=self._saved(reading),
            engines=reading.engines,
            caches=reading.caches,
            curves=reading.curves,
            num_requests=self._view.num_requests,
            prefix_changes=self._view.prefix_changes,
        )

    async def new_reading(self) -> Reading:
        """A reading that begins now: it has what the caller has just changed."""
        if self._looking is not None:
            await asyncio.wait({self._looking})
        if self._looking is None:
            self._looking = asyncio.ensure_future(self._look())
        return await asyncio.shield(self._looking)

    async def reading(self) -> Reading:
        """The last reading if it is fresh, else a new one."""
        if self._reading is not None and self._clock() - self._read_at < _FRESH_S:
            return self._reading
        if self._looking is None:
            self._looking = asyncio.ensure_future(self._look())
        return await asyncio.shield(self._looking)

    async def events(self, after: int) -> tuple[list[bytes], int]:
        """The current events, the state and the requests with numbers above `after`, and the last request's number."""
        state = await self.state()
        log = self._view.log
        requests = log.newest(MAX_TOLD_REQUESTS, after)
        events = [event("state", msgspec.json.encode(state))]
        if requests:
            skipped = max(0, requests[-1].number - after - 1) if after else 0
            fields = {"run": log.run, "requests": requests, "skipped": skipped}
            events.append(event("requests", msgspec.json.encode(fields)))
        return events, log.last_number

    def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()

    async def _look(self) -> Reading:
        try:
            reading = await self._view.read()
            self.num_readings += 1
            self._note_rates(reading)
            self._reading, self._read_at = reading, self._clock()
            return reading
        finally:
            self._looking = None

    def _note_rates(self, reading: Reading) -> None:
        passed_s = self._clock() - self._rated_at
        if passed_s < _FRESH_S:
            return  # too short a time for a rate
        if passed_s <= _RATE_S:
            self._rates = {
                move: max(0.0, nbytes - self._rated[move]) / passed_s
                for move, nbytes in reading.moved.items()
                if move in self._rated  # else its owner was away, for a time that is not known
            }
        else:
            self._rates = {}
        self._rated, self._rated_at = reading.moved, self._clock()

    def _with_rates(self, tiers: list[TierLevel]) -> list[TierLevel]:
        """Add rates to tiers. If several tiers share a name, a sum over all of them is shown at none of them.

        Tiers that only have rates are added at the end.
        """
        names = [_TIER_OF.get(tier.name, tier.name) for tier in tiers]
        found = [
            self._with_rate(tier, "" if names.count(name) > 1 else name)
            for tier, name in zip(tiers, names, strict=True)
        ]
        others = sorted({move.tier for move in self._rates if not move.owner and move.tier not in names})
        return found + [self._with_rate(TierLevel(name=name, owner=""), name) for name in others]

    def _with_rate(self, tier: TierLevel, name: str) -> TierLevel:
        """Add the tier's own rates, or those summed over all tiers of `name`."""

        def rate(direction: str) -> float | None:
            own = self._rates.get(Move(direction, tier.name, tier.owner))
            return self._rates.get(Move(direction, name)) if own is None else own

        return msgspec.structs.replace(tier, in_bytes_per_s=rate("in"), out_bytes_per_s=rate("out"))

    def _saved(self, reading: Reading) -> Saved:
        price, unvalued = self._config.gpu_hour_price, reading.unvalued_tokens
        gpu_s = None if unvalued and not reading.saved_s else reading.saved_s
        money = None if price is None or gpu_s is None else gpu_s / 3600.0 * price
        return Saved(gpu_s=gpu_s, unvalued_tokens=unvalued, money=money, currency=self._config.currency)


def event(name: str, data: bytes) -> bytes:
    """A server-sent event; `data` is JSON, so it has no line breaks."""
    return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"
