"""Matches prompts in the tiers, on threads of its own, and keeps the leases until their last user is done. No torch.

The engine's thread asks and never waits. A tier that fails or is late costs time; its blocks are then computed.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.match_end import MatchEnd
from kvtier.tiers.hierarchy import Ending, Hierarchy, HierarchyLease, TierSegment
from kvtier.transfer.decision import LoadOrCompute
from kvtier.transfer.load import LoadPlan, Span
from kvtier.transfer.worker_threads import WorkerThreads

NUM_THREADS = 4
_MATCH_TIMEOUT_S = 0.25
_PENDING_LOOK_S = 0.003
_PENDING_SLACK_S = 0.1
_UNKNOWN_PENDING_S = 1.0
_MAX_PENDING_S = 30.0


@dataclass(eq=False, slots=True)
class TierMatch:
    """One prompt's match in the tiers, from block `first` of the prompt on.

    `hashes` are those looked up so far.
    """

    first: int
    hashes: list[BlockHash]
    is_matching: bool = True
    is_cancelled: bool = False
    spans: list[Span] = field(default_factory=list)
    ending: Ending = field(default_factory=lambda: Ending("", 0, MatchEnd.ALL))
    leases: list[HierarchyLease] = field(default_factory=list)
    decided: LoadPlan | None = None
    """What is loaded next, once the prompt has all blocks for it."""
    num_users: int = 1
    """Its owner, and every load that reads from the leases."""
    num_rematches: int = 0

    @property
    def end(self) -> int:
        return self.spans[-1].end if self.spans else self.first

    @property
    def asked_end(self) -> int:
        """The block where a further match begins."""
        return self.first + len(self.hashes)

    @property
    def has_all(self) -> bool:
        """Everything looked up so far was a hit."""
        return not self.is_matching and self.ending.ended is MatchEnd.ALL


class Matcher:
    """The matches of one engine."""

    def __init__(
        self,
        hierarchy: Hierarchy,
        decision: LoadOrCompute,
        wake: Callable[[], None],
        *,
        clock: Callable[[], float],
        let_pass: Callable[[], None] | None,
    ) -> None:
        """`wake` is called when a match ends. At safe points, the threads call `let_pass` (see `latency_guard`)."""
        self._hierarchy = hierarchy
        self._decision = decision
        self._clock = clock
        self._lock = threading.Lock()
        self._threads = WorkerThreads(NUM_THREADS, "kvtier-match", let_pass, wake)
        self.num_matching = 0
        self.is_quick = all(guard.tier.answers_at_once for guard in hierarchy.guards)
        """A dictionary lookup costs less than a thread switch: `match` has its answer at once."""

    # --- the engine's thread ---------------------------------------------------------------------------------------

    def match(self, first: int, hashes: Sequence[BlockHash], num_more: int = 0) -> TierMatch:
        """Begin to look for `hashes`, those of a prompt's blocks from `first` on. `num_more` blocks follow them."""
        match = TierMatch(first, [])
        self.match_further(match, hashes, num_more)
        return match

    def match_further(self, match: TierMatch, hashes: Sequence[BlockHash], num_more: int = 0) -> None:
        """Everything so far was a hit: also look for `hashes`, those of the next blocks."""
        first = match.asked_end
        match.hashes += hashes
        match.is_matching = bool(hashes)
        if not hashes:
            return
        if self.is_quick:
            lease = self._hierarchy.match(hashes)
            if lease.ended is not MatchEnd.PENDING:
                self._found(match, lease, first, len(hashes) + num_more)
                return
            lease.release()
        if not self._decision.is_match_worth_it(first, first + len(hashes)):
            match.ending = Ending("", first, MatchEnd.SLOWER)
            match.is_matching = False
            return
        with self._lock:
            match.num_users += 1
            self.num_matching += 1
        self._threads.submit(functools.partial(self._match, match, first, hashes, num_more))

    def give_up(self, match: TierMatch) -> None:
        """The owner is done with the match."""
        match.is_cancelled = True
        if self._is_last_user(match):  # on a thread that no interrupt reaches: half a release could never be repaired
            self._threads.submit(functools.partial(self._release, match))

    def close(self) -> None:
        self._threads.close()

    # --- any thread ------------------------------------------------------------------------------------------------

    def join(self, match: TierMatch) -> None:
        """Add a user, until it leaves."""
        with self._lock:
            match.num_users += 1

    def leave(self, match: TierMatch) -> None:
        """The last user to leave ends the leases."""
        if self._is_last_user(match):
            self._release(match)

    def _is_last_user(self, match: TierMatch) -> bool:
        with self._lock:
            match.num_users -= 1
            return not match.num_users

    def _release(self, match: TierMatch) -> None:
        leases, match.leases = match.leases, []
        for lease in leases:
            lease.release()

    # --- the threads -----------------------------------------------------------------------------------------------

    def _match(self, match: TierMatch, first: int, hashes: Sequence[BlockHash], num_more: int) -> None:
        match.ending = Ending("", first, MatchEnd.TIER_DOWN)
        is_found = False
        try:
            if not match.is_cancelled:
                self._found(match, self._match_and_wait(match, first, hashes), first, len(hashes) + num_more)
                is_found = True
        finally:
            if not is_found:  # otherwise `_found` has reset it, and the next match may be running
                match.is_matching = False
            with self._lock:
                self.num_matching -= 1
            self.leave(match)

    def _found(self, match: TierMatch, lease: HierarchyLease, first: int, num_wanted: int) -> None:
        is_all = lease.ended is MatchEnd.ALL
        self._hierarchy.count(lease, lease.num_blocks if is_all else num_wanted)
        match.leases.append(lease)
        match.spans = match.spans + spans_of(lease.segments, first)
        match.ending = replace(lease.ending, position=first + lease.num_blocks)
        match.is_matching = False

    def _match_and_wait(self, match: TierMatch, first: int, hashes: Sequence[BlockHash]) -> HierarchyLease:
        """Match, and wait for blocks that are being computed, about as long as computing them would take."""
        asked_at = self._clock()
        lease = self._ask(hashes)
        started_at = progressed_at = self._clock()
        self._decision.note_match(started_at - asked_at)
        num_blocks = lease.num_blocks
        while lease.ended is MatchEnd.PENDING and not match.is_cancelled:
            now = self._clock()
            compute_s = self._decision.compute_s(first + num_blocks, first + len(hashes), None)
            patience_s = _UNKNOWN_PENDING_S if compute_s is None else compute_s + _PENDING_SLACK_S
            if now - progressed_at > patience_s or now - started_at > _MAX_PENDING_S:
                break
            time.sleep(_PENDING_LOOK_S)
            lease.release()
            lease = self._ask(hashes)
            if lease.num_blocks > num_blocks:
                num_blocks, progressed_at = lease.num_blocks, self._clock()
        return lease

    def _ask(self, hashes: Sequence[BlockHash]) -> HierarchyLease:
        return self._hierarchy.match(hashes, timeout_s=_MATCH_TIMEOUT_S, is_lazy=True)


def spans_of(segments: Sequence[TierSegment], first: int) -> list[Span]:
    """The hits of a prompt from its block `first` on, by where the bytes are."""
    spans: list[Span] = []
    for segment in segments:
        tier, lease = segment.tier, segment.lease
        num_ready = lease.num_ready_at_match
        start = first + segment.first
        ready, leased, end = start + num_ready, start + lease.num_blocks, start + segment.num_blocks
        spans += [
            Span(tier, tier, start, ready, lease, 0),
            Span(lease.stored_in, tier, ready, leased, lease, num_ready),  # being read for another client
            Span(lease.stored_in, tier, leased, end, None, 0),
        ]
    return [span for span in spans if span.first < span.end]
