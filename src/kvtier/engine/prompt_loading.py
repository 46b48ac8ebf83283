"""A prompt's way through the tiers below the device, as the scheduler asks for it: match, load, offer. No torch.

The engine's thread calls everything; nothing here waits. What a request holds of the tiers hangs on the request:
`fetch` is its match, `load` what is on its way to blocks that it has on the device.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable

from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.namespace import Namespace
from kvtier.engine.block_manager import BlockManager
from kvtier.engine.copier import Transfer
from kvtier.engine.load import Load, Order, Plan
from kvtier.engine.naive_blocks import extend_hashes
from kvtier.engine.request import MatchEnding, Request
from kvtier.engine.step import Step
from kvtier.engine.tier_traffic import Fetch, TierTraffic
from kvtier.tiers.explanation import MatchEnd, match_end_of

_LOOK_AHEAD = 32
"""So many waiting requests are matched before their turn comes: each leases what it found."""

_MATCHING_SHARE = 0.25
_MAX_MATCHING_S = 0.05
"""A step is not held up longer than this, and that share of the time since the one before, by matching who waits."""

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
    ) -> None:
        self._traffic = traffic
        self._blocks = blocks
        self._namespace = namespace
        self._clock = clock
        self._arrivals: list[Transfer] = []
        self._short_since: float | None = None
        self._polled_at = clock()
        self.has_unmatched = False
        """Some who wait were not looked at, so that what was found for others is loaded meanwhile: poll again soon."""
        self._announced: dict[BlockHash, Request] = {}
        """Who is computing, or has computed, a block."""
        self._last_steps = [0] * blocks.num_blocks
        """For each block the number of the last step that may read or write it for who had it before."""
        self._generation = traffic.generation
        self._offered_again: set[BlockHash] | None = None
        """Once a tier was away: what it was offered since."""

    def poll(self, waiting: Iterable[Request], *, is_idle: bool) -> None:
        """Take back what is copied away, and begin to match who is next.

        If `is_idle`, nothing can be computed meanwhile, so what is found first is loaded before others are matched.
        """
        copied = self._traffic.poll()
        for held in copied:
            self._blocks.release(held)
        if copied:
            self._short_since = None
        started_at, polled_at = self._clock(), self._polled_at
        self._polled_at = started_at
        allowed_s = 0.0 if is_idle else min(_MATCHING_SHARE * (started_at - polled_at), _MAX_MATCHING_S)
        self.has_unmatched = False
        for request in itertools.islice(waiting, _LOOK_AHEAD):
            if request.fetch is not None or request.num_in_flight:
                continue
            if self.has_unmatched:
                return
            fetch = self._match(request)
            may_stop = not is_idle or fetch.is_matching or bool(fetch.parts)
            self.has_unmatched = may_stop and self._clock() - started_at >= allowed_s
        self.has_unmatched = False

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
        position = request.num_computed // self._blocks.block_tokens
        hashes = self._wanted(request)
        next_missing = max(position, fetch.end)
        is_computed = next_missing < len(hashes) and hashes[next_missing] in self._announced
        if fetch.num_rematches >= _MAX_REMATCHES or (fetch.first <= position and not is_computed):
            return True
        num_rematches = fetch.num_rematches + 1
        self._traffic.give_up(fetch)
        request.fetch = self._traffic.match(position, hashes[position:])
        request.fetch.num_rematches = num_rematches
        return False

    def _match(self, request: Request) -> Fetch:
        hashes = self._wanted(request)
        first = self._blocks.num_known_blocks(request)
        request.fetch = self._traffic.match(first, hashes[first:])
        return request.fetch

    def _wanted(self, request: Request) -> list[BlockHash]:
        """The hashes of all full blocks that leave at least one token to compute."""
        extend_hashes(request, self._namespace, self._blocks.block_tokens)
        return request.blocks.hashes[: (len(request.tokens) - 1) // self._blocks.block_tokens]

    # --- loading ---------------------------------------------------------------------------------------------------

    def plan(self, request: Request) -> Plan | None:
        """What to load next for a request that has, or is about to get, its blocks; None to compute from here."""
        position, offset = divmod(request.num_computed, self._blocks.block_tokens)
        if request.fetch is None or offset:
            return None
        return self._traffic.plan(request.fetch, position, len(request.tokens))

    def begin(self, request: Request, plan: Plan) -> None:
        """Load `plan` into blocks that the request has."""
        assert request.fetch is not None
        hashes = request.blocks.hashes[plan.first : plan.end]
        ids = request.blocks.ids[plan.first : plan.end]
        after_step = max(map(self._last_steps.__getitem__, ids))
        request.load = self._traffic.load(request.fetch, plan, hashes, ids, after_step)

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
            return True
        if request.num_computed == load.front * self._blocks.block_tokens and load.has_met:
            self._end(request, load)
        return True

    def start_early(self, request: Request) -> bool:
        """Everything was handed to the device: go on as if it had arrived, each layer after its own arrival."""
        load = request.load
        assert load is not None
        if not load.is_submitted or load.plan.order is not Order.FRONT:
            return False
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

    def take_arrivals(self) -> list[Transfer]:
        arrivals, self._arrivals = self._arrivals, []
        return arrivals

    def settle(self, request: Request) -> None:
        """No more is loaded: what ended the match is what the request says of itself."""
        fetch = request.fetch
        if fetch is None:
            return
        position = request.num_computed // self._blocks.block_tokens
        if request.ending is None:
            ending = fetch.ending
            left = next((part for part in fetch.parts if part.end > position), None)
            if position >= len(self._wanted(request)):
                request.ending = MatchEnding(position, MatchEnd.ALL, "")
            elif left is None:
                request.ending = MatchEnding(max(position, ending.position), match_end_of(ending.ended), ending.tier)
            elif left.first <= position:
                request.ending = MatchEnding(position, MatchEnd.SLOWER, left.tier)
            else:
                request.ending = MatchEnding(position, MatchEnd.LOST, "device", "evicted while the request waited")
        self._traffic.give_up(fetch)
        request.fetch = None

    def _abandon(self, request: Request, load: Load) -> None:
        """Late: what has arrived is used, the rest is computed."""
        self._traffic.abandon_late(load)
        if load.plan.order is Order.FRONT:
            if request.ending is None:
                request.ending = MatchEnding(load.arrived()[1], MatchEnd.SLOWER, load.plan.part.tier, "it was late")
            self._end(request, load)
        self.settle(request)

    def _end(self, request: Request, load: Load) -> None:
        """Count what arrived as computed."""
        block_tokens = self._blocks.block_tokens
        if load.plan.order is Order.BACK:
            self._traffic.note_met(load)
        first, end = load.arrived()
        tier = load.plan.part.tier
        if end > first:
            request.num_computed = end * block_tokens
            if not request.num_preemptions:
                request.loaded_tokens[tier] = request.loaded_tokens.get(tier, 0) + (end - first) * block_tokens
            # A tier that was away may lack what another had; but what is still on its way must not be offered.
            if self._offered_again is None or not load.is_over:
                request.num_offered = end
        if end < load.plan.end:
            self._blocks.unclaim(request)
            if request.ending is None:
                lost = MatchEnding(end, MatchEnd.LOST, tier)
                request.ending = MatchEnding(end, MatchEnd.LIMIT, "host") if load.lacks_room else lost
            request.load = None
            self.settle(request)
        request.load = None
        if load.is_over:
            self._blocks.note_computed(request)

    # --- storing ---------------------------------------------------------------------------------------------------

    def announce(self, request: Request) -> None:
        """It begins to compute: others wait for the blocks of its prompt."""
        if request.is_announced or request.load is not None:
            return
        request.is_announced = True
        extend_hashes(request, self._namespace, self._blocks.block_tokens)
        first = request.num_computed // self._blocks.block_tokens
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

    def note_step(self, step: Step) -> None:
        """It was handed to the device."""
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
        for block_id in request.blocks.ids:
            self._last_steps[block_id] = self._traffic.num_steps
        if request.load is not None:
            self._traffic.abandon(request.load)
            request.load = None
        if request.fetch is not None:
            self._traffic.give_up(request.fetch)
            request.fetch = None
        if request.is_announced:
            request.is_announced = False
            for block_hash in request.blocks.hashes:
                if self._announced.get(block_hash) is request:
                    del self._announced[block_hash]
            self._traffic.withdraw(request)
