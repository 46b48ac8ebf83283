"""What goes between the device's blocks and the slower tiers: matches, loads and the decision for them. No torch.

The engine's thread calls everything here and never waits: a few threads match and load, `engine/storing` stores. What
they have done is told with the next `poll`. A tier that fails or is late costs time; the answer is computed then.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.layout import KvLayout
from kvtier.engine.copier import Copier, Mark, Transfer
from kvtier.engine.held import Held
from kvtier.engine.load import Load, Order, Part, Plan
from kvtier.engine.speeds import Speeds
from kvtier.engine.storing import Storing
from kvtier.errors import CapacityError
from kvtier.memory.lease import BlockLease, Lease, Reservation
from kvtier.observe.metrics import TierMetrics
from kvtier.tiers.explanation import Explanation
from kvtier.tiers.hierarchy import Ending, Hierarchy, HierarchyLease
from kvtier.tiers.host import HostTier
from kvtier.tiers.remote import RemoteTier
from kvtier.tiers.tier import Tier

logger = logging.getLogger(__name__)

DISK = "disk"
"""Where blocks are that a cache server has still to read when they are matched."""

_NUM_THREADS = 4
_MATCH_TIMEOUT_S = 0.25
_PENDING_LOOK_S = 0.003
_PENDING_SLACK_S = 0.1
_UNKNOWN_PENDING_S = 1.0
_MAX_PENDING_S = 30.0
_UNIT_BYTES = 8 << 20
_NUM_UNITS = 3
_CLEARLY_FASTER = 0.5
"""A load that takes at most this share of computing is left alone: the device has other things to compute."""

_WORTH_MEETING = 0.85
_MEETING_STEPS = 2
"""Computing from the front while loading from the back takes about so many more steps."""

_UNITS_TO_MEET = 16
_MIN_UNIT_S = 0.001
_LATE_SLACK_S = 0.01
_RETRY_SLOW_S = 10.0
_DRAIN_S = 60.0


@dataclass(eq=False, slots=True)
class Fetch:
    """One request's match in the tiers: what was found from block `first` of its prompt on."""

    first: int
    hashes: Sequence[BlockHash]
    is_matching: bool = True
    is_cancelled: bool = False
    parts: list[Part] = field(default_factory=list)
    ending: Ending = field(default_factory=lambda: Ending("", 0, "all"))
    lease: HierarchyLease | None = None
    num_users: int = 1
    """Its owner, and every load that reads from the lease."""
    num_rematches: int = 0

    @property
    def end(self) -> int:
        return self.parts[-1].end if self.parts else self.first


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
    ) -> None:
        """`always_loads` turns the decision off: what is found is loaded, however long it takes."""
        self.hierarchy = hierarchy
        self.speeds = speeds
        self._copier = copier
        self._block_tokens = layout.block_tokens
        self._block_bytes = layout.block_bytes
        self._last_layer = layout.layers - 1
        self._chunk_tokens = chunk_tokens
        self._always_loads = always_loads
        self._clock = clock
        self._host = next((guard.tier for guard in hierarchy.guards if isinstance(guard.tier, HostTier)), None)
        if self._host is not None:
            copier.adopt(self._host.arena)
        self._lock = threading.Lock()
        self._woken = threading.Event()
        self._threads = ThreadPoolExecutor(_NUM_THREADS, "kvtier-load")
        self._storing = Storing(hierarchy, copier, self._woken.set)
        self._slow_since: dict[str, float] = {}
        self.num_steps = 0
        self._marks: deque[tuple[int, Mark]] = deque([(0, copier.mark())])
        """Where the device is once it has done a step, for those it may not have done yet."""
        self._is_quick = all(isinstance(guard.tier, HostTier) for guard in hierarchy.guards)
        self._is_closed = False

    @property
    def metrics(self) -> TierMetrics:
        return self.hierarchy.metrics

    # --- matching --------------------------------------------------------------------------------------------------

    def match(self, first: int, hashes: Sequence[BlockHash]) -> Fetch:
        """Begin to look for `hashes`, those of a prompt's blocks from `first` on."""
        fetch = Fetch(first, hashes)
        if not hashes:
            fetch.is_matching = False
            return fetch
        if self._is_quick:  # a look into a dictionary takes less than another thread's turn
            lease = self.hierarchy.match(hashes, is_counted=False)
            if lease.ended != "pending":
                self._found(fetch, lease)
                return fetch
            lease.release()
        fetch.num_users += 1
        self._threads.submit(self._guarded, self._match, fetch)
        return fetch

    def give_up(self, fetch: Fetch) -> None:
        """Its owner needs nothing more of what was found."""
        fetch.is_cancelled = True
        if self._is_last_user(fetch):
            self._threads.submit(self._guarded, self._release, fetch)

    # --- loading ---------------------------------------------------------------------------------------------------

    def plan(self, fetch: Fetch, position: int, prompt_tokens: int) -> Plan | None:
        """What to load now that all before block `position` is there; None when the rest is to be computed."""
        part = next((part for part in fetch.parts if part.first <= position < part.end), None)
        if part is None:
            return None
        nbytes = (part.end - position) * self._block_bytes
        load_s = self.speeds.load_s(part.tier, nbytes)
        plan = Plan(part, position, part.end, Order.FRONT, load_s, max(1, _UNIT_BYTES // self._block_bytes))
        if self._always_loads:
            return plan
        compute_s = self._compute_s(position, part.end, prompt_tokens)
        if load_s is None or compute_s is None or load_s <= _CLEARLY_FASTER * compute_s:
            return plan
        from_back = self._from_back(plan, load_s, compute_s)
        if from_back is not None:
            return from_back
        return plan if load_s <= compute_s else self._retry(plan)

    def note_step(self) -> None:
        """A step was handed to the device."""
        self.num_steps += 1
        self._marks.append((self.num_steps, self._copier.mark()))
        while self._marks[0][1].query() and len(self._marks) > 1:
            self._marks.popleft()

    def load(
        self, fetch: Fetch, plan: Plan, hashes: Sequence[BlockHash], block_ids: Sequence[int], after_step: int
    ) -> Load:
        """Begin to bring blocks into the device's `block_ids`, which step `after_step` was the last to use."""
        after = next((mark for number, mark in self._marks if number >= after_step), self._marks[-1][1])
        load = Load(plan, hashes, block_ids, after, self._clock())
        with self._lock:
            fetch.num_users += 1
        self._threads.submit(self._guarded, self._run, fetch, load)
        return load

    def share(self, load: Load, prompt_tokens: int) -> int:
        """From the back: how many blocks the engine should compute next, so that both sides meet at the same time."""
        left = load.num_left
        if not left:
            return 0
        if load.is_over:
            return left
        block_s = self._per_block_s(load, self._clock() - load.started_at)
        compute_s = self._compute_s(load.front, load.front + left, prompt_tokens)
        if compute_s is None:
            return max(1, left // 2)
        if left * block_s < self.speeds.step_s():
            return 0  # it is here before another step is done
        return max(1, min(left, round(left * block_s / max(block_s + compute_s / left, 1e-9))))

    def is_late(self, load: Load, prompt_tokens: int) -> bool:
        """It takes longer than expected, and what is missing would be computed sooner than it comes."""
        if self._always_loads or load.is_submitted or load.is_over:
            return False
        elapsed = self._clock() - load.started_at
        expected = (load.plan.expected_s or 0.0) + _LATE_SLACK_S
        if elapsed <= expected:
            return False
        if load.plan.order is Order.FRONT:
            first, num_missing = load.plan.first + load.num_arrived, load.num_blocks - load.num_arrived
        elif load.num_left:
            return False  # the engine has something to do meanwhile
        else:
            first, num_missing = load.front, load.arrived()[0] - load.front
        compute_s = self._compute_s(first, first + num_missing, prompt_tokens)
        if compute_s is None:
            return False
        return num_missing * self._per_block_s(load, elapsed) > compute_s

    def abandon(self, load: Load) -> None:
        """No byte of it is written any more. What is being written comes before all that the device does next."""
        for transfer in load.abandon():
            self._follow(transfer)

    # --- storing ---------------------------------------------------------------------------------------------------

    def announce(self, owner: object, hashes: Sequence[BlockHash]) -> None:
        """`owner` is going to compute these: others wait for them."""
        self._storing.announce(owner, hashes)

    def withdraw(self, owner: object) -> None:
        """Nothing more comes of what `owner` announced."""
        self._storing.withdraw(owner)

    def offer(self, hashes: Sequence[BlockHash], held: Held) -> None:
        """Blocks that are full once the device has done what was handed to it. `poll` returns `held` when it may go."""
        self._storing.offer(hashes, held)

    def send_offers(self) -> None:
        """All offers since the last time begin when the device is done with what was handed to it so far."""
        if self._storing.has_offers:
            self._storing.send(self._marks[-1][1])

    def poll(self) -> list[Held]:
        """Blocks that are copied away."""
        return self._storing.take_copied()

    @property
    def has_stores(self) -> bool:
        """Blocks are held for stores."""
        return self._storing.num_held > 0

    def hurry(self) -> None:
        """Blocks are needed: what waits for a tier, and is not being copied, is not stored."""
        self._storing.cancel_waiting()

    def note(self, explanation: Explanation) -> None:
        """Tell the cache server why a match ended, for whoever asks it."""
        self._storing.note(explanation)

    # --- waiting and ending ----------------------------------------------------------------------------------------

    @property
    def generation(self) -> object:
        """Changes when a tier may have lost what it was offered: its server was away."""
        return tuple(guard.tier.generation for guard in self.hierarchy.guards if isinstance(guard.tier, RemoteTier))

    def wake(self) -> None:
        """End a `wait`: there is something new to do."""
        self._woken.set()

    def wait(self, timeout_s: float) -> None:
        """Until something has happened."""
        self._woken.wait(timeout_s)
        self._woken.clear()

    def settle(self, timeout_s: float = 10.0) -> bool:
        """Wait until everything offered so far is stored, or was given up. False when that takes too long."""
        return self._storing.settle(timeout_s)

    def drain(self) -> None:
        """After a failure: wait until no copy touches the device's blocks any more, and forget what is held."""
        self._storing.cancel_waiting()
        self._storing.settle(_DRAIN_S)
        self._storing.take_copied()

    def close(self) -> None:
        """Finish the stores that are under way and end everything."""
        if self._is_closed:
            return
        self._is_closed = True
        self._storing.close()
        self._threads.shutdown()
        self._copier.close()
        self.hierarchy.close()

    # --- private: the tiers' threads -------------------------------------------------------------------------------

    def _guarded(self, act: Callable[..., None], *job: object) -> None:
        try:
            act(*job)
        except Exception:
            logger.exception("a tier's thread failed")
        finally:
            self._woken.set()

    def _match(self, fetch: Fetch) -> None:
        try:
            if not fetch.is_cancelled:
                self._found(fetch, self._match_and_wait(fetch))
        finally:
            fetch.is_matching = False
            self._leave(fetch)

    def _found(self, fetch: Fetch, lease: HierarchyLease) -> None:
        self.hierarchy.count(lease, len(fetch.hashes))
        fetch.lease = lease
        fetch.parts = self._parts_of(lease, fetch.first)
        fetch.ending = replace(lease.ending, position=fetch.first + lease.num_blocks)
        fetch.is_matching = False

    def _match_and_wait(self, fetch: Fetch) -> HierarchyLease:
        """Match, and wait for blocks that somebody is just computing, about as long as computing them would take."""
        hierarchy, hashes = self.hierarchy, fetch.hashes
        lease = hierarchy.match(hashes, timeout_s=_MATCH_TIMEOUT_S, is_counted=False, is_lazy=True)
        started_at = progressed_at = self._clock()
        num_blocks = lease.num_blocks
        while lease.ended == "pending" and not fetch.is_cancelled:
            now = self._clock()
            position = fetch.first + num_blocks
            compute_s = self._compute_s(position, fetch.first + len(fetch.hashes), None)
            patience_s = _UNKNOWN_PENDING_S if compute_s is None else compute_s + _PENDING_SLACK_S
            if now - progressed_at > patience_s or now - started_at > _MAX_PENDING_S:
                break
            time.sleep(_PENDING_LOOK_S)
            lease.release()
            lease = hierarchy.match(hashes, timeout_s=_MATCH_TIMEOUT_S, is_counted=False, is_lazy=True)
            if lease.num_blocks > num_blocks:
                num_blocks, progressed_at = lease.num_blocks, self._clock()
        return lease

    def _parts_of(self, found: HierarchyLease, first: int) -> list[Part]:
        parts: list[Part] = []
        for segment in found.segments:
            tier, lease = segment.tier, segment.lease
            num_ready = lease.num_ready_at_match if isinstance(lease, BlockLease) else lease.num_blocks
            start = first + segment.first
            ready, leased, end = start + num_ready, start + lease.num_blocks, start + segment.num_blocks
            parts += [
                Part(tier, tier, start, ready, lease, 0),
                Part(DISK, tier, ready, leased, lease, num_ready),  # somebody else has them read just now
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
        lease, fetch.lease = fetch.lease, None
        if lease is not None:
            lease.release()

    def _run(self, fetch: Fetch, load: Load) -> None:
        started_at = self._clock()
        try:
            part = load.plan.part
            guard = next(guard for guard in self.hierarchy.guards if guard.tier.name == part.asked)
            num_blocks = 0
            with guard.watched():
                if isinstance(part.lease, BlockLease) and part.lease.arena is not None:
                    num_blocks = self._bring_in_place(load, part.lease)
                else:
                    num_blocks = self._bring_units(load, guard.tier)
            for transfer in load.transfers:
                transfer.wait()
            self._note_speed(load, num_blocks, self._clock() - started_at)
        finally:
            load.end()
            self._leave(fetch)

    def _bring_in_place(self, load: Load, lease: BlockLease) -> int:
        """From memory of this host: what is there at once, what comes from disk as it comes. Returns how many came."""
        plan, part = load.plan, load.plan.part
        arena = lease.arena
        assert arena is not None
        self._copier.adopt(arena)
        position = plan.first
        while position < plan.end:
            wanted = min(plan.end, position + plan.unit) if part.tier == DISK else plan.end
            there = min(part.first + lease.wait(part.place(wanted)) - part.lease_first, plan.end)
            first, end = load.take(max(0, there - position))
            if first >= end:
                return max(position, there) - plan.first
            offsets = lease.offsets[part.place(first) : part.place(end)]
            if load.write(first, end, functools.partial(self._copier.load, arena, offsets, after=load.after)) is None:
                return there - plan.first
            position = end
        self._submit_all(load)
        return position - plan.first

    def _bring_units(self, load: Load, tier: Tier) -> int:
        """A unit at a time: the next are read or received while the last ones go on to the device.

        What is on disk is leased by the unit, so that a prompt may be longer than the memory that it passes through.
        Returns how many blocks came.
        """
        unit = load.plan.unit
        if self._host is not None:
            unit = max(1, min(unit, self._host.num_blocks // (2 * _NUM_THREADS * _NUM_UNITS)))
        coming: deque[_Unit] = deque()
        going: deque[_Unit] = deque()
        num_blocks = 0
        try:
            while True:
                while len(coming) < (_NUM_UNITS if load.plan.part.lease is None else 1):
                    first, end = load.take(unit)
                    if first >= end:
                        break
                    coming.append(self._open_unit(load, tier, first, end))
                if not coming:
                    self._submit_all(load)
                    return num_blocks
                going.append(coming.popleft())
                is_whole = self._bring_unit(load, going[-1])
                num_blocks += going[-1].num_arrived
                if not is_whole:
                    return num_blocks
                if len(going) == _NUM_UNITS:
                    going.popleft().finish()
        finally:
            with contextlib.ExitStack() as stack:
                for one in (*coming, *going):
                    stack.callback(one.finish)

    def _open_unit(self, load: Load, tier: Tier, first: int, end: int) -> _Unit:
        plan = load.plan
        hashes = load.hashes[first - plan.first : end - plan.first]
        if plan.part.lease is not None:
            return _Unit(first, hashes, plan.part.lease, plan.part.place(first))
        lease = tier.match(hashes)
        return _Unit(first, hashes, lease, 0, own_lease=lease)

    def _bring_unit(self, load: Load, unit: _Unit) -> bool:
        """Let the device have it, or as much of it as came in order; False when that is not all."""
        lease, count = unit.lease, len(unit.hashes)
        if isinstance(lease, BlockLease) and lease.arena is not None:
            arena = lease.arena
            self._copier.adopt(arena)
            unit.num_arrived = min(count, lease.wait(count))
            offsets = lease.offsets
        else:
            host = self._host
            assert host is not None, "a tier without memory of this host needs a host tier before it"
            try:
                unit.stage = host.stage(unit.hashes)
            except CapacityError:
                return False
            arena, offsets = host.arena, unit.stage.offsets
            unit.num_arrived = lease.fetch(unit.stage.views(), unit.lease_first)
        if not unit.num_arrived or (load.plan.order is Order.BACK and unit.num_arrived < count):
            return False
        begin = functools.partial(self._copier.load, arena, offsets[: unit.num_arrived], after=load.after)
        unit.transfer = load.write(unit.first, unit.first + unit.num_arrived, begin)
        return unit.transfer is not None and unit.num_arrived == count

    def _submit_all(self, load: Load) -> None:
        load.submit_all()
        self._woken.set()

    # --- private: the decision -------------------------------------------------------------------------------------

    def _compute_s(self, first: int, end: int, prompt_tokens: int | None) -> float | None:
        """How much longer the prompt takes if blocks `first..end` are computed too."""
        start, stop = first * self._block_tokens, end * self._block_tokens
        total = max(stop, prompt_tokens or 0)
        whole = self.speeds.prefill_s(start, total - start, self._chunk_tokens)
        rest = self.speeds.prefill_s(stop, total - stop, self._chunk_tokens)
        return None if whole is None or rest is None else max(0.0, whole - rest)

    def _per_block_s(self, load: Load, elapsed_s: float) -> float:
        """How long a block takes to come, as this load shows so far, or as its tier has shown before."""
        expected = (load.plan.expected_s or 0.0) / load.num_blocks
        if load.num_arrived:
            return elapsed_s / load.num_arrived
        return max(expected, elapsed_s / load.num_blocks)

    def _note_speed(self, load: Load, num_blocks: int, seconds: float) -> None:
        """`num_blocks` came, some of them perhaps too late to be used."""
        nbytes = num_blocks * self._block_bytes
        tier = load.plan.part.tier
        metrics = self.hierarchy.metrics
        metrics.loaded_bytes.labels(tier=tier).inc(nbytes)
        metrics.load_seconds.labels(tier=tier).inc(seconds)
        if nbytes:
            self.speeds.note_load(tier, nbytes, seconds)
            self._slow_since.pop(tier, None)

    def _from_back(self, plan: Plan, load_s: float, compute_s: float) -> Plan | None:
        """Load from the back while the front is computed, if that is the fastest by far; None if not."""
        if plan.part.comes_in_order:
            return None
        num_blocks = plan.end - plan.first
        load_block_s, compute_block_s = load_s / num_blocks, compute_s / num_blocks
        num_loaded = num_blocks * compute_block_s / (load_block_s + compute_block_s)
        meet_s = num_loaded * load_block_s + _MEETING_STEPS * self.speeds.step_s()
        if meet_s > _WORTH_MEETING * min(load_s, compute_s):
            return None
        unit = max(1, round(num_loaded / _UNITS_TO_MEET), round(_MIN_UNIT_S / load_block_s))
        return replace(plan, order=Order.BACK, unit=min(unit, plan.unit))

    def _retry(self, plan: Plan) -> Plan | None:
        """A tier that was slow is tried again now and then: it may have become fast."""
        now = self._clock()
        tier = plan.part.tier
        if now - self._slow_since.setdefault(tier, now) < _RETRY_SLOW_S:
            return None
        self._slow_since[tier] = now
        return plan

    def _follow(self, transfer: Transfer) -> None:
        if not transfer.is_done:
            transfer.precede(self._last_layer)


@dataclass(eq=False, slots=True)
class _Unit:
    """Blocks of a prompt from `first` on that come together, from `lease_first` of a lease, perhaps of their own."""

    first: int
    hashes: Sequence[BlockHash]
    lease: Lease
    lease_first: int
    own_lease: Lease | None = None
    stage: Reservation | None = None
    num_arrived: int = 0
    transfer: Transfer | None = None

    def finish(self) -> None:
        """Once the device has its copy: what lies in the host's tier is its own, and the lease ends."""
        try:
            if self.transfer is not None:
                self.transfer.wait()
            if self.stage is not None:
                if self.num_arrived:
                    self.stage.commit(0, self.num_arrived)
                self.stage.close()
        finally:
            if self.own_lease is not None:
                self.own_lease.release()
