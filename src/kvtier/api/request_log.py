"""The last requests that were answered, for people who look at the server. One event loop."""

from __future__ import annotations

import itertools
import secrets
from collections import deque
from collections.abc import Iterator

import msgspec

from kvtier.api.limits import MAX_LOGGED_REQUESTS


class LoggedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt that was answered. Counts and times that are not known are None; `at` is in seconds of the epoch.

    `ended_at_tokens` is where its cached part ended, `reason` why, and `tier` who said so. `key` is the name of the API
    key that asked.
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
    """The newest requests, within `MAX_LOGGED_REQUESTS`. Each has a number; those of later ones are higher.

    Numbers are of one `run`, which a log after a restart has another of: there they begin anew.
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
        """At most `limit`, the last one first, whose numbers are above `after`."""
        newer: Iterator[LoggedRequest] = itertools.takewhile(lambda one: one.number > after, reversed(self._kept))
        return list(itertools.islice(newer, limit))

    def get(self, request_id: str) -> LoggedRequest | None:
        return next((one for one in reversed(self._kept) if one.request_id == request_id), None)

    def __len__(self) -> int:
        return len(self._kept)
