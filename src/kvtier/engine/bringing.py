"""Brings a load's blocks from a tier to the device. On the tiers' threads; no torch.

Blocks in memory of this host are copied from where they lie. Others come a unit at a time: from disk into a server's
memory, or over TCP into slots of the host's tier, and on from there while the next are on their way.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvtier.blocks.hashing import BlockHash
from kvtier.courtesy import give_way
from kvtier.engine.copier import Copier, Transfer
from kvtier.engine.load import DISK, Load, Order
from kvtier.errors import CapacityError, TierUnavailable
from kvtier.memory.lease import BlockLease, Lease, Reservation
from kvtier.tiers.hierarchy import Hierarchy
from kvtier.tiers.remote import SharedMemoryTier
from kvtier.tiers.tier import Tier

_NUM_UNITS = 3
_AHEAD_BYTES = 256 << 20
"""So much is read from disk ahead of the device's copies, by all loads together, but a unit by each: what keeps a disk
busy. More would pass through more memory, and the sooner a slot is read into again, the faster that is."""

_ARENA_SHARE = 4
"""What is read ahead takes at most one in so many bytes of the server's memory."""

_SERVER_SHARE = 48
_HOST_SHARE = 24
"""A unit is one in so many blocks, at most, of the memory that it passes through. Without reading further ahead, a load
has five of them: two that come and three that go on to the device. Four loads have room, and others beside them."""


class Bringing:
    """Thread-safe: each load is one thread's."""

    def __init__(self, hierarchy: Hierarchy, copier: Copier, wake: Callable[[], None]) -> None:
        """`wake` is called when all of a load is with the device."""
        self._hierarchy = hierarchy
        self._copier = copier
        self._wake = wake
        self._host = hierarchy.host
        self._lock = threading.Lock()
        self._num_bringing = 0

    def bring(self, load: Load) -> int:
        """Returns how many blocks came, some of them perhaps too late, once the device has its copies."""
        part = load.plan.part
        guard = next(guard for guard in self._hierarchy.guards if guard.tier.name == part.asked)
        num_blocks = 0
        with guard.watched():
            if isinstance(part.lease, BlockLease) and part.lease.arena is not None:
                num_blocks = self._bring_in_place(load, part.lease)
            else:
                num_blocks = self._bring_units(load, guard.tier)
        for transfer in load.transfers:
            transfer.wait()
        return num_blocks

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
            give_way()
            if load.write(first, end, functools.partial(self._copier.load, arena, offsets, after=load.after)) is None:
                return there - plan.first
            position = end
        self._tell_submitted(load)
        return position - plan.first

    def _bring_units(self, load: Load, tier: Tier) -> int:
        """A unit at a time: the next are read or received while the last ones go on to the device.

        What is on disk is leased by the unit, so that a prompt may be longer than the memory that it passes through.
        Returns how many blocks came.
        """
        unit = self._unit_blocks(load.plan.unit, tier)
        coming: deque[_Unit] = deque()
        going: deque[_Unit] = deque()
        num_blocks = 0
        most = _NUM_UNITS if load.plan.part.lease is None else 1
        self._count_bringing(1)
        try:
            while True:
                while len(coming) < most:
                    first, end = load.take(unit)
                    if first >= end:
                        break
                    coming.append(self._open_unit(load, tier, first, end))
                    most = self._num_ahead(coming[-1], unit * tier.layout.slot_bytes) or most
                if not coming:
                    self._tell_submitted(load)
                    return num_blocks
                going.append(coming.popleft())
                is_whole = self._bring_unit(load, going[-1])
                num_blocks += going[-1].num_arrived
                if not is_whole:
                    return num_blocks
                while len(going) == _NUM_UNITS or (going and going[0].is_there):
                    going.popleft().finish()
        finally:
            self._count_bringing(-1)
            with contextlib.ExitStack() as stack:
                for one in (*coming, *going):
                    stack.callback(one.finish)

    def _unit_blocks(self, most: int, tier: Tier) -> int:
        """How many blocks come together: `most`, or fewer where the memory that they pass through is small."""
        if self._host is not None:
            most = min(most, self._host.num_blocks // _HOST_SHARE)
        if isinstance(tier, SharedMemoryTier):
            with contextlib.suppress(TierUnavailable):  # which matching says again
                most = min(most, tier.arena.nbytes // tier.layout.slot_bytes // _SERVER_SHARE)
        return max(1, most)

    def _num_ahead(self, unit: _Unit, unit_bytes: int) -> int:
        """How many units like this a load has under way, if they come from a disk of this host; else 0."""
        lease = unit.own_lease
        if not isinstance(lease, BlockLease) or lease.arena is None:
            return 0
        most_bytes = min(_AHEAD_BYTES, lease.arena.nbytes // _ARENA_SHARE)
        return max(1, most_bytes // (self._num_bringing * unit_bytes))

    def _count_bringing(self, change: int) -> None:
        with self._lock:
            self._num_bringing += change

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
        if not lease.num_blocks:
            return False  # evicted since it was matched
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
                load.lacks_room = True
                return False
            arena, offsets = host.arena, unit.stage.offsets
            unit.num_arrived = lease.fetch(unit.stage.views(), unit.lease_first)
        if not unit.num_arrived or (load.plan.order is Order.BACK and unit.num_arrived < count):
            return False
        begin = functools.partial(self._copier.load, arena, offsets[: unit.num_arrived], after=load.after)
        give_way()
        unit.transfer = load.write(unit.first, unit.first + unit.num_arrived, begin)
        return unit.transfer is not None and unit.num_arrived == count

    def _tell_submitted(self, load: Load) -> None:
        load.submit_all()
        self._wake()


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

    @property
    def is_there(self) -> bool:
        """The device has its copy, as far as it came."""
        return self.transfer is None or self.transfer.is_done

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
