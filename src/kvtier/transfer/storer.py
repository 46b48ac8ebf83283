"""Full blocks on their way from the device to the tiers. One thread copies. No torch.

Blocks about to be computed are announced to tiers that support it: slots are reserved, and other clients that ask for
the blocks wait. Everything is best effort: a tier that is full, slow or gone loses what it was offered.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field

from kvtier.blocks.hashing import BlockHash
from kvtier.latency_guard import give_way, yield_to
from kvtier.tiers.explanation import Explanation
from kvtier.tiers.hierarchy import Hierarchy
from kvtier.transfer.copier import Copier, Mark
from kvtier.transfer.device_lease import DeviceLease
from kvtier.transfer.pusher import Pusher
from kvtier.transfer.reserved_slots import ReservedSlots
from kvtier.transfer.step_marks import StepMarks

logger = logging.getLogger(__name__)

_MAX_JOBS = 512
_BATCH_BLOCKS = 64
_BATCH_S = 0.05
"""How long a small batch waits for more blocks: each batch has a cost for the engine."""


@dataclass(eq=False, slots=True)
class _Offer:
    """Blocks of one prompt. An offer can be cancelled until its blocks are being copied."""

    hashes: Sequence[BlockHash]
    held: DeviceLease
    owner: object
    is_found: bool = False
    """A whole segment that has hits among its blocks: only for a tier that keeps segments, through host memory."""
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
    hashes: Sequence[BlockHash]


@dataclass(eq=False, slots=True)
class _Unsent:
    """The contents of the next batch; its withdrawals come after it.

    `after` is the mark behind the steps that fill its blocks; None until `send` is called after the last offer.
    """

    offers: list[_Offer] = field(default_factory=list)
    withdrawals: list[_Withdrawal] = field(default_factory=list)
    num_blocks: int = 0
    since: float | None = None
    after: Mark | None = None


_Job = _Batch | _Announcement | _Withdrawal | Explanation | threading.Event


class Storer:
    """The engine's thread announces blocks, offers them and asks which were copied; it never waits."""

    def __init__(
        self,
        hierarchy: Hierarchy,
        copier: Copier,
        marks: StepMarks,
        wake: Callable[[], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        let_pass: Callable[[], None] | None = None,
        sends_alone: bool = False,
    ) -> None:
        """At safe points, its threads call `let_pass` (see `latency_guard`).

        With `sends_alone`, a small batch is sent after a moment even if `send` is not called again: for an engine whose
        steps may end without notice.
        """
        self._marks = marks
        self._wake = wake
        self._clock = clock
        self._sends_alone = sends_alone
        guards, metrics = hierarchy.guards, hierarchy.metrics
        self._slots = [ReservedSlots(guard, copier, metrics) for guard in guards if guard.tier.is_local]
        far = [guard for guard in guards if not guard.tier.is_local]
        self._noters = [guard.tier for guard in guards if guard.tier.keeps_notes]
        self._lock = threading.Condition(threading.Lock())
        self._unsent = _Unsent()
        self._announced: dict[object, Sequence[BlockHash]] = {}
        self._waiting: deque[_Offer] = deque()
        self._copied: deque[DeviceLease] = deque()
        self.num_held = 0
        self._jobs: queue.SimpleQueue[_Job | _Unsent | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, args=(let_pass,), name="kvtier-store", daemon=True)
        self._thread.start()
        host = hierarchy.host
        self._pusher = Pusher(host, far, metrics, let_pass) if far and host is not None else None

    # --- the engine's thread ---------------------------------------------------------------------------------------

    def announce(self, owner: object, hashes: Sequence[BlockHash]) -> None:
        """`owner` is about to compute these blocks: other clients wait for them.

        Skipped if the backlog is long: the announcement would come too late, and the queue must stay bounded.
        """
        if hashes and self._jobs.qsize() < _MAX_JOBS:
            self._announced[owner] = hashes
            self._jobs.put(_Announcement(owner, hashes))

    def withdraw(self, owner: object) -> None:
        """`owner` offers no more of the blocks that it announced; its earlier offers stand."""
        hashes = self._announced.pop(owner, None)
        if hashes is None:
            return
        with self._lock:
            if self._unsent.offers:
                self._unsent.withdrawals.append(_Withdrawal(owner, hashes))
            else:
                self._jobs.put(_Withdrawal(owner, hashes))

    def offer(self, hashes: Sequence[BlockHash], held: DeviceLease, owner: object = None) -> None:
        """Offer blocks that are full once the device has done its work so far. They are held until `take_copied`."""
        self._add(_Offer(hashes, held, owner))

    def offer_segment(self, hashes: Sequence[BlockHash], held: DeviceLease) -> None:
        """Like `offer`, but a whole segment, for tiers that keep only whole ones: other tiers have its hits already."""
        self._add(_Offer(hashes, held, None, is_found=True))

    def _add(self, offer: _Offer) -> None:
        with self._lock:
            self._unsent.offers.append(offer)
            self._unsent.num_blocks += len(offer.held.ids)
            self._unsent.after = None
        self.num_held += len(offer.held.ids)

    def send(self, *, is_last: bool = False) -> None:
        """Send offers, which begin when the device has done what was handed to it so far.

        A few blocks wait a moment for more, unless these are the last for now.
        """
        if not self._unsent.num_blocks:
            self._unsent.since = None
            return
        now = self._clock()
        with self._lock:
            unsent = self._unsent
            is_waiting = unsent.since is not None
            if unsent.since is None:
                unsent.since = now
            if is_last or unsent.num_blocks >= _BATCH_BLOCKS or now - unsent.since >= _BATCH_S:
                self._send(unsent, self._marks.last)
                return
            unsent.after = self._marks.last
            if self._sends_alone and not is_waiting:
                self._jobs.put(unsent)

    def _send(self, unsent: _Unsent, after: Mark) -> None:
        """Under the lock."""
        self._waiting.extend(unsent.offers)  # first: `owners` looks at both without the lock
        self._unsent = _Unsent()
        self._jobs.put(_Batch(unsent.offers, after))
        for withdrawal in unsent.withdrawals:
            self._jobs.put(withdrawal)

    @property
    def num_unsent(self) -> int:
        """Blocks that were offered since the last batch."""
        return self._unsent.num_blocks

    def take_copied(self) -> list[DeviceLease]:
        """The blocks that were copied away since the last call."""
        copied: list[DeviceLease] = []
        if not self._copied:
            return copied
        while self._copied:
            copied.append(self._copied.popleft())
        self.num_held -= sum(len(held.ids) for held in copied)
        return copied

    @property
    def has_stores(self) -> bool:
        """Blocks are held for stores."""
        return self.num_held > 0

    def hurry(self) -> None:
        """Blocks are needed: drop all offers that are not being copied, and free their blocks."""
        self.send(is_last=True)
        with self._lock:
            for offer in self._waiting:
                if not offer.is_copying and not offer.is_cancelled:
                    offer.is_cancelled = True
                    self._copied.append(offer.held)
                    self._count_refused(offer)

    def _count_refused(self, offer: _Offer) -> None:
        if not offer.is_found:
            for slots in self._slots:
                slots.count_refused(len(offer.hashes))
        elif self._pusher is not None:
            self._pusher.refuse_segment(offer.hashes)

    def drop(self, owners: Set[object]) -> None:
        """Wait until nothing that was offered for these owners is being copied; nothing will be from now on."""
        with self._lock:
            unsent = self._unsent
            dropped = [offer for offer in unsent.offers if offer.owner in owners]
            unsent.offers = [offer for offer in unsent.offers if offer.owner not in owners]
            unsent.num_blocks -= sum(len(offer.held.ids) for offer in dropped)
            if not unsent.num_blocks:
                unsent.since = None
            self._copied.extend(offer.held for offer in dropped)
            offers = [offer for offer in self._waiting if offer.owner in owners]
            for offer in offers:
                if not offer.is_copying and not offer.is_cancelled:
                    offer.is_cancelled = True
                    self._copied.append(offer.held)
            self._lock.wait_for(lambda: not any(offer.is_copying for offer in offers))

    def owners(self) -> set[object]:
        """The owners of blocks that were offered and are not copied yet."""
        if not self._unsent.offers and not self._waiting:  # only this thread offers more
            return set()
        with self._lock:
            return {offer.owner for offer in (*self._unsent.offers, *self._waiting)}

    @property
    def num_stored(self) -> int:
        """Blocks that tiers of this host have taken."""
        return sum(slots.num_stored for slots in self._slots)

    @property
    def num_refused(self) -> int:
        """Blocks that tiers of this host have not taken, for lack of room or because they failed."""
        return sum(slots.num_refused for slots in self._slots)

    def note(self, explanation: Explanation) -> None:
        """Report to the cache server why a match ended, for clients that ask for it."""
        if self._noters and self._jobs.qsize() < _MAX_JOBS:
            self._jobs.put(explanation)

    def start_over(self, timeout_s: float) -> None:
        """After a failure: forget all held blocks, and show no earlier offers to others.

        Waits until nothing is being copied from the device.
        """
        with self._lock:
            unsent, self._unsent = self._unsent, _Unsent()
            for withdrawal in unsent.withdrawals:
                self._jobs.put(withdrawal)
            for offer in self._waiting:
                offer.is_cancelled = True
        self._settle_copies(timeout_s)
        with self._lock:
            self._waiting.clear()
            self._copied.clear()
        self.num_held = 0

    def settle(self, timeout_s: float) -> bool:
        """Wait until everything sent so far is stored or dropped. False on timeout."""
        deadline = time.monotonic() + timeout_s
        if not self._settle_copies(timeout_s):
            return False
        return self._pusher is None or self._pusher.settle(deadline - time.monotonic())

    def _settle_copies(self, timeout_s: float) -> bool:
        """Wait until nothing that was sent is still being copied from the device."""
        done = threading.Event()
        self._jobs.put(done)
        return done.wait(timeout_s)

    def close(self) -> None:
        """Finish the copies in progress; pushes that are not done within a moment are dropped."""
        self._jobs.put(None)
        self._thread.join()
        if self._pusher is not None:
            self._pusher.close()

    # --- the copying thread ----------------------------------------------------------------------------------------

    def _run(self, let_pass: Callable[[], None] | None) -> None:
        yield_to(let_pass)
        for job in self._coming():
            give_way()
            try:
                self._do(job)
            except Exception:
                logger.exception("storing blocks failed")
            self._wake()
        for slots in self._slots:
            slots.close()

    def _coming(self) -> Iterator[_Job]:
        """All jobs until the end. Between them, a small batch that has waited long enough is sent."""
        late: _Unsent | None = None
        late_at = 0.0
        while True:
            try:
                job = self._jobs.get(timeout=None if late is None else max(0.0, late_at - time.monotonic()))
            except queue.Empty:
                late_at = time.monotonic() + _BATCH_S
                if late is not None and self._send_late(late):
                    late = None
                continue
            if job is None:
                return
            if isinstance(job, _Unsent):
                late, late_at = job, time.monotonic() + _BATCH_S
            else:
                yield job

    def _send_late(self, late: _Unsent) -> bool:
        """Whether nothing is left to be sent: the batch is not sent while more is just being offered."""
        with self._lock:
            if late is not self._unsent or not late.num_blocks:
                return True
            if late.after is None:
                return False
            self._send(late, late.after)
            return True

    def _do(self, job: _Job) -> None:
        if isinstance(job, _Batch):
            self._store(job)
        elif isinstance(job, _Announcement):
            for slots in self._slots:
                slots.announce(job.owner, job.hashes)
            if self._pusher is not None:
                self._pusher.announce(job.hashes)
        elif isinstance(job, _Withdrawal):
            for slots in self._slots:
                slots.withdraw(job.owner)
            if self._pusher is not None:
                self._pusher.withdraw(job.hashes)
        elif isinstance(job, Explanation):
            for tier in self._noters:
                tier.note(job)
        else:
            job.set()

    def _store(self, batch: _Batch) -> None:
        offers: list[_Offer] = []
        wanted = [offer for offer in batch.offers if not offer.is_cancelled]
        computed = [block_hash for offer in wanted if not offer.is_found for block_hash in offer.hashes]
        found = [block_hash for offer in wanted if offer.is_found for block_hash in offer.hashes]
        hashes = computed + found
        try:
            for slots in self._slots:  # may wait for a tier: the offers can be cancelled meanwhile
                slots.make(hashes if slots.is_staging else computed)
            offers = self._start_copying(batch.offers)
            ids = {
                block_hash: block_id
                for offer in offers
                for block_hash, block_id in zip(offer.hashes, offer.held.ids, strict=True)
            }
            copies = [slots.copy(ids, batch.after) for slots in self._slots]
            for slots, copy in zip(self._slots, copies, strict=True):
                slots.wait(copy)
            self._end_copying(batch.offers)
            self._wake()
            if not any(offer.is_cancelled for offer in offers):  # otherwise its blocks may be another prompt's by now
                for slots, copy in zip(self._slots, copies, strict=True):
                    slots.commit(copy)
        finally:
            self._end_copying(batch.offers)
            for slots in self._slots:
                slots.give_back(hashes)
        if self._pusher is not None:
            for offer in offers:
                push = self._pusher.push_segment if offer.is_found else self._pusher.push
                push(offer.hashes)

    def _start_copying(self, offers: Sequence[_Offer]) -> list[_Offer]:
        with self._lock:
            wanted = [offer for offer in offers if not offer.is_cancelled]
            for offer in wanted:
                offer.is_copying = True
            return wanted

    def _end_copying(self, offers: Sequence[_Offer]) -> None:
        """Release the device's blocks, once for each offer."""
        with self._lock:
            for offer in offers:
                if offer in self._waiting:
                    offer.is_copying = False
                    self._waiting.remove(offer)
                    if not offer.is_cancelled:
                        self._copied.append(offer.held)
            self._lock.notify_all()
