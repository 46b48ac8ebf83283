"""Counts the prompts that begin with prefixes which somebody else knows by name. Thread-safe, no torch."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvtier.blocks.hashing import BlockHash


@dataclass(slots=True)
class _Count:
    number: int = 0
    last_at: float = 0.0


class PrefixUses:
    """A prefix is known by the hash of its last full block, whose chain includes all tokens before it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._counts: dict[BlockHash, _Count] = {}

    def note(self, hashes: Sequence[BlockHash]) -> None:
        """A prompt with these blocks was computed or found."""
        if not self._counts:
            return
        with self._lock:
            for end in self._counts.keys() & hashes:
                count = self._counts[end]
                count.number += 1
                count.last_at = self._clock()

    def take(self, ends: Sequence[BlockHash]) -> list[tuple[bytes, int, float]]:
        """The used prefixes, each with its number of prompts since the last call and the seconds since the last one.

        From now on, prompts that begin with `ends` are counted, and no others.
        """
        with self._lock:
            before, self._counts = self._counts, {end: _Count() for end in ends}
            now = self._clock()
        return [(end, count.number, now - count.last_at) for end, count in before.items() if count.number]
