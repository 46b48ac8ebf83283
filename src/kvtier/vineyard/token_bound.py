"""Keeps a tree at `capacity` tokens: after an update, the excess is pruned: least recently used first, from the ends.

The bound holds whenever no update is running, for all processes together, as each prunes after its own. A server's
memory is also a bound, which the server keeps by itself; if that is the smaller one, and there is no disk, nothing is
done here.

To prune, a process lists the tree, orders it by time of use and remembers the colder half for later: recorded times
show which were used meanwhile, and newer tokens are not as cold. So the cost of a listing is spread over as many
updates as store half of the tree.

A server with a disk does not report how many blocks it has both there and in memory. So if there may be too many, they
are listed, a sixteenth more than needed are pruned, and the next listing comes after as many were stored.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.namespace import Namespace
from kvtier.client.client import CacheClient
from kvtier.errors import TierError
from kvtier.vineyard.recency import LocalRecency, SharedRecency

logger = logging.getLogger(__name__)

_SPARE_PART = 16
_SAME_START_S = 1.0
"""Tolerance of a server's start time: it reports how long it has been running, and the answer takes some time."""


@dataclass(frozen=True, slots=True)
class _Counts:
    """Blocks of the tree as the server counts them: at least `num_tokens`, at most `most_tokens`.

    `num_returns` is how often the server came back, `began_at` when it was started, and `num_stored` how many blocks it
    has stored since.
    """

    num_tokens: int
    most_tokens: int
    num_returns: int
    began_at: float
    num_stored: int

    def num_stored_since(self, before: _Counts) -> int | None:
        """How many blocks were stored since then; None if the server was restarted."""
        is_same = self.num_returns == before.num_returns and abs(self.began_at - before.began_at) <= _SAME_START_S
        return self.num_stored - before.num_stored if is_same and self.num_stored >= before.num_stored else None


class TokenBound:
    """The bound of one cache object on `server`. Thread-safe."""

    def __init__(self, server: CacheClient, namespace: Namespace, *, capacity: int, timeout_s: float) -> None:
        self._server = server
        self._namespace = namespace
        self._capacity = capacity
        self._slot_bytes = server.layout.slot_bytes
        self._lock = threading.Lock()
        self._cold: deque[tuple[BlockHash, int]] = deque()
        self._last_listed: tuple[_Counts, int] | None = None  # and how many more there could be since
        self._recency: SharedRecency | LocalRecency
        if server.is_local:
            self._recency = SharedRecency(
                str(server.address), namespace, self._slot_bytes, timeout_s, functools.partial(_disk_bytes, server)
            )
        else:
            self._recency = LocalRecency(capacity)

    def touch(self, hashes: Sequence[BlockHash], used_at_ns: int) -> None:
        """These consecutive tokens were used at that time of `time.monotonic_ns`."""
        if hashes and self._can_be_reached():
            self._follow()
            self._recency.touch(hashes, used_at_ns)

    def enforce(self, hashes: Sequence[BlockHash], num_kept: int) -> int:
        """Prune the excess, but none of the leading `num_kept`. Returns how many tokens were pruned.

        Nothing is pruned while the server is away: its tokens count again when it is back.
        """
        if not self._can_be_reached():
            return 0
        try:
            counts = self._counts()
            if counts.most_tokens <= self._capacity:
                return 0
            with self._lock:
                kept = set(hashes[:num_kept])
                if counts.most_tokens > counts.num_tokens:
                    return self._prune_listed(counts, kept)
                return self._prune(counts.num_tokens - self._capacity, kept)
        except TierError as error:
            logger.debug("the bound is not kept: %s", error)
            return 0

    def close(self) -> None:
        self._recency.close()

    def _can_be_reached(self) -> bool:
        """Whether the server has room for more tokens than the bound. A server that never answered has none yet."""
        if not self._server.is_local or self._server.has_disk:
            return True
        try:
            return self._server.arena.nbytes > self._capacity * self._slot_bytes
        except TierError:
            return False

    def _follow(self) -> None:
        if isinstance(self._recency, SharedRecency):
            try:
                self._recency.follow(self._server.arena)
            except TierError as error:
                logger.debug("times of use are not noted: %s", error)

    def _counts(self) -> _Counts:
        """Counts tokens being written, too. Raises a `TierError`."""
        digest = self._namespace.hex()
        num_tokens = most_tokens = 0
        num_returns = self._server.num_returns
        described = self._server.stats()
        spaces = described.get("namespaces")
        for space in spaces if isinstance(spaces, list) else []:
            if space["namespace"] == digest:
                in_memory, on_disk = int(space["blocks"]), int(space["disk_blocks"])
                num_tokens += max(in_memory, on_disk)
                most_tokens += in_memory + on_disk
        began_at = time.monotonic() - float(str(described["uptime_s"]))
        return _Counts(num_tokens, most_tokens, num_returns, began_at, int(str(described["stored_blocks"])))

    def _prune_listed(self, counts: _Counts, kept: Collection[BlockHash]) -> int:
        """List and prune to less than the capacity, or do nothing if there are known not to be too many.

        `counts` are from before.
        """
        if self._last_listed is not None:
            before, num_more = self._last_listed
            num_stored = counts.num_stored_since(before)
            if num_stored is not None and num_stored <= num_more:
                return 0
        self._last_listed = None
        hashes = self._listed()
        num_pruned = 0
        if len(hashes) > self._capacity:
            excess = len(hashes) - self._capacity + self._capacity // _SPARE_PART
            self._remember_cold(hashes, excess + len(kept))
            while num_pruned < excess and (victims := self._still_cold(excess - num_pruned, kept)):
                # The server reports the larger of its counts in memory and on disk, not the total.
                self._server.drop(victims)
                num_pruned += len(victims)
        if len(hashes) >= counts.num_tokens:  # otherwise others pruned
            self._last_listed = (counts, self._capacity - len(hashes) + num_pruned)
        return num_pruned

    def _prune(self, excess: int, kept: Collection[BlockHash]) -> int:
        num_pruned = 0
        has_listed = False
        while num_pruned < excess:
            victims = self._still_cold(excess - num_pruned, kept)
            if victims:
                num_pruned += self._server.drop(victims)  # fewer if another process was first
            elif has_listed:
                break
            else:
                self._remember_cold(self._listed(), excess + len(kept))
                has_listed = True
        return num_pruned

    def _still_cold(self, count: int, kept: Collection[BlockHash]) -> list[BlockHash]:
        """The next remembered tokens that were not used since. Empty if none are left."""
        found: list[BlockHash] = []
        while self._cold and not found:
            some = [self._cold.popleft() for _ in range(min(count, len(self._cold)))]
            times = self._recency.times([block_hash for block_hash, _ in some])
            found = [
                block_hash
                for (block_hash, listed_at), used_at in zip(some, times, strict=True)
                if used_at <= listed_at and block_hash not in kept
            ]
        return found

    def _listed(self) -> list[BlockHash]:
        """The tree, the last stored first."""
        return list(dict.fromkeys(block_hash for block_hash, _ in self._server.list_blocks()))[::-1]

    def _remember_cold(self, hashes: Sequence[BlockHash], count: int) -> None:
        """Remember the colder half of the tree, or `count` if that is more.

        Those of an unknown time come first, and of them the last stored: no end is left without its beginning.
        """
        times = self._recency.times(hashes)
        order = sorted(range(len(hashes)), key=times.__getitem__)[: max(count, len(hashes) // 2)]
        self._cold = deque((hashes[position], times[position]) for position in order)


def _disk_bytes(server: CacheClient) -> int:
    return int(str(server.stats().get("disk_file_space_bytes", 0))) if server.has_disk else 0
