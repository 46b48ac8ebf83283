"""The view of a single cache server for its own page: its stats, and the notes that engines left on their requests."""

from __future__ import annotations

from typing import Protocol

from kvtier.api.page.cache_levels import curve_of, namespaces_of, state_of, tiers_of, warnings_of
from kvtier.api.page.curve_cache import CurveCache
from kvtier.api.page.moved_blocks import MovedBlocks
from kvtier.api.page.view import Reading, ShownWarning
from kvtier.api.request_log import LoggedRequest, RequestLog
from kvtier.api.token_history import TokenHistory
from kvtier.errors import ConfigError
from kvtier.tiers.explanation import Explanation

_NAME = "cache"
_MAX_NOTES = 512


class ObservedServer(Protocol):
    """A cache server in this process; any thread may call."""

    def stats(self) -> dict[str, object]: ...

    def miss_curve(self) -> dict[str, object]: ...

    def newest_notes(self, count: int) -> list[tuple[str, str]]: ...


class CacheServerView:
    """The view of `server`. Engines note each request when it ends; each reading logs the new notes."""

    kind = "cache-server"
    num_requests: int | None = None
    prefix_changes: int | None = None

    def __init__(self, server: ObservedServer, address: str) -> None:
        self._server = server
        self._curve = CurveCache(server.miss_curve)
        self._address = address
        self._moved = MovedBlocks(_NAME)
        self._log = RequestLog()
        self._history = TokenHistory()
        self._newest = ""
        self._has_read = False

    @property
    def log(self) -> RequestLog:
        return self._log

    @property
    def history(self) -> TokenHistory:
        return self._history

    async def read(self) -> Reading:
        stats = {**self._server.stats(), "hit_curve": self._curve.points()}
        self._take_notes()
        namespaces, count = namespaces_of(_NAME, stats, {})
        curve = curve_of(_NAME, stats)
        return Reading(
            status="ready",
            tiers=tiers_of(_NAME, stats),
            caches=[state_of(_NAME, self._address, stats)],
            namespaces=namespaces,
            num_namespaces=count,
            moved=self._moved.take(stats),
            curves=[] if curve is None else [curve],
        )

    async def warnings(self) -> list[ShownWarning]:
        return warnings_of(_NAME, self._server.stats())

    async def explain(self, request_id: str, *, with_text: bool) -> dict[str, object] | None:
        text = next((text for noted, text in self._server.newest_notes(_MAX_NOTES) if noted == request_id), "")
        try:
            explanation = Explanation.from_json(text)
        except ConfigError:
            return None
        found: dict[str, object] = {
            "request_id": request_id,
            "request": self._log.get(request_id),
            "sentence": explanation.sentence(),
            "ended_at_tokens": explanation.ended_at_tokens,
        }
        if explanation.parting is not None:
            parting = explanation.parting if with_text else explanation.parting.without_text()
            found |= {"parting": parting, "parting_sentence": parting.sentence(), "advice": parting.advice()}
        return found

    def rest(self) -> None:
        pass

    def close(self) -> None:
        pass

    def _take_notes(self) -> None:
        """Log the new notes. If consecutive notes differ in their request id alone, the last one is shown."""
        fresh: list[tuple[str, str]] = []
        for request_id, text in self._server.newest_notes(_MAX_NOTES):
            if request_id == self._newest:
                break
            fresh.append((request_id, text))
        if fresh:
            self._newest = fresh[0][0]
        seen = ""
        found: list[Explanation] = []
        for request_id, text in fresh:
            same = text.replace(request_id, "", 1)
            if same != seen:
                seen = same
                try:
                    found.append(Explanation.from_json(text))
                except ConfigError:  # a note of another kind
                    continue
        for explanation in reversed(found):
            self._add(explanation)
        self._has_read = True

    def _add(self, explanation: Explanation) -> None:
        cached = {tier: count for tier, count in explanation.cached_tokens.items() if count}
        if self._has_read:  # requests before the first reading ended at an unknown time
            self._history.add(explanation.prompt_tokens, cached)
        self._log.add(
            LoggedRequest(
                number=self._log.next_number(),
                request_id=explanation.request_id,
                model=explanation.model,
                prompt_tokens=explanation.prompt_tokens,
                cached_tokens=cached,
                ended_at_tokens=explanation.ended_at_tokens,
                reason=explanation.reason.value,
                tier=explanation.tier,
                detail=explanation.detail,
            )
        )
