"""Prefixes that were hashed before, found by another engine's own hashes of them. No torch.

Such an engine hashes every prompt itself. Its hashes are no identity of ours (they may differ between its processes),
but within one process the same hash is the same tokens, adapter and inputs. So a prefix is hashed here once, and what
is known of it stays: its block hashes, and when the cache was last known to have it.
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
"""One in so many of the engine's hashes is remembered, and the last of a prompt."""

_MAX_BLOCKS = 1 << 17
"""Of all prefixes together: 2 million tokens in about 15 MB."""

_FRESH_S = 60.0
"""The cache is asked again for a prefix that the engine has itself when it was not for so long: it keeps what is asked
for, and what it has lost is saved again."""


@dataclass(eq=False, slots=True)
class Prefix:
    """`hashes` of full blocks from `root` on. The cache has `num_stored` of them; it was last asked at `asked_at`."""

    root: Namespace
    hashes: list[BlockHash]
    num_stored: int = 0
    asked_at: float = 0.0
    keys: list[bytes] = field(default_factory=list)


class KnownPrefixes:
    """Thread-safe. Remembers nothing where the engine's hashes are not those of a cryptographic function."""

    def __init__(
        self,
        page_tokens: int,
        block_tokens: int,
        algorithm: str,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """The engine hashes pages of `page_tokens` by `algorithm`."""
        self._page_tokens = page_tokens
        self._block_tokens = block_tokens
        self._clock = clock
        self._is_on = algorithm.startswith("sha256")
        self._lock = threading.Lock()
        self._places: dict[bytes, tuple[Prefix, int]] = {}
        self._prefixes: OrderedDict[Prefix, None] = OrderedDict()
        self._num_blocks = 0

    def find(self, root: Namespace, pages: Sequence[bytes]) -> tuple[Prefix, int] | None:
        """The longest known prefix of what the engine's hashes `pages` stand for, and how many blocks of it they have.

        At most `_STRIDE` pages more may be known, unless the last of `pages` is the last of a prompt that was.
        """
        with self._lock:
            found = self._places.get(pages[-1]) if pages else None
            if found is None:
                low, high = 0, len(pages) // _STRIDE  # `low` strides are known; what is known of a prompt is its front
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
        """The hashes of a prompt. `hash_rest` makes those from a block on, after the hash of the one before."""
        found = self.find(root, pages)
        hashes = [] if found is None else found[0].hashes[: found[1]]
        hashes += hash_rest(len(hashes), hashes[-1] if hashes else None)
        if found is None or self._is_beyond(len(pages), found[1]):
            self._remember(Prefix(root, hashes[:], *self._stored(found)), pages)
        return Described(root, hashes)

    def fresh(self, root: Namespace, pages: Sequence[bytes]) -> Described | None:
        """Nearly all that `pages` stand for, if the cache was known a moment ago to have it."""
        found = self.find(root, pages)
        if found is None:
            return None
        prefix, num_blocks = found
        is_stored = prefix.num_stored >= num_blocks and self._clock() - prefix.asked_at < _FRESH_S
        if not is_stored or self._is_beyond(len(pages), num_blocks):
            return None
        return Described(root, prefix.hashes[:num_blocks])

    def note_stored(self, root: Namespace, pages: Sequence[bytes], num_blocks: int, *, is_asked: bool) -> None:
        """The cache has, or is given, the first `num_blocks` of these. `is_asked`: it was asked for all of them."""
        found = self.find(root, pages)
        if found is not None:
            found[0].num_stored = num_blocks
            if is_asked:
                found[0].asked_at = self._clock()

    def forget_stored(self) -> None:
        """The cache may have nothing of them."""
        with self._lock:
            for prefix in self._prefixes:
                prefix.num_stored = 0

    def _is_beyond(self, num_pages: int, num_blocks: int) -> bool:
        """So many pages are a stride or more than so many blocks."""
        return (num_pages - _STRIDE) * self._page_tokens >= num_blocks * self._block_tokens

    def _stored(self, found: tuple[Prefix, int] | None) -> tuple[int, float]:
        """Of a longer prefix, what is known of the shorter one that it begins with."""
        return (0, 0.0) if found is None else (min(found[0].num_stored, found[1]), found[0].asked_at)

    def _remember(self, prefix: Prefix, pages: Sequence[bytes]) -> None:
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

    def _forget(self, prefix: Prefix) -> None:
        self._num_blocks -= len(prefix.hashes)
        for key in prefix.keys:
            place = self._places.get(key)
            if place is not None and place[0] is prefix:
                del self._places[key]
