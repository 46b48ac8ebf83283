"""Brings a load's blocks from a tier to the device. Runs on the tiers' threads; no torch.

Blocks in this host's memory are copied from where they lie. Others come a unit at a time: from disk into a server's
memory, or over TCP into slots of the host tier, and from there to the device while the next units arrive.
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
from kvtier.transfer.load import Load, Order

_NUM_UNITS = 3
_AHEAD_BYTES = 256 << 20
"""Limit on the bytes that all loads together read from disk ahead of the device's copies; a load always gets one unit.
This keeps a disk busy. More would spread over more memory, and slots that are soon reused for reading are faster."""

_MAX_UNITS = 12
"""Limit on the units that one load has in flight. A load that meets the compute front uses small units, since the
engine does not compute what is in flight."""

_ARENA_SHARE = 4
"""Read-ahead takes at most one in this many bytes of the server's memory, or one unit per load."""

_SERVER_SHARE = 48
_HOST_SHARE = 24
"""A unit is at most one in this many blocks of the memory it passes through. Without further read-ahead, a load has
five units in flight: two arriving, three on their way to the device. Four loads fit, with room for others."""


class Loader:
    """Thread-safe: each load belongs to one thread."""

    def __init__(self, hierarchy: Hierarchy, copier: Copier, wake: Callable[[], None]) -> None:
        """`wake` is called when all of a load was handed to the device."""
        self._hierarchy = hierarchy
        self._copier = copier
        self._wake = wake
        self._host = hierarchy.host
        self._ahead = _ReadAhead()

    def bring(self, load: Load) -> int:
        """Return once the device has its copies: the number of blocks that came, some perhaps too late."""
        num_blocks = self.begin(load)
        for copies in load.copies:
            copies.wait()
        return num_blocks

    def begin(self, load: Load) -> int:
        """Like `bring`, but the device's last copies may still be in flight."""
        span = load.plan.span
        guard = next(guard for guard in self._hierarchy.guards if guard.tier.name == span.asked)
        with guard.watched():
            if span.lease is not None and span.lease.arena is not None:
                return self._bring_in_place(load, span.lease)
            return self._bring_units(load, guard.tier)
        return 0

    def _bring_in_place(self, load: Load, lease: Lease) -> int:
        """From this host's memory: resident blocks at once, those from disk as they arrive. Returns how many came."""
        plan, span = load.plan, load.plan.span
        arena = lease.arena
        assert arena is not None
        self._copier.adopt(arena)
        position = plan.first
        while position < plan.end:
            wanted = min(plan.end, position + plan.unit) if span.is_below else plan.end
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
        """Unit by unit: the next units are read or received while the last ones move on to the device.

        Blocks on disk are leased unit by unit, so a prompt may be longer than the memory it passes through. Returns how
        many blocks came.
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
        """Blocks per unit: `most`, or fewer if the memory that they pass through is small."""
        if self._host is not None:
            most = min(most, self._host.num_blocks // _HOST_SHARE)
        with contextlib.suppress(TierUnavailable):  # matching reports it again
            if tier.arena is not None:
                most = min(most, tier.arena.nbytes // tier.layout.slot_bytes // _SERVER_SHARE)
        return max(1, most)

    def _may_open(self, coming: Sequence[_Unit], most: int) -> bool:
        """Whether to open another unit behind those `coming`. `most` limits all but reads from this host's disk."""
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
        """Hand the unit to the device, as far as it came in order; False if that is not all of it."""
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
    """Reads in flight from this host's disks, over all loads. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_loads = 0
        self._nbytes = 0

    def count(self, num_loads: int, nbytes: int) -> None:
        """Add to both counts; negative numbers subtract."""
        with self._lock:
            self._num_loads += num_loads
            self._nbytes += nbytes

    def has_room(self, num_units: int, unit_bytes: int, arena_bytes: int) -> bool:
        """Whether a load with `num_units` of these in flight, at least one, may have another."""
        most_bytes = min(_AHEAD_BYTES, arena_bytes // _ARENA_SHARE)
        with self._lock:
            share = min(_MAX_UNITS, most_bytes // (self._num_loads * unit_bytes))
            return num_units < share and self._nbytes + unit_bytes <= most_bytes


@dataclass(eq=False, slots=True)
class _Unit:
    """Blocks of a prompt, from `first` on, that come together. They lie in `lease` from `lease_first` on; `own_lease`
    is set if the lease is only theirs."""

    first: int
    hashes: Sequence[BlockHash]
    lease: Lease
    lease_first: int
    own_lease: Lease | None = None
    read_bytes: int = 0
    """Bytes of a server's memory that it takes if it is read there from this host's disk."""
    stage: Reservation | None = None
    num_arrived: int = 0
    transfer: Copies | None = None

    @property
    def is_there(self) -> bool:
        """The device has its copy, as far as it came."""
        return self.transfer is None or self.transfer.is_done

    def finish(self) -> None:
        """Wait for the device's copy, commit what lies in the host tier, and end the unit's own lease."""
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
