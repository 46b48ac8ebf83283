"""What `Traffic` does, simulated: tiers without threads, which act when the test says so.

A tier remembers the checksums of a block under its hash. A match, each unit of a load, each copy to the device and each
store is an event that waits for `deliver`; chance decides between what the real thing may do. What would be corruption
fails at once: a load into a block that another request has; an offer of other KV than its hash names; a lease that is
given back twice or not at all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import cast

from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.match_end import MatchEnd
from kvtier.engine.schedule.request import Request, Status
from kvtier.memory.lease import Lease
from kvtier.tiers.hierarchy import Ending
from kvtier.transfer.device_lease import DeviceLease
from kvtier.transfer.load import Load, LoadPlan, Order, Span
from kvtier.transfer.matching import TierMatch
from tests.support.tiered_device import NUM_LAYERS, BlockBook, SimulatedTransfer, Sums, TieredDevice

HOST = "host"
SERVER = "server"
TIERS = (HOST, SERVER)


class _SimulatedLease:
    """The part of a prompt that a tier had when it was asked."""

    def __init__(self, blocks: Sequence[Sums], *, has_views: bool) -> None:
        self.blocks = blocks
        self.has_views = has_views
        self.num_released = 0

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)

    def release(self) -> None:
        self.num_released += 1


def _lease_of(span: Span) -> _SimulatedLease:
    lease: object = span.lease
    assert isinstance(lease, _SimulatedLease)
    return lease


class _Past:
    """The simulated device has always done what was handed to it."""

    def query(self) -> bool:
        return True


@dataclass(eq=False, slots=True)
class _Offer:
    hashes: Sequence[BlockHash]
    held: DeviceLease
    is_cancelled: bool = False
    is_copying: bool = False


@dataclass(eq=False)
class _Asked:
    """Hashes of a prompt's blocks from `first` on that are being looked for."""

    fetch: TierMatch
    first: int
    hashes: list[BlockHash]


class SimulatedSegments:
    """Stands in for a tier that keeps whole segments: what it says of them is as chance has it."""

    def __init__(self, segment_blocks: int, chance: Random) -> None:
        self.segment_blocks = segment_blocks
        self.answers: Sequence[bool | None] = (True, False, None)
        self._chance = chance

    def has_segments(self, names: Sequence[BlockHash]) -> list[bool | None]:
        return [self._chance.choice(self.answers) for _ in names]


class SimulatedTraffic:
    """Stands in for `Traffic` and its parts. `chance` makes every choice that the real one makes by the clock."""

    def __init__(self, device: TieredDevice, requests: Sequence[Request], chance: Random) -> None:
        self.matcher = self.loading = self.storer = self.marks = self
        self.book = BlockBook(device.block_tokens)
        self.memory: dict[str, dict[BlockHash, Sums]] = {tier: {} for tier in TIERS}
        self.is_failing = False
        """Loads break off, matches find nothing, stores are refused."""
        self.is_forced: Order | None = None
        """Every plan is of this order, where that can be."""
        self.generation = 0
        """How often a tier has come back without what it had."""
        self.is_smooth = False
        """Loads bring everything and are never late, and copies to the device take a while."""
        self.is_quick = False
        """Matches are answered at once."""
        self.copies_left_s: float | None = None
        """What a smooth one says of copies that were handed to the device."""
        self.segmented: SimulatedSegments | None = None
        self.segments: list[list[BlockHash]] = []
        """The segments that were offered whole."""
        self.busy_s = 0.0
        self.num_late = 0
        self.num_steps = 0
        self._learned: set[BlockHash] = set()
        self._device = device
        self._requests = requests
        self._chance = chance
        self._fetches: list[TierMatch] = []
        self._given_up: set[TierMatch] = set()
        self._leases: list[_SimulatedLease] = []
        self._matching: deque[_Asked] = deque()
        self._loads: list[tuple[Load, Iterator[None]]] = []
        self._offers: list[_Offer] = []
        self._batches: deque[tuple[list[_Offer], Iterator[None]]] = deque()
        self._copied: deque[DeviceLease] = deque()
        self._announced: dict[object, Sequence[BlockHash]] = {}
        self.offered: list[Sequence[BlockHash]] = []
        self._num_held = 0

    # --- what the test does ----------------------------------------

    def remember(self, tokens: Sequence[int], tier: str, first: int = 0, end: int | None = None) -> None:
        """The tier has blocks `first..end` of this prompt."""
        for block_hash in self.book.note(tokens)[first:end]:
            self.memory[tier][block_hash] = self.book.sums(block_hash, ())

    def forget(self, tier: str, count: int) -> None:
        for block_hash in list(self.memory[tier])[:count]:
            del self.memory[tier][block_hash]

    @property
    def has_events(self) -> bool:
        """Something is under way that the engine may be waiting for."""
        return bool(self._matching or self._loads or self._batches or self._copied or self._device.in_flight)

    def deliver(self) -> None:
        """One thing happens, if any is under way."""
        acts: list[Callable[[], None]] = []
        if self._matching:
            acts.append(lambda: self._answer(self._chance.choice(list(self._matching))))
        for number in range(len(self._loads)):
            acts.append(lambda number=number: self._go_on(number))  # type: ignore[misc]
        if self._batches:
            acts.append(self._store_on)
        if self._device.in_flight:
            acts.append(lambda: self._device.in_flight[0].finish())
        if acts:
            self._chance.choice(acts)()

    def deliver_all(self) -> None:
        """Everything that is under way ends."""
        self.answer_all()
        while self._loads:
            self._go_on(0)
        self.finish_stores()
        while self._device.in_flight:
            self._device.in_flight[0].finish()

    def answer_all(self) -> None:
        """Every match is answered."""
        while self._matching:
            self._answer(self._matching[0])

    def submit_loads(self) -> None:
        """Everything is handed to the device, and nothing has arrived."""
        assert self.is_smooth, "it may fail otherwise"
        for load, bringing in self._loads:
            while not load.is_submitted:
                next(bringing)

    def lose_loads(self) -> None:
        """No load brings anything more. What was handed to the device stays on its way."""
        for load, _ in self._loads:
            if not load.is_submitted:
                load.end()

    def finish_stores(self) -> None:
        while self._batches:
            self._store_on()

    def check_idle(self) -> None:
        """Nothing is held and every lease was given back once."""
        assert not self.has_events
        assert not self._num_held
        assert not self._offers
        assert not self._announced
        assert not self._device.held
        assert self._given_up == set(self._fetches), "a match was never given up"
        assert all(not fetch.num_users for fetch in self._fetches)
        assert all(lease.num_released == 1 for lease in self._leases)

    # --- what the engine does: matching ----------------------------------------

    def worth_offering(self, num_blocks: int) -> int:
        return num_blocks

    def learn(self, hashes: Sequence[BlockHash]) -> None:
        self._learned.update(hashes)

    def match(self, first: int, hashes: Sequence[BlockHash], num_more: int = 0) -> TierMatch:
        fetch = TierMatch(first, [])
        self._fetches.append(fetch)
        self.match_further(fetch, hashes, num_more)
        return fetch

    def match_further(self, fetch: TierMatch, hashes: Sequence[BlockHash], num_more: int = 0) -> None:
        assert not fetch.is_cancelled
        assert self._learned.issuperset(hashes), "a tier may not know where these stand in their prompt"
        assert not fetch.hashes or fetch.has_all, "more is looked for behind what was not found"
        asked = _Asked(fetch, fetch.asked_end, list(hashes))
        fetch.hashes += hashes
        fetch.is_matching = bool(hashes)
        if hashes:
            fetch.num_users += 1
            self._matching.append(asked)
            is_pending = not self.is_smooth and self._chance.random() < 0.2
            if self.is_quick and not is_pending:
                self._answer(asked)

    def give_up(self, fetch: TierMatch) -> None:
        assert fetch not in self._given_up, "a match was given up twice"
        self._given_up.add(fetch)
        fetch.is_cancelled = True
        self._leave(fetch)

    # --- loading ----------------------------------------

    def plan(self, fetch: TierMatch, position: int, prompt_tokens: int) -> LoadPlan | None:
        assert not fetch.is_cancelled
        assert not fetch.is_matching
        span = next((span for span in fetch.spans if span.first <= position < span.end), None)
        if span is None:
            return None
        orders: list[Order | None] = (
            [Order.FRONT, None] if _lease_of(span).has_views else [Order.FRONT, Order.BACK, None]
        )
        if self.is_forced is not None:
            orders = [self.is_forced if self.is_forced in orders else Order.FRONT]
        order, end = self._chance.choice(orders), span.end
        if order is Order.BACK:  # as `LoadOrCompute` has it: the last token comes after all that meets
            before_last = min(end, (prompt_tokens - 1) // self._device.block_tokens)
            order, end = (order, before_last) if before_last > position else (Order.FRONT, end)
        return None if order is None else LoadPlan(span, position, end, order, None, self._chance.randint(1, 4))

    def note_step(self) -> None:
        self.num_steps += 1
        assert self.num_steps == self._device.num_steps

    def load(
        self,
        fetch: TierMatch,
        plan: LoadPlan,
        hashes: Sequence[BlockHash],
        block_ids: Sequence[int],
        after_step: int,
        behind: Load | None = None,
    ) -> Load:
        assert not fetch.is_cancelled, "a load from a match that was given up"
        assert behind is None or (behind.plan.end == plan.first and not behind.is_abandoned)
        last_use = max(self._device.last_uses.get(block_id, 0) for block_id in block_ids)
        assert last_use <= after_step <= self.num_steps, "a load may write before a step that uses the block is done"
        assert len(block_ids) == len(hashes) == plan.end - plan.first
        for other, _ in self._loads:
            is_same = other.plan.span.lease is plan.span.lease and _lease_of(plan.span).has_views
            assert not is_same or other.is_submitted or other.is_over, "two threads use one lease"
        request = next(request for request in self._requests if request.prefetch.match is fetch)
        load = Load(plan, hashes, list(block_ids), _Past(), 0.0, behind)
        fetch.num_users += 1
        self._loads.append((load, self._bring(request, fetch, load)))
        return load

    def share(self, load: Load, prompt_tokens: int) -> int:
        left = load.num_left
        if not left or load.is_over:
            return left
        return self._chance.randint(1 if load.take(0) == (0, 0) else 0, left)

    def is_late(self, load: Load, prompt_tokens: int) -> bool:
        if load.is_submitted or load.is_over:
            return False
        if load.plan.order is Order.FRONT:
            num_missing = load.num_blocks - load.num_arrived
        elif load.num_left:
            return False
        else:
            num_missing = load.arrived()[0] - load.front
        is_late = num_missing > 0 and not self.is_smooth and self._chance.random() < 0.15
        self.num_late += is_late
        return is_late

    def note_met(self, load: Load) -> None:
        pass

    def left_s(self, loads: Sequence[Load]) -> float | None:
        assert all(load.is_submitted for load in loads)
        return self.copies_left_s if self.is_smooth else self._chance.choice((0.0, 1.0, None))

    def abandon_late(self, load: Load) -> None:
        self.abandon(load)

    def abandon(self, load: Load) -> None:
        for transfer in load.abandon():
            if not transfer.is_done:
                transfer.precede(NUM_LAYERS - 1)

    # --- storing ----------------------------------------

    def announce(self, owner: object, hashes: Sequence[BlockHash]) -> None:
        assert owner not in self._announced, "announced twice"
        self._announced[owner] = hashes

    def withdraw(self, owner: object) -> None:
        del self._announced[owner]

    def offer(self, hashes: Sequence[BlockHash], held: DeviceLease) -> None:
        assert len(hashes) == len(held.ids) > 0
        assert self._learned.issuperset(hashes), "a tier may not know where these stand in their prompt"
        offer = _Offer(list(hashes), held)
        self._check(offer)
        self._device.hold(held)
        self.offered.append(offer.hashes)
        self._offers.append(offer)
        self._num_held += len(held.ids)

    def offer_segment(self, hashes: Sequence[BlockHash], held: DeviceLease) -> None:
        assert self.segmented is not None
        assert len(hashes) == self.segmented.segment_blocks, "not a whole segment"
        self.segments.append(list(hashes))
        self.offer(hashes, held)
        self.offered.pop()

    def send(self, *, is_last: bool = False) -> None:
        if self._offers and (is_last or len(self._offers) > 1):  # one waits for another
            offers, self._offers = self._offers, []
            self._batches.append((offers, self._store(offers)))

    def take_copied(self) -> list[DeviceLease]:
        copied = list(self._copied)
        self._copied.clear()
        self._num_held -= sum(len(held.ids) for held in copied)
        return copied

    @property
    def num_loads(self) -> int:
        return len(self._loads)

    @property
    def has_stores(self) -> bool:
        return self._num_held > 0

    def hurry(self) -> None:
        for offers, _ in self._batches:
            for offer in offers:
                if not offer.is_copying and not offer.is_cancelled:
                    offer.is_cancelled = True
                    self._return(offer)

    @property
    def held_ids(self) -> set[int]:
        """Blocks that the block manager has not got back yet."""
        offers = [*self._offers, *(offer for batch, _ in self._batches for offer in batch if not offer.is_cancelled)]
        return {block_id for held in [*self._copied, *(offer.held for offer in offers)] for block_id in held.ids}

    # --- private: the tiers' threads ----------------------------------------

    def _answer(self, asked: _Asked) -> None:
        self._matching.remove(asked)
        fetch = asked.fetch
        if not fetch.is_cancelled:
            position = 0
            for tier in TIERS:
                found: list[Sums] = []
                for block_hash in asked.hashes[position:]:
                    if self.is_failing or block_hash not in self.memory[tier]:
                        break
                    found.append(self.memory[tier][block_hash])
                if found:
                    lease = _SimulatedLease(found, has_views=tier == HOST)
                    self._leases.append(lease)
                    fetch.spans += self._parts(tier, asked.first + position, lease)
                    position += len(found)
            is_all = position == len(asked.hashes)
            fetch.ending = Ending(
                "" if is_all else SERVER, asked.first + position, MatchEnd.ALL if is_all else MatchEnd.NEVER_STORED
            )
        fetch.is_matching = False
        self._leave(fetch)

    def _parts(self, tier: str, first: int, lease: _SimulatedLease) -> list[Span]:
        """Some blocks may have to be loaded from the tier's disk."""
        end = first + lease.num_blocks
        middle = end if self.is_smooth else self._chance.choice([first, end, end, self._chance.randint(first, end)])
        known = cast(Lease, lease)
        spans = [Span(tier, tier, first, middle, known, 0), Span("disk", tier, middle, end, known, middle - first)]
        return [span for span in spans if span.end > span.first]

    def _leave(self, fetch: TierMatch) -> None:
        fetch.num_users -= 1
        assert fetch.num_users >= 0
        if not fetch.num_users:
            for lease in {_lease_of(span) for span in fetch.spans}:
                lease.release()

    def _go_on(self, number: int) -> None:
        _, bringing = self._loads[number]
        if next(bringing, "over") == "over":
            del self._loads[number]

    def _bring(self, request: Request, fetch: TierMatch, load: Load) -> Iterator[None]:
        """The work of a tier's thread; at each `yield` the engine may run."""
        plan = load.plan
        yield
        is_whole = True
        while is_whole and not load.is_over:
            first, end = load.take(plan.unit)
            if first >= end:
                break
            yield
            if load.is_over:  # it was lost
                is_whole = False
                break
            arrived = self._num_arriving(end - first)
            is_whole = arrived == end - first
            if arrived and (is_whole or plan.order is Order.FRONT):
                is_whole &= self._write(request, load, first, first + arrived)
            else:
                is_whole = False
            yield
        if is_whole:
            load.submit_all()
        for transfer in load.copies:
            assert isinstance(transfer, SimulatedTransfer)
            while not transfer.is_done:
                yield
                if not transfer.is_done:
                    transfer.finish()
        yield
        load.end()
        self._leave(fetch)

    def _num_arriving(self, count: int) -> int:
        if self.is_failing:
            return self._chance.randint(0, count - 1)
        if self.is_smooth:
            return count
        return self._chance.randint(0, count) if self._chance.random() < 0.1 else count

    def _write(self, request: Request, load: Load, first: int, end: int) -> bool:
        lease = _lease_of(load.plan.span)
        assert not lease.num_released, "a load reads from a lease that was given back"
        place = load.plan.span.place(first)

        def begin(block_ids: Sequence[int]) -> SimulatedTransfer:
            assert load in (request.prefetch.load, *request.prefetch.next_loads)
            assert request.status is Status.RUNNING
            assert request.blocks.ids[first:end] == list(block_ids), "the load's blocks are not the request's any more"
            for other in self._requests:
                assert other is request or not set(other.blocks.ids) & set(block_ids), "another request has the block"
            transfer = self._device.begin(block_ids, lease.blocks[place : place + end - first])
            if not self.is_smooth and self._chance.random() < 0.3:
                transfer.finish()
            return transfer

        return load.write(first, end, begin) is not None

    def _store_on(self) -> None:
        _, storing = self._batches[0]
        if next(storing, "over") == "over":
            self._batches.popleft()

    def _store(self, offers: Sequence[_Offer]) -> Iterator[None]:
        yield
        wanted = [offer for offer in offers if not offer.is_cancelled]
        for offer in wanted:
            offer.is_copying = True
            self._check(offer)
        yield
        for offer in wanted:
            self._check(offer)
            self._return(offer)
            offer.is_cancelled = True  # its blocks are the device's again
        yield
        if self.is_failing:
            return
        for offer in wanted:
            for block_hash in offer.hashes:
                sums = self.book.sums(block_hash, self._requests)
                for tier in TIERS:
                    if self._chance.random() < 0.8:
                        self.memory[tier][block_hash] = sums

    def _check(self, offer: _Offer) -> None:
        for block_hash, block_id in zip(offer.hashes, offer.held.ids, strict=True):
            assert block_id not in self._device.ids_in_flight(), "a store reads a block that has not arrived"
            assert self._device.block(block_id) == self.book.sums(block_hash, self._requests), (
                "what is stored is not what its hash names"
            )

    def _return(self, offer: _Offer) -> None:
        self._device.release(offer.held)
        self._copied.append(offer.held)
