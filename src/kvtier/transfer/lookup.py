"""Prompts looked up for an engine that asks once where a load ends, and computes what follows. No torch.

The scheduler's thread calls everything here and never waits: hashing and calls to the tier run on threads. What was
found is leased until it is loaded, or until the scheduler goes on without it.
"""

from __future__ import annotations

import logging
import time
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
from kvtier.transfer.load import DISK, Span

logger = logging.getLogger(__name__)

_HASHED_AT_ONCE = 512
_PAUSE_S = 1e-5
"""Half a millisecond of work, then a moment for the scheduler's thread. It may be long before it lets go again."""

_ASK_AGAIN_S = 0.005


@dataclass(frozen=True, slots=True)
class Described:
    """The hashes of all full blocks of a prompt, chained from `root` on."""

    root: Namespace
    hashes: list[BlockHash]


@dataclass(frozen=True, slots=True)
class Searched:
    """What a search found: a lease of `blocks`, in memory and then on disk, with which a load can end before `end`.

    `ended` says what was missing there. With `is_prefix`, the blocks are those from the first on, one after the other:
    a load can also end before any of them.
    """

    lease: Lease
    end: int
    blocks: Sequence[BlockHash]
    ended: MatchEnd
    is_prefix: bool = False


class Search(Protocol):
    """How a tier is asked for a prompt."""

    def __call__(self, chain: Sequence[BlockHash], first: int, num_tokens: int, timeout_s: float) -> Searched:
        """Look for the first `num_tokens` of the prompt whose blocks have the hashes `chain`, from `first` on."""
        ...


class PrefixSearch:
    """A `Search` for models whose layers all look back to the first token: a load can end after any block."""

    def __init__(self, tier: Tier) -> None:
        self._tier = tier

    def __call__(self, chain: Sequence[BlockHash], first: int, num_tokens: int, timeout_s: float) -> Searched:
        wanted = chain[first : num_tokens // self._tier.layout.block_tokens]
        lease = self._tier.match_lazily(wanted, timeout_s=timeout_s)
        return Searched(lease, first + lease.num_blocks + lease.num_stored, wanted, lease.ended, is_prefix=True)


@dataclass(frozen=True, slots=True)
class _Found:
    """What the cache has of a prompt."""

    prompt: Described
    searched: Searched
    seconds: float


@dataclass(eq=False, slots=True)
class Lookup:
    """One prompt. `hashes` are those of its full blocks so far, from `root` on, once it was looked up."""

    describe: Callable[[], Described]
    """Called on a thread. What it raises says why the prompt cannot be cached."""
    first: int = 0
    """The block from which on the tier was asked."""
    num_tokens: int = 0
    """How long the prompt was then."""
    asked_at: float = 0.0
    root: Namespace | None = None
    hashes: list[BlockHash] = field(default_factory=list)
    lease: Lease | None = None
    """What was found, while it is held."""
    blocks: Sequence[BlockHash] = ()
    """Those that the lease is of."""
    found_end: int = 0
    """The block behind those that were found."""
    ended: MatchEnd = MatchEnd.TIER_DOWN
    """What the block was that was not found."""
    end: int = 0
    """The block before which a load ends."""
    is_cachable: bool = True
    is_over: bool = False
    matching: Future[_Found | None] | None = None
    limited_at: float | None = None

    @property
    def is_idle(self) -> bool:
        """Nothing is being looked for and nothing is held: it takes another lookup to load."""
        return self.matching is None and self.lease is None

    def leased(self, first: int, end: int) -> LeasedBlocks | None:
        """Where blocks `first..end` lie in memory of this host, if all of them do."""
        lease = self.lease
        if lease is None or lease.arena is None or end - self.first > lease.num_ready_at_match:
            return None
        return LeasedBlocks(lease.arena.inode, list(lease.offsets[first - self.first : end - self.first]))

    def leased_among(self, hashes: Sequence[BlockHash]) -> LeasedBlocks | None:
        """Where these of `blocks` lie in memory of this host, if all of them do."""
        lease = self.lease
        if lease is None or lease.arena is None:
            return None
        offsets = dict(zip(self.blocks, lease.offsets[: lease.num_ready_at_match], strict=False))
        if not all(block_hash in offsets for block_hash in hashes):
            return None
        return LeasedBlocks(lease.arena.inode, [offsets[block_hash] for block_hash in hashes])


class Lookups:
    """All prompts of one engine, in one tier. Owns the leases of everything that is promised to the scheduler."""

    def __init__(
        self,
        tier: Tier,
        decision: LoadOrCompute,
        threads: ThreadPoolExecutor,
        *,
        timeout_s: float,
        search: Search | None = None,
    ) -> None:
        """Without a `search`, prefixes are looked for block by block."""
        self._tier = tier
        self._search = search or PrefixSearch(tier)
        self._decision = decision
        self._threads = threads
        self._timeout_s = timeout_s
        self._lookups: dict[Lookup, None] = {}
        self._loading: set[Lookup] = set()
        self._log = LogLimit(logger)

    # --- the scheduler's thread ---------------------------------------------------------------------------------------

    def begin(self, lookup: Lookup, num_tokens: int, first: int = 0, to_release: Sequence[Lease] = ()) -> None:
        """Look for the full blocks from `first` on of a prompt of `num_tokens`, but for the one of its last token."""
        self._lookups[lookup] = None
        lookup.first, lookup.found_end, lookup.num_tokens = first, first, num_tokens
        asks = self._decision.is_match_worth_it(first, num_tokens // self._tier.layout.block_tokens)
        lookup.asked_at = time.monotonic()
        lookup.matching = self._threads.submit(self._match, lookup, num_tokens, first, asks, to_release)

    def begin_again(self, lookup: Lookup, num_tokens: int, first: int) -> None:
        """What was found, or will be, is of no use: look from another block on."""
        self.release(lookup)
        _discard(lookup)
        self.begin(lookup, num_tokens, first)

    def cancel(self, lookup: Lookup) -> None:
        """The answer is not waited for. A lookup that has not begun never does; else it says what need not be saved."""
        is_limited = lookup.limited_at is not None  # it may have to give back what others held
        if lookup.matching is not None and not is_limited and lookup.matching.cancel():
            lookup.matching = None

    def wait(self, lookup: Lookup, timeout_s: float) -> None:
        """Let the threads have the interpreter until the answer is there, so long at most."""
        if lookup.matching is not None:
            wait([lookup.matching], timeout_s)

    def take(self, lookup: Lookup, first: int) -> bool:
        """Whether the answer is there. Blocks before `first` are on the device."""
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
        if lookup.found_end > lookup.first or searched.ended is MatchEnd.NEVER_STORED:
            self._decision.note_match(found.seconds)
        spans = self._spans(lookup.first, searched)
        lookup.end = max(first, self._decision.end_of_load(spans, first, lookup.num_tokens))
        return True

    def is_worth_waiting(self, lookup: Lookup) -> bool:
        """This client holds as much as it may, and the prompt got less than there is. Asks again now and then.

        What loads hold comes back soon; when there are none, it is prompts that wait who hold it.
        """
        if lookup.lease is None or lookup.ended is not MatchEnd.LIMIT:
            return False
        now = time.monotonic()
        lookup.limited_at = lookup.limited_at or now
        if now - lookup.limited_at > self._timeout_s:
            return False
        if now - lookup.asked_at > _ASK_AGAIN_S:
            if self._loading:
                self.begin_again(lookup, lookup.num_tokens, lookup.first)
            else:
                self._make_room(lookup)
        return True

    def begin_load(self, lookup: Lookup) -> None:
        """What was found is held until `end_load`."""
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
        """The prompt is over: what is still being found is of no use either. What is being loaded stays until then."""
        self._lookups.pop(lookup, None)
        if lookup not in self._loading:
            self.release(lookup)
        lookup.is_over = True
        _discard(lookup)

    def close(self) -> None:
        """Forget all of them."""
        for lookup in list(self._loading):
            self.end_load(lookup)
        for lookup in list(self._lookups):
            self.forget(lookup)

    def _make_room(self, lookup: Lookup) -> None:
        """Prompts whose turn comes later give back what was found for them."""
        leases = []
        for other in self._lookups:
            if other.lease is not None and other not in self._loading:
                leases.append(other.lease)
                other.lease = None
        self.begin(lookup, lookup.num_tokens, lookup.first, leases)

    def _spans(self, first: int, searched: Searched) -> list[Span]:
        name, lease, end = self._tier.name, searched.lease, searched.end
        in_memory = end - lease.num_stored
        if not searched.is_prefix:
            in_memory = first if lease.num_stored else end
        disk = DISK if self._tier.is_local else name  # how a server out of reach has them makes no difference
        spans = [Span(name, name, first, in_memory, None, 0), Span(disk, name, in_memory, end, None, 0)]
        return [span for span in spans if span.first < span.end]

    # --- the threads --------------------------------------------------------------------------------------------------

    def _match(
        self, lookup: Lookup, num_tokens: int, first: int, asks: bool, to_release: Sequence[Lease]
    ) -> _Found | None:
        """None when the prompt cannot be told from others, and so cannot be cached."""
        for lease in to_release:
            lease.release()
        if lookup.is_over:
            return None  # given up while others were matched: those that come after it need not wait for it
        try:
            prompt = lookup.describe()
        except Exception as error:
            self._log.warning("identity", "a request is computed and not cached: %s", error)
            return None
        started_at = time.monotonic()
        searched = Searched(EmptyLease(MatchEnd.SLOWER), first, [], MatchEnd.SLOWER)
        if asks:
            searched = self._search(prompt.hashes, first, num_tokens - 1, self._timeout_s)
        return _Found(prompt, searched, time.monotonic() - started_at)


def hashed_gently(
    root: Namespace, tokens: Sequence[int], block_tokens: int, parent: BlockHash | None = None
) -> list[BlockHash]:
    """The hashes of all full blocks. Lets the scheduler's thread have the GIL between many and the next."""
    hashes: list[BlockHash] = []
    for first in range(0, len(tokens), _HASHED_AT_ONCE * block_tokens):
        if hashes:
            time.sleep(_PAUSE_S)
        some = tokens[first : first + _HASHED_AT_ONCE * block_tokens]
        hashes += block_hashes(root, some, block_tokens, parent=hashes[-1] if hashes else parent)
    return hashes


def _discard(lookup: Lookup) -> None:
    """What it still finds is given back."""
    matching, lookup.matching = lookup.matching, None
    if matching is not None:
        matching.add_done_callback(_release_result)


def _release_result(matching: Future[_Found | None]) -> None:
    found = None if matching.cancelled() else matching.result()
    if found is not None:
        found.searched.lease.release()
