"""Slots of one tier of this host, reserved for blocks before they are computed or when they are stored. No torch.

Used by the storing thread only. A tier that fails or is full loses what it was offered.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtier.blocks.hashing import BlockHash
from kvtier.errors import CapacityError
from kvtier.memory.lease import Reservation
from kvtier.observe.metrics import TierMetrics
from kvtier.tiers.hierarchy import Guard
from kvtier.transfer.copier import Copier, Copies, Mark


@dataclass(eq=False, slots=True)
class _Slots:
    """A reservation whose slots are filled one after another."""

    reservation: Reservation
    num_open: int


@dataclass(slots=True)
class SlotCopies:
    """Slots that are being written: for each reservation, the numbers of its slots."""

    slots: list[tuple[_Slots, list[int]]] = field(default_factory=list)
    begun: list[Copies] = field(default_factory=list)
    started_at: float = 0.0


class ReservedSlots:
    """The reserved slots in one tier."""

    def __init__(self, guard: Guard, copier: Copier, metrics: TierMetrics) -> None:
        self._guard = guard
        self._tier = guard.tier
        self._copier = copier
        name = guard.tier.name
        self._refused_blocks = metrics.refused_blocks.labels(tier=name)
        self._stored_blocks = metrics.stored_blocks.labels(tier=name)
        self._stored_bytes = metrics.stored_bytes.labels(tier=name)
        self._store_seconds = metrics.store_seconds.labels(tier=name)
        self._places: dict[BlockHash, tuple[_Slots, int]] = {}
        self._announced: dict[object, list[tuple[BlockHash, _Slots]]] = {}
        self.is_staging = guard.tier.staging is not None
        """Blocks for remote tiers pass through this tier."""
        self.num_stored = 0
        self.num_refused = 0
        """Blocks that the tier did not take, for lack of room or because it failed."""

    def announce(self, owner: object, hashes: Sequence[BlockHash]) -> None:
        made = self.make(hashes)
        if made:
            known = self._announced.setdefault(owner, [])
            known += [(block_hash, self._places[block_hash][0]) for block_hash in made]

    def withdraw(self, owner: object) -> None:
        """Give back the slots that were reserved for `owner` and are unused."""
        announced = self._announced.pop(owner, ())
        self.give_back(
            [known for known, slots in announced if known in self._places and self._places[known][0] is slots]
        )

    def make(self, hashes: Sequence[BlockHash]) -> list[BlockHash]:
        """Reserve slots for all of them that the tier lacks. Returns the hashes for which slots were reserved now."""
        return self._reserve([block_hash for block_hash in hashes if block_hash not in self._places])

    def copy(self, ids: dict[BlockHash, int], after: Mark) -> SlotCopies:
        """Begin to copy the blocks that have a slot."""
        copy = SlotCopies(started_at=time.monotonic())
        by_slots: dict[int, tuple[_Slots, list[tuple[int, int]]]] = {}
        for block_hash, block_id in ids.items():
            place = self._places.get(block_hash)
            if place is not None:
                by_slots.setdefault(id(place[0]), (place[0], []))[1].append((place[1], block_id))
        for slots, pairs in by_slots.values():
            pairs.sort()
            reservation = slots.reservation
            arena = reservation.arena
            assert arena is not None
            with self._guard.watched():
                self._copier.adopt(arena)
                offsets = [reservation.offsets[number] for number, _ in pairs]
                copy.begun.append(self._copier.store([block_id for _, block_id in pairs], arena, offsets, after))
                copy.slots.append((slots, [number for number, _ in pairs]))
        return copy

    def wait(self, copy: SlotCopies) -> None:
        """Wait until the copies are done; failed ones will not be committed."""
        arrived = []
        for slots, copies in zip(copy.slots, copy.begun, strict=True):
            with self._guard.watched():
                copies.wait()
                arrived.append(slots)
        copy.slots = arrived

    def commit(self, copy: SlotCopies) -> None:
        """Commit slots whose bytes are written."""
        num_stored = 0
        for slots, numbers in copy.slots:
            with self._guard.watched():
                try:
                    for first, count in _runs(numbers):
                        num_stored += slots.reservation.commit(first, count)
                except CapacityError:
                    self.count_refused(len(numbers))
        if num_stored:
            self.num_stored += num_stored
            self._stored_blocks.inc(num_stored)
            self._stored_bytes.inc(num_stored * self._tier.layout.block_bytes)
            self._store_seconds.inc(time.monotonic() - copy.started_at)

    def give_back(self, hashes: Sequence[BlockHash]) -> None:
        """Give up their slots; a reservation without open slots is closed."""
        for block_hash in hashes:
            place = self._places.pop(block_hash, None)
            if place is None:
                continue
            slots = place[0]
            slots.num_open -= 1
            if not slots.num_open:
                with self._guard.watched():
                    slots.reservation.close()

    def close(self) -> None:
        self.give_back(list(self._places))

    def count_refused(self, num_blocks: int) -> None:
        self.num_refused += num_blocks
        self._refused_blocks.inc(num_blocks)

    def _reserve(self, hashes: Sequence[BlockHash]) -> list[BlockHash]:
        """Reserve slots for those of `hashes` that are neither stored nor being written."""
        if not hashes:
            return []
        reservation = None if self._guard.is_resting else self._reservation(hashes)
        self.num_refused += len(hashes) if reservation is None else reservation.num_refused
        if reservation is None:
            return []
        if not reservation.num_blocks:
            with self._guard.watched():
                reservation.close()
            return []
        if reservation.num_refused:
            self._refused_blocks.inc(reservation.num_refused)
        made: list[BlockHash] = []
        slots = _Slots(reservation, reservation.num_blocks)
        for number, position in enumerate(reservation.positions):
            self._places[hashes[position]] = (slots, number)
            made.append(hashes[position])
        return made

    def _reservation(self, hashes: Sequence[BlockHash]) -> Reservation | None:
        """None if the tier fails, or has no room for any of them."""
        with self._guard.watched():
            try:
                return self._tier.reserve(hashes)
            except CapacityError:
                self._refused_blocks.inc(len(hashes))
        return None


def _runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Ascending numbers as (first, count) of runs."""
    runs: list[tuple[int, int]] = []
    for _, group in itertools.groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        run = [number for _, number in group]
        runs.append((run[0], len(run)))
    return runs
