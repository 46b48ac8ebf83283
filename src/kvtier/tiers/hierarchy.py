"""The ordered tiers as one cache that can only help: match and lease across them, fetch, offer. Thread-safe.

A tier that fails is counted, left alone for a while and tried again; whoever asked gets less from the cache, never an
error. Match first, then reserve: nothing is taken until it is known what is there.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.match_end import MatchEnd, most_telling
from kvtier.errors import CapacityError, ConfigError, LeaseError, ProtocolError, TierError
from kvtier.memory.copying import Buffer
from kvtier.memory.lease import Lease
from kvtier.observe.log_limit import LogLimit
from kvtier.observe.metrics import TierMetrics
from kvtier.tiers.host import HostTier
from kvtier.tiers.remote import RemoteTier
from kvtier.tiers.tier import LazyTier, Tier

logger = logging.getLogger(__name__)

_FIRST_REST_S = 0.1
_LAST_REST_S = 5.0


class Guard:
    """One tier and its health. A failing tier rests, longer each time, up to five seconds."""

    def __init__(self, tier: Tier, metrics: TierMetrics, clock: Callable[[], float]) -> None:
        self.tier = tier
        self._metrics = metrics
        self._clock = clock
        self._log = LogLimit(logger)
        self._lock = threading.Lock()
        self._rest_s = _FIRST_REST_S
        self._rests_until = float("-inf")
        self._generation = _generation(tier)

    @property
    def is_resting(self) -> bool:
        """It failed a moment ago, and has not come back since, as far as it can tell."""
        return self._clock() < self._rests_until and _generation(self.tier) == self._generation

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Failures of the tier end here. Mistakes of the caller do not."""
        try:
            yield
        except (TierError, ProtocolError, OSError) as error:
            self._fail(error)
            return
        with self._lock:
            self._rest_s = _FIRST_REST_S

    def _fail(self, error: Exception) -> None:
        kind = error.kind if isinstance(error, TierError) else "io" if isinstance(error, OSError) else "protocol"
        self._metrics.failures.labels(tier=self.tier.name, kind=kind).inc()
        with self._lock:
            self._rests_until = self._clock() + self._rest_s
            self._generation = _generation(self.tier)
            self._rest_s = min(2 * self._rest_s, _LAST_REST_S)
        self._log.warning(kind, "tier failed name=%s: %s", self.tier.name, str(error))


def _generation(tier: Tier) -> tuple[int, ...]:
    return tier.generation if isinstance(tier, RemoteTier) else ()


@dataclass(frozen=True, slots=True)
class Segment:
    """The blocks from `first` on that one tier holds; after those of the lease, `num_stored` are on its disk."""

    tier: str
    first: int
    lease: Lease

    @property
    def num_blocks(self) -> int:
        return self.lease.num_blocks + self.lease.num_stored


@dataclass(frozen=True, slots=True)
class Ending:
    """What a tier said of the block at `position`, where its part of a match ended."""

    tier: str
    position: int
    ended: MatchEnd


class Hierarchy:
    """Tiers from fast to slow. They must agree on the layout. `promotes` copies what is fetched into faster tiers."""

    def __init__(
        self,
        tiers: Sequence[Tier],
        *,
        metrics: TierMetrics | None = None,
        promotes: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if len({tier.name for tier in tiers}) < len(tiers):
            raise ConfigError("two tiers have the same name")
        if len({tier.layout for tier in tiers}) > 1:
            raise ConfigError("the tiers do not agree on the layout of a block")
        self.metrics = TierMetrics() if metrics is None else metrics
        self._promotes = promotes
        self._guards = [Guard(tier, self.metrics, clock) for tier in tiers]

    def match(
        self,
        hashes: Sequence[BlockHash],
        *,
        timeout_s: float | None = None,
        is_counted: bool = True,
        is_lazy: bool = False,
    ) -> HierarchyLease:
        """Lease the longest prefix that the tiers hold together, each block in the fastest tier that has it.

        Not `is_counted`: the caller asks again for the same, and calls `count` for the answer that it uses. If lazy,
        what would have to be read from disk is counted in the segments and not leased; `fetch` stops before it.
        """
        segments: list[Segment] = []
        endings: list[Ending] = []
        num_blocks = 0
        for guard in self._guards:
            if num_blocks == len(hashes):
                break
            name = guard.tier.name
            ended = MatchEnd.TIER_DOWN
            if not guard.is_resting:
                with guard.watched():
                    wanted = hashes[num_blocks:]
                    tier = guard.tier
                    if is_lazy and isinstance(tier, LazyTier):
                        lease = tier.match_lazily(wanted, timeout_s=timeout_s)
                    else:
                        lease = tier.match(wanted, timeout_s=timeout_s)
                    ended = lease.ended
                    if lease.num_blocks or lease.num_stored:
                        segments.append(Segment(name, num_blocks, lease))
                        num_blocks += segments[-1].num_blocks
            endings.append(Ending(name, num_blocks, ended))
        found = HierarchyLease(self, hashes[:num_blocks], segments, _ending(endings, num_blocks, len(hashes)))
        if is_counted:
            self.count(found, len(hashes))
        return found

    def count(self, lease: HierarchyLease, num_wanted: int) -> None:
        """A match was used: every tier that was asked for more than it had has missed that."""
        by_tier = lease.blocks_by_tier
        for guard in self._guards:
            if not num_wanted:
                break
            num_hit = by_tier.get(guard.tier.name, 0)
            num_wanted -= num_hit
            self.metrics.hit_blocks.labels(tier=guard.tier.name).inc(num_hit)
            self.metrics.missed_blocks.labels(tier=guard.tier.name).inc(num_wanted)

    @property
    def guards(self) -> Sequence[Guard]:
        """The tiers with their health, from fast to slow."""
        return self._guards

    @property
    def host(self) -> HostTier | None:
        """The tier in memory of this process, if there is one."""
        return next((guard.tier for guard in self._guards if isinstance(guard.tier, HostTier)), None)

    def offer(self, hashes: Sequence[BlockHash], blocks: Sequence[Buffer]) -> dict[str, int]:
        """Offer blocks to every tier. Returns how many each wrote."""
        return self._offer(self._guards, hashes, blocks)

    def contains(self, hashes: Sequence[BlockHash]) -> list[bool]:
        found = [False] * len(hashes)
        for guard in self._guards:
            if guard.is_resting:
                continue
            with guard.watched():
                found = [known or here for known, here in zip(found, guard.tier.contains(hashes), strict=True)]
        return found

    def close(self) -> None:
        """Close every tier, also when one of them cannot."""
        with contextlib.ExitStack() as stack:
            for guard in reversed(self._guards):
                stack.callback(guard.tier.close)

    def fetch_segment(self, segment: Segment, hashes: Sequence[BlockHash], into: Sequence[Buffer]) -> int:
        """Bytes of one segment into `into`, and into faster tiers. Returns how many leading blocks arrived."""
        position = [guard.tier.name for guard in self._guards].index(segment.tier)
        guard = self._guards[position]
        arrived = 0
        with guard.watched():
            arrived = segment.lease.fetch(into)
        if self._promotes and arrived and position:
            self._offer(self._guards[:position], hashes[:arrived], into[:arrived])
        return arrived

    def _offer(self, guards: Sequence[Guard], hashes: Sequence[BlockHash], blocks: Sequence[Buffer]) -> dict[str, int]:
        stored = dict.fromkeys((guard.tier.name for guard in guards), 0)
        for guard in guards:
            if guard.is_resting:
                continue
            name = guard.tier.name
            with guard.watched():
                try:
                    stored[name] = guard.tier.offer(hashes, blocks)
                except CapacityError:
                    self.metrics.refused_blocks.labels(tier=name).inc(len(hashes))
                self.metrics.stored_blocks.labels(tier=name).inc(stored[name])
        return stored


class HierarchyLease:
    """A prefix leased across tiers. Not thread-safe."""

    def __init__(
        self, hierarchy: Hierarchy, hashes: Sequence[BlockHash], segments: Sequence[Segment], ending: Ending
    ) -> None:
        self._hierarchy = hierarchy
        self._hashes = hashes
        self.segments = segments
        self.ending = ending
        self._is_over = False

    @property
    def num_blocks(self) -> int:
        return len(self._hashes)

    @property
    def ended(self) -> MatchEnd:
        """As `Lease.ended`: what the next block was."""
        return self.ending.ended

    @property
    def blocks_by_tier(self) -> dict[str, int]:
        return {segment.tier: segment.num_blocks for segment in self.segments}

    def fetch(self, into: Sequence[Buffer]) -> int:
        """Fill the caller's buffers. Returns how many leading blocks arrived: fewer where a tier failed."""
        if self._is_over:
            raise LeaseError("this lease has ended")
        for segment in self.segments:
            end = min(segment.first + segment.lease.num_blocks, len(into))
            if segment.first >= end:
                break
            wanted = slice(segment.first, end)
            arrived = self._hierarchy.fetch_segment(segment, self._hashes[wanted], into[wanted])
            if segment.first + arrived < min(segment.first + segment.num_blocks, len(into)):
                return segment.first + arrived
        return min(len(into), self.num_blocks)

    def release(self) -> None:
        for segment in self.segments:
            segment.lease.release()
        self._is_over = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def _ending(endings: Sequence[Ending], num_blocks: int, num_wanted: int) -> Ending:
    """Why a match of `num_blocks` is not longer: what the tiers asked for the next block say of it."""
    if num_blocks == num_wanted:
        return Ending("", num_blocks, MatchEnd.ALL)
    last = [ending for ending in endings if ending.position == num_blocks]
    ended = most_telling(ending.ended for ending in last)
    return next((ending for ending in last if ending.ended is ended), Ending("", num_blocks, ended))
