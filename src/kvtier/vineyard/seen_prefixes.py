"""Long prefixes that were fully cached a moment ago: an append to one looks up only its last token."""

from __future__ import annotations

import threading
import time

from kvtier.blocks.hashing import BlockHash

_LONG_TOKENS = 256
_FRESH_NS = 1_000_000_000
_MAX_PREFIXES = 256


class SeenPrefixes:
    """Prefixes by the hash of their last token. Short ones are not kept: their lookup is quick. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._used_at: dict[BlockHash, int] = {}  # the latest last

    def note(self, last: BlockHash, num_tokens: int, used_at_ns: int) -> None:
        """All of the prefix that ends with `last` was present and used at that time of `time.monotonic_ns`."""
        if num_tokens < _LONG_TOKENS:
            return
        with self._lock:
            self._used_at.pop(last, None)
            self._used_at[last] = used_at_ns
            if len(self._used_at) > _MAX_PREFIXES:
                del self._used_at[next(iter(self._used_at))]

    def used_at_ns(self, last: BlockHash) -> int | None:
        """When the prefix was last seen, if that is recent enough to skip the lookup."""
        with self._lock:
            used_at_ns = self._used_at.get(last)
        if used_at_ns is None or time.monotonic_ns() - used_at_ns > _FRESH_NS:
            return None
        return used_at_ns
