"""Where blocks go among several servers: rendezvous hashing with replicas. Thread-safe.

Each block has an order of servers of its own, which depends on their addresses only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from kvtier.blocks.hashing import BlockHash
from kvtier.errors import ConfigError

_NUM_BUCKETS = 4096


class Placement:
    """Servers are numbered as in `addresses`. A block belongs on the first `replicas` of its order that are up."""

    def __init__(self, addresses: Sequence[str], replicas: int) -> None:
        if not 1 <= replicas <= len(addresses):
            raise ConfigError(f"replicas must be from 1 to the number of servers, {len(addresses)}, not {replicas}")
        if len(set(addresses)) < len(addresses):
            raise ConfigError("a server is named twice")
        self._addresses = addresses
        self._replicas = replicas
        self._orders: list[tuple[int, ...] | None] = [None] * _NUM_BUCKETS

    def homes(self, block_hash: BlockHash, is_up: Sequence[bool] | None = None) -> Sequence[int]:
        """The servers that should hold the block, first choice first; without `is_up`, when all servers are up."""
        order = self._order(block_hash)
        return (order if is_up is None else [server for server in order if is_up[server]])[: self._replicas]

    def by_server(self, hashes: Sequence[BlockHash], is_up: Sequence[bool]) -> dict[int, list[int]]:
        """Positions by server, each position with all of its servers."""
        groups: dict[int, list[int]] = {}
        for position, block_hash in enumerate(hashes):
            for server in self.homes(block_hash, is_up):
                groups.setdefault(server, []).append(position)
        return groups

    def _order(self, block_hash: BlockHash) -> tuple[int, ...]:
        """The servers with the highest score for the block's bucket first."""
        bucket = block_hash[0] << 4 | block_hash[1] >> 4
        order = self._orders[bucket]
        if order is None:
            scores = [hashlib.sha256(f"{bucket} {address}".encode()).digest() for address in self._addresses]
            order = tuple(sorted(range(len(scores)), key=lambda server: scores[server], reverse=True))
            self._orders[bucket] = order
        return order
