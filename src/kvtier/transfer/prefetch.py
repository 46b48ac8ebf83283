"""One prompt's way up: matched in the tiers, loaded into the device's blocks, and handed over. No torch.

A long prompt is hashed in pieces, of which a step has time for a few while other prompts compute. Where the tiers
answer at once, it is also matched in pieces: the first is loaded while the next are hashed, and each further hit is
handed to the tiers' threads behind the one before. The engine's thread calls everything; nothing here waits.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from dataclasses import dataclass, field

from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.match_end import MatchEnd
from kvtier.transfer.copier import Copies
from kvtier.transfer.found_segments import FoundSegments
from kvtier.transfer.load import Load, LoadPlan, Order
from kvtier.transfer.match_budget import MatchBudget
from kvtier.transfer.matching import TierMatch
from kvtier.transfer.prefetch_state import READY, WAIT, History, MatchEnding, PrefetchState, Verdict, ending_of
from kvtier.transfer.prompt_blocks import PromptBlocks
from kvtier.transfer.traffic import Traffic

_MAX_REMATCHES = 2
_MAX_OFFERED_AGAIN = 1 << 18
_GROWTH_PIECES = 4
"""A prompt takes blocks for this many pieces at a time while others compute."""


@dataclass(slots=True)
class SharedState:
    """State that the prefetches of one device share."""

    traffic: Traffic
    budget: MatchBudget
    last_steps: list[int]
    """For each block of the device, the last step that may read or write it for the prompt that had it before."""
    looking: list[Prefetch] = field(default_factory=list)
    """Prompts only partly looked up: every block so far was a hit."""
    growing: dict[Prefetch, int] = field(default_factory=dict)
    """Prompts that lack blocks for what they load next, and how many blocks they will have."""
    announced: dict[BlockHash, Prefetch] = field(default_factory=dict)
    """By block: the prompt that computes it, or has computed it."""
    arrivals: list[Copies] = field(default_factory=list)
    """Copies to the device that the next step waits for."""
    has_unmatched: bool = False
    """Some waiting prompts were not matched, so that hits of others are loaded first: poll again soon."""
    generation: object = None
    offered_again: set[BlockHash] | None = None
    """None until a tier was away and may have lost earlier offers; from then on, the blocks offered since."""


class Prefetch:
    """The prefetch of one prompt. `load` and `next_loads` are on their way into its blocks, one behind another."""

    __slots__ = (
        "_found",
        "_shared",
        "_was_left",
        "blocks",
        "ending",
        "history",
        "is_admitted",
        "is_announced",
        "load",
        "match",
        "next_loads",
        "num_offered",
        "offers_all",
        "state",
    )

    def __init__(self, shared: SharedState, blocks: PromptBlocks) -> None:
        self._shared = shared
        self.blocks = blocks
        self.state = PrefetchState.UNASKED
        self.match: TierMatch | None = None
        self.load: Load | None = None
        self.next_loads: deque[Load] = deque()
        self.ending: MatchEnding | None = None
        self.history = History()
        self.num_offered = 0
        """Leading blocks that the tiers were offered, or have."""
        self.offers_all = False
        """The tiers are offered the whole prompt, even what the device already has: they may have dropped that."""
        self.is_announced = False
        self.is_admitted = False
        """The prompt has blocks, until it leaves."""
        self._was_left = False
        self._found = FoundSegments(shared.traffic.segmented)

    # --- matching --------------------------------------------------------------------------------------------------

    @property
    def is_matching(self) -> bool:
        """It is not known yet what the tiers have of the prompt."""
        return self.match is not None and self.match.is_matching

    @property
    def is_looking(self) -> bool:
        """More of the prompt may still be found, behind what was found so far."""
        return self.match is not None and (self.match.is_matching or self.has_more)

    @property
    def has_more(self) -> bool:
        """Everything looked up was a hit, and the prompt goes on."""
        match = self.match
        return match is not None and match.has_all and match.asked_end < self.blocks.num_wanted

    def ask(self, *, is_idle: bool) -> None:
        """Look for what the device lacks of the prompt. It stays `UNASKED` if more of it has to be hashed first."""
        hashes = self._hash_piece(is_idle=is_idle)
        first = self.blocks.num_on_device()
        is_quick = self._shared.traffic.matcher.is_quick
        if len(hashes) == self.blocks.num_wanted or (is_quick and first < len(hashes)):
            self._ask(first, hashes)

    def _ask(self, first: int, hashes: list[BlockHash]) -> TierMatch:
        self.history.asked_at = self.history.asked_at or time.monotonic()
        num_more = self.blocks.num_wanted - len(hashes)
        match = self.match = self._shared.traffic.matcher.match(first, hashes[first:], num_more)
        self.state = PrefetchState.MATCHING
        self._shared.budget.was_found = bool(match.spans)
        if self.is_looking:
            if self not in self._shared.looking:
                self._shared.looking.append(self)
        else:
            self._stop_looking()
        return match

    def look_further(self, *, is_idle: bool) -> bool:
        """Look for the next piece of the prompt, and load the hits. False if there was nothing to do."""
        match = self.match
        assert match is not None
        was_matching = match.is_matching
        if self.has_more:
            hashes = self._hash_piece(is_idle=is_idle)
            num_more = self.blocks.num_wanted - len(hashes)
            self._shared.traffic.matcher.match_further(match, hashes[match.asked_end :], num_more)
        if not match.is_matching:
            self._load_ahead()
        if not self.is_looking:
            self._stop_looking()
        return not was_matching

    def _is_current(self) -> bool:
        """False, and the tiers are asked again, if things have changed since they were asked.

        The device has lost blocks that it had then, or another prompt has begun to compute blocks that were missing.
        """
        match = self.match
        assert match is not None
        position = self.blocks.num_filled // self.blocks.block_tokens
        hashes = self._hashed()
        next_missing = max(position, match.end)
        is_computed = next_missing < len(hashes) and hashes[next_missing] in self._shared.announced
        if match.num_rematches >= _MAX_REMATCHES or (match.first <= position and not is_computed):
            return True
        num_rematches = match.num_rematches + 1
        self._shared.traffic.matcher.give_up(match)
        self._ask(position, hashes).num_rematches = num_rematches
        return False

    def _stop_looking(self) -> None:
        self.blocks.hash_up_to(None)
        if self in self._shared.looking:
            self._shared.looking.remove(self)

    def _hash_piece(self, *, is_idle: bool) -> list[BlockHash]:
        """Hash another piece of the prompt. Returns all wanted hashes so far."""
        shared, num_hashed = self._shared, len(self.blocks.hashes)
        num_loads = shared.traffic.loading.num_loads
        end = num_hashed + shared.budget.next_piece(num_hashed, is_idle=is_idle, num_loads=num_loads)
        self.blocks.hash_up_to(end if end < self.blocks.num_wanted else None)
        return self._hashed()

    def _hashed(self) -> list[BlockHash]:
        """The hashes of all wanted blocks, as far as they may be computed by now."""
        self.blocks.extend_hashes()
        self._shared.traffic.learn(self.blocks.hashes)
        return self.blocks.hashes[: self.blocks.num_wanted]

    # --- verdicts --------------------------------------------------------------------------------------------------

    def admission(self) -> Verdict | LoadPlan:
        """What a waiting prompt begins with, now that the device's own cache was searched.

        `WAIT` while the tiers have not answered, a plan to begin once the prompt has blocks, or `READY`.
        """
        if self.state is PrefetchState.FINISHED:
            return READY
        if not self._is_current():
            return WAIT
        plan = self.plan()
        if plan is not None:
            return plan
        if self.is_looking:
            return WAIT
        self._stop_looking()  # this may have become clear only since the poll: now all of the prompt can be hashed
        return READY

    def advance(self, num_tokens: int, *, is_alone: bool) -> Verdict:
        """How much of the next `num_tokens` of a running prompt may be computed. `is_alone`: no other prompt runs."""
        if self.load is not None:
            if not self._see_load():
                return WAIT
            if self.load is not None:
                return self._beside(num_tokens)
        if self.match is not None:
            if self not in self._shared.growing and not self.blocks.extend():
                return WAIT
            plan = self.plan()
            if plan is None and self.is_looking:
                return WAIT
            if plan is not None and self.grow(plan, is_alone=is_alone):
                return self.begin(plan, num_tokens)
            self.finish()
        return READY

    def plan(self) -> LoadPlan | None:
        """What to load next; None to compute from here."""
        position, offset = divmod(self.blocks.num_computed, self.blocks.block_tokens)
        match = self.match
        if match is None or match.is_matching or offset:
            return None
        self.history.answered_at = self.history.answered_at or time.monotonic()
        if match.decided is None or match.decided.first != position:
            match.decided = self._shared.traffic.loading.plan(match, position, self.blocks.num_tokens)
        return match.decided

    def grow(self, plan: LoadPlan, *, is_alone: bool) -> bool:
        """Take blocks for `plan`, only some of them while other prompts compute.

        False, and nothing changes, if there is no room.
        """
        end, budget = plan.end, self._shared.budget
        if not is_alone and not budget.is_idle:
            end = min(end, max(plan.first, len(self.blocks.ids)) + _GROWTH_PIECES * budget.piece_blocks)
        return self.blocks.grow(end)

    def begin(self, plan: LoadPlan, num_tokens: int) -> Verdict:
        """Load `plan` into the prompt's blocks, once it has them all. Returns what may be computed meanwhile."""
        assert self.match is not None
        if len(self.blocks.ids) < plan.end:
            self.state = PrefetchState.LOADING
            self._shared.growing[self] = max(plan.end, self.match.end)
            self._shared.has_unmatched = True
            return WAIT
        self._shared.growing.pop(self, None)
        self.load = self._start(plan)
        self.state = PrefetchState.LOADING if plan.order is Order.FRONT else PrefetchState.MEETING
        self._load_ahead()
        return self._beside(num_tokens)

    def _beside(self, num_tokens: int) -> Verdict:
        """How many tokens at the front to compute while the rest comes from the back."""
        load = self.load
        assert load is not None
        if load.plan.order is Order.FRONT:
            return WAIT
        block_tokens = self.blocks.block_tokens
        claimed = load.front * block_tokens - self.blocks.num_computed
        if claimed <= 0:
            share = self._shared.traffic.loading.share(load, self.blocks.num_tokens)
            claimed = load.claim(min(share, max(1, num_tokens // block_tokens))) * block_tokens
        claimed = min(claimed, num_tokens)
        return Verdict(True, claimed) if claimed else WAIT

    # --- loading ---------------------------------------------------------------------------------------------------

    def _load_ahead(self) -> None:
        """Load what follows the loads in flight from the same tier, unless it is to be computed or lacks room."""
        match, load = self.match, self.load
        assert match is not None
        while load is not None and load.plan.order is Order.FRONT:
            last = self.next_loads[-1] if self.next_loads else load
            plan = self._shared.traffic.loading.plan(match, last.plan.end, self.blocks.num_tokens)
            if plan is None or plan.order is not Order.FRONT or plan.span.tier != last.plan.span.tier:
                return
            if plan.span.lease is last.plan.span.lease:
                return  # only one thread may use a lease at a time
            if not self.blocks.grow(plan.end):
                return
            self.next_loads.append(self._start(plan, last))

    def _start(self, plan: LoadPlan, behind: Load | None = None) -> Load:
        assert self.match is not None
        self.match.decided = None
        self.history.load_began_at = self.history.load_began_at or time.monotonic()
        hashes = self.blocks.hashes[plan.first : plan.end]
        ids = self.blocks.ids[plan.first : plan.end]
        after_step = max(map(self._shared.last_steps.__getitem__, ids))
        return self._shared.traffic.loading.load(self.match, plan, hashes, ids, after_step, behind)

    def _see_load(self) -> bool:
        """See how far the load is. False if there is nothing to do but wait for it."""
        load = self.load
        assert load is not None
        if self._shared.traffic.loading.is_late(load, self.blocks.num_tokens):
            self._abandon(load)
            return True
        if load.plan.order is Order.FRONT:
            if not load.is_over:
                return False
            self._end(load)
            return self.load is None or self._see_load()
        if self.blocks.num_computed == load.front * self.blocks.block_tokens and load.has_met:
            self._end(load)
        return True

    def start_early(self, *, is_alone: bool) -> bool:
        """If everything was handed to the device: go on as if it had arrived, each layer after its own arrival.

        Unless the prompt `is_alone` in its step, only if the rest arrives while the device does other things.
        """
        assert self.load is not None
        shared, loads = self._shared, [self.load, *self.next_loads]
        if self.is_looking or any(not load.is_submitted or load.plan.order is not Order.FRONT for load in loads):
            return False
        if not is_alone and not shared.budget.is_in_time(shared.traffic.loading.left_s(loads)):
            return False
        for load in loads:
            shared.arrivals += [copies for copies in load.copies if not copies.is_done]
            self._end(load)
        if self.plan() is not None:
            return False
        self.finish()
        return True

    def finish(self) -> None:
        """Finish loading: the end of the match becomes the prompt's `ending`.

        There is none if the tiers were not asked yet; then they are not asked until the prompt leaves its blocks.
        """
        match = self.match
        if match is None:
            if self.state is PrefetchState.UNASKED:
                self.state = PrefetchState.FINISHED
            return
        if self.ending is None:
            self.ending = ending_of(match, self.blocks)
        self._shared.traffic.matcher.give_up(match)
        self.match = None
        if self.load is None:
            self.state = PrefetchState.FINISHED
        if self._shared.growing.pop(self, None) is not None:
            self.blocks.unclaim()
        self._stop_looking()

    def _abandon(self, load: Load) -> None:
        """The load is late: blocks that have arrived are used, the rest is computed."""
        self._abandon_next()
        self._shared.traffic.loading.abandon_late(load)
        if load.plan.order is Order.FRONT:
            if self.ending is None:
                self.ending = MatchEnding(load.arrived()[1], MatchEnd.SLOWER, load.plan.span.tier, "it was late")
            self._end(load)
            self.blocks.unclaim()
        self.finish()

    def _abandon_next(self) -> None:
        while self.next_loads:
            self._shared.traffic.loading.abandon(self.next_loads.popleft())

    def _end(self, load: Load) -> None:
        """Count the arrived blocks as computed; if all came, the next load takes its place."""
        blocks, tier = self.blocks, load.plan.span.tier
        self.history.load_ended_at = time.monotonic()
        if load.plan.order is Order.BACK:
            self._shared.traffic.loading.note_met(load)
        first, end = load.arrived()
        if end > first:
            blocks.fill(end)
            self.history.loaded_spans.append((first, end))
            if not self._was_left:
                num_loaded = blocks.num_computed - first * blocks.block_tokens
                loaded_tokens = self.history.loaded_tokens
                loaded_tokens[tier] = loaded_tokens.get(tier, 0) + num_loaded
            self._found.note(first, end)
            # A tier that was away may lack what another tier had. But blocks still on their way must not be offered.
            may_lack = self.offers_all or self._shared.offered_again is not None
            if not may_lack or not load.is_over:
                self.num_offered = end
        self.load = None
        if end < load.plan.end:
            self._abandon_next()
            blocks.unclaim()
            if self.ending is None:
                lost = MatchEnding(end, MatchEnd.LOST, tier)
                self.ending = MatchEnding(end, MatchEnd.LIMIT, "host") if load.lacks_room else lost
            self.finish()
        if self.next_loads:
            self.load = self.next_loads.popleft()
        else:
            self.state = PrefetchState.FINISHED if self.match is None else PrefetchState.MATCHING
        if load.is_over:
            blocks.show()

    def has_room(self, num_blocks: int, num_free_blocks: int) -> bool:
        """Whether there are blocks for the first `num_blocks`, and for all that admitted prompts are still to load.

        Also counts hits of this prompt behind that, and those that may still be found.
        """
        shared, match = self._shared, self.match
        if self in shared.looking:
            num_blocks = self.blocks.num_wanted
        elif match is not None and match.decided is not None:
            num_blocks = max(num_blocks, match.end)
        missing = num_blocks - len(self.blocks.ids)
        promised = {other: other.blocks.num_wanted for other in shared.looking if other.is_admitted}
        for other, end in (promised | shared.growing).items():
            if other is not self:
                missing += max(0, end - len(other.blocks.ids))
        return missing <= num_free_blocks

    # --- storing, and the end --------------------------------------------------------------------------------------

    def admit(self) -> None:
        """The prompt has the blocks that the device had of it. If a tier was away since, they are offered once more."""
        shared, blocks = self._shared, self.blocks
        self.is_admitted = True
        self.num_offered = blocks.num_filled // blocks.block_tokens
        self._found.note(0, self.num_offered)
        if self.offers_all:
            self.num_offered = 0
        if not blocks.num_computed:
            return
        generation = shared.traffic.generation
        if generation != shared.generation:
            shared.generation, shared.offered_again = generation, set()
        offered = shared.offered_again
        if offered is None:
            return
        if len(offered) > _MAX_OFFERED_AGAIN:
            offered.clear()
        num_known = sum(1 for _ in itertools.takewhile(offered.__contains__, blocks.hashes))
        self.num_offered = min(self.num_offered, num_known)

    def filled(self) -> None:
        """Offer full blocks of known tokens to the tiers, once the device has done what was handed to it.

        Of a prompt that no tier can keep whole, the beginning is offered. Also offers segments that were hits in part,
        to a tier that keeps whole segments.
        """
        blocks, first, traffic = self.blocks, self.num_offered, self._shared.traffic
        num_full = min(blocks.num_computed, blocks.num_tokens) // blocks.block_tokens
        if num_full > first and (end := traffic.worth_offering(num_full)) > first:
            blocks.extend_hashes()
            traffic.learn(blocks.hashes)
            hashes = blocks.hashes[first:end]
            traffic.storer.offer(hashes, blocks.lease(first, end))
            if self._shared.offered_again is not None:
                self._shared.offered_again.update(hashes)
            self.num_offered = end
        for start, end in self._found.take(blocks.hashes, num_full):
            traffic.storer.offer_segment(blocks.hashes[start:end], blocks.lease(start, end))

    def announce(self) -> None:
        """Computing the prompt begins: other prompts wait for its blocks."""
        if self.is_announced or self.load is not None:
            return
        self.is_announced = True
        blocks, announced = self.blocks, self._shared.announced
        blocks.extend_hashes()
        first = blocks.num_filled // blocks.block_tokens
        for block_hash in blocks.hashes[first:]:
            announced.setdefault(block_hash, self)
        traffic = self._shared.traffic
        traffic.storer.announce(self, blocks.hashes[first : traffic.worth_offering(len(blocks.hashes))])

    def leave(self) -> None:
        """The prompt gives up its blocks: nothing more is loaded into them. Its prefetch may begin again."""
        shared, traffic = self._shared, self._shared.traffic
        last_steps, num_steps = shared.last_steps, traffic.marks.num_steps
        for block_id in self.blocks.ids:
            last_steps[block_id] = num_steps
        if self.load is not None:
            traffic.loading.abandon(self.load)
            self.load = None
        self._abandon_next()
        shared.growing.pop(self, None)
        self._stop_looking()
        if self.match is not None:
            traffic.matcher.give_up(self.match)
            self.match = None
        if self.is_announced:
            self.is_announced = False
            for block_hash in self.blocks.hashes:
                if shared.announced.get(block_hash) is self:
                    del shared.announced[block_hash]
            traffic.storer.withdraw(self)
        self.state = PrefetchState.UNASKED
        self.is_admitted = False
        self._was_left = True
        self._found.clear()


class NoPrefetch(Prefetch):
    """The prefetch of every prompt of an engine without tiers: finished, and nothing is stored."""

    __slots__ = ()

    def __init__(self) -> None:
        self.state = PrefetchState.FINISHED
        self.match = self.load = self.ending = None
        self.history = History()

    def has_room(self, num_blocks: int, num_free_blocks: int) -> bool:
        return True

    def admit(self) -> None:
        pass

    def filled(self) -> None:
        pass

    def announce(self) -> None:
        pass

    def leave(self) -> None:
        pass
