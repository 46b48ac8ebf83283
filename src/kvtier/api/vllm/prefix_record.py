"""Which beginnings of prompts each engine has seen, as far as is known: bounded, and forgotten with the engine.

The HTTP server notes where it sends prompts. It does not read the KV events of engines: a prefix that an engine has
evicted counts until the record's bound drops it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from kvtier.api.limits import MAX_REMEMBERED_PREFIXES
from kvtier.api.vllm.prefix_keys import PrefixKey


class PrefixRecord:
    """Keys by the name of the engine that has seen them. `most` is how many are kept of each."""

    def __init__(self, most: int = MAX_REMEMBERED_PREFIXES) -> None:
        self._most = most
        self._of_engines: dict[str, OrderedDict[PrefixKey, None]] = {}

    def match(self, engine: str, keys: Sequence[PrefixKey]) -> int:
        """How many of `keys`, the shortest beginning first, the engine has seen: up to the longest that it has."""
        seen = self._of_engines.get(engine)
        if not seen:
            return 0
        return next((number for number in range(len(keys), 0, -1) if keys[number - 1] in seen), 0)

    def note(self, engine: str, keys: Sequence[PrefixKey]) -> None:
        seen = self._of_engines.setdefault(engine, OrderedDict())
        for key in reversed(keys):  # a beginning that many prompts have is forgotten last
            seen[key] = None
            seen.move_to_end(key)
        while len(seen) > self._most:
            seen.popitem(last=False)

    def forget(self, engine: str) -> None:
        self._of_engines.pop(engine, None)
