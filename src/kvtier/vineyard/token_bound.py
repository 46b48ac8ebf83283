"""Keeps a tree at `capacity` tokens: when an update has brought more, those used longest ago go, sequences' ends first.

The bound holds whenever no update is under way, for all processes together, as each prunes after its own. A server's
memory is a bound as well, which the server keeps by itself; where that is the smaller one, and there is no disk,
nothing is done here.

Whoever prunes lists the tree, orders it by time of use and remembers the colder half, for the next times: what was used
meanwhile is told by its time, and what has come since is not as cold. So a listing is paid for by as many updates as
bring half of the tree.

A server with a disk does not say how many blocks it has both there and in memory. So where there may be too many they
are listed, a sixteenth more are pruned than must be, and nobody lists again before as many were stored.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TypeVar

from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.namespace import Namespace
from kvtier.client.client import SingleClient
from kvtier.errors import TierError
from kvtier.vineyard.recency import LocalRecency, SharedRecency

logger = logging.getLogger(__name__)

_Answer = TypeVar("_Answer")

_SPARE_PART = 16
_SAME_START_S = 1.0
"""A server says how long it has been running; an answer takes some of that."""


@dataclass(frozen=True, slots=True)
class _Counts:
    """Blocks of the tree as the servers count them: `num_copies` at least, `most_copies` at most.

    `returns` is how often the servers came back. `stored` tells of those that answered which it is, when it was started
    and how many blocks it has stored since.
    """

    num_copies: int
    most_copies: int
    returns: tuple[tuple[int, ...], ...]
    stored: tuple[tuple[int, float, int], ...]

    def num_stored_since(self, before: _Counts) -> int | None:
        """How many blocks were stored since; None when other servers answered then, or one was started anew."""
        if self.returns != before.returns or len(self.stored) != len(before.stored):
            return None
        num_stored = 0
        for (number, began_at, count), (old_number, old_began_at, old_count) in zip(
            self.stored, before.stored, strict=True
        ):
            if number != old_number or abs(began_at - old_began_at) > _SAME_START_S or count < old_count:
                return None
            num_stored += count - old_count
        return num_stored


class TokenBound:
    """Of one cache object, over `servers` that keep `replicas` of each token. Thread-safe."""

    def __init__(
        self,
        servers: Sequence[SingleClient],
        namespace: Namespace,
        *,
        capacity: int,
        replicas: int,
        timeout_s: float,
    ) -> None:
        self._servers = servers
        self._namespace = namespace
        self._capacity = capacity
        self._replicas = replicas
        self._slot_bytes = servers[0].layout.slot_bytes
        self._lock = threading.Lock()
        self._cold: deque[tuple[BlockHash, int]] = deque()
        self._last_listed: tuple[_Counts, int] | None = None  # and how many more there could be since
        self._local = next((server for server in servers if server.is_local), None)
        self._recency: SharedRecency | LocalRecency
        if self._local is None:
            self._recency = LocalRecency(capacity)
        else:
            self._recency = SharedRecency(
                str(self._local.address),
                namespace,
                self._slot_bytes,
                timeout_s,
                functools.partial(_disk_bytes, self._local),
            )

    def touch(self, hashes: Sequence[BlockHash], used_at_ns: int) -> None:
        """These tokens, which follow each other, were used at that time of `time.monotonic_ns`."""
        if hashes and self._can_be_reached():
            self._follow()
            self._recency.touch(hashes, used_at_ns)

    def enforce(self, hashes: Sequence[BlockHash], num_kept: int) -> int:
        """Prune what is too many, but nothing of the leading `num_kept`. Returns how many tokens went.

        A server that is away is left out: what it has counts again when it is back.
        """
        if not self._can_be_reached():
            return 0
        num_pruned = 0
        while True:
            counts = self._counts()
            if self._num_distinct(counts.most_copies) <= self._capacity:
                break
            with self._lock:
                if counts.most_copies > counts.num_copies:
                    num_gone = self._prune_listed(counts, set(hashes[:num_kept]))
                else:
                    excess = self._num_distinct(counts.num_copies) - self._capacity
                    num_gone = self._prune(excess, set(hashes[:num_kept]))
            num_pruned += num_gone
            if not num_gone or len(self._servers) == 1:
                break  # of several, some tokens may have fewer copies than was reckoned with
        return num_pruned

    def close(self) -> None:
        self._recency.close()

    def _can_be_reached(self) -> bool:
        """The servers have room for more tokens than may be there. One that never answered has none yet."""
        if not all(server.is_local and not server.has_disk for server in self._servers):
            return True
        memory_bytes: list[int] = []
        for server in self._servers:
            with contextlib.suppress(TierError):
                memory_bytes.append(server.arena.nbytes)
        num_replicas = min(self._replicas, len(memory_bytes))
        return sum(memory_bytes) > self._capacity * num_replicas * self._slot_bytes

    def _follow(self) -> None:
        if isinstance(self._recency, SharedRecency):
            assert self._local is not None
            try:
                self._recency.follow(self._local.arena)
            except TierError as error:
                logger.debug("times of use are not noted: %s", error)

    def _counts(self) -> _Counts:
        """Those being written count."""
        digest = self._namespace.hex()
        num_copies = most_copies = 0
        stored: list[tuple[int, float, int]] = []
        returns = tuple(server.num_returns for server in self._servers)
        for number, described in self._of_those_that_answer(
            lambda server: (self._servers.index(server), server.stats())
        ):
            began_at = time.monotonic() - float(str(described["uptime_s"]))
            stored.append((number, began_at, int(str(described["stored_blocks"]))))
            spaces = described.get("namespaces")
            for space in spaces if isinstance(spaces, list) else []:
                if space["namespace"] == digest:
                    in_memory, on_disk = int(space["blocks"]), int(space["disk_blocks"])
                    num_copies += max(in_memory, on_disk)
                    most_copies += in_memory + on_disk
        return _Counts(num_copies, most_copies, returns, tuple(stored))

    def _num_distinct(self, num_copies: int) -> int:
        num_replicas = min(self._replicas, sum(server.is_up for server in self._servers))
        return -(-num_copies // max(1, num_replicas))

    def _of_those_that_answer(self, ask: Callable[[SingleClient], _Answer]) -> list[_Answer]:
        answers: list[_Answer] = []
        for server in self._servers:
            try:
                answers.append(ask(server))
            except TierError as error:
                logger.debug("the bound is kept without a server: %s", error)
        return answers

    def _prune_listed(self, counts: _Counts, kept: Collection[BlockHash]) -> int:
        """Prune by a listing, and to less than the capacity; or not at all if it is known that there are not too many.

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
                # A server says how many it had in memory or on disk, whichever is more, and not how many in all.
                self._of_those_that_answer(functools.partial(SingleClient.drop, hashes=victims))
                num_pruned += len(victims)
        if len(hashes) >= self._num_distinct(counts.num_copies):  # else a server did not answer, or others pruned
            self._last_listed = (counts, self._capacity - len(hashes) + num_pruned)
        return num_pruned

    def _prune(self, excess: int, kept: Collection[BlockHash]) -> int:
        num_pruned = 0
        has_listed = False
        while num_pruned < excess:
            victims = self._still_cold(excess - num_pruned, kept)
            if victims:
                dropped = self._of_those_that_answer(functools.partial(SingleClient.drop, hashes=victims))
                num_pruned += self._num_distinct(sum(dropped))  # less than that where another process was first
            elif has_listed:
                break
            else:
                self._remember_cold(self._listed(), excess + len(kept))
                has_listed = True
        return num_pruned

    def _still_cold(self, count: int, kept: Collection[BlockHash]) -> list[BlockHash]:
        """The next of the remembered that were not used since. Empty when none are left."""
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
        listings = self._of_those_that_answer(SingleClient.list_blocks)
        return list(dict.fromkeys(block_hash for listing in listings for block_hash, _ in listing))[::-1]

    def _remember_cold(self, hashes: Sequence[BlockHash], count: int) -> None:
        """Remember the colder half of the tree, or `count` if that is more.

        First are those of an unknown time, of them the last stored first: no end is left without its beginning.
        """
        times = self._recency.times(hashes)
        order = sorted(range(len(hashes)), key=times.__getitem__)[: max(count, len(hashes) // 2)]
        self._cold = deque((hashes[position], times[position]) for position in order)


def _disk_bytes(server: SingleClient) -> int:
    return int(str(server.stats().get("disk_file_space_bytes", 0))) if server.has_disk else 0
