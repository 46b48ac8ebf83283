"""Prefixes that were hashed before, found by another engine's own hashes of them. No torch.

Such an engine hashes every prompt itself. Its hashes cannot serve as our block hashes (they may differ between its
processes), but within one process, equal hashes mean equal tokens, adapter and inputs. So each prefix is hashed here
only once, and remembered: its block hashes, and when the cache was last known to have it.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.namespace import Namespace
from kvtier.transfer.lookup import Described

_STRIDE = 8
"""Every this many of the engine's hashes is remembered, and the last one of each prompt."""

_MAX_BLOCKS = 1 << 17
"""Limit on the blocks of all prefixes: 2 million tokens in about 15 MB."""

_FRESH_S = 60.0
"""Time after which the cache is asked again for a prefix that the engine itself holds. Asking keeps the prefix warm in
the cache, and shows what has to be saved again."""


@dataclass(eq=False, slots=True)
class KnownPrefix:
    """`hashes` of full blocks, from `root` on. The cache has `num_stored` of them; it was last asked at `asked_at`."""

    root: Namespace
    hashes: list[BlockHash]
    num_stored: int = 0
    asked_at: float = 0.0
    keys: list[bytes] = field(default_factory=list)


class KnownPrefixes:
    """Thread-safe. Stays empty if the engine's hash function is not cryptographic."""

    def __init__(
        self,
        page_tokens: int,
        block_tokens: int,
        algorithm: str,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """The engine hashes pages of `page_tokens` with `algorithm`."""
        self._page_tokens = page_tokens
        self._block_tokens = block_tokens
        self._clock = clock
        self._is_on = algorithm.startswith("sha256")
        self._lock = threading.Lock()
        self._places: dict[bytes, tuple[KnownPrefix, int]] = {}
        self._prefixes: OrderedDict[KnownPrefix, None] = OrderedDict()
        self._num_blocks = 0

    def find(self, root: Namespace, pages: Sequence[bytes]) -> tuple[KnownPrefix, int] | None:
        """The longest known prefix of the prompt that the engine hashed as `pages`, and how many blocks it has.

        Up to `_STRIDE` pages more may be known, unless the last of `pages` ended a prompt before.
        """
        with self._lock:
            found = self._places.get(pages[-1]) if pages else None
            if found is None:
                low, high = 0, len(pages) // _STRIDE  # `low` strides are known: always a leading part
                while low < high:
                    middle = (low + high + 1) // 2
                    place = self._places.get(pages[middle * _STRIDE - 1])
                    if place is None:
                        high = middle - 1
                    else:
                        low, found = middle, place
            if found is None or found[0].root != root:
                return None
            self._prefixes.move_to_end(found[0])
            return found

    def describe(
        self,
        root: Namespace,
        pages: Sequence[bytes],
        hash_rest: Callable[[int, BlockHash | None], list[BlockHash]],
    ) -> Described:
        """The hashes of a prompt. `hash_rest` computes them from a block on, given the hash of the block before it."""
        found = self.find(root, pages)
        hashes = [] if found is None else found[0].hashes[: found[1]]
        hashes += hash_rest(len(hashes), hashes[-1] if hashes else None)
        if found is None or self._is_beyond(len(pages), found[1]):
            self._remember(KnownPrefix(root, hashes[:], *self._stored(found)), pages)
        return Described(root, hashes)

    def fresh(self, root: Namespace, pages: Sequence[bytes]) -> Described | None:
        """The hashes of nearly all of `pages`, if the cache was recently known to have them."""
        found = self.find(root, pages)
        if found is None or self._is_beyond(len(pages), found[1]):
            return None
        prefix, num_blocks = found
        return Described(root, prefix.hashes[:num_blocks]) if self._num_fresh(found) == num_blocks else None

    def num_stored(self, root: Namespace, pages: Sequence[bytes]) -> int:
        """How many of the first blocks of `pages`, at least, the cache was recently known to have."""
        found = self.find(root, pages)
        return 0 if found is None else self._num_fresh(found)

    def _num_fresh(self, found: tuple[KnownPrefix, int]) -> int:
        prefix, num_blocks = found
        is_fresh = self._clock() - prefix.asked_at < _FRESH_S
        return min(num_blocks, prefix.num_stored) if is_fresh else 0

    def note_stored(self, root: Namespace, pages: Sequence[bytes], num_blocks: int, *, is_asked: bool) -> None:
        """The cache has, or is being given, the first `num_blocks` blocks. `is_asked`: it was asked for all of them."""
        found = self.find(root, pages)
        if found is None:
            return
        prefix, num_known = found
        # What the prompt has beyond the known prefix is not what the prefix has there.
        prefix.num_stored = num_blocks if num_blocks <= num_known else max(prefix.num_stored, num_known)
        if is_asked:
            prefix.asked_at = self._clock()

    def forget_stored(self) -> None:
        """The cache may have lost all of them."""
        with self._lock:
            for prefix in self._prefixes:
                prefix.num_stored = 0

    def _is_beyond(self, num_pages: int, num_blocks: int) -> bool:
        """Whether this many pages are a stride or more beyond this many blocks."""
        return (num_pages - _STRIDE) * self._page_tokens >= num_blocks * self._block_tokens

    def _stored(self, found: tuple[KnownPrefix, int] | None) -> tuple[int, float]:
        """What a new, longer prefix inherits from the shorter one that it begins with."""
        return (0, 0.0) if found is None else (min(found[0].num_stored, found[1]), found[0].asked_at)

    def _remember(self, prefix: KnownPrefix, pages: Sequence[bytes]) -> None:
        if not self._is_on:
            return
        ends = [*range(_STRIDE, len(pages), _STRIDE), len(pages)] if pages else []
        with self._lock:
            for end in ends:
                num_blocks = end * self._page_tokens // self._block_tokens
                if num_blocks and num_blocks <= len(prefix.hashes):
                    prefix.keys.append(pages[end - 1])
                    self._places[pages[end - 1]] = (prefix, num_blocks)
            if prefix.keys:
                self._prefixes[prefix] = None
                self._num_blocks += len(prefix.hashes)
            while self._num_blocks > _MAX_BLOCKS:
                self._forget(self._prefixes.popitem(last=False)[0])

    def _forget(self, prefix: KnownPrefix) -> None:
        self._num_blocks -= len(prefix.hashes)
        for key in prefix.keys:
            place = self._places.get(key)
            if place is not None and place[0] is prefix:
                del self._places[key]
