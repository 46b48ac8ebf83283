"""Pushes stored blocks from the host tier on to remote tiers. One thread; best effort. No torch."""

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
    """Blocks, and the tiers they are for. A segment is pushed completely or not at all."""

    hashes: Sequence[BlockHash]
    guards: Sequence[Guard]
    is_segment: bool = False


class _Withdrawal(NamedTuple):
    """Announced blocks: those that were not pushed before this will not be."""

    hashes: Sequence[BlockHash]


class Pusher:
    """Pushes to the tiers of `guards`. A backlog beyond the limit is refused."""

    def __init__(
        self, host: StagingTier, guards: Sequence[Guard], metrics: TierMetrics, let_pass: Callable[[], None] | None
    ) -> None:
        """At safe points, its thread calls `let_pass` (see `latency_guard`)."""
        self._host = host
        self._guards = guards
        self._segmented = [guard for guard in guards if guard.tier.segmented is not None]
        self._metrics = metrics
        self._until = float("inf")
        self._jobs: queue.Queue[_Push | _Withdrawal | threading.Event | None] = queue.Queue(_MAX_PUSHES)
        self._thread = threading.Thread(target=self._run, args=(let_pass,), name="kvtier-push", daemon=True)
        self._thread.start()

    def announce(self, hashes: Sequence[BlockHash]) -> None:
        """These blocks are being computed and will be pushed: other hosts need not compute them. Never waits."""
        for guard in self._guards:
            guard.tier.announce(hashes)

    def withdraw(self, hashes: Sequence[BlockHash]) -> None:
        """No more of these announced blocks will be pushed. Never waits."""
        try:
            self._jobs.put_nowait(_Withdrawal(hashes))
        except queue.Full:
            self._withdraw(hashes)

    def push(self, hashes: Sequence[BlockHash]) -> None:
        """Push blocks to all tiers. Never waits."""
        step = max(1, _PUSH_BYTES // self._host.layout.block_bytes)
        for first in range(0, len(hashes), step):
            self._put(_Push(hashes[first : first + step], self._guards))

    def push_segment(self, hashes: Sequence[BlockHash]) -> None:
        """Push a whole segment to the tiers that keep only whole ones. Never waits."""
        self._put(_Push(hashes, self._segmented, is_segment=True))

    def refuse_segment(self, hashes: Sequence[BlockHash]) -> None:
        """Count a segment that cannot be pushed."""
        self._refuse(_Push(hashes, self._segmented))

    def _put(self, push: _Push) -> None:
        try:
            self._jobs.put_nowait(push)
        except queue.Full:
            self._refuse(push)

    def settle(self, timeout_s: float) -> bool:
        """Wait until all pushes so far are done or dropped. False on timeout."""
        deadline = time.monotonic() + timeout_s
        pushed = threading.Event()
        try:
            self._jobs.put(pushed, timeout=max(0.0, timeout_s))
        except queue.Full:
            return False
        return pushed.wait(max(0.0, deadline - time.monotonic()))

    def close(self) -> None:
        """Pushes that are not done within a moment are dropped."""
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
            try:
                if isinstance(job, _Withdrawal):
                    self._withdraw(job.hashes)
                elif time.monotonic() > self._until:
                    self._refuse(job)
                else:
                    self._push(job)
            except Exception:
                logger.exception("pushing blocks failed")

    def _push(self, push: _Push) -> None:
        """Push the leading blocks that are still in the host tier."""
        metrics, hashes = self._metrics, push.hashes
        with self._host.hold(hashes) as lease:
            if lease.num_blocks < len(hashes):  # the host tier was too small to keep them
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

    def _withdraw(self, hashes: Sequence[BlockHash]) -> None:
        for guard in self._guards:
            guard.tier.withdraw(hashes)

    def _refuse(self, push: _Push) -> None:
        for guard in push.guards:
            self._metrics.refused_blocks.labels(tier=guard.tier.name).inc(len(push.hashes))
