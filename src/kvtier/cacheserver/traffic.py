"""Records clients' requests for planners and recorders. Thread-safe, without a lock of its own."""

from __future__ import annotations

import enum

from kvtier.blocks.eviction import Eviction
from kvtier.blocks.layout import SLOT_ALIGN_BYTES
from kvtier.cacheserver.namespaces import MemorySpace
from kvtier.cacheserver.prompt_log import PromptLog
from kvtier.cacheserver.reuse_record import ReuseRecord

_SHARE_DIGITS = 5
_MEMORY_FACTOR = 16
_DISK_FACTOR = 4


class Asking(enum.IntEnum):
    """The kinds of lookup. A client that uses a higher kind repeats its requests in the lower ones.

    An engine matches a prompt lazily, then matches the part that it loads from disk, and over TCP gets those blocks.
    """

    GET = 1
    MATCH = 2
    LAZY_MATCH = 3


class ServerTraffic:
    """The traffic of one server, with `memory_bytes` of memory and, with a disk, `file_bytes` on it."""

    def __init__(self, memory_bytes: int, file_bytes: int | None, eviction: Eviction) -> None:
        self._eviction = eviction
        self._memory_bytes = memory_bytes
        self._file_bytes = file_bytes
        max_bytes = max(_MEMORY_FACTOR * memory_bytes, _DISK_FACTOR * (file_bytes or 0))
        self._record = ReuseRecord(SLOT_ALIGN_BYTES, max_bytes // SLOT_ALIGN_BYTES)
        self._prompts = PromptLog()

    def note_asked(self, space: MemorySpace, hashes: bytes, asking: Asking) -> None:
        """Record a prompt's lookup; it counts once, however many requests its client makes for it."""
        if asking < space.asking or hashes == space.namespace:  # the latter is a table, not a prompt
            return
        space.asking = asking
        self._record.note_asked(hashes, space.index.block_units, space.block_tokens)
        self._prompts.note(space.namespace, space.block_tokens, hashes)

    def note_stored(self, space: MemorySpace, hashes: bytes) -> None:
        self._record.note_stored(hashes, space.index.block_units)

    def curve(self) -> dict[str, object]:
        """The share of prompt tokens that LRU would hit, by cache size, and the server's own sizes."""
        use = self._record.read()
        points = [[size, round(share, _SHARE_DIGITS)] for size, share in use.points]
        return {
            "policy": "lru",
            "runs": self._eviction,
            "memory_bytes": self._memory_bytes,
            "file_bytes": self._file_bytes,
            "requests": use.num_requests,
            "asked_tokens": use.asked_tokens,
            "asked_bytes": use.asked_bytes,
            "seconds": round(use.seconds, 3),
            "sampled_share": use.sampled_share,
            "points": points,
        }

    def prompts_from(self, first: int) -> dict[str, object]:
        """The prompts requested since the previous call, for a recorder. The keys are the beginnings of hashes."""
        return self._prompts.read(first)
