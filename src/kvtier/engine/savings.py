"""The time that cached tokens have saved, by the device's measured speed. Owned by the engine's thread. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvtier.observe.metrics import EngineCounts


class Savings:
    """Cached tokens are valued once a step was measured that says how fast the device computes so many.

    Tokens that came before are counted as not valued until then, and afterwards as prompts of their mean length. An
    engine that has computed nothing but ends of prompts since its start has measured only what a step costs, whatever
    its size.
    """

    def __init__(self, counts: EngineCounts, compute_s: Callable[[int], float | None]) -> None:
        """`compute_s` has the time for a prompt of so many tokens; None while it is unknown."""
        self._counts = counts
        self._compute_s = compute_s
        self._num_waiting = 0

    def note_end(self, reason: str, prompt_tokens: int, cached_tokens: Mapping[str, int]) -> None:
        """Count a request that is over; `cached_tokens` of its prompt were not computed, by tier."""
        self._counts.note_end(reason, prompt_tokens, cached_tokens)
        num_cached = sum(cached_tokens.values())
        if num_cached:
            self._add(num_cached)
        if self._num_waiting:
            self._value_waiting()

    def _add(self, cached_tokens: int) -> None:
        seconds = self._compute_s(cached_tokens)
        if seconds is None:
            self._num_waiting += 1
            self._counts.unvalued_tokens += cached_tokens
        else:
            self._counts.saved_s += seconds

    def _value_waiting(self) -> None:
        seconds = self._compute_s(self._counts.unvalued_tokens // self._num_waiting)
        if seconds is not None:
            self._counts.saved_s += self._num_waiting * seconds
            self._counts.unvalued_tokens = self._num_waiting = 0
