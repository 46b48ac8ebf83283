"""The cost model of the simulation. Every number is measured, or is an assumption that its comment names."""

from __future__ import annotations

import math
from dataclasses import dataclass

from benchmarks.shapes import SHAPES
from kvtier.stores.valkey.shard import CONNECTIONS_PER_SHARD

_FEW_NODES = 3
"""With fewer nodes, `stores/valkey/cluster` asks each over all of its connections."""

LAYOUT = SHAPES["Qwen2.5-7B"]
"""57,344 bytes a token, 0.9 MB a block of 16."""


@dataclass(frozen=True, slots=True)
class Costs:
    """The costs of an H200 with Qwen2.5-7B, kvtier's client and Valkey 9.1. Rates are in bytes per second."""

    token_prefill_s: float = 2.115e-5
    pair_prefill_s: float = 2.951e-10
    """Fitted to two measurements on an H200: 10,240 tokens in 0.2475 s, 30,000 tokens in 0.90 s."""

    step_s: float = 0.0076
    """A prompt of 30,000 tokens that the device has: measured."""

    client_rate: float = 2.6e9
    """kvtier's get from a cluster of three nodes on loopback (`results/cpu_valkey.json`); a core's worth."""

    shard_get_rate: float = 1 / 0.28 * 1e9
    shard_put_rate: float = 1 / 0.24 * 1e9
    """One core of a node: 0.28 s for a GB got, 0.24 s for a GB put, measured on loopback. Its network may be slower."""

    host_memory_rate: float = 52e9
    """From memory of the host to the GPU: measured."""

    match_key_s: float = 5.2e-3 / 512
    """The client's time for each key of a match (`results/cpu_valkey.json`)."""

    shard_key_s: float = 3.3e-6
    """A node's CPU for each key of a match, pipelined: measured on one core."""

    deadline_s: float = 1.0
    """`timeout_s`: the wait of the first request to a hung node."""

    keeper_s: float = 0.5
    """The longest time until a host notices that a node is back."""

    failover_s: float = 3.3
    """From the end of a primary to its replica's first answer: measured with `cluster-node-timeout 2000`."""

    first_rest_s: float = 1.0
    last_rest_s: float = 10.0
    """A host whose load was late leaves the cluster alone, twice as long each time, as `transfer/decision` does."""

    in_flight_bytes: int = 64 << 20
    max_in_flight: int = 16
    """Bytes in flight to a host, and blocks of one connection, as in `stores/valkey/window`."""

    def window_blocks(self, num_nodes: int) -> int:
        """Blocks in flight from each of the nodes that a load asks at once.

        The bound of a host is divided among the connections in use: two to each of a few nodes, else one.
        """
        connections = CONNECTIONS_PER_SHARD if num_nodes < _FEW_NODES else 1
        share = self.in_flight_bytes // (LAYOUT.block_bytes * connections * num_nodes)
        return connections * max(1, min(self.max_in_flight, share))

    def prefill_s(self, first_token: int, num_tokens: int) -> float:
        """Computing `num_tokens` behind the first `first_token` tokens of a prompt."""
        end = first_token + num_tokens
        return self.token_prefill_s * num_tokens + self.pair_prefill_s * (end**2 - first_token**2)

    def blocks_s(self, first_block: int, num_blocks: int) -> float:
        return self.prefill_s(first_block * LAYOUT.block_tokens, num_blocks * LAYOUT.block_tokens)

    def blocks_in(self, first_block: int, seconds: float) -> float:
        """The number of blocks from `first_block` on computed in `seconds`: the inverse of `blocks_s`."""
        first_token = first_block * LAYOUT.block_tokens
        slope = self.token_prefill_s + 2 * self.pair_prefill_s * first_token
        root = math.sqrt(slope**2 + 4 * self.pair_prefill_s * max(0.0, seconds))
        return (root - slope) / (2 * self.pair_prefill_s) / LAYOUT.block_tokens


def bytes_of(num_blocks: int) -> int:
    return num_blocks * LAYOUT.block_bytes
