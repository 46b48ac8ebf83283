"""Full blocks on their way from the device to the tiers. One thread copies, another pushes to tiers out of reach.

Blocks that somebody is going to compute are announced where that can be: slots are reserved, and whoever asks for them
waits. Everything is best effort: a tier that is full, slow or gone loses what it was offered. No torch.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvtier.blocks.hashing import BlockHash
from kvtier.errors import CapacityError
from kvtier.latency_guard import give_way, yield_to
from kvtier.memory.lease import Reservation
from kvtier.tiers.explanation import Explanation
from kvtier.tiers.hierarchy import Guard, Hierarchy
from kvtier.tiers.host import HostTier
from kvtier.tiers.remote import RemoteTier, SharedMemoryTier
from kvtier.transfer.copier import Copier, Copies, Mark
from kvtier.transfer.device_lease import DeviceLease

logger = logging.getLogger(__name__)

_MAX_JOBS = 512
_MAX_PUSHES = 1024
_PUSH_BYTES = 32 << 20
_CLOSE_S = 1.0


@dataclass(eq=False, slots=True)
class _Offer:
    """Blocks of one request. It can be cancelled as long as nothing of it is being copied."""

    hashes: Sequence[BlockHash]
    held: DeviceLease
    is_cancelled: bool = False
    is_copying: bool = False


@dataclass(frozen=True, slots=True)
class _Batch:
    offers: list[_Offer]
    after: Mark


@dataclass(frozen=True, slots=True)
class _Announcement:
    owner: object
    hashes: Sequence[BlockHash]


@dataclass(frozen=True, slots=True)
class _Withdrawal:
    owner: object


_Job = _Batch | _Announcement | _Withdrawal | Explanation | threading.Event


class Storer:
    """The engine's thread announces, offers and asks what was copied; it never waits."""

    def __init__(
        self,
        hierarchy: Hierarchy,
        copier: Copier,
        wake: Callable[[], None],
        let_pass: Callable[[], None] | None = None,
    ) -> None:
        """Its threads `let_pass` where they can (`latency_guard`)."""
        self._copier = copier
        self._wake = wake
        guards = hierarchy.guards
        self._places = [
            _Places(guard, guard.tier, copier, hierarchy)
            for guard in guards
            if isinstance(guard.tier, (HostTier, SharedMemoryTier))
        ]
        self._host = hierarchy.host
        self._far = [guard for guard in guards if not isinstance(guard.tier, (HostTier, SharedMemoryTier))]
        self._noters = [guard.tier.client for guard in guards if isinstance(guard.tier, RemoteTier)]
        self._hierarchy = hierarchy
        self._lock = threading.Lock()
        self._offers: list[_Offer] = []
        self._withdrawals: list[_Withdrawal] = []
        self._announced: set[object] = set()
        self.num_offered = 0
        """Blocks that were offered and not sent yet."""
        self._waiting: deque[_Offer] = deque()
        self._copied: deque[DeviceLease] = deque()
        self.num_held = 0
        self._pushes_until = float("inf")
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._pushes: queue.Queue[Sequence[BlockHash] | threading.Event | None] = queue.Queue(_MAX_PUSHES)
        self._thread = threading.Thread(target=self._run, args=(let_pass,), name="kvtier-store", daemon=True)
        self._thread.start()
        self._pusher: threading.Thread | None = None
        if self._far and self._host is not None:
            self._pusher = threading.Thread(target=self._push_all, args=(let_pass,), name="kvtier-push", daemon=True)
            self._pusher.start()

    # --- the engine's thread ---------------------------------------------------------------------------------------

    def announce(self, owner: object, hashes: Sequence[BlockHash]) -> None:
        """Not while there is much to do: it would come too late, and the queue must not grow without end."""
        if hashes and self._jobs.qsize() < _MAX_JOBS:
            self._announced.add(owner)
            self._jobs.put(_Announcement(owner, hashes))

    def withdraw(self, owner: object) -> None:
        """After what was offered before."""
        if owner not in self._announced:
            return
        self._announced.remove(owner)
        if self._offers:
            self._withdrawals.append(_Withdrawal(owner))
        else:
            self._jobs.put(_Withdrawal(owner))

    def offer(self, hashes: Sequence[BlockHash], held: DeviceLease) -> None:
        self._offers.append(_Offer(hashes, held))
        self.num_offered += len(held.ids)
        self.num_held += len(held.ids)

    def note(self, explanation: Explanation) -> None:
        if self._noters and self._jobs.qsize() < _MAX_JOBS:
            self._jobs.put(explanation)

    def send(self, after: Mark) -> None:
        offers, self._offers = self._offers, []
        self.num_offered = 0
        with self._lock:
            self._waiting.extend(offers)
        self._jobs.put(_Batch(offers, after))
        for withdrawal in self._withdrawals:
            self._jobs.put(withdrawal)
        self._withdrawals.clear()

    def take_copied(self) -> list[DeviceLease]:
        copied = []
        while self._copied:
            copied.append(self._copied.popleft())
        self.num_held -= sum(len(held.ids) for held in copied)
        return copied

    def cancel_waiting(self) -> None:
        """Give up what is not being copied yet; its blocks are free at once."""
        with self._lock:
            for offer in self._waiting:
                if not offer.is_copying and not offer.is_cancelled:
                    offer.is_cancelled = True
                    self._copied.append(offer.held)
                    for places in self._places:
                        places.count_refused(len(offer.hashes))

    def start_over(self, timeout_s: float) -> None:
        """After a failure: whatever is held is forgotten, and nothing that was offered is shown to anybody any more.

        Waits until nothing is copied from the device.
        """
        self._offers.clear()
        self.num_offered = 0
        for withdrawal in self._withdrawals:
            self._jobs.put(withdrawal)
        self._withdrawals.clear()
        with self._lock:
            for offer in self._waiting:
                offer.is_cancelled = True
        self.settle_copies(timeout_s)
        with self._lock:
            self._waiting.clear()
            self._copied.clear()
        self.num_held = 0

    def settle_copies(self, timeout_s: float) -> bool:
        """Wait until nothing of what was sent is copied from the device any more."""
        done = threading.Event()
        self._jobs.put(done)
        return done.wait(timeout_s)

    def settle(self, timeout_s: float) -> bool:
        """Wait until all that was sent is stored or given up."""
        deadline = time.monotonic() + timeout_s
        if not self.settle_copies(timeout_s):
            return False
        if self._pusher is None:
            return True
        pushed = threading.Event()
        try:
            self._pushes.put(pushed, timeout=max(0.0, deadline - time.monotonic()))
        except queue.Full:
            return False
        return pushed.wait(max(0.0, deadline - time.monotonic()))

    def close(self) -> None:
        """Finish what is under way; what is not pushed within a moment is not pushed."""
        self._jobs.put(None)
        self._thread.join()
        self._pushes_until = time.monotonic() + _CLOSE_S
        if self._pusher is not None:
            self._pushes.put(None)
            self._pusher.join()

    # --- the copying thread ----------------------------------------------------------------------------------------

    def _run(self, let_pass: Callable[[], None] | None) -> None:
        yield_to(let_pass)
        while (job := self._jobs.get()) is not None:
            give_way()
            try:
                self._do(job)
            except Exception:
                logger.exception("storing blocks failed")
            self._wake()
        for places in self._places:
            places.close()

    def _do(self, job: _Job) -> None:
        if isinstance(job, _Batch):
            self._store(job)
        elif isinstance(job, _Announcement):
            for places in self._places:
                places.announce(job.owner, job.hashes)
        elif isinstance(job, _Withdrawal):
            for places in self._places:
                places.withdraw(job.owner)
        elif isinstance(job, Explanation):
            for client in self._noters:
                client.note(job)
        else:
            job.set()

    def _store(self, batch: _Batch) -> None:
        offers: list[_Offer] = []
        hashes = [block_hash for offer in batch.offers if not offer.is_cancelled for block_hash in offer.hashes]
        try:
            for places in self._places:  # may wait for a tier: the offers can be cancelled meanwhile
                places.make(hashes)
            offers = self._start_copying(batch.offers)
            ids = {
                block_hash: block_id
                for offer in offers
                for block_hash, block_id in zip(offer.hashes, offer.held.ids, strict=True)
            }
            copies = [places.copy(ids, batch.after) for places in self._places]
            for places, copy in zip(self._places, copies, strict=True):
                places.wait(copy)
            self._end_copying(batch.offers)
            self._wake()
            if not any(offer.is_cancelled for offer in offers):  # else its blocks may be somebody else's by now
                for places, copy in zip(self._places, copies, strict=True):
                    places.commit(copy)
        finally:
            self._end_copying(batch.offers)
            for places in self._places:
                places.give_back(hashes)
        if self._pusher is not None:
            for offer in offers:
                self._queue_push(offer.hashes)

    def _start_copying(self, offers: Sequence[_Offer]) -> list[_Offer]:
        with self._lock:
            wanted = [offer for offer in offers if not offer.is_cancelled]
            for offer in wanted:
                offer.is_copying = True
            return wanted

    def _end_copying(self, offers: Sequence[_Offer]) -> None:
        """Once for each: the device's blocks are free."""
        with self._lock:
            for offer in offers:
                if offer in self._waiting:
                    self._waiting.remove(offer)
                    if not offer.is_cancelled:
                        self._copied.append(offer.held)

    # --- the pushing thread ----------------------------------------------------------------------------------------

    def _queue_push(self, hashes: Sequence[BlockHash]) -> None:
        assert self._host is not None
        step = max(1, _PUSH_BYTES // self._host.layout.block_bytes)
        for first in range(0, len(hashes), step):
            try:
                self._pushes.put_nowait(hashes[first : first + step])
            except queue.Full:
                self._refuse_push(hashes[first : first + step])

    def _refuse_push(self, hashes: Sequence[BlockHash]) -> None:
        for guard in self._far:
            self._hierarchy.metrics.refused_blocks.labels(tier=guard.tier.name).inc(len(hashes))

    def _push_all(self, let_pass: Callable[[], None] | None) -> None:
        yield_to(let_pass)
        while (job := self._pushes.get()) is not None:
            if isinstance(job, threading.Event):
                job.set()
                continue
            if time.monotonic() > self._pushes_until:
                self._refuse_push(job)
                continue
            try:
                self._push(job)
            except Exception:
                logger.exception("pushing blocks failed")

    def _push(self, hashes: Sequence[BlockHash]) -> None:
        """From the host's tier, as far as the blocks are still there."""
        assert self._host is not None
        metrics = self._hierarchy.metrics
        with self._host.match(hashes) as lease:
            if lease.num_blocks < len(hashes):
                self._refuse_push(hashes[lease.num_blocks :])  # the host's tier is too small to keep them so long
            if not lease.num_blocks:
                return
            for guard in self._far:
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


@dataclass(eq=False, slots=True)
class _Slots:
    """A reservation whose slots are filled one after the other."""

    reservation: Reservation
    num_open: int


@dataclass(slots=True)
class _Copy:
    """Slots that are being written: for each reservation the numbers of its slots."""

    slots: list[tuple[_Slots, list[int]]] = field(default_factory=list)
    transfers: list[Copies] = field(default_factory=list)
    started_at: float = 0.0


class _Places:
    """Slots in one tier, reserved before or when they are needed. Only the copying thread uses it."""

    def __init__(self, guard: Guard, tier: HostTier | SharedMemoryTier, copier: Copier, hierarchy: Hierarchy) -> None:
        self._guard = guard
        self._tier = tier
        self._copier = copier
        metrics, name = hierarchy.metrics, tier.name
        self._refused_blocks = metrics.refused_blocks.labels(tier=name)
        self._stored_blocks = metrics.stored_blocks.labels(tier=name)
        self._stored_bytes = metrics.stored_bytes.labels(tier=name)
        self._store_seconds = metrics.store_seconds.labels(tier=name)
        self._places: dict[BlockHash, tuple[_Slots, int]] = {}
        self._announced: dict[object, list[tuple[BlockHash, _Slots]]] = {}

    def announce(self, owner: object, hashes: Sequence[BlockHash]) -> None:
        made = self.make(hashes)
        if made:
            known = self._announced.setdefault(owner, [])
            known += [(block_hash, self._places[block_hash][0]) for block_hash in made]

    def withdraw(self, owner: object) -> None:
        """Give back the places that were made for `owner` and are not used."""
        announced = self._announced.pop(owner, ())
        self.give_back(
            [known for known, slots in announced if known in self._places and self._places[known][0] is slots]
        )

    def make(self, hashes: Sequence[BlockHash]) -> list[BlockHash]:
        """Places for all of them that the tier lacks; for which they were made now."""
        return self._reserve([block_hash for block_hash in hashes if block_hash not in self._places])

    def copy(self, ids: dict[BlockHash, int], after: Mark) -> _Copy:
        """Begin to copy the blocks that have a place."""
        copy = _Copy(started_at=time.monotonic())
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
                transfer = self._copier.store([block_id for _, block_id in pairs], arena, offsets, after)
                copy.transfers.append(transfer)
                copy.slots.append((slots, [number for number, _ in pairs]))
        return copy

    def wait(self, copy: _Copy) -> None:
        """Until the copies are done; what failed is not committed."""
        arrived = []
        for slots, transfer in zip(copy.slots, copy.transfers, strict=True):
            with self._guard.watched():
                transfer.wait()
                arrived.append(slots)
        copy.slots = arrived

    def commit(self, copy: _Copy) -> None:
        """The bytes are there: show them."""
        num_stored = 0
        for slots, numbers in copy.slots:
            with self._guard.watched():
                for first, count in _runs(numbers):
                    num_stored += slots.reservation.commit(first, count)
        if num_stored:
            self._stored_blocks.inc(num_stored)
            self._stored_bytes.inc(num_stored * self._tier.layout.block_bytes)
            self._store_seconds.inc(time.monotonic() - copy.started_at)

    def give_back(self, hashes: Sequence[BlockHash]) -> None:
        """Their places are done with; a reservation without open ones ends."""
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
        self._refused_blocks.inc(num_blocks)

    def _reserve(self, hashes: Sequence[BlockHash]) -> list[BlockHash]:
        """Places for those of `hashes` that are neither there nor being written."""
        if not hashes or self._guard.is_resting:
            return []
        made: list[BlockHash] = []
        with self._guard.watched():
            try:
                reservation = self._tier.reserve(hashes)
            except CapacityError:
                self._refused_blocks.inc(len(hashes))
                return []
            if not reservation.num_blocks:
                reservation.close()
                return []
            if reservation.num_refused:
                self._refused_blocks.inc(reservation.num_refused)
            slots = _Slots(reservation, reservation.num_blocks)
            for number, position in enumerate(reservation.positions):
                self._places[hashes[position]] = (slots, number)
                made.append(hashes[position])
        return made


def _runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Rising numbers as (first, count) of neighbours."""
    runs: list[tuple[int, int]] = []
    for _, group in itertools.groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        run = [number for _, number in group]
        runs.append((run[0], len(run)))
    return runs
