"""Looks up prompts for an engine that asks once where a load ends and computes what follows. No torch.

The scheduler's thread calls everything here and never waits: hashing and calls to the tier run on threads. Hits are
leased until they are loaded, or until the scheduler goes on without them.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Protocol

from kvtier.blocks.hashing import BlockHash, block_hashes
from kvtier.blocks.match_end import MatchEnd
from kvtier.blocks.namespace import Namespace
from kvtier.memory.lease import EmptyLease, Lease
from kvtier.observe.log_limit import LogLimit
from kvtier.tiers.tier import Tier
from kvtier.transfer.decision import LoadOrCompute
from kvtier.transfer.leased_blocks import LeasedBlocks
from kvtier.transfer.load import Span

logger = logging.getLogger(__name__)

_HASHED_AT_ONCE = 512
_PAUSE_S = 1e-5
"""A pause after each half millisecond of hashing lets the scheduler's thread take its turn, possibly a long one."""

_ASK_AGAIN_S = 0.005
_MOST_ALONE = 8
"""A prompt that meets the limit so often while nothing else is leased is longer than the limit: waiting is in vain."""

_ASKING_AGAIN = 4
"""Most prompts beyond the limit that ask again within that time: those at the front of the engine's queue."""


@dataclass(frozen=True, slots=True)
class Described:
    """The hashes of all full blocks of a prompt, chained from `root` on."""

    root: Namespace
    hashes: list[BlockHash]


@dataclass(frozen=True, slots=True)
class Searched:
    """The result of a search: a lease of `blocks`, those in memory before those on disk; a load can end before `end`.

    `ended` says why the match ended there. With `is_prefix`, `blocks` are consecutive from the first one on, a load can
    also end before any of them, and the tier has all blocks before `stored_end`.
    """

    lease: Lease
    end: int
    blocks: Sequence[BlockHash]
    ended: MatchEnd
    is_prefix: bool = False
    stored_end: int = 0


class Search(Protocol):
    """How a tier is asked for a prompt."""

    def __call__(self, chain: Sequence[BlockHash], first: int, num_tokens: int, timeout_s: float) -> Searched:
        """Look for the first `num_tokens` of the prompt whose blocks have the hashes `chain`, from block `first` on."""
        ...


class PrefixSearch:
    """A `Search` for models whose layers all look back to the first token: a load can end after any block.

    A full block in which `num_tokens` end is asked for too: it is not loaded, but if the tier has it, it need not be
    saved.
    """

    def __init__(self, tier: Tier) -> None:
        self._tier = tier

    def __call__(self, chain: Sequence[BlockHash], first: int, num_tokens: int, timeout_s: float) -> Searched:
        block_tokens = self._tier.layout.block_tokens
        most = max(first, min(num_tokens // block_tokens, len(chain)))
        wanted = chain[first : -(-num_tokens // block_tokens)]
        lease = self._tier.match_lazily(wanted, timeout_s=timeout_s)
        stored_end = first + lease.num_blocks + lease.num_stored
        ended = MatchEnd.ALL if first < most <= stored_end else lease.ended
        return Searched(lease, min(most, stored_end), wanted, ended, is_prefix=True, stored_end=stored_end)


@dataclass(frozen=True, slots=True)
class _Found:
    """What the cache has of a prompt."""

    prompt: Described
    searched: Searched
    seconds: float


@dataclass(eq=False, slots=True)
class Lookup:
    """One prompt. After its lookup, `hashes` are those of its full blocks so far, from `root` on."""

    describe: Callable[[], Described]
    """Called on a thread. If it raises, the prompt cannot be cached; the error says why."""
    num_computed_last: int = 1
    """Tokens at the end of the prompt that the engine computes in any case; they are not looked up."""
    first: int = 0
    """The block from which the tier was asked."""
    num_tokens: int = 0
    """The length of the prompt when the tier was asked."""
    asked_at: float = 0.0
    number: int = 0
    """Prompts that came later have higher ones."""
    root: Namespace | None = None
    hashes: list[BlockHash] = field(default_factory=list)
    lease: Lease | None = None
    """The lease of the hits, until it is released."""
    blocks: Sequence[BlockHash] = ()
    """The blocks that the lease covers."""
    found_end: int = 0
    """The block after the last hit that can be loaded."""
    stored_end: int = 0
    """The tier has all blocks before this one, as far as the lookup shows."""
    ended: MatchEnd = MatchEnd.TIER_DOWN
    """Why the block at `found_end` was not a hit."""
    end: int = 0
    """The block before which a load ends."""
    is_cachable: bool = True
    is_over: bool = False
    matching: Future[_Found | None] | None = None
    waits_since: float | None = None
    """When it met the limit on leases, or a prompt before it last moved on."""
    is_patient: bool = True
    """False once it has waited for leases in vain."""
    num_alone: int = 0
    """How often it has asked while this engine held no other lease."""

    @property
    def is_idle(self) -> bool:
        """No lookup is running and nothing is leased: loading needs another lookup."""
        return self.matching is None and self.lease is None

    def leased(self, first: int, end: int) -> LeasedBlocks | None:
        """Where blocks `first..end` lie in this host's memory; None unless all of them do."""
        lease = self.lease
        if lease is None or lease.arena is None or end - self.first > lease.num_ready_at_match:
            return None
        return LeasedBlocks(lease.arena.inode, list(lease.offsets[first - self.first : end - self.first]))

    def leased_among(self, hashes: Sequence[BlockHash]) -> LeasedBlocks | None:
        """Where `hashes`, a subset of `blocks`, lie in this host's memory; None unless all of them do."""
        lease = self.lease
        if lease is None or lease.arena is None:
            return None
        offsets = dict(zip(self.blocks, lease.offsets[: lease.num_ready_at_match], strict=False))
        if not all(block_hash in offsets for block_hash in hashes):
            return None
        return LeasedBlocks(lease.arena.inode, [offsets[block_hash] for block_hash in hashes])


class Lookups:
    """All prompts of one engine, in one tier. Owns the leases of everything promised to the scheduler."""

    def __init__(
        self,
        tier: Tier,
        decision: LoadOrCompute,
        threads: ThreadPoolExecutor,
        *,
        timeout_s: float,
        search: Search | None = None,
    ) -> None:
        """By default, `search` looks for prefixes block by block."""
        self._tier = tier
        self._search = search or PrefixSearch(tier)
        self._decision = decision
        self._threads = threads
        self._timeout_s = timeout_s
        self._lookups: dict[Lookup, None] = {}
        """In the order in which the prompts came, that of their numbers."""
        self._numbers = itertools.count()
        self._loading: set[Lookup] = set()
        self._asked_again: deque[float] = deque(maxlen=_ASKING_AGAIN)
        self._log = LogLimit(logger)

    # --- the scheduler's thread ---------------------------------------------------------------------------------------

    def begin(self, lookup: Lookup, num_tokens: int, first: int = 0, to_release: Sequence[Lease] = ()) -> None:
        """Look up the full blocks from `first` on of a prompt of `num_tokens`."""
        if lookup not in self._lookups:
            self._lookups[lookup] = None
            lookup.number = next(self._numbers)
        lookup.first, lookup.found_end, lookup.stored_end, lookup.num_tokens = first, first, first, num_tokens
        asks = self._decision.is_match_worth_it(first, num_tokens // self._tier.layout.block_tokens)
        lookup.asked_at = time.monotonic()
        lookup.matching = self._threads.submit(self._match, lookup, num_tokens, first, asks, to_release)

    def begin_again(self, lookup: Lookup, num_tokens: int, first: int) -> None:
        """Discard what was found, or will be: look up from another block on."""
        self.release(lookup)
        _discard(lookup)
        self.begin(lookup, num_tokens, first)

    def cancel(self, lookup: Lookup) -> None:
        """Stop waiting for the answer. A lookup that has not begun never does; others still show what to save."""
        is_limited = lookup.waits_since is not None  # it may have to release leases of other lookups
        if lookup.matching is not None and not is_limited and lookup.matching.cancel():
            lookup.matching = None

    def wait(self, lookup: Lookup, timeout_s: float) -> None:
        """Give up the GIL to the threads until the answer has arrived, for `timeout_s` at most."""
        if lookup.matching is not None:
            wait([lookup.matching], timeout_s)

    def take(self, lookup: Lookup, first: int) -> bool:
        """Whether the answer has arrived. Blocks before `first` are already on the device."""
        if lookup.matching is None or not lookup.matching.done():
            return False
        found, lookup.matching = lookup.matching.result(), None
        if found is None:
            lookup.is_cachable = False
            del self._lookups[lookup]
            return True
        searched = found.searched
        lookup.root, lookup.hashes = found.prompt.root, found.prompt.hashes
        lookup.lease, lookup.blocks = searched.lease, searched.blocks
        lookup.found_end, lookup.ended = searched.end, searched.ended
        lookup.stored_end = max(searched.end, searched.stored_end)
        if lookup.found_end > lookup.first or searched.ended is MatchEnd.NEVER_STORED:
            self._decision.note_match(found.seconds)
        spans = self._spans(lookup.first, searched)
        lookup.end = max(first, self._decision.end_of_load(spans, first, lookup.num_tokens))
        return True

    def is_worth_waiting(self, lookup: Lookup) -> bool:
        """Whether the client's limit on leases cut the match short, and waiting may help. Asks again at intervals.

        Loads soon release their leases: a prompt waits for as long as those before it in the queue move on. If nothing
        loads, the waiting prompts hold all leases.
        """
        if lookup.lease is None or lookup.ended is not MatchEnd.LIMIT or not lookup.is_patient:
            return False
        now = time.monotonic()
        if lookup.lease.num_blocks and lookup.num_alone >= _MOST_ALONE:
            lookup.is_patient = False
            return False
        lookup.waits_since = lookup.waits_since or now
        if now - lookup.waits_since > self._timeout_s:
            lookup.is_patient = False
            if self._is_behind_a_load(lookup):
                self._note_moved(lookup)  # one prompt is computed at a time: those behind it may still be loaded
            return False
        if now - lookup.asked_at > _ASK_AGAIN_S and self._may_ask_again(now):
            if self._loading:
                lookup.num_alone = 0
                self.begin_again(lookup, lookup.num_tokens, lookup.first)
            else:
                lookup.num_alone += 1
                self._make_room(lookup)
        return True

    def begin_load(self, lookup: Lookup) -> None:
        """The lease is kept until `end_load`."""
        self._loading.add(lookup)
        lookup.waits_since = None
        self._note_moved(lookup)

    def end_load(self, lookup: Lookup) -> None:
        self._loading.discard(lookup)
        self.release(lookup)
        self._note_moved(lookup)

    def is_loading(self, lookup: Lookup) -> bool:
        return lookup in self._loading

    def release(self, lookup: Lookup) -> None:
        """Release the lease, on a thread, since it takes a call."""
        lease, lookup.lease = lookup.lease, None
        if lease is not None:
            self._threads.submit(lease.release)

    def forget(self, lookup: Lookup) -> None:
        """The prompt is over: the result of a running lookup is useless, too. A load in progress keeps its lease."""
        self._lookups.pop(lookup, None)
        if lookup not in self._loading:
            self.release(lookup)
        lookup.is_over = True
        _discard(lookup)

    def close(self) -> None:
        """Forget all prompts."""
        for lookup in list(self._loading):
            self.end_load(lookup)
        for lookup in list(self._lookups):
            self.forget(lookup)

    def _is_behind_a_load(self, lookup: Lookup) -> bool:
        """Whether a prompt that came earlier is loading. What came later and overtook it brings no other its turn."""
        return any(other.number < lookup.number for other in self._loading)

    def _note_moved(self, lookup: Lookup) -> None:
        """A prompt moved on: the turn of those that came later is nearer, so they start to wait anew."""
        now = time.monotonic()
        for other in reversed(self._lookups):
            if other.number <= lookup.number:
                return
            if other.waits_since is not None:
                other.waits_since = now

    def _may_ask_again(self, now: float) -> bool:
        if len(self._asked_again) == _ASKING_AGAIN and now - self._asked_again[0] <= _ASK_AGAIN_S:
            return False
        self._asked_again.append(now)
        return True

    def _make_room(self, lookup: Lookup) -> None:
        """Prompts whose turn comes later release their leases."""
        leases = []
        for other in self._lookups:
            if other in self._loading or other.lease is None:
                continue
            if other is lookup or other.lease.num_blocks:
                leases.append(other.lease)
                other.lease = None
        self.begin(lookup, lookup.num_tokens, lookup.first, leases)

    def _spans(self, first: int, searched: Searched) -> list[Span]:
        name, lease, end = self._tier.name, searched.lease, searched.end
        in_memory = min(end, searched.stored_end - lease.num_stored)
        if not searched.is_prefix:
            in_memory = first if lease.num_stored else end
        # For a remote server, it makes no difference where it keeps them.
        below = lease.stored_in if self._tier.is_local else name
        spans = [Span(name, name, first, in_memory, None, 0), Span(below, name, in_memory, end, None, 0)]
        return [span for span in spans if span.first < span.end]

    # --- the threads --------------------------------------------------------------------------------------------------

    def _match(
        self, lookup: Lookup, num_tokens: int, first: int, asks: bool, to_release: Sequence[Lease]
    ) -> _Found | None:
        """None if the prompt cannot be identified, and so cannot be cached."""
        for lease in to_release:
            lease.release()
        if lookup.is_over:
            return None  # dropped while others were matched: later lookups need not wait for it
        try:
            prompt = lookup.describe()
        except Exception as error:
            self._log.warning("identity", "a request is computed and not cached: %s", error)
            return None
        started_at = time.monotonic()
        searched = Searched(EmptyLease(MatchEnd.SLOWER), first, [], MatchEnd.SLOWER)
        if asks:
            self._tier.learn(prompt.hashes)
            searched = self._search(prompt.hashes, first, num_tokens - lookup.num_computed_last, self._timeout_s)
        return _Found(prompt, searched, time.monotonic() - started_at)


def hashed_gently(
    root: Namespace, tokens: Sequence[int], block_tokens: int, parent: BlockHash | None = None
) -> list[BlockHash]:
    """The hashes of all full blocks. Pauses between batches, so that the scheduler's thread gets the GIL."""
    hashes: list[BlockHash] = []
    for first in range(0, len(tokens), _HASHED_AT_ONCE * block_tokens):
        if hashes:
            time.sleep(_PAUSE_S)
        some = tokens[first : first + _HASHED_AT_ONCE * block_tokens]
        hashes += block_hashes(root, some, block_tokens, parent=hashes[-1] if hashes else parent)
    return hashes


def _discard(lookup: Lookup) -> None:
    """Release whatever it still finds."""
    matching, lookup.matching = lookup.matching, None
    if matching is not None:
        matching.add_done_callback(_release_result)


def _release_result(matching: Future[_Found | None]) -> None:
    found = None if matching.cancelled() else matching.result()
    if found is not None:
        found.searched.lease.release()
