"""A prompt's way through the tiers below the device, as the scheduler asks for it: match, load, offer. No torch.

The engine's thread calls everything; nothing here waits. What a request holds of the tiers hangs on the request:
`fetch` is its match, `load` and `next_loads` what is on its way to blocks that it has on the device.

A long prompt is hashed in pieces, a step has time for a few of them while others compute. Where the tiers answer at
once it is looked for in pieces too: the first is loaded while the next are hashed, and each that is found is handed to
the tiers' threads behind the one before.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Sequence

from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.namespace import Namespace
from kvtier.engine.schedule.block_manager import BlockManager
from kvtier.engine.schedule.naive_blocks import extend_hashes, num_reusable_blocks
from kvtier.engine.schedule.request import MatchEnding, Request, Status
from kvtier.engine.schedule.step import Step
from kvtier.tiers.explanation import MatchEnd, match_end_of
from kvtier.transfer.copier import Copies
from kvtier.transfer.load import Load, Order, Plan
from kvtier.transfer.tier_traffic import Fetch, TierTraffic

_LOOK_AHEAD = 64
"""So many waiting requests are matched before their turn comes: each leases what it found."""

_MATCHING_SHARE = 0.25
_MAX_MATCHING_S = 0.05
"""A step is not held up longer than this, and that share of the shorter of the last two, by matching who waits. One of
them may have been long for another reason, and then the next one has to make up for it."""

_MANY_WAITING = 32
_MANY_SHARE = 0.75
"""If so many wait and are not matched, the device may soon have too little to do, and the share is this."""

_FEW_LOADS = 3
_FEW_SHARE = 0.5
"""If fewer loads than that are under way, and the last prompt that was looked for is loaded, the bus may soon have too
little to do: the share is this, and pieces are twice as large."""

_PIECE_BLOCKS = 128
"""So much of a long prompt is hashed at a time, in a sixth to half of a millisecond, while others compute."""

_EARLY_STEPS = 1.5
_MAX_EARLY_S = 0.01
"""What is left of a load is there in time for a step if it comes during the one before, or the first half of its own:
the last layers come last. Longer than the second of these, no step waits, whatever was computed before it."""

_MAX_REMATCHES = 2
_MAX_OFFERED_AGAIN = 1 << 18
_PATIENCE_S = 0.05
"""How long blocks that wait for a tier may hold up whoever needs them."""


class PromptLoading:
    """What the scheduler knows of the tiers."""

    def __init__(
        self,
        traffic: TierTraffic,
        blocks: BlockManager,
        namespace: Namespace,
        clock: Callable[[], float] = time.monotonic,
        piece_blocks: int = _PIECE_BLOCKS,
    ) -> None:
        """While others compute, a step hashes `piece_blocks` of a prompt at a time, and takes four times as many."""
        self._traffic = traffic
        self._piece_blocks = piece_blocks
        self._blocks = blocks
        self._namespace = namespace
        self._clock = clock
        self._arrivals: list[Copies] = []
        self._short_since: float | None = None
        self._polled_at = clock()
        self._step_s = 0.0
        """How long after the poll before it the last one came: about a step, while there is something to compute."""
        self._own_s = 0.0
        """As much of it as was not for matching."""
        self._matched_s = 0.0
        """How long the last poll matched."""
        self._is_put_off = False
        """The last poll matched nothing, for the step had taken in too much; this one does."""
        self._is_idle = False
        """At the last poll nothing could be computed."""
        self._was_found = False
        """A tier that answers at once had something of the last prompt that was looked for."""
        self._has_few_loads = False
        """The bus may soon be idle for want of matches."""
        self._is_full = False
        """The last step had no room for another token: who comes next waits for one like it, at least."""
        self.has_unmatched = False
        """Some who wait were not looked at, so that what was found for others is loaded meanwhile: poll again soon."""
        self._looking: list[Request] = []
        """Those of whose prompts not all was asked for yet, since all so far was found."""
        self._growing: dict[Request, int] = {}
        """Those who have not all blocks yet for what they load next, and how many they are going to have."""
        self._announced: dict[BlockHash, Request] = {}
        """Who is computing, or has computed, a block."""
        self._last_steps = [traffic.num_steps] * blocks.num_blocks
        """For each block the number of the last step that may read or write it for who had it before."""
        self._generation = traffic.generation
        self._offered_again: set[BlockHash] | None = None
        """Once a tier was away: what it was offered since."""

    def poll(self, waiting: Collection[Request], *, is_idle: bool, taken_in_s: float) -> None:
        """Take back what is copied away, and begin to match who is next.

        If `is_idle`, nothing can be computed meanwhile, so what is found first is loaded before others are matched.
        Else, prompts were taken in for `taken_in_s` since the last step, and there is less time left for matching.
        """
        copied = self._traffic.poll()
        for held in copied:
            self._blocks.release(held)
        if copied:
            self._short_since = None
        started_at, polled_at = self._clock(), self._polled_at
        self._polled_at = started_at
        self._step_s = started_at - polled_at
        last_own_s, self._own_s = self._own_s, self._step_s - self._matched_s
        self._is_full = self._is_full and not is_idle
        self._traffic.busy_s = self._step_s if self._is_full else 0.0
        self._is_idle = is_idle
        self._has_few_loads = self._was_found and self._traffic.num_loads < _FEW_LOADS
        allowed_s = 0.0 if is_idle else self._allowed_s(waiting, min(self._own_s, last_own_s)) - taken_in_s
        if not is_idle and allowed_s < 0 and not self._is_put_off:
            self._is_put_off, self._matched_s = True, 0.0
            self.has_unmatched = bool(waiting or self._looking)
            return
        self._is_put_off = False
        # Who has not all blocks for its load yet gets more of them after this: it must not take long.
        may_take_long = is_idle and not self._growing
        self._match_until(waiting, started_at, started_at + allowed_s, is_idle=may_take_long)
        self._matched_s = self._clock() - started_at

    def _allowed_s(self, waiting: Collection[Request], own_s: float) -> float:
        """For how long to match beside a step, if each has `own_s` without that."""
        num_unmatched = sum(request.fetch is None for request in itertools.islice(waiting, _LOOK_AHEAD))
        share = _FEW_SHARE if self._has_few_loads else _MATCHING_SHARE
        if num_unmatched >= _MANY_WAITING:
            share = _MANY_SHARE
        return min(share * own_s, _MAX_MATCHING_S)

    def _match_until(self, waiting: Collection[Request], started_at: float, end_at: float, *, is_idle: bool) -> None:
        """A piece at least; another one if it ends in time, should it take as long as the one before it."""
        self.has_unmatched = False
        piece_at = started_at
        for request in list(self._looking):
            while not self.has_unmatched and self._look_further(request, is_idle=is_idle):
                piece_at, before_at = self._clock(), piece_at
                self.has_unmatched = 2 * piece_at - before_at >= end_at
                if not self._has_more(request):
                    break
        for request in itertools.islice(waiting, _LOOK_AHEAD):
            while request.fetch is None and not request.num_in_flight:
                if self.has_unmatched:
                    return
                fetch = self._match(request, is_idle=is_idle)
                may_stop = not is_idle or (fetch is not None and (fetch.is_matching or bool(fetch.parts)))
                piece_at, before_at = self._clock(), piece_at
                self.has_unmatched = may_stop and 2 * piece_at - before_at >= end_at
        self.has_unmatched = any(map(self._has_more, self._looking))

    # --- matching --------------------------------------------------------------------------------------------------

    def is_matched(self, request: Request) -> bool:
        """It is known what the tiers have of its prompt."""
        assert request.fetch is not None
        return not request.fetch.is_matching

    def is_useful(self, request: Request) -> bool:
        """False, and it is matched again, when things have changed since the tiers were asked.

        The device has lost what was there then, or another request has begun to compute what was not.
        """
        fetch = request.fetch
        assert fetch is not None
        position = request.num_there // self._blocks.block_tokens
        hashes = self._hashed(request)
        next_missing = max(position, fetch.end)
        is_computed = next_missing < len(hashes) and hashes[next_missing] in self._announced
        if fetch.num_rematches >= _MAX_REMATCHES or (fetch.first <= position and not is_computed):
            return True
        num_rematches = fetch.num_rematches + 1
        self._traffic.give_up(fetch)
        self._ask(request, position, hashes).num_rematches = num_rematches
        return False

    def is_looking(self, request: Request) -> bool:
        """More of its prompt may be found yet, behind what was found so far."""
        return request.fetch is not None and (request.fetch.is_matching or self._has_more(request))

    def is_through(self, request: Request) -> bool:
        """No more of its prompt is looked for, which may have turned out since the poll: all of it can be hashed."""
        if self.is_looking(request):
            return False
        self._stop_looking(request)
        return True

    def _match(self, request: Request, *, is_idle: bool) -> Fetch | None:
        """Look for what the device has not of a prompt; None when more of it has to be hashed first."""
        hashes = self._hash_piece(request, is_idle=is_idle)
        first = self._blocks.num_known_blocks(request)
        if len(hashes) < self._num_wanted(request) and (first == len(hashes) or not self._traffic.is_quick):
            return None
        return self._ask(request, first, hashes)

    def _ask(self, request: Request, first: int, hashes: Sequence[BlockHash]) -> Fetch:
        fetch = request.fetch = self._traffic.match(first, hashes[first:], self._num_wanted(request) - len(hashes))
        self._was_found = bool(fetch.parts)
        if self.is_looking(request):
            if request not in self._looking:
                self._looking.append(request)
        else:
            self._stop_looking(request)
        return fetch

    def _look_further(self, request: Request, *, is_idle: bool) -> bool:
        """Look for the next piece of a prompt, and load what is found. False when there was nothing to do."""
        fetch = request.fetch
        assert fetch is not None
        was_matching = fetch.is_matching
        if self._has_more(request):
            hashes = self._hash_piece(request, is_idle=is_idle)
            more = hashes[fetch.asked_end :]
            self._traffic.match_further(fetch, more, self._num_wanted(request) - len(hashes))
        if not fetch.is_matching:
            self._load_ahead(request)
        if not self.is_looking(request):
            self._stop_looking(request)
        return not was_matching

    def _has_more(self, request: Request) -> bool:
        """All that was asked for was found, and it was not all of the prompt."""
        fetch = request.fetch
        return fetch is not None and fetch.has_all and fetch.asked_end < self._num_wanted(request)

    def _stop_looking(self, request: Request) -> None:
        request.blocks.max_hashes = None
        if request in self._looking:
            self._looking.remove(request)

    def _num_wanted(self, request: Request) -> int:
        return num_reusable_blocks(len(request.tokens), self._blocks.block_tokens)

    def _hash_piece(self, request: Request, *, is_idle: bool) -> list[BlockHash]:
        """Hash some more of a prompt. Returns all wanted hashes so far.

        If nobody is held up, little at first, so that a load begins, and then as much as is hashed while it comes.
        """
        num_hashed = len(request.blocks.hashes)
        size = self._piece_blocks
        if is_idle:
            size = 2 * num_hashed or (8 * size if self._traffic.num_loads else max(1, size // 2))
        elif self._has_few_loads:
            size *= 2
        end = num_hashed + size
        request.blocks.max_hashes = end if end < self._num_wanted(request) else None
        return self._hashed(request)

    def _hashed(self, request: Request) -> list[BlockHash]:
        """The hashes of all wanted blocks that may be known by now."""
        extend_hashes(request, self._namespace, self._blocks.block_tokens)
        return request.blocks.hashes[: self._num_wanted(request)]

    # --- loading ---------------------------------------------------------------------------------------------------

    def plan(self, request: Request) -> Plan | None:
        """What to load next for a request that has, or is about to get, its blocks; None to compute from here."""
        position, offset = divmod(request.num_computed, self._blocks.block_tokens)
        fetch = request.fetch
        if fetch is None or fetch.is_matching or offset:
            return None
        if fetch.decided is None or fetch.decided.first != position:
            fetch.decided = self._traffic.plan(fetch, position, len(request.tokens))
        return fetch.decided

    def has_room(self, request: Request, num_tokens: int) -> bool:
        """There are blocks for its first `num_tokens`, and for all that is still to be loaded for those who have some.

        Also for what was found of its own prompt behind that, or may be found yet.
        """
        fetch = request.fetch
        if request in self._looking:
            num_tokens = self._num_wanted(request) * self._blocks.block_tokens
        elif fetch is not None and fetch.decided is not None:
            num_tokens = max(num_tokens, fetch.end * self._blocks.block_tokens)
        missing = -(-num_tokens // self._blocks.block_tokens) - len(request.blocks.ids)
        promised = {other: self._num_wanted(other) for other in self._looking if other.status is Status.RUNNING}
        for other, end in (promised | self._growing).items():
            if other is not request:
                missing += max(0, end - len(other.blocks.ids))
        return missing <= self._blocks.num_free_blocks

    def grow(self, request: Request, plan: Plan, *, is_alone: bool) -> bool:
        """Take blocks for `plan`, not more than some of them if others compute; if the request `is_alone`, none does.

        False, and nothing changes, when there is no room.
        """
        end = plan.end
        if not is_alone and not self._is_idle:
            end = min(end, max(plan.first, len(request.blocks.ids)) + 4 * self._piece_blocks)
        return self._blocks.grow(request, end * self._blocks.block_tokens, is_loaded=True)

    def is_growing(self, request: Request) -> bool:
        """It has not all blocks yet for what it loads next; others may wait for those that it has."""
        return request in self._growing

    def begin(self, request: Request, plan: Plan) -> None:
        """Load `plan` into blocks that the request has, once it has them all."""
        assert request.fetch is not None
        if len(request.blocks.ids) >= plan.end:
            self._growing.pop(request, None)
            request.load = self._load(request, plan)
            self._load_ahead(request)
        else:
            self._growing[request] = max(plan.end, request.fetch.end)
            self.has_unmatched = True

    def _load_ahead(self, request: Request) -> None:
        """Load what follows on the loads under way from the same tier, unless it is to be computed or lacks room."""
        fetch, load = request.fetch, request.load
        assert fetch is not None
        while load is not None and load.plan.order is Order.FRONT:
            last = request.next_loads[-1] if request.next_loads else load
            plan = self._traffic.plan(fetch, last.plan.end, len(request.tokens))
            if plan is None or plan.order is not Order.FRONT or plan.part.tier != last.plan.part.tier:
                return
            if plan.part.lease is last.plan.part.lease:
                return  # a lease is one thread's at a time
            if not self._blocks.grow(request, plan.end * self._blocks.block_tokens, is_loaded=True):
                return
            request.next_loads.append(self._load(request, plan, last))

    def _load(self, request: Request, plan: Plan, behind: Load | None = None) -> Load:
        assert request.fetch is not None
        request.fetch.decided = None
        hashes = request.blocks.hashes[plan.first : plan.end]
        ids = request.blocks.ids[plan.first : plan.end]
        after_step = max(map(self._last_steps.__getitem__, ids))
        return self._traffic.load(request.fetch, plan, hashes, ids, after_step, behind)

    def waits_for_load(self, request: Request) -> bool:
        """Nothing of it can be computed before what is being loaded has come, or before there is room for that."""
        if request.load is None:
            return request in self._growing
        return request.load.plan.order is Order.FRONT

    def may_compute_beside(self, request: Request) -> bool:
        """The load comes from the back: the front can be computed."""
        return request.load is not None and request.load.plan.order is Order.BACK

    def claim(self, request: Request, count: int) -> int:
        """How many of its next `count` tokens to compute while the rest comes from the back."""
        load = request.load
        assert load is not None
        block_tokens = self._blocks.block_tokens
        claimed = load.front * block_tokens - request.num_computed
        if claimed <= 0:
            wanted = min(self._traffic.share(load, len(request.tokens)), max(1, count // block_tokens))
            claimed = load.claim(wanted) * block_tokens
        return min(claimed, count)

    def advance(self, request: Request) -> bool:
        """See how far a load is. False when there is nothing to do but wait for it."""
        load = request.load
        assert load is not None
        if self._traffic.is_late(load, len(request.tokens)):
            self._abandon(request, load)
            return True
        if load.plan.order is Order.FRONT:
            if not load.is_over:
                return False
            self._end(request, load)
            return request.load is None or self.advance(request)
        if request.num_computed == load.front * self._blocks.block_tokens and load.has_met:
            self._end(request, load)
        return True

    def start_early(self, request: Request, *, is_alone: bool) -> bool:
        """Everything was handed to the device: go on as if it had arrived, each layer after its own arrival.

        Unless the request `is_alone` in its step, only if the rest comes while the device does other things.
        """
        assert request.load is not None
        loads = [request.load, *request.next_loads]
        if self.is_looking(request):
            return False
        if any(not load.is_submitted or load.plan.order is not Order.FRONT for load in loads):
            return False
        if not is_alone:
            left_s = self._traffic.left_s(loads)
            if left_s is None or left_s > min(_EARLY_STEPS * self._step_s, _MAX_EARLY_S):
                return False
        for load in loads:
            self._arrivals += [transfer for transfer in load.transfers if not transfer.is_done]
            self._end(request, load)
        if self.plan(request) is not None:
            return False
        self.settle(request)
        return True

    @property
    def has_arrivals(self) -> bool:
        """The next step waits for something that is on its way."""
        return bool(self._arrivals)

    def take_arrivals(self) -> list[Copies]:
        arrivals, self._arrivals = self._arrivals, []
        return arrivals

    def settle(self, request: Request) -> None:
        """No more is loaded: what ended the match is what the request says of itself."""
        fetch = request.fetch
        if fetch is None:
            return
        position = request.num_there // self._blocks.block_tokens
        if request.ending is None:
            ending = fetch.ending
            left = next((part for part in fetch.parts if part.end > position), None)
            # What meets from the back leaves out the block of the last token, found or not.
            before_last = (len(request.tokens) - 1) // self._blocks.block_tokens
            if position >= (before_last if fetch.has_all else self._num_wanted(request)):
                request.ending = MatchEnding(position, MatchEnd.ALL, "")
            elif left is None:
                request.ending = MatchEnding(max(position, ending.position), match_end_of(ending.ended), ending.tier)
            elif left.first <= position:
                request.ending = MatchEnding(position, MatchEnd.SLOWER, left.tier)
            else:
                request.ending = MatchEnding(position, MatchEnd.LOST, "device", "evicted while the request waited")
        self._traffic.give_up(fetch)
        request.fetch = None
        if self._growing.pop(request, None) is not None:
            self._blocks.unclaim(request)
        self._stop_looking(request)

    def _abandon(self, request: Request, load: Load) -> None:
        """Late: what has arrived is used, the rest is computed."""
        self._abandon_next(request)
        self._traffic.abandon_late(load)
        if load.plan.order is Order.FRONT:
            if request.ending is None:
                request.ending = MatchEnding(load.arrived()[1], MatchEnd.SLOWER, load.plan.part.tier, "it was late")
            self._end(request, load)
            self._blocks.unclaim(request)
        self.settle(request)

    def _abandon_next(self, request: Request) -> None:
        while request.next_loads:
            self._traffic.abandon(request.next_loads.popleft())

    def _end(self, request: Request, load: Load) -> None:
        """Count what arrived as computed; if that is all, the next load is the request's."""
        block_tokens = self._blocks.block_tokens
        if load.plan.order is Order.BACK:
            self._traffic.note_met(load)
        first, end = load.arrived()
        tier = load.plan.part.tier
        if end > first:
            request.fill(end * block_tokens)
            if not request.num_preemptions:
                num_loaded = request.num_computed - first * block_tokens
                request.loaded_tokens[tier] = request.loaded_tokens.get(tier, 0) + num_loaded
            # A tier that was away may lack what another had; but what is still on its way must not be offered.
            if self._offered_again is None or not load.is_over:
                request.num_offered = end
        if end < load.plan.end:
            self._abandon_next(request)
            self._blocks.unclaim(request)
            if request.ending is None:
                lost = MatchEnding(end, MatchEnd.LOST, tier)
                request.ending = MatchEnding(end, MatchEnd.LIMIT, "host") if load.lacks_room else lost
            request.load = None
            self.settle(request)
        request.load = request.next_loads.popleft() if request.next_loads else None
        if load.is_over:
            self._blocks.note_computed(request)

    # --- storing ---------------------------------------------------------------------------------------------------

    def announce(self, request: Request) -> None:
        """It begins to compute: others wait for the blocks of its prompt."""
        if request.is_announced or request.load is not None:
            return
        request.is_announced = True
        extend_hashes(request, self._namespace, self._blocks.block_tokens)
        first = request.num_there // self._blocks.block_tokens
        hashes = request.blocks.hashes[first:]
        for block_hash in hashes:
            self._announced.setdefault(block_hash, request)
        self._traffic.announce(request, hashes)

    def offer_again(self, request: Request) -> None:
        """A tier was away since blocks that the device has were offered: offer them once more with this request."""
        generation = self._traffic.generation
        if generation != self._generation:
            self._generation, self._offered_again = generation, set()
        offered = self._offered_again
        if offered is None:
            return
        if len(offered) > _MAX_OFFERED_AGAIN:
            offered.clear()
        num_known = sum(1 for _ in itertools.takewhile(offered.__contains__, request.blocks.hashes))
        request.num_offered = min(request.num_offered, num_known)

    def offer(self, request: Request) -> None:
        """Its full blocks of known tokens go to the tiers once the device has done what was handed to it."""
        num_full = min(request.num_computed, len(request.tokens)) // self._blocks.block_tokens
        first = request.num_offered
        if num_full <= first:
            return
        extend_hashes(request, self._namespace, self._blocks.block_tokens)
        held = self._blocks.hold(request, first, num_full)
        hashes = request.blocks.hashes[first:num_full]
        self._traffic.offer(hashes, held)
        if self._offered_again is not None:
            self._offered_again.update(hashes)
        request.num_offered = num_full

    def send_offers(self, *, is_last: bool = False) -> None:
        """Once in a step at least; `is_last` when no step follows for now."""
        self._traffic.send_offers(is_last=is_last)

    def note_step(self, step: Step, *, is_full: bool) -> None:
        """It was handed to the device; `is_full` if it has no room for another token."""
        self._is_full = is_full
        self._traffic.note_step()
        for copy in step.copies:
            self._last_steps[copy.source] = self._last_steps[copy.target] = self._traffic.num_steps

    def may_wait_for_room(self) -> bool:
        """Blocks are being copied away, and not for long yet: they come back by themselves."""
        if not self._traffic.has_stores:
            self._short_since = None
            return False
        self._traffic.send_offers(is_last=True)
        now = self._clock()
        if self._short_since is None:
            self._short_since = now
        if now - self._short_since > _PATIENCE_S:
            self._traffic.hurry()
        return True

    # --- the end ---------------------------------------------------------------------------------------------------

    def leave(self, request: Request) -> None:
        """The request gives up its blocks: nothing is loaded into them any more."""
        last_steps, num_steps = self._last_steps, self._traffic.num_steps
        for block_id in request.blocks.ids:
            last_steps[block_id] = num_steps
        if request.load is not None:
            self._traffic.abandon(request.load)
            request.load = None
        self._abandon_next(request)
        self._growing.pop(request, None)
        self._stop_looking(request)
        if request.fetch is not None:
            self._traffic.give_up(request.fetch)
            request.fetch = None
        if request.is_announced:
            request.is_announced = False
            for block_hash in request.blocks.hashes:
                if self._announced.get(block_hash) is request:
                    del self._announced[block_hash]
            self._traffic.withdraw(request)
