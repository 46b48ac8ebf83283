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
from kvtier.errors import CapacityError, TierUnavailable
from kvtier.latency_guard import give_way
from kvtier.memory.lease import Lease, Reservation
from kvtier.tiers.hierarchy import Hierarchy
from kvtier.tiers.tier import Tier
from kvtier.transfer.copier import Copier, Copies
from kvtier.transfer.load import DISK, Load, Order

_NUM_UNITS = 3
_AHEAD_BYTES = 256 << 20
"""So much is read from disk ahead of the device's copies, by all loads together, but a unit by each: what keeps a disk
busy. More would pass through more memory, and the sooner a slot is read into again, the faster that is."""

_MAX_UNITS = 12
"""No load has more under way: where it meets what is computed, units are small, and what it took on is not computed."""

_ARENA_SHARE = 4
"""What is read ahead takes at most one in so many bytes of the server's memory, or a unit for each load."""

_SERVER_SHARE = 48
_HOST_SHARE = 24
"""A unit is one in so many blocks, at most, of the memory that it passes through. Without reading further ahead, a load
has five of them: two that come and three that go on to the device. Four loads have room, and others beside them."""


class Loader:
    """Thread-safe: each load is one thread's."""

    def __init__(self, hierarchy: Hierarchy, copier: Copier, wake: Callable[[], None]) -> None:
        """`wake` is called when all of a load is with the device."""
        self._hierarchy = hierarchy
        self._copier = copier
        self._wake = wake
        self._host = hierarchy.host
        self._ahead = _ReadAhead()

    def bring(self, load: Load) -> int:
        """Returns how many blocks came, some of them perhaps too late, once the device has its copies."""
        num_blocks = self.begin(load)
        for copies in load.copies:
            copies.wait()
        return num_blocks

    def begin(self, load: Load) -> int:
        """As `bring`, but the device may not have its last copies yet."""
        span = load.plan.span
        guard = next(guard for guard in self._hierarchy.guards if guard.tier.name == span.asked)
        with guard.watched():
            if span.lease is not None and span.lease.arena is not None:
                return self._bring_in_place(load, span.lease)
            return self._bring_units(load, guard.tier)
        return 0

    def _bring_in_place(self, load: Load, lease: Lease) -> int:
        """From memory of this host: what is there at once, what comes from disk as it comes. Returns how many came."""
        plan, span = load.plan, load.plan.span
        arena = lease.arena
        assert arena is not None
        self._copier.adopt(arena)
        position = plan.first
        while position < plan.end:
            wanted = min(plan.end, position + plan.unit) if span.tier == DISK else plan.end
            there = min(span.first + lease.wait(span.place(wanted)) - span.lease_first, plan.end)
            first, end = load.take(max(0, there - position))
            if first >= end:
                return max(position, there) - plan.first
            offsets = lease.offsets[span.place(first) : span.place(end)]
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
        most = _NUM_UNITS if load.plan.span.lease is None else 1
        is_reading = False
        try:
            while True:
                while self._may_open(coming, most):
                    first, end = load.take(unit)
                    if first >= end:
                        break
                    coming.append(self._open_unit(load, tier, first, end))
                    nbytes = coming[-1].read_bytes
                    self._ahead.count(nbytes > 0 and not is_reading, nbytes)
                    is_reading = is_reading or nbytes > 0
                if not coming:
                    self._tell_submitted(load)
                    return num_blocks
                going.append(coming.popleft())
                self._ahead.count(0, -going[-1].read_bytes)
                is_whole = self._bring_unit(load, going[-1])
                num_blocks += going[-1].num_arrived
                if not is_whole:
                    return num_blocks
                while len(going) == _NUM_UNITS or (going and going[0].is_there):
                    going.popleft().finish()
        finally:
            self._ahead.count(-is_reading, -sum(one.read_bytes for one in coming))
            with contextlib.ExitStack() as stack:
                for one in (*coming, *going):
                    stack.callback(one.finish)

    def _unit_blocks(self, most: int, tier: Tier) -> int:
        """How many blocks come together: `most`, or fewer where the memory that they pass through is small."""
        if self._host is not None:
            most = min(most, self._host.num_blocks // _HOST_SHARE)
        with contextlib.suppress(TierUnavailable):  # which matching says again
            if tier.arena is not None:
                most = min(most, tier.arena.nbytes // tier.layout.slot_bytes // _SERVER_SHARE)
        return max(1, most)

    def _may_open(self, coming: Sequence[_Unit], most: int) -> bool:
        """Whether to ask for another unit behind those `coming`. From a disk of this host, `most` is for the first."""
        if not coming or not coming[-1].read_bytes:
            return len(coming) < most
        last = coming[-1]
        assert last.lease.arena is not None
        return self._ahead.has_room(len(coming), last.read_bytes, last.lease.arena.nbytes)

    def _open_unit(self, load: Load, tier: Tier, first: int, end: int) -> _Unit:
        plan = load.plan
        hashes = load.hashes[first - plan.first : end - plan.first]
        if plan.span.lease is not None:
            return _Unit(first, hashes, plan.span.lease, plan.span.place(first))
        lease = tier.match(hashes)
        read_bytes = 0 if lease.arena is None else lease.num_blocks * tier.layout.slot_bytes
        return _Unit(first, hashes, lease, 0, own_lease=lease, read_bytes=read_bytes)

    def _bring_unit(self, load: Load, unit: _Unit) -> bool:
        """Let the device have it, or as much of it as came in order; False when that is not all."""
        lease, count = unit.lease, len(unit.hashes)
        if not lease.num_blocks:
            return False  # evicted since it was matched
        if lease.arena is not None:
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


class _ReadAhead:
    """What all loads together read from disks of this host and have not yet. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_loads = 0
        self._nbytes = 0

    def count(self, num_loads: int, nbytes: int) -> None:
        """So many more, or fewer."""
        with self._lock:
            self._num_loads += num_loads
            self._nbytes += nbytes

    def has_room(self, num_units: int, unit_bytes: int, arena_bytes: int) -> bool:
        """Whether a load that has `num_units` of these under way, one at least, may have another."""
        most_bytes = min(_AHEAD_BYTES, arena_bytes // _ARENA_SHARE)
        with self._lock:
            share = min(_MAX_UNITS, most_bytes // (self._num_loads * unit_bytes))
            return num_units < share and self._nbytes + unit_bytes <= most_bytes


@dataclass(eq=False, slots=True)
class _Unit:
    """Blocks of a prompt from `first` on that come together, from `lease_first` of a lease, perhaps of their own."""

    first: int
    hashes: Sequence[BlockHash]
    lease: Lease
    lease_first: int
    own_lease: Lease | None = None
    read_bytes: int = 0
    """What it takes of a server's memory, if it is read there from a disk of this host."""
    stage: Reservation | None = None
    num_arrived: int = 0
    transfer: Copies | None = None

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
