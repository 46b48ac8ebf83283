"""Pushes stored blocks on to tiers out of reach, from the host's tier. One thread; best effort. No torch."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvtier.blocks.hashing import BlockHash
from kvtier.errors import CapacityError
from kvtier.latency_guard import yield_to
from kvtier.observe.metrics import TierMetrics
from kvtier.tiers.hierarchy import Guard
from kvtier.tiers.tier import StagingTier

logger = logging.getLogger(__name__)

_MAX_PUSHES = 1024
_PUSH_BYTES = 32 << 20
_CLOSE_S = 1.0


class _Push(NamedTuple):
    """Blocks, and whom they are for. Of a whole segment all are pushed, or none."""

    hashes: Sequence[BlockHash]
    guards: Sequence[Guard]
    is_segment: bool = False


class Pusher:
    """To the tiers of `guards`. What comes faster than it can be pushed is refused."""

    def __init__(
        self, host: StagingTier, guards: Sequence[Guard], metrics: TierMetrics, let_pass: Callable[[], None] | None
    ) -> None:
        """Its thread does `let_pass` where it can (`latency_guard`)."""
        self._host = host
        self._guards = guards
        self._segmented = [guard for guard in guards if guard.tier.segmented is not None]
        self._metrics = metrics
        self._until = float("inf")
        self._jobs: queue.Queue[_Push | threading.Event | None] = queue.Queue(_MAX_PUSHES)
        self._thread = threading.Thread(target=self._run, args=(let_pass,), name="kvtier-push", daemon=True)
        self._thread.start()

    def push(self, hashes: Sequence[BlockHash]) -> None:
        """Never waits."""
        step = max(1, _PUSH_BYTES // self._host.layout.block_bytes)
        for first in range(0, len(hashes), step):
            self._put(_Push(hashes[first : first + step], self._guards))

    def push_segment(self, hashes: Sequence[BlockHash]) -> None:
        """All of a segment at once, to tiers that keep it whole or not at all. Never waits."""
        self._put(_Push(hashes, self._segmented, is_segment=True))

    def refuse_segment(self, hashes: Sequence[BlockHash]) -> None:
        """It was to be pushed, and cannot be."""
        self._refuse(_Push(hashes, self._segmented))

    def _put(self, push: _Push) -> None:
        try:
            self._jobs.put_nowait(push)
        except queue.Full:
            self._refuse(push)

    def settle(self, timeout_s: float) -> bool:
        """Wait until all pushes so far are done or given up. False when that takes too long."""
        deadline = time.monotonic() + timeout_s
        pushed = threading.Event()
        try:
            self._jobs.put(pushed, timeout=max(0.0, timeout_s))
        except queue.Full:
            return False
        return pushed.wait(max(0.0, deadline - time.monotonic()))

    def close(self) -> None:
        """What is not pushed within a moment is not pushed."""
        self._until = time.monotonic() + _CLOSE_S
        self._jobs.put(None)
        self._thread.join()

    # --- its thread ------------------------------------------------------------------------------------------------

    def _run(self, let_pass: Callable[[], None] | None) -> None:
        yield_to(let_pass)
        while (job := self._jobs.get()) is not None:
            if isinstance(job, threading.Event):
                job.set()
                continue
            if time.monotonic() > self._until:
                self._refuse(job)
                continue
            try:
                self._push(job)
            except Exception:
                logger.exception("pushing blocks failed")

    def _push(self, push: _Push) -> None:
        """As far as the blocks are still in the host's tier."""
        metrics, hashes = self._metrics, push.hashes
        with self._host.match(hashes) as lease:
            if lease.num_blocks < len(hashes):  # the host's tier is too small to keep them until now
                self._refuse(push if push.is_segment else push._replace(hashes=hashes[lease.num_blocks :]))
            if not lease.num_blocks or (push.is_segment and lease.num_blocks < len(hashes)):
                return
            for guard in push.guards:
                if guard.is_resting:
                    continue
                name = guard.tier.name
                started_at = time.monotonic()
                with guard.watched():
                    try:
                        num_stored = guard.tier.offer(hashes[: lease.num_blocks], lease.views())
                    except CapacityError:
                        metrics.refused_blocks.labels(tier=name).inc(lease.num_blocks)
                        continue
                    metrics.stored_blocks.labels(tier=name).inc(num_stored)
                    metrics.stored_bytes.labels(tier=name).inc(num_stored * guard.tier.layout.block_bytes)
                    metrics.store_seconds.labels(tier=name).inc(time.monotonic() - started_at)

    def _refuse(self, push: _Push) -> None:
        for guard in push.guards:
            self._metrics.refused_blocks.labels(tier=guard.tier.name).inc(len(push.hashes))
