"""Prompts looked up for an engine that asks once where a load ends, and computes what follows. No torch.

The scheduler's thread calls everything here and never waits: hashing and calls to the tier run on threads. What was
found is leased until it is loaded, or until the scheduler goes on without it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from kvtier.blocks.hashing import BlockHash, block_hashes
from kvtier.blocks.match_end import MatchEnd
from kvtier.blocks.namespace import Namespace
from kvtier.memory.lease import EmptyLease, Lease
from kvtier.observe.log_limit import LogLimit
from kvtier.tiers.tier import Tier
from kvtier.transfer.decision import LoadOrCompute
from kvtier.transfer.load import DISK, Span

logger = logging.getLogger(__name__)

_HASHED_AT_ONCE = 128
_PAUSE_S = 1e-5
_ASK_AGAIN_S = 0.005


@dataclass(frozen=True, slots=True)
class _Found:
    """A prompt's hashes, and what the cache has of them: blocks leased in memory, then blocks on disk."""

    root: Namespace
    hashes: list[BlockHash]
    lease: Lease
    seconds: float


@dataclass(eq=False, slots=True)
class Lookup:
    """One prompt. `hashes` are those of its full blocks so far, from `root` on, once it was looked up."""

    tokens: Callable[[], list[int]]
    """A copy of all tokens so far."""
    find_root: Callable[[], Namespace]
    """Called on a thread. What it raises says why the prompt cannot be cached."""
    asked_at: float = 0.0
    root: Namespace | None = None
    hashes: list[BlockHash] = field(default_factory=list)
    lease: Lease | None = None
    """What was found, while it is held."""
    end: int = 0
    """The block before which a load ends."""
    is_cachable: bool = True
    is_over: bool = False
    matching: Future[_Found | None] | None = None
    limited_at: float | None = None

    @property
    def is_used_up(self) -> bool:
        """What was found is given back: it takes another lookup to load."""
        return self.matching is None and self.lease is None

    @property
    def num_found(self) -> int:
        """Blocks in the tier, while they are held."""
        return 0 if self.lease is None else self.lease.num_blocks + self.lease.num_stored


class Lookups:
    """All prompts of one engine, in one tier. Owns the leases of everything that is promised to the scheduler."""

    def __init__(self, tier: Tier, decision: LoadOrCompute, threads: ThreadPoolExecutor, *, timeout_s: float) -> None:
        self._tier = tier
        self._decision = decision
        self._threads = threads
        self._timeout_s = timeout_s
        self._lookups: dict[Lookup, None] = {}
        self._loading: set[Lookup] = set()
        self._log = LogLimit(logger)

    # --- the scheduler's thread ---------------------------------------------------------------------------------------

    def begin(self, lookup: Lookup, to_release: Sequence[Lease] = ()) -> None:
        """Look for all full blocks of its tokens, but for the one of the last token."""
        self._lookups[lookup] = None
        tokens = lookup.tokens()
        asks = self._decision.is_match_worth_it(0, len(tokens) // self._tier.layout.block_tokens)
        lookup.asked_at = time.monotonic()
        lookup.matching = self._threads.submit(self._match, lookup, tokens, asks, to_release)

    def take(self, lookup: Lookup, first: int, num_tokens: int) -> bool:
        """Whether the answer is there. Of a prompt of `num_tokens`, blocks before `first` are on the device."""
        if lookup.matching is None or not lookup.matching.done():
            return False
        found, lookup.matching = lookup.matching.result(), None
        if found is None:
            lookup.is_cachable = False
            del self._lookups[lookup]
            return True
        lookup.lease, lookup.root, lookup.hashes = found.lease, found.root, found.hashes
        if lookup.num_found or found.lease.ended is MatchEnd.NEVER_STORED:
            self._decision.note_match(found.seconds)
        lookup.end = max(first, self._decision.end_of_load(self._spans(found.lease), first, num_tokens))
        return True

    def is_worth_waiting(self, lookup: Lookup) -> bool:
        """This client holds as much as it may, and the prompt got less than there is. Asks again now and then.

        What loads hold comes back soon; when there are none, it is prompts that wait who hold it.
        """
        if lookup.lease is None or lookup.lease.ended is not MatchEnd.LIMIT:
            return False
        now = time.monotonic()
        lookup.limited_at = lookup.limited_at or now
        if now - lookup.limited_at > self._timeout_s:
            return False
        if now - lookup.asked_at > _ASK_AGAIN_S:
            if self._loading:
                self.release(lookup)
                self.begin(lookup)
            else:
                self._make_room(lookup)
        return True

    def begin_load(self, lookup: Lookup) -> None:
        """What was found is held until `end_load`, or until the prompt is over."""
        self._loading.add(lookup)

    def end_load(self, lookup: Lookup) -> None:
        self._loading.discard(lookup)
        self.release(lookup)

    def is_loading(self, lookup: Lookup) -> bool:
        return lookup in self._loading

    def release(self, lookup: Lookup) -> None:
        """Give back what was found, on a thread: it takes a call."""
        lease, lookup.lease = lookup.lease, None
        if lease is not None:
            self._threads.submit(lease.release)

    def forget(self, lookup: Lookup) -> None:
        """The prompt is over: what is still being found is of no use either."""
        self._lookups.pop(lookup, None)
        self.release(lookup)
        lookup.is_over = True
        if lookup.matching is not None:
            lookup.matching.add_done_callback(_release_result)
            lookup.matching = None

    def close(self) -> None:
        """Forget all of them."""
        for lookup in list(self._lookups):
            self.forget(lookup)

    def _make_room(self, lookup: Lookup) -> None:
        """Prompts whose turn comes later give back what was found for them."""
        leases = []
        for other in self._lookups:
            if other.lease is not None and other not in self._loading:
                leases.append(other.lease)
                other.lease = None
        self.begin(lookup, leases)

    def _spans(self, lease: Lease) -> list[Span]:
        name = self._tier.name
        in_memory, end = lease.num_blocks, lease.num_blocks + lease.num_stored
        disk = DISK if self._tier.is_local else name  # how a server out of reach has them makes no difference
        spans = [Span(name, name, 0, in_memory, None, 0), Span(disk, name, in_memory, end, None, 0)]
        return [span for span in spans if span.first < span.end]

    # --- the threads --------------------------------------------------------------------------------------------------

    def _match(self, lookup: Lookup, tokens: list[int], asks: bool, to_release: Sequence[Lease]) -> _Found | None:
        """None when the prompt cannot be told from others, and so cannot be cached."""
        for lease in to_release:
            lease.release()
        if lookup.is_over:
            return None  # given up while others were matched: those that come after it need not wait for it
        block_tokens = self._tier.layout.block_tokens
        try:
            root = lookup.find_root()
            hashes = _hashed_gently(root, tokens, block_tokens)
        except Exception as error:
            self._log.warning("identity", "a request is computed and not cached: %s", error)
            return None
        started_at = time.monotonic()
        lease = EmptyLease(MatchEnd.SLOWER)
        if asks:
            usable = hashes[: (len(tokens) - 1) // block_tokens]
            lease = self._tier.match_lazily(usable, timeout_s=self._timeout_s)
        return _Found(root, hashes, lease, time.monotonic() - started_at)


def _hashed_gently(root: Namespace, tokens: Sequence[int], block_tokens: int) -> list[BlockHash]:
    """The hashes of all full blocks. Lets the scheduler's thread have the GIL between some and the next."""
    hashes: list[BlockHash] = []
    for first in range(0, len(tokens), _HASHED_AT_ONCE * block_tokens):
        if hashes:
            time.sleep(_PAUSE_S)
        some = tokens[first : first + _HASHED_AT_ONCE * block_tokens]
        hashes += block_hashes(root, some, block_tokens, parent=hashes[-1] if hashes else None)
    return hashes


def _release_result(matching: Future[_Found | None]) -> None:
    found = None if matching.cancelled() else matching.result()
    if found is not None:
        found.lease.release()
