"""Traffic between a device's blocks and the tiers: matches, loads and stores, each with threads of its own. No torch.

The engine's thread calls everything here. Only `wait`, `settle`, `drain` and `close` wait.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence

from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.layout import KvLayout
from kvtier.errors import TierError
from kvtier.tiers.hierarchy import Hierarchy
from kvtier.tiers.speeds import Speeds
from kvtier.tiers.tier import SegmentTier
from kvtier.transfer.copier import Copier
from kvtier.transfer.decision import LoadOrCompute
from kvtier.transfer.loader import Loader
from kvtier.transfer.loading import Loading
from kvtier.transfer.matching import Matcher
from kvtier.transfer.step_marks import StepMarks
from kvtier.transfer.storer import Storer

_DRAIN_S = 60.0
_TURN_S = 5e-5
_ANSWER_S = 0.002
_MIN_SEGMENTS = 2
"""Segments that host memory must hold so that segments with hits can pass through it."""


class Traffic:
    """Everything below the device's own pool. One per engine."""

    def __init__(
        self,
        hierarchy: Hierarchy,
        copier: Copier,
        speeds: Speeds,
        *,
        layout: KvLayout,
        chunk_tokens: int,
        always_loads: bool = False,
        clock: Callable[[], float] = time.monotonic,
        let_pass: Callable[[], None] | None = None,
    ) -> None:
        """`always_loads` turns the decision off: every hit is loaded, however long it takes.

        At safe points, the threads call `let_pass` (see `latency_guard`).
        """
        self.hierarchy = hierarchy
        self._copier = copier
        self._adopt_arenas()
        self._woken = threading.Event()
        wake = self._woken.set
        self.marks = StepMarks(copier)
        self.decision = LoadOrCompute(speeds, layout, chunk_tokens, always_loads=always_loads, clock=clock)
        self.matcher = Matcher(hierarchy, self.decision, wake, clock=clock, let_pass=let_pass)
        self.loading = Loading(
            Loader(hierarchy, copier, wake),
            self.matcher,
            self.decision,
            self.marks,
            hierarchy.metrics,
            layout,
            wake,
            clock=clock,
            let_pass=let_pass,
        )
        self.segmented = _segmented(hierarchy)
        self.storer = Storer(hierarchy, copier, self.marks, wake, clock=clock, let_pass=let_pass)
        self._is_closed = False
        self._pid = os.getpid()

    @property
    def is_foreign(self) -> bool:
        """This process was forked from the one that has the threads and the memory."""
        return os.getpid() != self._pid

    @property
    def generation(self) -> object:
        """Changes when a tier may have lost earlier offers: its server was away."""
        return tuple(guard.tier.generation for guard in self.hierarchy.guards)

    def learn(self, hashes: Sequence[BlockHash]) -> None:
        """All hashes of a prompt so far, from its first block on; see `Tier.learn`."""
        self.hierarchy.learn(hashes)

    def worth_offering(self, num_blocks: int) -> int:
        """How many of a prompt's first `num_blocks` some tier can keep together."""
        most = self.hierarchy.most_prompt_blocks
        return num_blocks if most is None else min(num_blocks, most)

    def wake(self) -> None:
        """From any thread: end a `wait`, because there is something new to do."""
        self._woken.set()

    def wait(self, timeout_s: float) -> None:
        """Wait until something has happened."""
        self._woken.wait(timeout_s)
        self._woken.clear()

    def give_way(self, *, is_idle: bool) -> None:
        """Let a load that has just begun hand over its first copies: this thread would otherwise keep the GIL for 5 ms.

        If there are no loads and the device `is_idle`, let a tier's first answer arrive.
        """
        if self.loading.num_loads:
            time.sleep(_TURN_S)
        elif is_idle and self.matcher.num_matching:
            self.wait(_ANSWER_S)

    def settle(self, timeout_s: float = 10.0) -> bool:
        """Wait until everything offered so far is stored or dropped. False on timeout.

        Must not be called while another thread does steps.
        """
        if self._is_closed:
            return True
        self.storer.send(is_last=True)
        return self.storer.settle(timeout_s)

    def drain(self) -> None:
        """After a failure: wait until no copy touches the device's blocks, and forget all held blocks."""
        self.loading.abandon_all()
        self.storer.start_over(_DRAIN_S)
        self.marks.note_step()  # work handed to the device, perhaps not noted, comes before the next load

    def close(self) -> None:
        """Finish the stores in progress and end everything."""
        if self._is_closed or self.is_foreign:
            return
        self._is_closed = True
        self.storer.send(is_last=True)
        self.storer.close()
        self.loading.close()
        self.matcher.close()
        self._copier.close()
        self.hierarchy.close()

    def _adopt_arenas(self) -> None:
        """Adopt before the first request: this takes a GPU seconds. A server that is away is adopted later."""
        for guard in reversed(self.hierarchy.guards):
            with contextlib.suppress(TierError):
                if guard.tier.arena is not None:
                    self._copier.adopt(guard.tier.arena)


def _segmented(hierarchy: Hierarchy) -> SegmentTier | None:
    """The tier that is offered whole segments, if there is enough host memory for a segment to pass through."""
    tier, host = hierarchy.segmented, hierarchy.host
    if tier is None or host is None or host.num_blocks < _MIN_SEGMENTS * tier.segment_blocks:
        return None
    return tier
