"""The ordered tiers as one cache that can only help: match and lease across them. Thread-safe.

A failure of a tier is counted; the tier is left alone for a while and then tried again. The caller gets less from the
cache, never an error. Match first, then reserve: no room is taken before the cached blocks are known.
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
from kvtier.blocks.retention import Granted
from kvtier.errors import ConfigError, ProtocolError, TierError
from kvtier.memory.lease import Lease
from kvtier.observe.log_limit import LogLimit
from kvtier.observe.metrics import TierMetrics
from kvtier.tiers.explaining import Asked
from kvtier.tiers.retention import RetentionAsk
from kvtier.tiers.tier import SegmentTier, StagingTier, Tier

logger = logging.getLogger(__name__)

_FIRST_REST_S = 0.1
_LAST_REST_S = 5.0


class Guard:
    """One tier and its health. A failing tier rests, longer each time, up to five seconds."""

    def __init__(self, tier: Tier, metrics: TierMetrics, clock: Callable[[], float], failure: str) -> None:
        self.tier = tier
        self._failure = failure
        self._metrics = metrics
        self._clock = clock
        self._log = LogLimit(logger)
        self._lock = threading.Lock()
        self._rest_s = _FIRST_REST_S
        self._rests_until = float("-inf")
        self._generation = tier.generation

    @property
    def is_resting(self) -> bool:
        """Whether the tier failed a moment ago and, as far as it can tell, has not come back since."""
        return self._clock() < self._rests_until and self.tier.generation == self._generation

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """A scope that ends failures of the tier, but not the caller's mistakes."""
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
            self._generation = self.tier.generation
            self._rest_s = min(2 * self._rest_s, _LAST_REST_S)
        self._log.warning(kind, self._failure, {"tier": self.tier.name, "error": str(error)})


@dataclass(frozen=True, slots=True)
class TierSegment:
    """The blocks from `first` on in one tier: those of the lease, then its `num_stored`, on a disk for instance."""

    tier: str
    first: int
    lease: Lease

    @property
    def num_blocks(self) -> int:
        return self.lease.num_blocks + self.lease.num_stored


@dataclass(frozen=True, slots=True)
class Ending:
    """A tier's answer on the block at `position`, where its part of a match ended."""

    tier: str
    position: int
    ended: MatchEnd


class Hierarchy:
    """Tiers from fast to slow. They must agree on the layout."""

    def __init__(
        self,
        tiers: Sequence[Tier],
        *,
        metrics: TierMetrics | None = None,
        clock: Callable[[], float] = time.monotonic,
        failure: str = "tier failed name=%(tier)s: %(error)s",
    ) -> None:
        """`failure` is the log message for a tier that fails."""
        if len({tier.name for tier in tiers}) < len(tiers):
            raise ConfigError("two tiers have the same name")
        if len({tier.layout for tier in tiers}) > 1:
            raise ConfigError("the tiers do not agree on the layout of a block")
        self.metrics = TierMetrics() if metrics is None else metrics
        self._guards = [Guard(tier, self.metrics, clock, failure) for tier in tiers]

    def match(
        self,
        hashes: Sequence[BlockHash],
        *,
        timeout_s: float | None = None,
        is_lazy: bool = False,
    ) -> HierarchyLease:
        """Lease the longest prefix that the tiers have together, each block in the fastest tier that has it.

        If lazy, blocks that would have to be read from disk are counted in the segments but not leased. The caller may
        match the same prompt again, and calls `count` for the answer that it uses.
        """
        segments: list[TierSegment] = []
        endings: list[Ending] = []
        num_blocks = 0
        for guard in self._guards:
            if num_blocks == len(hashes):
                break
            name = guard.tier.name
            ended = MatchEnd.TIER_DOWN
            if not guard.is_resting:
                with guard.watched():
                    match = guard.tier.match_lazily if is_lazy else guard.tier.match
                    lease = match(hashes[num_blocks:], timeout_s=timeout_s)
                    ended = lease.ended
                    if lease.num_blocks or lease.num_stored:
                        segments.append(TierSegment(name, num_blocks, lease))
                        num_blocks += segments[-1].num_blocks
            endings.append(Ending(name, num_blocks, ended))
        return HierarchyLease(num_blocks, segments, _ending(endings, num_blocks, len(hashes)))

    @property
    def most_prompt_blocks(self) -> int | None:
        """The most leading blocks of a prompt that some tier has room for; None without a limit."""
        limits = [guard.tier.most_prompt_blocks for guard in self._guards]
        return max((limit for limit in limits if limit is not None), default=None) if None not in limits else None

    def learn(self, hashes: Sequence[BlockHash]) -> None:
        """Pass on all hashes of a prompt so far, from its first block on. Never waits."""
        for guard in self._guards:
            guard.tier.learn(hashes)

    def retain(self, hashes: Sequence[BlockHash], ask: RetentionAsk) -> tuple[str, Granted]:
        """Have every tier retain a prompt's blocks. Returns the name and answer of the tier that retains the most."""
        best = "", Granted(0, 0.0)
        for guard in self._guards:
            if guard.is_resting:
                continue
            with guard.watched():
                granted = guard.tier.retain(hashes, ask)
                is_first_word = not best[1].num_blocks and not best[1].reason
                if granted.num_blocks > best[1].num_blocks or is_first_word:
                    best = guard.tier.name, granted
        return best

    def count(self, lease: HierarchyLease, num_wanted: int) -> None:
        """Count the hits and misses of a match that was used: a tier missed the blocks it was asked for and lacked."""
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
    def host(self) -> StagingTier | None:
        """The tier in memory of this process, if there is one."""
        return next((guard.tier.staging for guard in self._guards if guard.tier.staging is not None), None)

    @property
    def segmented(self) -> SegmentTier | None:
        """The tier that keeps only whole segments, if there is one."""
        return next((guard.tier.segmented for guard in self._guards if guard.tier.segmented is not None), None)

    @property
    def asked(self) -> Asked | None:
        """The object that explains misses, if a tier has one."""
        return next((guard.tier.asked for guard in self._guards if guard.tier.asked is not None), None)

    def close(self) -> None:
        """Close every tier, even if one of them fails to close."""
        with contextlib.ExitStack() as stack:
            for guard in reversed(self._guards):
                stack.callback(guard.tier.close)


class HierarchyLease:
    """A prefix leased across tiers. Not thread-safe."""

    def __init__(self, num_blocks: int, segments: Sequence[TierSegment], ending: Ending) -> None:
        self.num_blocks = num_blocks
        self.segments = segments
        self.ending = ending

    @property
    def ended(self) -> MatchEnd:
        """Why the match ended; see `Lease.ended`."""
        return self.ending.ended

    @property
    def blocks_by_tier(self) -> dict[str, int]:
        return {segment.tier: segment.num_blocks for segment in self.segments}

    def release(self) -> None:
        for segment in self.segments:
            segment.lease.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def _ending(endings: Sequence[Ending], num_blocks: int, num_wanted: int) -> Ending:
    """Why a match of `num_blocks` is not longer, from the answers of the tiers asked for the next block."""
    if num_blocks == num_wanted:
        return Ending("", num_blocks, MatchEnd.ALL)
    last = [ending for ending in endings if ending.position == num_blocks]
    ended = most_telling(ending.ended for ending in last)
    return next((ending for ending in last if ending.ended is ended), Ending("", num_blocks, ended))
