"""Loads and stores of a worker process. A scheduler matches, and says which blocks to bring where. No torch.

One thread, the worker's, calls everything here; only `drop` and `close` wait. A load or store is identified by a *key*,
the scheduler's name for a prompt. Blocks of the device are given by their places (`places`).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import time
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass

from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.match_end import MatchEnd
from kvtier.errors import TierError
from kvtier.memory.lease import Lease
from kvtier.observe.log_limit import LogLimit
from kvtier.tiers.hierarchy import Hierarchy, TierSegment
from kvtier.tiers.tier import Tier
from kvtier.transfer.copier import Copier, Copies, Mark
from kvtier.transfer.device_lease import DeviceLease
from kvtier.transfer.leased_blocks import LeasedBlocks
from kvtier.transfer.load import Load, LoadPlan, Order, Span
from kvtier.transfer.load_news import EndedLoad, Loaded, LoadNews
from kvtier.transfer.loader import Loader
from kvtier.transfer.matching import spans_of
from kvtier.transfer.quick_turns import QUICK_TURNS
from kvtier.transfer.shared_stores import ReservedRoom, ShareWriter
from kvtier.transfer.small_pages import SmallPageCopier, packed
from kvtier.transfer.step_marks import StepMarks
from kvtier.transfer.step_pace import StepPace
from kvtier.transfer.storer import Storer
from kvtier.transfer.worker_threads import WorkerThreads

logger = logging.getLogger(__name__)

_NUM_LOADERS = 2
_ROOM_POLL_S = 0.005
_MAX_ROOM_POLL_S = 0.04
_TURN_S = 0.005
"""A load whose turn has not come holds up those behind it for as long."""

_UNIT_BYTES = 16 << 20
"""Blocks from disk or TCP are copied to the device whenever this many bytes have arrived."""

_TAIL_BYTES = 1280 << 20
"""On an idle device, a load from memory is reported while this much of it is still in flight, about 24 ms early on an
H200: its step is scheduled and prepared meanwhile, which takes vLLM's host up to 20 ms, and waits on the device."""

_STEPS_BETWEEN = 2
"""On a busy device, a load is reported this many steps early. As many begin before the one that uses it: the step in
which it is reported, and the one that vLLM has prepared by the time it hears of that."""


class WorkerTransfer:
    """Moves blocks between one device and one tier. Owns the tier and the copier. `loads` reports loads that ended."""

    def __init__(
        self,
        tier: Tier,
        copier: Copier,
        *,
        batch_bytes: int,
        parts_per_block: int = 1,
        shares: ShareWriter | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """About `batch_bytes` are stored together. `shares` is for a device that lacks some heads of a block.

        `clock` is for the lengths of steps.
        """
        self._tier = tier
        self._parts_per_block = parts_per_block
        self._copier = copier if parts_per_block == 1 else SmallPageCopier(copier, parts_per_block)
        self._hierarchy = Hierarchy([tier], failure="blocks are not kept: %(error)s")
        self._shares = shares
        self._batch_blocks = max(1, batch_bytes // tier.layout.slot_bytes)
        self._marks = StepMarks(self._copier)
        self._pace = StepPace(clock)
        self._bytes_per_s = 0.0
        """Of the last load from memory."""
        self.loads = LoadNews()
        self._log = LogLimit(logger)
        with contextlib.suppress(TierError):  # the arena of a server that is away is adopted later
            if tier.arena is not None:
                self._copier.adopt(tier.arena)
        self._loader = Loader(self._hierarchy, self._copier, _nothing)
        self._storer = Storer(self._hierarchy, self._copier, self._marks, _nothing, sends_alone=True)
        self._threads = WorkerThreads(_NUM_LOADERS, "kvtier-load")

    # --- the worker's thread ------------------------------------------------------------------------------------------

    def note_step(self) -> None:
        """Work begun from now on comes after everything handed to the device so far."""
        self._marks.note_step()

    def begin_step(self, *, is_idle: bool) -> None:
        """A step is about to be queued; one that `is_idle` computes nothing."""
        self._pace.note_step(is_idle=is_idle)

    def load(
        self,
        key: str,
        hashes: list[BlockHash],
        places: Sequence[int],
        timeout_s: float,
        leased: LeasedBlocks | None = None,
    ) -> None:
        """Bring these blocks, from the first on, until one is missing or the time is up.

        Blocks `leased` by another process stay leased until this load is reported as over.
        """
        ids = packed(places, self._parts_per_block)
        order = _Order(EndedLoad(key, len(ids)), hashes, ids, self._marks.last, timeout_s, leased)
        self._threads.submit(functools.partial(self._load, order))
        QUICK_TURNS.begin()

    def store(self, key: object, hashes: Sequence[BlockHash], places: Sequence[int]) -> None:
        """Store these blocks once the device is past the last step; begins with a `send` or a full batch."""
        ids = list(packed(places, self._parts_per_block))
        for first in range(0, len(ids), self._batch_blocks):
            some = ids[first : first + self._batch_blocks]
            if self._storer.num_unsent + len(some) > self._batch_blocks:
                self.send()
            self._storer.offer(hashes[first : first + self._batch_blocks], DeviceLease(some, []), key)

    def send(self, *, is_last: bool = True) -> None:
        """Begin the stores. Unless they are the last for now, a few blocks wait a moment for those of later calls."""
        self._storer.send(is_last=is_last)

    def write_share(self, key: str, places: Sequence[int], slots: ReservedRoom) -> None:
        """Write the device's part of these blocks into slots that are reserved for them."""
        assert self._shares is not None
        self._shares.write(key, places, slots, self._marks.last)

    def take_shares(self) -> list[tuple[ReservedRoom, bool]]:
        """The shares that have ended, and whether each was written."""
        return [] if self._shares is None else self._shares.take_ended()

    def drop(self, keys: Set[str]) -> None:
        """Their blocks are about to be reused: wait until none is being copied to a tier; none will be from now on."""
        self._storer.drop(keys)
        if self._shares is not None:
            self._shares.drop(keys)

    def storing(self) -> set[object]:
        """The keys whose blocks are still needed for stores."""
        self._storer.take_copied()
        return self._storer.owners() | (set() if self._shares is None else self._shares.keys())

    @property
    def num_stored(self) -> int:
        """Blocks that the tier has taken, without shares."""
        return self._storer.num_stored

    @property
    def num_refused(self) -> int:
        """Blocks that the tier did not take."""
        return self._storer.num_refused + (0 if self._shares is None else self._shares.num_refused)

    def close(self) -> None:
        """Finish the stores and loads in progress."""
        self._threads.close()
        self.send()
        self._storer.close()
        if self._shares is not None:
            self._shares.close()
        self._copier.close()
        self._hierarchy.close()

    # --- the loading threads ------------------------------------------------------------------------------------------

    def _load(self, order: _Order) -> None:
        early_s = order.turn_at - time.monotonic()
        if early_s > 0:
            time.sleep(min(early_s, _TURN_S))
        if (early_s > _TURN_S or self._lacks_room(order)) and self._load_later(order):
            return
        self.loads.end(order.ended)
        QUICK_TURNS.end()

    def _load_later(self, order: _Order) -> bool:
        """Let other loads have their turn: this one may wait for what they hold. False if the worker ends."""
        with contextlib.suppress(RuntimeError):
            self._threads.submit(functools.partial(self._load, order))
            return True
        return False

    def _lacks_room(self, order: _Order) -> bool:
        """Bring what there is room for. True if that is not all, and there may be more later."""
        try:
            return self._bring(order)
        except TierError as error:
            self._log.warning("load", "a load failed and is computed instead: %s", error)
        except Exception:
            logger.exception("a load failed and is computed instead")
        return False

    def _bring(self, order: _Order) -> bool:
        """Bring the blocks, as many at a time as this client may lease. True if other loads hold all that it may."""
        order.deadline = order.deadline or time.monotonic() + order.timeout_s
        lease = self._lease(order)
        while True:
            with lease:
                num_loaded = self._bring_leased(order, lease, order.position)
            order.position += num_loaded
            if (
                lease.ended is not MatchEnd.LIMIT
                or num_loaded < lease.num_blocks
                or order.position == len(order.hashes)
                or time.monotonic() >= order.deadline
            ):
                return False
            if not num_loaded:
                order.pause_s = min(2 * order.pause_s, _MAX_ROOM_POLL_S)
                order.turn_at = time.monotonic() + order.pause_s
                return True
            order.pause_s = _ROOM_POLL_S
            lease = self._match_rest(order)

    def _bring_leased(self, order: _Order, lease: Lease, first: int) -> int:
        """Bring the blocks of `lease`, which begins with block `first` of the load. Returns how many have arrived."""
        ended, started_at, end = order.ended, time.monotonic(), first + lease.num_blocks
        spans = spans_of([TierSegment(self._tier.name, 0, lease)], first)
        if not lease.has_views:  # for a remote server, it makes no difference where it keeps them
            spans = [Span(self._tier.name, self._tier.name, first, end, lease, 0)]
        num_arrived = 0
        for span in spans:
            is_last = span is spans[-1] and end == len(order.hashes)
            num_loaded = self._bring_span(order, span, is_last=is_last)
            now = time.monotonic()
            if num_loaded:
                nbytes = num_loaded * self._tier.layout.block_bytes
                ended.parts.append(Loaded(span.tier, nbytes, now - started_at))
            started_at = now
            num_arrived += num_loaded
            if num_loaded < span.end - span.first:
                break
        return num_arrived

    def _lease(self, order: _Order) -> Lease:
        """A lease of the blocks that are leased already, or else a new match."""
        if order.leased is not None and self._tier.arena is not None:
            lease = order.leased.lease_in(self._tier.arena, self._tier.layout.block_bytes, order.hashes)
            if lease is not None:
                return lease
        return self._match_rest(order)

    def _match_rest(self, order: _Order) -> Lease:
        left_s = max(0.0, order.deadline - time.monotonic())
        return self._tier.match(order.hashes[order.position :], timeout_s=left_s)

    def _bring_span(self, order: _Order, span: Span, *, is_last: bool) -> int:
        """Returns how many of its blocks are on the device."""
        ended, started_at = order.ended, time.monotonic()
        idle_cut, busy_cut = self._cuts(span) if is_last and span.is_in_memory else (span.end, span.end)
        bounds = sorted({span.first, idle_cut, busy_cut, span.end})
        parts = [self._part(order, span, *bound) for bound in itertools.pairwise(bounds)]
        for part in parts:
            self._loader.begin(part)
            if part.num_arrived < part.num_blocks:
                break
        num_loaded = sum(part.num_arrived for part in parts)
        is_reported = False
        for number, part in enumerate(parts, 1):
            _wait(part.copies)
            rest = [copies for later in parts[number:] for copies in later.copies]
            cut = idle_cut if self._pace.is_idle else busy_cut
            if rest and not is_reported and part.plan.end >= cut:
                ended.num_loaded += num_loaded
                ended.arriving = rest
                self.loads.arrive(ended)
                is_reported = True
        if not is_reported:
            ended.num_loaded += num_loaded
        if span.is_in_memory and num_loaded:
            self._bytes_per_s = num_loaded * self._tier.layout.block_bytes / (time.monotonic() - started_at)
        return num_loaded

    def _cuts(self, span: Span) -> tuple[int, int]:
        """Once the blocks before these have arrived, the load is reported: on an idle device, and on a busy one."""
        busy_s = _STEPS_BETWEEN * self._pace.shortest_s
        tails = (_TAIL_BYTES, min(_TAIL_BYTES, int(busy_s * self._bytes_per_s)))
        idle_cut, busy_cut = (max(span.first + 1, span.end - tail // self._tier.layout.block_bytes) for tail in tails)
        return idle_cut, busy_cut

    def _part(self, order: _Order, span: Span, first: int, end: int) -> _TimedLoad:
        unit = max(1, _UNIT_BYTES // self._tier.layout.slot_bytes)
        plan = LoadPlan(span, first, end, Order.FRONT, None, unit)
        return _TimedLoad(plan, order.hashes[first:end], order.ids[first:end], order.after, order.deadline)


@dataclass(eq=False, slots=True)
class _Order:
    """One load, as it was requested."""

    ended: EndedLoad
    hashes: list[BlockHash]
    ids: Sequence[int]
    after: Mark
    timeout_s: float
    leased: LeasedBlocks | None
    deadline: float = 0.0
    position: int = 0
    """The blocks before this one have arrived."""
    turn_at: float = 0.0
    """When to ask again, if there was no room."""
    pause_s: float = _ROOM_POLL_S


class _TimedLoad(Load):
    """Loads all of a plan, from the front, until the deadline."""

    def __init__(
        self, plan: LoadPlan, hashes: Sequence[BlockHash], ids: Sequence[int], after: Mark, deadline: float
    ) -> None:
        super().__init__(plan, hashes, ids, after, time.monotonic())
        self._deadline = deadline

    def take(self, count: int) -> tuple[int, int]:
        return (0, 0) if time.monotonic() >= self._deadline else super().take(count)


def _wait(many: Sequence[Copies]) -> None:
    for copies in many:
        copies.wait()


def _nothing() -> None:
    pass
