"""Limits what is served at a time: requests, their answers, and the memory of their prompts. One event loop.

Engines hold all of these in queues: without a limit, a few requests with many long prompts would take all of their
memory and hours of their time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kvtier.api.config import ApiConfig
from kvtier.api.http_error import overloaded
from kvtier.api.limits import ANSWERS_OVER_REQUESTS, SERVED_PROMPTS_OVER_LARGEST
from kvtier.sizes import format_size


@dataclass(slots=True)
class _Load:
    num_requests: int = 0
    num_answers: int = 0
    prompt_bytes: int = 0

    def add(self, num_requests: int, num_answers: int, prompt_bytes: int) -> None:
        self.num_requests += num_requests
        self.num_answers += num_answers
        self.prompt_bytes += prompt_bytes


class Places:
    """With several keys, each gets at most half of everything. If no other request is in flight, any is accepted."""

    def __init__(self, config: ApiConfig) -> None:
        most = config.max_requests
        self._limit = _Load(most, ANSWERS_OVER_REQUESTS * most, SERVED_PROMPTS_OVER_LARGEST * config.max_body_bytes)
        share = 2 if len(config.keys) > 1 else 1
        self._limit_of_one = _Load(
            max(1, most // share), self._limit.num_answers // share, self._limit.prompt_bytes // share
        )
        self._all = _Load()
        self._of_keys: dict[str, _Load] = {}

    @property
    def num_requests(self) -> int:
        return self._all.num_requests

    @contextmanager
    def take(self, key: str, num_answers: int, prompt_bytes: int) -> Iterator[None]:
        """A scope for one request of the key of this name. Raises `HttpError` if there is no room for it."""
        own = self._of_keys.setdefault(key, _Load())
        _check(self._all, self._limit, num_answers, prompt_bytes, "")
        _check(own, self._limit_of_one, num_answers, prompt_bytes, " of this API key")
        for load in (self._all, own):
            load.add(1, num_answers, prompt_bytes)
        try:
            yield
        finally:
            for load in (self._all, own):
                load.add(-1, -num_answers, -prompt_bytes)


def _check(load: _Load, limit: _Load, num_answers: int, prompt_bytes: int, of_key: str) -> None:
    if load.num_requests >= limit.num_requests:
        raise overloaded(f"{load.num_requests} requests{of_key} are being served, which is the limit")
    if not load.num_requests:
        return
    if load.num_answers + num_answers > limit.num_answers:
        raise overloaded(f"{load.num_answers} answers{of_key} of at most {limit.num_answers} are being computed")
    if load.prompt_bytes + prompt_bytes > limit.prompt_bytes:
        most = format_size(limit.prompt_bytes)
        raise overloaded(f"prompts{of_key} that are being served would take more than {most}, which is the limit")
