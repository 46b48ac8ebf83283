"""Replays a trace through a server's memory and disk: hits by tier, times to first token, GPU time, bytes written.

The server's own code matches, loads, admits and evicts (`cacheserver.cached_blocks`), over real pools with the
configured policies; the clock is the trace's, and blocks have no bytes. A request is served at the instant of its
arrival, on an idle GPU: it loads its hits, computes the rest, and stores the blocks it computed.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvtier.blocks.block import Block
from kvtier.blocks.eviction import Eviction
from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.layout import SLOT_ALIGN_BYTES
from kvtier.blocks.namespace import Namespace
from kvtier.cacheserver.cached_blocks import CachedBlocks
from kvtier.cacheserver.cluster_below import NO_CLUSTER
from kvtier.cacheserver.disk_admission import DiskAdmission, StoreOn, WriteBudget
from kvtier.cacheserver.namespaces import MemoryBlock, Namespaces
from kvtier.cacheserver.persistence import NO_DISK
from kvtier.cacheserver.sealer import NO_SEALER
from kvtier.cacheserver.tenants import Tenants
from kvtier.simulate.costs import Costs
from kvtier.simulate.disk import SimulatedDisk
from kvtier.simulate.replay import BlockNames, VirtualClock
from kvtier.simulate.trace import BLOCK_TOKENS, TracedRequest

_LEAVING_S = 1.0
"""Interval at which a server looks at the blocks that are about to leave its memory."""


@dataclass(frozen=True, slots=True)
class TierSettings:
    """The settings of a server, with at least one block of memory; without `disk_blocks` it has no disk."""

    memory_blocks: int
    disk_blocks: int = 0
    eviction: Eviction = "adaptive"
    stores_on: StoreOn = "commit"
    disk_writes_per_day: int | None = None


@dataclass(frozen=True, slots=True)
class TieredReplay:
    """The result of replaying a trace through a server. `ttfts_s` are in ascending order."""

    input_tokens: int
    memory_tokens: int
    disk_tokens: int
    saved_gpu_s: float
    memory_bytes_written: int
    disk_bytes_written: int
    num_withheld_blocks: int
    ttfts_s: Sequence[float]

    @property
    def hit_rate(self) -> float:
        return (self.memory_tokens + self.disk_tokens) / self.input_tokens if self.input_tokens else 0.0

    @property
    def mean_ttft_s(self) -> float:
        return math.fsum(self.ttfts_s) / len(self.ttfts_s) if self.ttfts_s else 0.0

    def ttft_s(self, share: float) -> float:
        """The time to first token that `share` of the requests do not exceed; 0 without a request."""
        return share_of_sorted(self.ttfts_s, share)


def share_of_sorted(values: Sequence[float], share: float) -> float:
    """The value that `share` of all, in ascending order, do not exceed."""
    return values[min(len(values) - 1, int(len(values) * share))] if values else 0.0


def replay_tiers(
    requests: Iterable[TracedRequest], settings: TierSettings, costs: Costs, block_tokens: int = BLOCK_TOKENS
) -> TieredReplay:
    """Replay `requests`, which must be in the order of their arrival; see `by_arrival`."""
    block_bytes = block_tokens * costs.shape.kv_bytes
    server = _Server(settings, costs, block_tokens, block_bytes)
    input_tokens = memory_tokens = disk_tokens = 0
    saved_s = 0.0
    ttfts_s = []
    for request in requests:
        in_memory, found = server.serve(request)
        compute_s = costs.rest_s(found, request.input_length)
        load_s = costs.load_s(in_memory * costs.shape.kv_bytes, from_disk=False)
        load_s += costs.load_s((found - in_memory) * costs.shape.kv_bytes, from_disk=True)
        ttfts_s.append(load_s + compute_s)
        saved_s += costs.prefill_s(0, request.input_length) - compute_s
        input_tokens += request.input_length
        memory_tokens += in_memory
        disk_tokens += found - in_memory
    disk = server.disk
    return TieredReplay(
        input_tokens,
        memory_tokens,
        disk_tokens,
        saved_s,
        server.num_into_memory * block_bytes,
        disk.num_written * block_bytes if disk is not None else 0,
        disk.admission.num_withheld if disk is not None else 0,
        sorted(ttfts_s),
    )


class _Server:
    """A server with one namespace, in memory and, if configured, on disk."""

    def __init__(self, settings: TierSettings, costs: Costs, block_tokens: int, block_bytes: int) -> None:
        self._clock = VirtualClock()
        self._costs = costs
        self._block_tokens = block_tokens
        self._names = BlockNames()
        self.disk = self._make_disk(settings, block_bytes) if settings.disk_blocks else None
        memory_bytes = settings.memory_blocks * SLOT_ALIGN_BYTES
        namespaces = Namespaces(memory_bytes)
        self._blocks = CachedBlocks(
            settings.memory_blocks,
            NO_DISK if self.disk is None else self.disk,
            namespaces,
            threading.Lock(),
            self._clock,
            True,
            False,
            NO_SEALER,
            NO_CLUSTER,
            settings.eviction,
        )
        owner = Tenants(memory_bytes=memory_bytes, file_bytes=None, file=None).owner
        name = Namespace(bytes(32))
        self._space = namespaces.open(owner, name, name, "trace", SLOT_ALIGN_BYTES, block_tokens, "")
        self._looked_at = 0.0
        self.num_into_memory = 0

    def serve(self, request: TracedRequest) -> tuple[int, int]:
        """Serve a request. Returns its hit tokens in memory, and those in memory and on disk together."""
        self._clock.now_s = request.arrived_s
        hashes = self._names.of(request.hashes)
        length = request.input_length
        found, num_stored = self._match(hashes)
        in_memory = min(len(found) * self._block_tokens, length)
        if num_stored:
            end = min((len(found) + num_stored) * self._block_tokens, length)
            if self._costs.is_worth_loading(in_memory, end, (end - in_memory) * self._costs.shape.kv_bytes):
                found += self._load(hashes[len(found) : len(found) + num_stored])
        self._store(hashes, found)
        if self.disk is not None:
            self.disk.touch(hashes[: len(found)])
            self._let_leave()
        return in_memory, min(len(found) * self._block_tokens, length)

    def _match(self, hashes: list[BlockHash]) -> tuple[list[Block], int]:
        if self.disk is None:
            return self._blocks.find_in_memory(self._space, hashes, len(hashes)).blocks, 0
        no_limit = 2 * len(hashes)
        found, _, num_stored = self._blocks.find_lazily(self._space, hashes, no_limit, no_limit)
        return found, num_stored

    def _load(self, hashes: list[BlockHash]) -> list[Block]:
        """Load blocks from disk, as many as memory has room for."""
        return self._blocks.find(self._space, hashes, len(hashes))[0]

    def _store(self, hashes: list[BlockHash], found: list[Block]) -> None:
        """Store the computed blocks, then return all references to the prompt's blocks."""
        granted: list[Block] = []
        if len(found) < len(hashes):
            granted = self._blocks.reserve(self._space, hashes[len(found) :], len(hashes)).blocks
            self._blocks.commit(self._space, granted)
            self.num_into_memory += len(granted)
        self._blocks.free(found + granted)

    def _let_leave(self) -> None:
        assert self.disk is not None
        if self.disk.admission.looks_at_leaving and self._clock.now_s - self._looked_at >= _LEAVING_S:
            self._looked_at = self._clock.now_s
            self._blocks.store_what_leaves()

    def _make_disk(self, settings: TierSettings, block_bytes: int) -> SimulatedDisk:
        budget = None
        if settings.disk_writes_per_day is not None:
            budget = WriteBudget(settings.disk_writes_per_day, self._clock)
        admission = DiskAdmission(settings.stores_on, budget)
        disk = SimulatedDisk(settings.disk_blocks, settings.eviction, admission, block_bytes, self._clock)
        disk.on_loaded = self._loaded
        return disk

    def _loaded(self, blocks: Sequence[MemoryBlock]) -> None:
        self.num_into_memory += len(blocks)
        self._blocks.end_loading(blocks, [True] * len(blocks))
