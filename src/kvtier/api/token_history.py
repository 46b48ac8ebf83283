"""Prompt tokens by the tier that they came from, over the last minutes and hours. One event loop; bounded."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping

import msgspec

_MAX_TIERS = 16
_OTHER = "other"


class Tokens(msgspec.Struct, kw_only=True):
    """Counts of the requests that ended in one time step, which begins at `at`, in seconds of the epoch."""

    at: float
    requests: int = 0
    prompt: int = 0
    cached: dict[str, int] = msgspec.field(default_factory=dict)
    """By tier."""

    def add(self, prompt_tokens: int, cached_tokens: Mapping[str, int]) -> None:
        self.requests += 1
        self.prompt += prompt_tokens
        for tier, count in cached_tokens.items():
            if count:
                known = tier if tier in self.cached or len(self.cached) < _MAX_TIERS else _OTHER
                self.cached[known] = self.cached.get(known, 0) + count


class _Span:
    """The last `whole_s`, in steps of `step_s`."""

    def __init__(self, step_s: float, whole_s: float) -> None:
        self.step_s = step_s
        self.runs: deque[Tokens] = deque(maxlen=round(whole_s / step_s))

    def current(self, now: float) -> Tokens:
        begin = now - now % self.step_s
        if not self.runs or self.runs[-1].at < begin:
            self.runs.append(Tokens(at=begin))
        return self.runs[-1]


class TokenHistory:
    """An hour in steps of ten seconds, and a day in steps of five minutes."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._spans = {"hour": _Span(10.0, 3600.0), "day": _Span(300.0, 86_400.0)}
        self.total = Tokens(at=clock())

    def add(self, prompt_tokens: int, cached_tokens: Mapping[str, int]) -> None:
        """Count an answered prompt; `cached_tokens` are by tier."""
        now = self._clock()
        self.total.add(prompt_tokens, cached_tokens)
        for span in self._spans.values():
            span.current(now).add(prompt_tokens, cached_tokens)

    def over(self, seconds: float) -> Tokens:
        """The sum over the last `seconds`, to the precision of the history's steps."""
        now = self._clock()
        span = self._spans["hour" if seconds <= 3600.0 else "day"]
        found = Tokens(at=now - seconds)
        for run in span.runs:
            if run.at > now - seconds:
                found.requests += run.requests
                found.prompt += run.prompt
                for tier, count in run.cached.items():
                    found.cached[tier] = found.cached.get(tier, 0) + count
        return found

    def steps(self, name: str) -> list[Tokens]:
        """The steps of "hour" or "day" in which a request ended, oldest first."""
        span = self._spans[name]
        oldest = self._clock() - span.step_s * (span.runs.maxlen or 0)
        return [run for run in span.runs if run.at >= oldest]

    def step_s(self, name: str) -> float:
        return self._spans[name].step_s
