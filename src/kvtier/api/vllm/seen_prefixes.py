"""The beginnings of prompts that each engine has seen: bounded, and forgotten when the engine restarts.

The HTTP server notes where it sends prompts. It does not read the engines' KV events: a prefix that an engine has
evicted counts until it drops out of the bounded record.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from kvtier.api.limits import MAX_REMEMBERED_PREFIXES
from kvtier.api.vllm.prefix_keys import PrefixKey


class SeenPrefixes:
    """Prefix keys by the name of the engine that has seen them; at most `most` are kept for each."""

    def __init__(self, most: int = MAX_REMEMBERED_PREFIXES) -> None:
        self._most = most
        self._of_engines: dict[str, OrderedDict[PrefixKey, None]] = {}

    def match(self, engine: str, keys: Sequence[PrefixKey]) -> int:
        """How many of `keys`, which are ordered by length, the engine has seen, counted up to the longest known one."""
        seen = self._of_engines.get(engine)
        if not seen:
            return 0
        return next((number for number in range(len(keys), 0, -1) if keys[number - 1] in seen), 0)

    def note(self, engine: str, keys: Sequence[PrefixKey]) -> None:
        seen = self._of_engines.setdefault(engine, OrderedDict())
        for key in reversed(keys):  # short beginnings, which many prompts share, are forgotten last
            seen[key] = None
            seen.move_to_end(key)
        while len(seen) > self._most:
            seen.popitem(last=False)

    def forget(self, engine: str) -> None:
        self._of_engines.pop(engine, None)
