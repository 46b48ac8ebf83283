"""A compiled grammar, in as many copies as its concurrent answers need.

The library gives all matchers of one copy the same lexer, behind a lock: only matchers of different copies make masks
and take tokens in parallel. Each copy learns its lexer's states for itself, so answers that run alone share the first.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLMatcher

_MAX_THREADS = 16


def num_mask_threads() -> int:
    """The library's threads for masks; more copies of a grammar than threads gain nothing."""
    return max(1, min(_MAX_THREADS, len(os.sched_getaffinity(0)) - 1))


class GrammarCopy:
    """From `take_copy` to `give_back`, one answer's. Any thread."""

    def __init__(self, start: LLMatcher) -> None:
        self.num_users = 0
        self._start = start
        self._lock = threading.Lock()

    def matcher(self) -> LLMatcher:
        """A matcher at the beginning of an answer, for one thread. It takes microseconds."""
        with self._lock:
            return self._start.deep_copy()

    def take(self) -> None:
        with self._lock:
            self.num_users += 1

    def give_back(self) -> None:
        """The answer has ended; its matcher must not be used any more."""
        with self._lock:
            self.num_users -= 1


class CompiledGrammar:
    """A grammar for one vocabulary, whose tokens are bits of `num_words` words of 32. Any thread."""

    def __init__(self, start: LLMatcher, num_words: int, recompile: Callable[[], LLMatcher] | None = None) -> None:
        """Without `recompile`, which takes milliseconds, there is one copy."""
        self.num_words = num_words
        self._recompile = recompile
        self._lock = threading.Lock()
        self._copies = [GrammarCopy(start)]
        self._num_announced = 0
        """Answers that will take a copy, or were refused since; bounded, so the latter cost a few copies at most."""
        self._num_being_made = 0

    @property
    def num_copies(self) -> int:
        return len(self._copies)

    def announce(self, num_answers: int, max_copies: int) -> None:
        """These answers will take copies soon: compile the ones that are missing, in this thread."""
        with self._lock:
            self._num_announced = min(max_copies, self._num_announced + num_answers)
            wanted = min(max_copies, self._num_announced + sum(copy.num_users for copy in self._copies))
            num_missing = wanted - len(self._copies) - self._num_being_made
            if self._recompile is None or num_missing <= 0:
                return
            self._num_being_made += num_missing
        made: list[GrammarCopy] = []
        try:
            for _ in range(num_missing):
                start = self._recompile()
                if not start.is_error():
                    made.append(GrammarCopy(start))
        finally:
            with self._lock:
                self._num_being_made -= num_missing
                self._copies += made

    def take_copy(self) -> GrammarCopy:
        """The copy with the fewest users; the first of several."""
        with self._lock:
            copy = min(self._copies, key=lambda one: one.num_users)
            copy.take()
            self._num_announced = max(0, self._num_announced - 1)
            return copy

    def drop_copies(self) -> None:
        """Keep the first only. Answers keep the copies that they have."""
        with self._lock:
            del self._copies[1:]
