"""Keeps a tree at `capacity` tokens: when an update has brought more, those used longest ago go, sequences' ends first.

The bound holds whenever no update is under way, for all processes together, as each prunes after its own. A server's
memory is a bound as well, which the server keeps by itself; where that is the smaller one nothing is done here.

Whoever prunes lists the tree, orders it by time of use and remembers the colder half, for the next times: what was used
meanwhile is told by its time, and what has come since is not as cold. So a listing is paid for by as many updates as
bring half of the tree.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.namespace import Namespace
from kvtier.client.client import SingleClient
from kvtier.errors import TierError
from kvtier.vineyard.recency import LocalRecency, SharedRecency

logger = logging.getLogger(__name__)

_Answer = TypeVar("_Answer")


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
        self._local = next((server for server in servers if server.is_local), None)
        self._recency: SharedRecency | LocalRecency
        if self._local is None:
            self._recency = LocalRecency(capacity)
        else:
            self._recency = SharedRecency(str(self._local.address), namespace, self._slot_bytes, timeout_s)

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
        while (excess := self._num_tokens() - self._capacity) > 0:
            with self._lock:
                num_gone = self._prune(excess, set(hashes[:num_kept]))
            num_pruned += num_gone
            if not num_gone or len(self._servers) == 1:
                break  # of several, some tokens may have fewer copies than was reckoned with
        return num_pruned

    def close(self) -> None:
        self._recency.close()

    def _can_be_reached(self) -> bool:
        """The servers have memory for more tokens than may be there. One that never answered has none yet."""
        if not all(server.is_local for server in self._servers):
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

    def _num_tokens(self) -> int:
        """Those being written count. Of a server with a disk, which has most blocks twice, the larger number counts."""
        digest = self._namespace.hex()
        num_copies = 0
        for described in self._of_those_that_answer(SingleClient.info):
            spaces = described.get("namespaces")
            for space in spaces if isinstance(spaces, list) else []:
                if space["namespace"] == digest:
                    num_copies += max(int(space["blocks"]), int(space["disk_blocks"]))
        return self._num_distinct(num_copies)

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
                self._look_for_cold(excess + len(kept))
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

    def _look_for_cold(self, count: int) -> None:
        """Remember the colder half of the tree, or `count` if that is more.

        First are those of an unknown time, of them the last stored first: no end is left without its beginning.
        """
        listings = self._of_those_that_answer(SingleClient.list_blocks)
        hashes = list(dict.fromkeys(block_hash for listing in listings for block_hash, _ in listing))[::-1]
        times = self._recency.times(hashes)
        order = sorted(range(len(hashes)), key=times.__getitem__)[: max(count, len(hashes) // 2)]
        self._cold = deque((hashes[position], times[position]) for position in order)
