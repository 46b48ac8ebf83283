"""Keeps a tree at `capacity` tokens: when an update has brought more, those used longest ago go, sequences' ends first.

The bound holds whenever no update is under way, for all processes together, as each prunes after its own. A server's
memory is a bound as well, which the server keeps by itself; where that is the smaller one nothing is done here.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.namespace import Namespace
from kvtier.client.client import CacheClient, SingleClient
from kvtier.errors import TierError
from kvtier.vineyard.recency import LocalRecency, SharedRecency

logger = logging.getLogger(__name__)

_SLACK = 32
"""A part in so many goes beyond what must, so that not every update has to look for what to prune."""


class TokenBound:
    """Of one cache object. Thread-safe."""

    def __init__(
        self,
        client: CacheClient,
        servers: Sequence[SingleClient],
        namespace: Namespace,
        capacity: int,
        timeout_s: float,
    ) -> None:
        self.capacity = capacity
        self._client = client
        self._servers = servers
        self._namespace = namespace
        self._slot_bytes = client.layout.slot_bytes
        self._local = next((server for server in servers if server.is_local), None)
        self._recency: SharedRecency | LocalRecency
        if self._local is None:
            self._recency = LocalRecency(capacity)
        else:
            self._recency = SharedRecency(str(self._local.address), namespace, self._slot_bytes, timeout_s)

    def touch(self, hashes: Sequence[BlockHash]) -> None:
        """These leading tokens of a sequence were used now."""
        if hashes and self._can_be_reached():
            self._follow()
            self._recency.touch(hashes)

    def enforce(self, kept: Collection[BlockHash]) -> int:
        """Prune what is too many, but nothing of `kept`. Returns how many tokens went; none when a server is away."""
        if not self._can_be_reached():
            return 0
        try:
            if self._num_blocks() <= self.capacity:
                return 0
            listed = self._listed()
            if len(listed) <= self.capacity:
                return 0
            victims = self._coldest(listed, kept, len(listed) - self.capacity + self.capacity // _SLACK)
            self._client.drop(victims)
            return len(victims)
        except TierError as error:
            logger.debug("nothing pruned: %s", error)
            return 0

    def close(self) -> None:
        self._recency.close()

    def _can_be_reached(self) -> bool:
        """The servers have memory for more tokens than may be there."""
        try:
            memory_bytes = [server.arena.nbytes for server in self._servers if server.is_local]
        except TierError:
            return False
        if len(memory_bytes) < len(self._servers):
            return True
        return sum(memory_bytes) > self.capacity * self._slot_bytes

    def _follow(self) -> None:
        if isinstance(self._recency, SharedRecency):
            assert self._local is not None
            try:
                self._recency.follow(self._local.arena)
            except TierError as error:
                logger.debug("times of use are not noted: %s", error)

    def _num_blocks(self) -> int:
        """At least as many as there are tokens."""
        digest = self._namespace.hex()
        total = 0
        for server in self._servers:
            spaces = server.info().get("namespaces")
            for space in spaces if isinstance(spaces, list) else []:
                if space["namespace"] == digest:
                    total += int(space["blocks"]) + int(space["disk_blocks"])
        return total

    def _listed(self) -> list[BlockHash]:
        """Every token's hash, once, those first stored first."""
        return list(dict.fromkeys(block_hash for server in self._servers for block_hash, _ in server.list_blocks()))

    def _coldest(self, listed: list[BlockHash], kept: Collection[BlockHash], count: int) -> list[BlockHash]:
        """Those of an unknown time first, of them the last stored first: no end is left without its beginning."""
        kept = set(kept)
        candidates = [block_hash for block_hash in reversed(listed) if block_hash not in kept]
        times = self._recency.times(candidates)
        order = sorted(range(len(candidates)), key=times.__getitem__)
        return [candidates[position] for position in order[:count]]
