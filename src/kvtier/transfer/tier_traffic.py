"""What goes between the device's blocks and the slower tiers: matches, loads and the decision for them. No torch.

The engine's thread calls everything here and never waits: a few threads match and load, `transfer/storer` stores. What
they have done is told with the next `poll`. A tier that fails or is late costs time; the answer is computed then.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.layout import KvLayout
from kvtier.blocks.match_end import MatchEnd
from kvtier.errors import TierError
from kvtier.observe.metrics import TierMetrics
from kvtier.tiers.explanation import Explanation
from kvtier.tiers.hierarchy import Ending, Hierarchy, HierarchyLease
from kvtier.tiers.speeds import Speeds
from kvtier.transfer.copier import Copier, Mark
from kvtier.transfer.decision import LoadOrCompute
from kvtier.transfer.device_lease import DeviceLease
from kvtier.transfer.load import DISK, Load, Part, Plan
from kvtier.transfer.loader import Loader
from kvtier.transfer.storer import Storer
from kvtier.transfer.worker_threads import WorkerThreads

logger = logging.getLogger(__name__)

_NUM_THREADS = 4
_MATCH_TIMEOUT_S = 0.25
_PENDING_LOOK_S = 0.003
_PENDING_SLACK_S = 0.1
_UNKNOWN_PENDING_S = 1.0
_MAX_PENDING_S = 30.0
_BATCH_BLOCKS = 64
_BATCH_S = 0.05
_DRAIN_S = 60.0
_HELD_UP = 4.0
_MIN_HELD_UP_S = 0.005
_MAX_HELD_UP = 2 * _NUM_THREADS
_TURN_S = 5e-5
_ANSWER_S = 0.002


@dataclass(eq=False, slots=True)
class Fetch:
    """One request's match in the tiers: what was found from block `first` of its prompt on.

    `hashes` are those that were asked for so far.
    """

    first: int
    hashes: list[BlockHash]
    is_matching: bool = True
    is_cancelled: bool = False
    parts: list[Part] = field(default_factory=list)
    ending: Ending = field(default_factory=lambda: Ending("", 0, MatchEnd.ALL))
    leases: list[HierarchyLease] = field(default_factory=list)
    decided: Plan | None = None
    """What is loaded next, once the request has all blocks for it."""
    num_users: int = 1
    """Its owner, and every load that reads from the lease."""
    num_rematches: int = 0

    @property
    def end(self) -> int:
        return self.parts[-1].end if self.parts else self.first

    @property
    def asked_end(self) -> int:
        """Whoever asks for more begins here."""
        return self.first + len(self.hashes)

    @property
    def has_all(self) -> bool:
        """All that was asked for was found."""
        return not self.is_matching and self.ending.ended is MatchEnd.ALL


class TierTraffic:
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
        """`always_loads` turns the decision off: what is found is loaded, however long it takes.

        The threads `let_pass` where they can (`latency_guard`).
        """
        self.hierarchy = hierarchy
        self.speeds = speeds
        self._copier = copier
        self._block_bytes = layout.block_bytes
        self._last_layer = layout.layers - 1
        self._clock = clock
        self._decision = LoadOrCompute(speeds, layout, chunk_tokens, always_loads=always_loads, clock=clock)
        self._adopt_arenas()
        self._lock = threading.Lock()
        self._loads: set[Load] = set()
        self._num_matching = 0
        self._last_end_at = 0.0
        self._num_bringing: Counter[str] = Counter()
        """How many loads from each tier the threads have taken on."""
        self._roomless: set[Load] = set()
        """Those of them for which the device was not done with their blocks when they were taken on."""
        self._num_held_up: Counter[str] = Counter()
        """How many of the last loads from each tier, which is memory, took far longer than expected."""
        self._woken = threading.Event()
        self._matchers = WorkerThreads(_NUM_THREADS, "kvtier-match", let_pass)
        self._loaders = WorkerThreads(_NUM_THREADS, "kvtier-load", let_pass)
        self._storing = Storer(hierarchy, copier, self._woken.set, let_pass)
        self._bringing = Loader(hierarchy, copier, self._woken.set)
        self._offered_at: float | None = None
        self.num_steps = 0
        self._marks: deque[tuple[int, Mark]] = deque([(0, copier.mark())])
        """Where the device is once it has done a step: the last that it is known to have done, and all after it."""
        self.is_quick = all(guard.tier.answers_at_once for guard in hierarchy.guards)
        """A look into a dictionary takes less than another thread's turn: what `match` finds is known at once."""
        self.busy_s = 0.0
        """For so long the device is going to compute for requests that need not wait for a load."""
        self._is_closed = False
        self._pid = os.getpid()

    @property
    def is_foreign(self) -> bool:
        """This process was forked from the one that has the threads and the memory."""
        return os.getpid() != self._pid

    @property
    def metrics(self) -> TierMetrics:
        return self.hierarchy.metrics

    # --- matching --------------------------------------------------------------------------------------------------

    def match(self, first: int, hashes: Sequence[BlockHash], num_more: int = 0) -> Fetch:
        """Begin to look for `hashes`, those of a prompt's blocks from `first` on. Behind them are `num_more`."""
        fetch = Fetch(first, [])
        self.match_further(fetch, hashes, num_more)
        return fetch

    def match_further(self, fetch: Fetch, hashes: Sequence[BlockHash], num_more: int = 0) -> None:
        """All that was asked for was found: look for `hashes`, those of the next blocks, too."""
        first = fetch.asked_end
        fetch.hashes += hashes
        fetch.is_matching = bool(hashes)
        if not hashes:
            return
        if self.is_quick:
            lease = self.hierarchy.match(hashes)
            if lease.ended is not MatchEnd.PENDING:
                self._found(fetch, lease, first, len(hashes) + num_more)
                return
            lease.release()
        if not self._decision.is_match_worth_it(first, first + len(hashes)):
            fetch.ending = Ending("", first, MatchEnd.SLOWER)
            fetch.is_matching = False
            return
        with self._lock:
            fetch.num_users += 1
            self._num_matching += 1
        self._matchers.submit(functools.partial(self._guarded, self._match, fetch, first, hashes, num_more))

    def give_up(self, fetch: Fetch) -> None:
        """Its owner needs nothing more of what was found."""
        fetch.is_cancelled = True
        if self._is_last_user(fetch):  # on a thread that no interrupt reaches: half a release would never be mended
            self._matchers.submit(functools.partial(self._guarded, self._release, fetch))

    # --- loading ---------------------------------------------------------------------------------------------------

    def plan(self, fetch: Fetch, position: int, prompt_tokens: int) -> Plan | None:
        """What to load now that all before block `position` is there; None when the rest is to be computed."""
        return self._decision.plan(fetch.parts, position, prompt_tokens, self.busy_s)

    def share(self, load: Load, prompt_tokens: int) -> int:
        """From the back: how many blocks the engine should compute next."""
        return self._decision.share(load, prompt_tokens)

    def is_late(self, load: Load, prompt_tokens: int) -> bool:
        """What is missing of it would be computed sooner than it comes."""
        was_picked = load.picked_at is not None  # asked first: a thread may take it on meanwhile
        if not was_picked and self._waits_for_device():
            return False  # as it would itself if it were computed
        since = load.turned_at
        if not was_picked:  # as long as those before it come, its turn will
            since = max(since, self._last_end_at)
        num_sharing = self._num_bringing[load.plan.part.tier]
        return self._decision.is_late(load, prompt_tokens, since, num_sharing, self.busy_s)

    def _waits_for_device(self) -> bool:
        """Some load that a thread has taken on waits for a step that uses its blocks."""
        if not self._roomless:
            return False
        with self._lock:
            roomless = list(self._roomless)
        return any(not load.is_abandoned and not load.after.query() for load in roomless)

    def note_step(self) -> None:
        """A step was handed to the device."""
        self.num_steps += 1
        self._marks.append((self.num_steps, self._copier.mark()))
        while len(self._marks) > 1 and self._marks[1][1].query():
            self._marks.popleft()

    def load(
        self,
        fetch: Fetch,
        plan: Plan,
        hashes: Sequence[BlockHash],
        block_ids: Sequence[int],
        after_step: int,
        behind: Load | None = None,
    ) -> Load:
        """Begin to bring blocks into the device's `block_ids`, which step `after_step` was the last to use.

        They follow those of `behind`, which may still be under way.
        """
        after = next((mark for number, mark in self._marks if number >= after_step), self._marks[-1][1])
        load = Load(plan, hashes, block_ids, after, self._clock(), behind)
        with self._lock:
            fetch.num_users += 1
            self._loads.add(load)
        self._loaders.submit(functools.partial(self._guarded, self._run, fetch, load))
        return load

    @property
    def num_loads(self) -> int:
        """How many loads are under way."""
        return len(self._loads)

    def note_met(self, load: Load) -> None:
        """What came from the back and what was computed have met."""
        self._decision.note_met(load)

    def abandon_late(self, load: Load) -> None:
        """As `abandon`; and its tier is left alone for a while."""
        self.metrics.failures.labels(tier=load.plan.part.asked, kind="late").inc()
        self._decision.note_late(load.plan.part.tier)
        self.abandon(load)

    def abandon(self, load: Load) -> None:
        """No byte of it is written any more. What is being written comes before all that the device does next."""
        for transfer in load.abandon():
            if not transfer.is_done:
                transfer.precede(self._last_layer)

    def left_s(self, loads: Sequence[Load]) -> float | None:
        """How long copies that were handed to the device take still, if no others come first; None if that is unknown.

        The loads are from one tier.
        """
        num_bytes = sum(transfer.num_bytes_left for load in loads for transfer in load.transfers)
        return self.speeds.load_s(loads[0].plan.part.tier, num_bytes) if num_bytes else 0.0

    # --- storing ---------------------------------------------------------------------------------------------------

    def announce(self, owner: object, hashes: Sequence[BlockHash]) -> None:
        """`owner` is going to compute these: others wait for them."""
        self._storing.announce(owner, hashes)

    def withdraw(self, owner: object) -> None:
        """Nothing more comes of what `owner` announced."""
        self._storing.withdraw(owner)

    def offer(self, hashes: Sequence[BlockHash], held: DeviceLease) -> None:
        """Blocks that are full once the device has done what was handed to it. `poll` returns `held` when it may go."""
        self._storing.offer(hashes, held)

    def send_offers(self, *, is_last: bool = False) -> None:
        """Offers begin when the device is done with what was handed to it so far.

        A few blocks wait a moment for more, unless these are the last for now: each batch costs the engine something.
        """
        storing = self._storing
        if not storing.num_offered:
            self._offered_at = None
            return
        now = self._clock()
        if self._offered_at is None:
            self._offered_at = now
        if is_last or storing.num_offered >= _BATCH_BLOCKS or now - self._offered_at >= _BATCH_S:
            storing.send(self._marks[-1][1])
            self._offered_at = None

    def poll(self) -> list[DeviceLease]:
        """Blocks that are copied away."""
        return self._storing.take_copied()

    @property
    def has_stores(self) -> bool:
        """Blocks are held for stores."""
        return self._storing.num_held > 0

    def hurry(self) -> None:
        """Blocks are needed: what waits for a tier, and is not being copied, is not stored."""
        self.send_offers(is_last=True)
        self._storing.cancel_waiting()

    def note(self, explanation: Explanation) -> None:
        """Tell the cache server why a match ended, for whoever asks it."""
        self._storing.note(explanation)

    # --- waiting and ending ----------------------------------------------------------------------------------------

    @property
    def generation(self) -> object:
        """Changes when a tier may have lost what it was offered: its server was away."""
        return tuple(guard.tier.generation for guard in self.hierarchy.guards)

    def wake(self) -> None:
        """End a `wait`: there is something new to do."""
        self._woken.set()

    def give_way(self, *, is_idle: bool) -> None:
        """Let a load that was just begun hand over its first copies: Python would go on with this thread for 5 ms.

        Before there is any, and if the device `is_idle`, let the first answer of a tier come.
        """
        if self._loads:
            time.sleep(_TURN_S)
        elif is_idle and self._num_matching:
            self.wait(_ANSWER_S)

    def wait(self, timeout_s: float) -> None:
        """Until something has happened."""
        self._woken.wait(timeout_s)
        self._woken.clear()

    def settle(self, timeout_s: float = 10.0) -> bool:
        """Wait until everything offered so far is stored, or was given up. False when that takes too long.

        Not while another thread does steps.
        """
        if self._is_closed:
            return True
        self.send_offers(is_last=True)
        return self._storing.settle(timeout_s)

    def drain(self) -> None:
        """After a failure: wait until no copy touches the device's blocks any more, and forget what is held."""
        with self._lock:
            loads = list(self._loads)
        for load in loads:  # an interrupt may have come before its request knew of it
            self.abandon(load)
        self._offered_at = None
        self._storing.start_over(_DRAIN_S)
        self.note_step()  # whatever was handed to the device, and perhaps not noted, comes before the next load

    def close(self) -> None:
        """Finish the stores that are under way and end everything."""
        if self._is_closed or self.is_foreign:
            return
        self._is_closed = True
        self.send_offers(is_last=True)
        self._storing.close()
        self._loaders.close()
        self._matchers.close()
        self._copier.close()
        self.hierarchy.close()

    # --- private: the engine's thread ------------------------------------------------------------------------------

    def _adopt_arenas(self) -> None:
        """Before the first request needs them: that takes a GPU seconds. A server that is away is adopted later."""
        for guard in reversed(self.hierarchy.guards):
            with contextlib.suppress(TierError):
                arena = guard.tier.arena
                if arena is not None:
                    self._copier.adopt(arena)

    # --- private: the tiers' threads -------------------------------------------------------------------------------

    def _guarded(self, act: Callable[..., None], *job: object) -> None:
        try:
            act(*job)
        except Exception:
            logger.exception("a tier's thread failed")
        finally:
            self._woken.set()

    def _match(self, fetch: Fetch, first: int, hashes: Sequence[BlockHash], num_more: int) -> None:
        fetch.ending = Ending("", first, MatchEnd.TIER_DOWN)
        is_found = False
        try:
            if not fetch.is_cancelled:
                self._found(fetch, self._match_and_wait(fetch, first, hashes), first, len(hashes) + num_more)
                is_found = True
        finally:
            if not is_found:  # else it has been said, and the next match may be under way
                fetch.is_matching = False
            with self._lock:
                self._num_matching -= 1
            self._leave(fetch)

    def _found(self, fetch: Fetch, lease: HierarchyLease, first: int, num_wanted: int) -> None:
        is_all = lease.ended is MatchEnd.ALL
        self.hierarchy.count(lease, lease.num_blocks if is_all else num_wanted)
        fetch.leases.append(lease)
        fetch.parts = fetch.parts + self._parts_of(lease, first)
        fetch.ending = replace(lease.ending, position=first + lease.num_blocks)
        fetch.is_matching = False

    def _match_and_wait(self, fetch: Fetch, first: int, hashes: Sequence[BlockHash]) -> HierarchyLease:
        """Match, and wait for blocks that somebody is just computing, about as long as computing them would take."""
        hierarchy = self.hierarchy
        asked_at = self._clock()
        lease = hierarchy.match(hashes, timeout_s=_MATCH_TIMEOUT_S, is_lazy=True)
        started_at = progressed_at = self._clock()
        self._decision.note_match(started_at - asked_at)
        num_blocks = lease.num_blocks
        while lease.ended is MatchEnd.PENDING and not fetch.is_cancelled:
            now = self._clock()
            position = first + num_blocks
            compute_s = self._decision.compute_s(position, first + len(hashes), None)
            patience_s = _UNKNOWN_PENDING_S if compute_s is None else compute_s + _PENDING_SLACK_S
            if now - progressed_at > patience_s or now - started_at > _MAX_PENDING_S:
                break
            time.sleep(_PENDING_LOOK_S)
            lease.release()
            lease = hierarchy.match(hashes, timeout_s=_MATCH_TIMEOUT_S, is_lazy=True)
            if lease.num_blocks > num_blocks:
                num_blocks, progressed_at = lease.num_blocks, self._clock()
        return lease

    def _parts_of(self, found: HierarchyLease, first: int) -> list[Part]:
        parts: list[Part] = []
        for segment in found.segments:
            tier, lease = segment.tier, segment.lease
            start = first + segment.first
            ready, leased, end = start + lease.num_ready_at_match, start + lease.num_blocks, start + segment.num_blocks
            parts += [
                Part(tier, tier, start, ready, lease, 0),
                Part(
                    DISK, tier, ready, leased, lease, lease.num_ready_at_match
                ),  # somebody else has them read just now
                Part(DISK, tier, leased, end, None, 0),
            ]
        return [part for part in parts if part.first < part.end]

    def _is_last_user(self, fetch: Fetch) -> bool:
        with self._lock:
            fetch.num_users -= 1
            return not fetch.num_users

    def _leave(self, fetch: Fetch) -> None:
        if self._is_last_user(fetch):
            self._release(fetch)

    def _release(self, fetch: Fetch) -> None:
        leases, fetch.leases = fetch.leases, []
        for lease in leases:
            lease.release()

    def _run(self, fetch: Fetch, load: Load) -> None:
        tier = load.plan.part.tier
        with self._lock:
            self._num_bringing[tier] += 1
            num_sharing = self._num_bringing[tier]
        load.picked_at = self._clock()
        try:
            has_room = load.after.query()
            if not has_room:
                with self._lock:
                    self._roomless.add(load)
            num_blocks = self._bringing.bring(load)
            num_sharing = min(num_sharing, self._num_bringing[tier])
            self._note_speed(load, num_blocks, self._clock() - load.turned_at, num_sharing, has_room=has_room)
        finally:
            load.ended_at = self._last_end_at = self._clock()
            load.end()
            with self._lock:
                self._num_bringing[tier] -= 1
                self._roomless.discard(load)
                self._loads.discard(load)
            self._leave(fetch)

    def _note_speed(self, load: Load, num_blocks: int, seconds: float, num_sharing: int, *, has_room: bool) -> None:
        """Loads that share a tier all the time hold each other up, as prompts do that are computed instead.

        One that had no room yet, since a step used its blocks for others, waited for the device, not for the tier: the
        tier took no longer than that.
        """
        nbytes = num_blocks * self._block_bytes
        tier = load.plan.part.tier
        self.metrics.loaded_bytes.labels(tier=tier).inc(nbytes)
        self.metrics.load_seconds.labels(tier=tier).inc(seconds)
        if not nbytes or load.is_abandoned or load.follows:
            return
        seconds /= num_sharing
        known_s = self.speeds.load_s(tier, nbytes)
        is_usual = has_room and (not load.plan.part.is_in_memory or self._is_usual(tier, seconds, known_s))
        if is_usual or known_s is None or seconds < known_s:
            self._decision.note_load(tier, nbytes, seconds)
        else:
            self._decision.note_well(tier)

    def _is_usual(self, tier: str, seconds: float, known_s: float | None) -> bool:
        """False for a load from memory that took far longer than others do, unless many in a row did.

        It waited for the interpreter or the driver, with all that were under way, and not for memory. What takes a few
        milliseconds is never far longer: little is known of sizes that are seldom loaded.
        """
        is_held_up = known_s is not None and seconds > max(_HELD_UP * known_s, _MIN_HELD_UP_S)
        with self._lock:
            self._num_held_up[tier] = self._num_held_up[tier] + 1 if is_held_up else 0
            return not is_held_up or self._num_held_up[tier] > _MAX_HELD_UP
