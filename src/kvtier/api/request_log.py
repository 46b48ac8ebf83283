"""The last answered requests, for the page. One event loop."""

from __future__ import annotations

import itertools
import secrets
from collections import deque
from collections.abc import Iterator

import msgspec

from kvtier.api.limits import MAX_LOGGED_REQUESTS


class LoggedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """An answered prompt. Unknown counts and times are None; `at` is in seconds of the epoch.

    `ended_at_tokens` is where the cached part ended, `reason` why, and `tier` the tier that gave the reason. `key` is
    the name of the request's API key.
    """

    number: int
    request_id: str
    at: float | None = None
    model: str
    engine: str = ""
    key: str = ""
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: dict[str, int] = {}
    ttft_s: float | None = None
    finish_reason: str | None = None
    ended_at_tokens: int | None = None
    reason: str = ""
    tier: str = ""
    detail: str = ""


class RequestLog:
    """The newest requests, at most `MAX_LOGGED_REQUESTS`. Later requests have higher numbers.

    Numbers start again after a restart, when the log gets another `run` id.
    """

    def __init__(self) -> None:
        self.run = secrets.token_hex(8)
        self._kept: deque[LoggedRequest] = deque(maxlen=MAX_LOGGED_REQUESTS)
        self._numbers = itertools.count(1)

    def next_number(self) -> int:
        return next(self._numbers)

    def add(self, request: LoggedRequest) -> None:
        self._kept.append(request)

    @property
    def last_number(self) -> int:
        return self._kept[-1].number if self._kept else 0

    def newest(self, limit: int, after: int = 0) -> list[LoggedRequest]:
        """At most `limit` requests with numbers above `after`, newest first."""
        newer: Iterator[LoggedRequest] = itertools.takewhile(lambda one: one.number > after, reversed(self._kept))
        return list(itertools.islice(newer, limit))

    def get(self, request_id: str) -> LoggedRequest | None:
        return next((one for one in reversed(self._kept) if one.request_id == request_id), None)

    def __len__(self) -> int:
        return len(self._kept)
