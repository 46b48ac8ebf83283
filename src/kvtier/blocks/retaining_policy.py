"""Keeps retained blocks from eviction for a time: a wrapper around any eviction policy.

A retention is an entry under a block's hash, with a deadline; each account that retains the block has its own entry.
An entry may exist before its block: clients retain a prompt's blocks while they are being computed. The wrapped policy
orders the evictable blocks without an entry. When the last entry of a block ends, the block joins them as just used.

Retentions are bounded: an entry counts its block's units towards its account, and a block with entries counts once
towards their owner; no entry may exceed the limit of either. An entry whose block does not come ends after `ARRIVAL_S`.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.policies import EvictionPolicy
from kvtier.blocks.retention import Retention
from kvtier.blocks.run import Run, Scoped
from kvtier.blocks.share import Share

ARRIVAL_S = 600.0
"""How long an entry waits for its block."""
_STALE_WAKES = 1024
_MAX_ENTRIES = 64
"""Most entries of one block, one for each account that retains it."""


class _Index(Protocol):
    share: Share
    block_units: int

    @property
    def blocks(self) -> Mapping[BlockHash, object]: ...


class _Retainable(Protocol):
    """A block of a pool."""

    hash: BlockHash
    size: int
    num_refs: int
    is_pinned: bool
    is_retained: bool

    @property
    def index(self) -> _Index: ...

    @property
    def is_ready(self) -> bool: ...


_Block = TypeVar("_Block", bound=_Retainable)


class _Entry:
    """One account's retention of one block. `ask` is the number of the `retain` call that made or extended it."""

    __slots__ = ("account", "ask", "deadline", "hash", "index", "is_over", "priority")

    def __init__(
        self, index: _Index, block_hash: BlockHash, deadline: float, priority: int, account: _Account, ask: int
    ) -> None:
        self.index = index
        self.hash = block_hash
        self.deadline = deadline
        self.priority = priority
        self.account = account
        self.ask = ask
        self.is_over = False


class _Account:
    """One caller's entries and their units. The entries are sorted by priority, then by `retain` call, oldest first."""

    __slots__ = ("entries", "name", "share", "units")

    def __init__(self, share: Share, name: str) -> None:
        self.share = share
        self.name = name
        self.entries: dict[int, dict[int, dict[_Entry, None]]] = {}
        self.units = 0

    def add(self, entry: _Entry) -> None:
        self.entries.setdefault(entry.priority, {}).setdefault(entry.ask, {})[entry] = None
        self.units += entry.index.block_units

    def remove(self, entry: _Entry) -> None:
        level = self.entries[entry.priority]
        of_one = level[entry.ask]
        del of_one[entry]
        self.units -= entry.index.block_units
        if not of_one:
            del level[entry.ask]
            if not level:
                del self.entries[entry.priority]

    def weakest(self, priority: int) -> Iterator[_Entry]:
        """The entries below `priority`, in the order in which they make room: a prompt loses its end first."""
        for below in sorted(each for each in self.entries if each < priority):
            for of_one in self.entries[below].values():
                yield from reversed(of_one)


class RetainingPolicy(Generic[_Block]):
    """An `EvictionPolicy`, called under the pool's lock. `inner` orders the blocks without a retention."""

    def __init__(self, inner: EvictionPolicy[_Block], clock: Callable[[], float]) -> None:
        self.inner = inner
        self.counts_shares = inner.counts_shares
        self._clock = clock
        self._entries: dict[_Index, dict[BlockHash, dict[_Account, _Entry]]] = {}
        self._num_idle = 0
        """The number of blocks that only their entries keep from eviction."""
        self._accounts: dict[tuple[Share, str], _Account] = {}
        self._units: dict[Share, int] = {}
        self._wakes: list[tuple[float, int, _Entry]] = []
        """A heap of times to check entries again. Each entry is in it once; entries that are over stay until due."""
        self._numbers = itertools.count()
        self._asks = itertools.count()
        self._num_entries = 0

    # --- the order of eviction --------------------------------------------------------------------------------------

    def missed(self, parent: _Block | None, index: Scoped, block_hash: BlockHash) -> None:
        self.inner.missed(parent, index, block_hash)

    def begin(self, parent: _Block | None, index: Scoped, block_hash: BlockHash, count: int) -> Run[_Block] | None:
        return self.inner.begin(parent, index, block_hash, count)

    def add_all(self, blocks: Sequence[_Block]) -> None:
        if free := self._without_entries(blocks):
            self.inner.add_all(free)

    def readmit(self, blocks: Sequence[_Block]) -> None:
        if free := self._without_entries(blocks):
            self.inner.readmit(free)

    def remove(self, block: _Block) -> None:
        if block.is_retained:
            block.is_retained = False
            self._num_idle -= 1
        else:
            self.inner.remove(block)

    def remove_all(self, blocks: Sequence[_Block]) -> None:
        for block in blocks:
            self.remove(block)

    def pop_coldest(self, requester: Share | None = None, newcomer: Run[_Block] | None = None) -> _Block | None:
        """The next victim, never a retained block."""
        return self.inner.pop_coldest(requester, newcomer)

    def pop_several(
        self, count: int, requester: Share | None = None, newcomer: Run[_Block] | None = None
    ) -> list[_Block]:
        return self.inner.pop_several(count, requester, newcomer)

    def put_back(self, blocks: Sequence[_Block]) -> None:
        self.inner.put_back(blocks)

    def may_evict(self, block: _Block, requester: Share | None, victims: Sequence[_Block]) -> bool:
        return not self._has_entry(block) and self.inner.may_evict(block, requester, victims)

    def coldest(self, count: int) -> list[_Block]:
        return self.inner.coldest(count)

    def __len__(self) -> int:
        return len(self.inner) + self._num_idle

    # --- retention --------------------------------------------------------------------------------------------------

    @property
    def is_empty(self) -> bool:
        return not self._entries

    @property
    def retained_units(self) -> int:
        return sum(self._units.values())

    def units_of(self, share: Share) -> int:
        return self._units.get(share, 0)

    def retain(self, index: _Index, hashes: Sequence[BlockHash], retention: Retention, max_units: int) -> int:
        """Retain the leading blocks of `hashes`, present or not, within the limits of the owner and the account.

        `max_units` is the limit of the index's owner. A block that the account has retained already keeps the longer
        time and the higher priority. If room is short, the account's own retentions of lower priority end. Returns how
        many of `hashes` are retained as requested.
        """
        self.expire()
        account = self._account(index.share, retention.account)
        ask, now = next(self._asks), self._clock()
        count = 0
        for block_hash in hashes:
            entry = self._entries.get(index, {}).get(block_hash, {}).get(account)
            if entry is not None:
                self._extend(entry, retention, ask, now)
            elif not self._begin(index, block_hash, retention, account, ask, max_units, now):
                break
            count += 1
        self._drop_account(account)
        return count

    def end(self, index: _Index, hashes: Sequence[BlockHash], account: str | None = None) -> int:
        """End the retentions of `hashes` by one account, or by all if None. Returns for how many blocks."""
        known = self._entries.get(index, {})
        found = [list(known[block_hash].values()) for block_hash in dict.fromkeys(hashes) if block_hash in known]
        ended = [[entry for entry in of_one if account is None or entry.account.name == account] for of_one in found]
        self._end_all([entry for of_one in ended for entry in of_one])
        return sum(map(bool, ended))

    def expire(self) -> None:
        """End entries that are past their deadline, or whose block has not come in time."""
        wakes, now = self._wakes, self._clock()
        over: dict[int, list[_Entry]] = {}
        while wakes and wakes[0][0] <= now:
            entry = heapq.heappop(wakes)[2]
            if entry.is_over:
                continue
            if entry.deadline > now and entry.hash in entry.index.blocks:
                self._wake_at(entry.deadline, entry)
            else:
                entry.is_over = True
                over.setdefault(entry.ask, []).append(entry)
        for of_one in over.values():
            self._end_all(of_one[::-1])

    # --- private ----------------------------------------------------------------------------------------------------

    def _begin(
        self,
        index: _Index,
        block_hash: BlockHash,
        retention: Retention,
        account: _Account,
        ask: int,
        max_units: int,
        now: float,
    ) -> bool:
        num_others = len(self._entries.get(index, {}).get(block_hash, ()))
        if num_others == _MAX_ENTRIES:
            return False
        if not self._make_place(account, index.block_units, retention, max_units, is_counted=num_others > 0):
            return False
        block: _Block | None = index.blocks.get(block_hash)  # type: ignore[assignment]
        is_ready = block is not None and block.is_ready
        if block is not None and is_ready and not (block.num_refs or block.is_pinned or block.is_retained):
            self.inner.remove(block)
            block.is_retained = True
            self._num_idle += 1
        entry = _Entry(index, block_hash, now + retention.ttl_s, retention.priority, account, ask)
        if not num_others:
            self._units[account.share] = self._units.get(account.share, 0) + index.block_units
        self._entries.setdefault(index, {}).setdefault(block_hash, {})[account] = entry
        self._num_entries += 1
        self._accounts[account.share, account.name] = account  # ending its last entry to make room may have removed it
        account.add(entry)
        self._wake_at(entry.deadline if is_ready else min(entry.deadline, now + ARRIVAL_S), entry)
        return True

    def _extend(self, entry: _Entry, retention: Retention, ask: int, now: float) -> None:
        deadline = now + retention.ttl_s
        if deadline <= entry.deadline and retention.priority <= entry.priority:
            return
        entry.account.remove(entry)
        entry.priority = max(entry.priority, retention.priority)
        entry.deadline = max(entry.deadline, deadline)
        entry.ask = ask
        entry.account.add(entry)

    def _make_place(
        self, account: _Account, units: int, retention: Retention, max_units: int, *, is_counted: bool
    ) -> bool:
        """End the account's weaker retentions until `units` more fit. False, ending none, if that cannot suffice.

        With `is_counted`, the block already counts towards the owner.
        """
        limit = retention.account_units
        excess = self._units.get(account.share, 0) + (0 if is_counted else units) - max_units
        own_excess = 0 if limit is None else account.units + units - limit
        ending: list[_Entry] = []
        for entry in account.weakest(retention.priority):
            if excess <= 0 and own_excess <= 0:
                break
            ending.append(entry)
            own_excess -= entry.index.block_units
            if len(self._entries[entry.index][entry.hash]) == 1:
                excess -= entry.index.block_units
        if excess > 0 or own_excess > 0:
            return False
        self._end_all(ending[::-1])
        return True

    def _account(self, share: Share, name: str) -> _Account:
        found = self._accounts.get((share, name))
        if found is None:
            found = self._accounts[share, name] = _Account(share, name)
        return found

    def _drop_account(self, account: _Account) -> None:
        if not account.entries:
            self._accounts.pop((account.share, account.name), None)

    def _end_all(self, entries: Sequence[_Entry]) -> None:
        """End `entries`, in prompt order. Blocks without another entry become evictable again."""
        freed = [block for entry in entries if (block := self._end(entry)) is not None]
        if freed:
            self.inner.readmit(freed)

    def _end(self, entry: _Entry) -> _Block | None:
        """End an entry. Returns its block if that may be evicted now."""
        index, account = entry.index, entry.account
        known = self._entries[index]
        of_block = known[entry.hash]
        del of_block[account]
        self._num_entries -= 1
        account.remove(entry)
        self._drop_account(account)
        entry.is_over = True
        if of_block:
            return None
        del known[entry.hash]
        if not known:
            del self._entries[index]
        left = self._units[account.share] - index.block_units
        if left:
            self._units[account.share] = left
        else:
            del self._units[account.share]
        block: _Block | None = index.blocks.get(entry.hash)  # type: ignore[assignment]
        if block is None or not block.is_retained:
            return None
        block.is_retained = False
        self._num_idle -= 1
        return block

    def _wake_at(self, time: float, entry: _Entry) -> None:
        if len(self._wakes) > 2 * self._num_entries + _STALE_WAKES:
            self._wakes = [wake for wake in self._wakes if not wake[2].is_over]
            heapq.heapify(self._wakes)
        # A prompt's last block comes first, so that its end is evicted before its beginning.
        heapq.heappush(self._wakes, (time, -next(self._numbers), entry))

    def _without_entries(self, blocks: Sequence[_Block]) -> list[_Block]:
        """The blocks that may be evicted; the others are marked as retained."""
        free = []
        for block in blocks:
            if self._has_entry(block):
                block.is_retained = True
                self._num_idle += 1
            else:
                free.append(block)
        return free

    def _has_entry(self, block: _Block) -> bool:
        entries = self._entries.get(block.index)
        return entries is not None and block.hash in entries
