"""Evicts the blocks least likely to be used soon, as learned from the traffic; where simpler rules do better, by those.

Blocks that were last used together are a `Run`: a stretch of one prompt, with the history of the gaps between its
uses. A prompt loses its end first, so a run shrinks from its last block. Runs with similar gaps form a class, and each
class learns how long its runs wait for their next use (`ReuseModel`); a block is worth the hits it can expect for the
time that it takes up room. Candidates for eviction are the oldest run of each class and a few at random.

The history outlives the blocks: a run that is evicted whole leaves a ghost, found by the hash of its first block. New
blocks that continue a prompt inherit the history of what they continue; those that branch off a shared prefix begin
without one. New blocks that are worth less than every candidate are declined, except for the first block of a run that
a match can reach: no match can reach blocks behind a gap.

`Duel` compares it with LRU and with age per use (`ages`), run by run. While one of these rules, the oldest run is
evicted and nothing is declined.
"""

from __future__ import annotations

import math
import operator
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from kvtier.blocks.ages import Rule
from kvtier.blocks.candidates import ONE_USE_S, Candidates
from kvtier.blocks.duel import Duel
from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.reuse_model import ReuseModel, class_of
from kvtier.blocks.run import MAX_USES, Run, Scoped
from kvtier.blocks.shadows import pops_of_one
from kvtier.blocks.share import Share

_RUN = operator.attrgetter("run")
_CAPACITY_WINDOW = 8
"""In capacities: blocks placed before the capacity is taken to have shrunk."""
_REST_S = 30.0
"""For this long after a decline, blocks that continue nothing cached are taken for the rest of that prompt, since a
prompt is stored in batches."""
_GHOSTS_PER_RUN = 4
_MIN_GHOSTS = 64
_MAX_EXPECTED = 1024


class RunBlock(Protocol):
    """The policy's view of a block; see `pool.Block`."""

    hash: BlockHash
    kept: int
    """Not zero while the block is pinned or retained."""
    num_refs: int
    run: Run[RunBlock] | None

    @property
    def index(self) -> Scoped: ...


_Block = TypeVar("_Block", bound=RunBlock)


class AdaptivePolicy(Generic[_Block]):
    """See `EvictionPolicy`. With `declines`, new blocks need not be admitted (`pop_coldest` with a newcomer)."""

    counts_shares = False

    def __init__(self, *, declines: bool = True, clock: Callable[[], float] = time.monotonic) -> None:
        self._declines = declines
        self._clock = clock
        self._model = ReuseModel()
        self._candidates: Candidates[_Block] = Candidates(self._model)
        self._duel = Duel(self._candidates, clock, declines=declines)
        self._ghosts: OrderedDict[int, Run[_Block]] = OrderedDict()
        self._expected: OrderedDict[int, Run[_Block] | None] = OrderedDict()
        self._num_live = 0
        self._capacity = 0
        self._peak = 0
        self._num_placed = 0
        self._num_uses = 0
        self._victim: Run[_Block] | None = None
        self._weighed_for: Run[_Block] | None = None
        self._num_left = 0
        self._declined_at = -math.inf

    # --- uses ------------------------------------------------------------------------------------------------------

    def missed(self, parent: _Block | None, index: Scoped, block_hash: BlockHash) -> None:
        """A match ended at `block_hash`, behind `parent`: a block stored under it next continues that prompt."""
        run: Run[_Block] | None = None if parent is None else parent.run  # type: ignore[assignment]
        self._expected[hash(block_hash) ^ index.scope] = run if run is not None and run.is_tail else None
        if len(self._expected) > _MAX_EXPECTED:
            self._expected.popitem(last=False)

    def begin(self, parent: _Block | None, index: Scoped, block_hash: BlockHash, count: int) -> Run[_Block]:
        """A run for `count` new blocks from `block_hash` on, with the history of the run they continue, if any."""
        key = hash(block_hash) ^ index.scope
        is_reachable = parent is not None or key in self._expected
        ghost = self._ghosts.pop(key, None)
        expected = self._expected.pop(key, None)
        if ghost is not None:
            self._duel.missed(ghost, count)
            run = self._reused(ghost, self._clock())
        else:
            source: Run[_Block] | None = expected
            if parent is not None and parent.run is not None and parent.run.is_tail:
                source = parent.run  # type: ignore[assignment]
            self._duel.missed(source, count)
            run = Run() if source is None else self._heir(source)
        run.num_wanted = count
        run.is_reachable = is_reachable
        return run

    def add_all(self, blocks: Sequence[_Block]) -> None:
        self._place(blocks, is_use=True)

    def readmit(self, blocks: Sequence[_Block]) -> None:
        """Add blocks as if just used, without changing their history."""
        self._place(blocks, is_use=False)

    def _place(self, blocks: Sequence[_Block], *, is_use: bool) -> None:
        now = self._clock()
        made: list[tuple[Run[_Block], int]] = []
        first, num_blocks = 0, len(blocks)
        self._num_live += num_blocks
        self._note_capacity(num_blocks)
        while first < num_blocks:
            old = blocks[first].run
            end = first + 1
            if not first and list(map(_RUN, blocks)).count(old) == num_blocks:
                end = num_blocks
            while end < num_blocks and blocks[end].run is old:
                end += 1
            self._place_stretch(old, blocks[first:end], made, now, is_use)  # type: ignore[arg-type]
            first = end
        for run, _ in reversed(made):
            self._num_uses += 1
            run.order = self._num_uses
            self._candidates.add(run)
        self._duel.use(made, self._capacity)

    def remove(self, block: _Block) -> None:
        self._remove(block.run, 1)  # type: ignore[arg-type]

    def remove_all(self, blocks: Sequence[_Block]) -> None:
        runs = list(map(_RUN, blocks))
        if runs and runs.count(runs[0]) == len(runs):  # most prompts: faster than counting by run
            self._remove(runs[0], len(runs))
            return
        for run, count in Counter(runs).items():
            self._remove(run, count)

    def _remove(self, run: Run[_Block] | None, count: int) -> None:
        assert run is not None
        self._num_live -= count
        run.num_live -= count
        if not run.num_live:
            self._unlist(run)

    def _note_capacity(self, num_placed: int) -> None:
        """Track the largest recent number of blocks: a pool may shrink, and a share may lose room to others."""
        self._peak = max(self._peak, self._num_live)
        self._num_placed += num_placed
        if self._num_placed > _CAPACITY_WINDOW * self._capacity:
            self._capacity, self._peak, self._num_placed = self._peak, self._num_live, 0
        self._capacity = max(self._capacity, self._num_live)

    def _place_stretch(
        self,
        old: Run[_Block] | None,
        blocks: Sequence[_Block],
        made: list[tuple[Run[_Block], int]],
        now: float,
        is_use: bool,
    ) -> None:
        """Place one stretch of blocks that were last used together, or a part of them."""
        used_at = now
        of_lru = len(blocks)
        if old is None:
            run: Run[_Block] = Run()
            run.is_tail = True
        elif old.used_at is None:
            run = old
            of_lru = max(of_lru, old.num_wanted)  # LRU declines nothing
            run.is_tail = True
        else:
            if is_use and now - old.used_at >= ONE_USE_S:
                self._duel.hit(old, len(blocks))
                run = self._reused(old, now)
            else:
                self._duel.moved(old, len(blocks))
                run = Run(old.gap_class, old.log2_gap, old.num_uses)
                used_at = old.used_at if is_use else now
            run.is_tail = old.is_tail and not old.num_live
            if len(old.blocks) > 2 * old.num_live:
                old.blocks = [block for block in old.blocks if block.run is old and _is_listed(block)]
        before = made[-1][0] if made else None
        if before is not None and before.gap_class == run.gap_class and before.num_uses == run.num_uses:
            before.is_tail = run.is_tail
            run = before
            made[-1] = (run, made[-1][1] + of_lru)
        else:
            if before is not None:
                before.is_tail = False
            run.used_at = used_at
            made.append((run, of_lru))
        if run is not old:
            for block in blocks:
                block.run = run  # type: ignore[assignment]
        run.blocks.extend(blocks)
        run.num_live += len(blocks)
        run.size += len(blocks)

    def _reused(self, old: Run[_Block], now: float) -> Run[_Block]:
        """A run with the history of `old` and one more gap, which ends now."""
        assert old.used_at is not None
        self._model.reused(old.gap_class, now - old.used_at)
        return _after(old, now)

    def _heir(self, source: Run[_Block]) -> Run[_Block]:
        """A run with the history of `source`; if `source` is in use, with the history it will have afterwards."""
        if source.num_live or source.used_at is None:
            return Run(source.gap_class, source.log2_gap, source.num_uses)
        return _after(source, self._clock())

    # --- evictions -------------------------------------------------------------------------------------------------

    def pop_coldest(self, requester: Share | None = None, newcomer: Run[_Block] | None = None) -> _Block | None:
        """The next victim; None if there is none, or if a block of `newcomer` is worth less than it."""
        popped = self.pop_several(1, requester, newcomer)
        return popped[0] if popped else None

    def pop_several(
        self, count: int, requester: Share | None = None, newcomer: Run[_Block] | None = None
    ) -> list[_Block]:
        run = self._victim
        is_weighed = newcomer is None or newcomer is self._weighed_for
        if run is None or not self._num_left or run not in self._candidates or not is_weighed:
            found = self._choose(newcomer)
            if found is None:
                return []
            is_by_age = self._duel.rule is not Rule.WORTH
            run, self._num_left = found, found.num_live if is_by_age else pops_of_one(self._capacity)
            self._victim, self._weighed_for = run, newcomer
        popped = self._pop(run, min(count, self._num_left))
        self._num_left -= len(popped)
        return popped

    def pop_oldest(self) -> _Block | None:
        """The victim that LRU would choose, run by run."""
        return self._pop(self._candidates.oldest(Rule.LRU, self._clock()), 1)[0] if len(self._candidates) else None

    def put_back(self, blocks: Sequence[_Block]) -> None:
        for block in reversed(blocks):
            run = block.run
            assert run is not None
            if run not in self._candidates:
                self._ghosts.pop(hash(block.hash) ^ block.index.scope, None)
                self._candidates.add(run, is_newest=False)  # type: ignore[arg-type]
            run.blocks.append(block)
            run.num_live += 1
            run.size += 1
            self._num_live += 1

    def may_evict(self, block: _Block, requester: Share | None, victims: Sequence[_Block]) -> bool:
        return True

    def coldest(self, count: int) -> list[_Block]:
        """Approximately the blocks evicted next, run by run in the order of their worths now."""
        found: list[_Block] = []
        now = self._clock()
        runs = sorted(self._candidates.runs, key=lambda run: (self._worth(run, now), run.order))
        for run in runs:
            for block in reversed(run.blocks):
                if len(found) >= count:
                    return found
                if block.run is run and _is_listed(block):
                    found.append(block)
        return found

    def __len__(self) -> int:
        return self._num_live

    def _choose(self, newcomer: Run[_Block] | None) -> Run[_Block] | None:
        if not len(self._candidates):
            return None
        now = self._clock()
        if self._duel.rule is not Rule.WORTH:
            return self._candidates.oldest(self._duel.rule, now)
        worth, _, _, found = self._candidates.compare(now)
        if newcomer is not None and self._declines and self._is_declined(newcomer, worth, now):
            newcomer.is_declined = True
            return None
        return found

    def _is_declined(self, newcomer: Run[_Block], worth: float, now: float) -> bool:
        if not newcomer.is_reachable and now - self._declined_at < _REST_S:
            return True
        if self._model.worth(newcomer.gap_class, 0.0) >= worth:
            return False
        self._declined_at = now
        return True

    def _worth(self, run: Run[_Block], now: float) -> float:
        assert run.used_at is not None
        return self._model.worth(run.gap_class, now - run.used_at)

    def _pop(self, run: Run[_Block], count: int) -> list[_Block]:
        """Take at most `count` blocks from the end of a run that has some."""
        blocks = run.blocks
        num_wanted = min(count, run.num_live)
        if len(blocks) == run.num_live:
            first = len(blocks) - num_wanted
            popped = blocks[first:]
            popped.reverse()
            del blocks[first:]
        else:
            popped = []
            while len(popped) < num_wanted:
                block = blocks.pop()
                if block.run is run and not block.num_refs and not block.kept:
                    popped.append(block)
        self._num_live -= num_wanted
        run.num_live -= num_wanted
        run.size -= num_wanted
        if not run.num_live:
            self._unlist(run)
            if not run.size:
                self._keep_ghost(run, hash(popped[-1].hash) ^ popped[-1].index.scope)
        return popped

    def _keep_ghost(self, run: Run[_Block], key: int) -> None:
        ghosts = self._ghosts
        ghosts[key] = run
        most = max(_MIN_GHOSTS, min(_GHOSTS_PER_RUN * len(self._candidates), self._capacity // 2))
        while len(ghosts) > most:
            _, forgotten = ghosts.popitem(last=False)
            assert forgotten.used_at is not None
            self._model.given_up(forgotten.gap_class, self._clock() - forgotten.used_at)

    def _unlist(self, run: Run[_Block]) -> None:
        self._candidates.remove(run)
        run.blocks = []  # blocks in use get another run later


def _after(run: Run[_Block], now: float) -> Run[_Block]:
    """An empty run with the history of `run` and the gap since its last use."""
    assert run.used_at is not None
    log2_gap = math.log2(max(now - run.used_at, ONE_USE_S))
    if run.log2_gap is not None:
        log2_gap = (log2_gap + run.log2_gap) / 2
    return Run(class_of(log2_gap), log2_gap, min(MAX_USES, run.num_uses + 1))


def _is_listed(block: RunBlock) -> bool:
    return not block.num_refs and not block.kept
