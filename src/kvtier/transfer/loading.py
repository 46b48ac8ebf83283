"""Loads in flight: begun by the engine's thread, run by threads, abandoned once computing is sooner. No torch."""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable, Sequence

from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.layout import KvLayout
from kvtier.observe.metrics import TierMetrics
from kvtier.transfer.decision import LoadOrCompute
from kvtier.transfer.load import Load, LoadPlan
from kvtier.transfer.loader import Loader
from kvtier.transfer.matching import NUM_THREADS, Matcher, TierMatch
from kvtier.transfer.step_marks import StepMarks
from kvtier.transfer.worker_threads import WorkerThreads

_HELD_UP = 4.0
_MIN_HELD_UP_S = 0.005
_MAX_HELD_UP = 2 * NUM_THREADS


class Loading:
    """The loads of one engine."""

    def __init__(
        self,
        loader: Loader,
        matcher: Matcher,
        decision: LoadOrCompute,
        marks: StepMarks,
        metrics: TierMetrics,
        layout: KvLayout,
        wake: Callable[[], None],
        *,
        clock: Callable[[], float],
        let_pass: Callable[[], None] | None,
    ) -> None:
        """`wake` is called when a load is over. At safe points, the threads call `let_pass` (see `latency_guard`)."""
        self._loader = loader
        self._matcher = matcher
        self._decision = decision
        self._marks = marks
        self._metrics = metrics
        self._layout = layout
        self._clock = clock
        self._lock = threading.Lock()
        self._loads: set[Load] = set()
        self._last_end_at = 0.0
        self._num_bringing: Counter[str] = Counter()
        """Loads from each tier that the threads have taken on."""
        self._roomless: set[Load] = set()
        """The loads whose blocks the device still used when they began."""
        self._num_held_up: Counter[str] = Counter()
        """For each in-memory tier: how many of its latest loads in a row took far longer than expected."""
        self._threads = WorkerThreads(NUM_THREADS, "kvtier-load", let_pass, wake)
        self.busy_s = 0.0
        """How long the device will compute for requests that need not wait for a load."""

    # --- the engine's thread ---------------------------------------------------------------------------------------

    def plan(self, match: TierMatch, position: int, prompt_tokens: int) -> LoadPlan | None:
        """What to load when all blocks before `position` are on the device; None if the rest is to be computed."""
        return self._decision.plan(match.spans, position, prompt_tokens, self.busy_s)

    def share(self, load: Load, prompt_tokens: int) -> int:
        """For a load from the back: how many blocks the engine should compute next."""
        return self._decision.share(load, prompt_tokens)

    def is_late(self, load: Load, prompt_tokens: int) -> bool:
        """Whether its missing blocks would be computed sooner than they arrive."""
        was_picked = load.times.picked_at is not None  # read first: a thread may take the load on meanwhile
        if not was_picked and self._waits_for_device():
            return False  # computing it would have to wait for the device, too
        since = load.turned_at
        if not was_picked:  # while earlier loads still arrive, its turn will come
            since = max(since, self._last_end_at)
        num_sharing = self._num_bringing[load.plan.span.tier]
        return self._decision.is_late(load, prompt_tokens, since, num_sharing, self.busy_s)

    def _waits_for_device(self) -> bool:
        """Whether a load that a thread has taken on waits for a step that uses its blocks."""
        if not self._roomless:
            return False
        with self._lock:
            roomless = list(self._roomless)
        return any(not load.is_abandoned and not load.after.query() for load in roomless)

    def load(
        self,
        match: TierMatch,
        plan: LoadPlan,
        hashes: Sequence[BlockHash],
        block_ids: Sequence[int],
        after_step: int,
        behind: Load | None = None,
    ) -> Load:
        """Begin to bring blocks into the device's `block_ids`, which step `after_step` was the last to use.

        They follow the blocks of `behind`, which may still be in flight.
        """
        load = Load(plan, hashes, block_ids, self._marks.after(after_step), self._clock(), behind)
        self._matcher.join(match)
        with self._lock:
            self._loads.add(load)
        self._threads.submit(functools.partial(self._run, match, load))
        return load

    @property
    def num_loads(self) -> int:
        return len(self._loads)

    def note_met(self, load: Load) -> None:
        """The load from the back and the computation from the front have met."""
        self._decision.note_met(load)

    def abandon_late(self, load: Load) -> None:
        """Like `abandon`, but its tier also rests for a while."""
        self._metrics.failures.labels(tier=load.plan.span.asked, kind="late").inc()
        self._decision.note_late(load.plan.span.tier)
        self.abandon(load)

    def abandon(self, load: Load) -> None:
        """Stop writing. Copies in flight are ordered before everything the device does next."""
        for transfer in load.abandon():
            if not transfer.is_done:
                transfer.precede(self._layout.layers - 1)

    def abandon_all(self) -> None:
        """Also abandons loads that their prompts do not know about: an interrupt may have come in between."""
        with self._lock:
            loads = list(self._loads)
        for load in loads:
            self.abandon(load)

    def left_s(self, loads: Sequence[Load]) -> float | None:
        """How long the copies handed to the device will still take, if no others come first; None if unknown.

        All `loads` are from one tier.
        """
        num_bytes = sum(copies.num_bytes_left for load in loads for copies in load.copies)
        return self._decision.speeds.load_s(loads[0].plan.span.tier, num_bytes) if num_bytes else 0.0

    def close(self) -> None:
        self._threads.close()

    # --- the threads -----------------------------------------------------------------------------------------------

    def _run(self, match: TierMatch, load: Load) -> None:
        tier = load.plan.span.tier
        with self._lock:
            self._num_bringing[tier] += 1
            num_sharing = self._num_bringing[tier]
        load.times.picked_at = self._clock()
        try:
            has_room = load.after.query()
            if not has_room:
                with self._lock:
                    self._roomless.add(load)
            num_blocks = self._loader.bring(load)
            num_sharing = min(num_sharing, self._num_bringing[tier])
            self._note_speed(load, num_blocks, self._clock() - load.turned_at, num_sharing, has_room=has_room)
        finally:
            load.times.ended_at = self._last_end_at = self._clock()
            load.end()
            with self._lock:
                self._num_bringing[tier] -= 1
                self._roomless.discard(load)
                self._loads.discard(load)
            self._matcher.leave(match)

    def _note_speed(self, load: Load, num_blocks: int, seconds: float, num_sharing: int, *, has_room: bool) -> None:
        """Loads that share a tier throughout slow each other down, as prompts do that are computed instead.

        If a step still used the load's blocks at first, the load waited for the device rather than the tier, so its
        time is only an upper bound for the tier.
        """
        nbytes = num_blocks * self._layout.block_bytes
        tier = load.plan.span.tier
        self._metrics.loaded_bytes.labels(tier=tier).inc(nbytes)
        self._metrics.load_seconds.labels(tier=tier).inc(seconds)
        if not nbytes or load.is_abandoned or load.follows:
            return
        seconds /= num_sharing
        known_s = self._decision.speeds.load_s(tier, nbytes)
        is_usual = has_room and (not load.plan.span.is_in_memory or self._is_usual(tier, seconds, known_s))
        if is_usual or known_s is None or seconds < known_s:
            self._decision.note_load(tier, nbytes, seconds)
        else:
            self._decision.note_well(tier)

    def _is_usual(self, tier: str, seconds: float, known_s: float | None) -> bool:
        """False for a load from memory that took far longer than others, unless many in a row did.

        Such a load was held up by the GIL or the driver, like all others in flight, and not by memory. A load of a few
        milliseconds is never far too long: little is known about sizes that are seldom loaded.
        """
        is_held_up = known_s is not None and seconds > max(_HELD_UP * known_s, _MIN_HELD_UP_S)
        with self._lock:
            self._num_held_up[tier] = self._num_held_up[tier] + 1 if is_held_up else 0
            return not is_held_up or self._num_held_up[tier] > _MAX_HELD_UP
