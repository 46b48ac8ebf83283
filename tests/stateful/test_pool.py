"""The block pool against a plain model: any order of calls, several indexes with blocks of different sizes.

Under every policy: what is evicted differs, the laws do not.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from kvtier.blocks.adaptive_policy import AdaptivePolicy
from kvtier.blocks.block import Block, PrefixIndex, Presence
from kvtier.blocks.fair_policy import FairPolicy
from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.policies import EvictionPolicy, LruPolicy
from kvtier.blocks.pool import BlockPool
from tests.support.examples import examples

NUM_UNITS = 12
BLOCK_UNITS = (1, 2, 5)
NAMES = [BlockHash(bytes([number]) * 32) for number in range(5)]

Key = tuple[int, BlockHash]

spaces = st.integers(0, len(BLOCK_UNITS) - 1)
prefixes = st.integers(1, len(NAMES)).map(lambda count: NAMES[:count])
prompts = prefixes | st.lists(st.sampled_from(NAMES), min_size=1, max_size=6)
limits = st.none() | st.integers(0, 4)


@dataclass(eq=False)
class Writing:
    """A reservation and what was granted."""

    space: int
    blocks: list[Block]


class PoolAgainstModel(RuleBasedStateMachine):
    """`ready` and `pending` say what is in the index, `refs` and `pinned` who may not go, `places` where it lies."""

    writings = Bundle("writings")
    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.pool = BlockPool(NUM_UNITS, self.policy())
        self.indexes = [PrefixIndex(units) for units in BLOCK_UNITS]
        self.ready: dict[Key, Block] = {}
        self.pending: dict[Key, Block] = {}
        self.pinned: set[Key] = set()
        self.refs: Counter[Block] = Counter()
        self.places: dict[Block, tuple[int, int]] = {}
        self.num_evicted = 0

    def policy(self) -> EvictionPolicy[Block]:
        return LruPolicy()

    def pinned_units_that_count(self, space: int) -> int:
        return self._pinned_units()

    def adaptive(self) -> EvictionPolicy[Block]:
        return AdaptivePolicy(clock=lambda: self.now)

    # --- calls -----------------------------------------------------------------------------------------------------

    @rule(target=writings, space=spaces, hashes=prompts, limit=limits)
    def reserve(self, space: int, hashes: list[BlockHash], limit: int | None) -> Writing:
        return self._reserve(space, hashes, limit)

    def _reserve(self, space: int, hashes: list[BlockHash], limit: int | None) -> Writing:
        wanted = [name for name in dict.fromkeys(hashes) if (space, name) not in self.ready | self.pending]
        own = {self.ready[space, name] for name in hashes if (space, name) in self.ready}

        grant = self.pool.reserve(self.indexes[space], hashes, limit)

        assert grant.num_ready == sum((space, name) in self.ready for name in hashes)
        assert grant.num_pending == sum((space, name) in self.pending for name in hashes)
        assert len(grant.blocks) + grant.num_refused == len(wanted)
        assert [block.hash for block in grant.blocks] == wanted[: len(grant.blocks)]
        assert grant.positions == [hashes.index(name) for name in wanted[: len(grant.blocks)]]
        self._note_evictions(own)
        for block in grant.blocks:
            assert block.size == BLOCK_UNITS[space]
            self.pending[space, block.hash] = block
            self.refs[block] = 1
            self.places[block] = (block.start, block.size)
        num_lacking = (len(wanted) if limit is None else min(limit, len(wanted))) - len(grant.blocks)
        assert grant.num_declined in (0, num_lacking)
        if num_lacking and not grant.num_declined:
            assert self._longest_run_without(own) < BLOCK_UNITS[space], "refused although there was room to make"
        return Writing(space, grant.blocks)

    @rule(space=spaces, hashes=prompts)
    def store(self, space: int, hashes: list[BlockHash]) -> None:
        writing = self._reserve(space, hashes, None)
        self._commit(writing, writing.blocks)
        self._free(writing.blocks)

    @rule(writing=writings, data=st.data())
    def commit(self, writing: Writing, data: st.DataObject) -> None:
        self._commit(writing, [block for block in writing.blocks if data.draw(st.booleans())])

    def _commit(self, writing: Writing, chosen: list[Block]) -> None:
        expected = [block for block in chosen if self.pending.get((writing.space, block.hash)) is block]

        assert self.pool.commit(chosen) == len(expected)

        for block in expected:
            self.ready[writing.space, block.hash] = self.pending.pop((writing.space, block.hash))

    @rule(writing=consumes(writings))
    def finish_or_abandon(self, writing: Writing) -> None:
        self._free(writing.blocks)

    @rule(target=leases, space=spaces, hashes=prompts, limit=limits)
    def match(self, space: int, hashes: list[BlockHash], limit: int | None) -> list[Block]:
        expected = []
        for name in hashes[:limit]:
            if (space, name) not in self.ready:
                break
            expected.append(self.ready[space, name])
        after = hashes[len(expected)] if len(expected) < len(hashes) else None

        match = self.pool.match(self.indexes[space], hashes, limit)

        assert match.blocks == expected
        assert match.ended is (Presence.READY if after is None else self._presence(space, after))
        self.refs.update(expected)
        return match.blocks

    @rule(target=leases, lease=consumes(leases))
    def reference_again(self, lease: list[Block]) -> object:
        self.pool.reference(lease)

        self.refs.update(lease)
        return multiple(lease, list(lease))

    @rule(lease=consumes(leases))
    def free(self, lease: list[Block]) -> None:
        self._free(lease)

    @rule(space=spaces, hashes=prompts)
    def drop(self, space: int, hashes: list[BlockHash]) -> None:
        known = [name for name in dict.fromkeys(hashes) if (space, name) in self.ready | self.pending]

        assert self.pool.drop(self.indexes[space], hashes) == len(known)

        for name in known:
            self.ready.pop((space, name), None)
            self.pending.pop((space, name), None)
            self.pinned.discard((space, name))

    @rule(space=spaces, hashes=prompts, max_units=st.integers(0, 12))
    def pin(self, space: int, hashes: list[BlockHash], max_units: int) -> None:
        expected = 0
        for name in hashes:
            if (space, name) not in self.ready:
                continue
            if (space, name) not in self.pinned:
                if self.pinned_units_that_count(space) + BLOCK_UNITS[space] > max_units:
                    break
                self.pinned.add((space, name))
            expected += 1

        assert self.pool.pin(self.indexes[space], hashes, max_units) == expected

    @rule(space=spaces, hashes=prompts)
    def unpin(self, space: int, hashes: list[BlockHash]) -> None:
        known = {(space, name) for name in hashes} & self.pinned

        assert self.pool.unpin(self.indexes[space], hashes) == len(known)

        self.pinned -= known

    @rule(seconds=st.sampled_from([0.1, 5.0, 100.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(space=spaces, hashes=prompts)
    def touch(self, space: int, hashes: list[BlockHash]) -> None:
        self.pool.touch([self.ready[space, name] for name in hashes if (space, name) in self.ready])

    # --- laws ------------------------------------------------------------------------------------------------------

    @invariant()
    def regions_tile_the_space(self) -> None:
        regions = list(self.pool._space.regions())
        start = 0
        for region in regions:
            assert region.start == start
            assert region.size > 0
            start += region.size
        assert start == NUM_UNITS
        assert not any(left.is_free and right.is_free for left, right in pairwise(regions))
        assert all(left.right is right and right.left is left for left, right in pairwise(regions))

    @invariant()
    def every_taken_region_is_a_block_that_is_cached_or_referenced(self) -> None:
        taken = {region for region in self.pool._space.regions() if not region.is_free}
        held = {block for block, count in self.refs.items() if count}

        assert taken == {*self.ready.values(), *self.pending.values(), *held}

    @invariant()
    def free_and_used_make_the_capacity(self) -> None:
        used = sum(region.size for region in self.pool._space.regions() if not region.is_free)

        assert self.pool.free_units + used == self.pool.num_units == NUM_UNITS

    @invariant()
    def references_are_those_that_were_given(self) -> None:
        for block, count in self.refs.items():
            assert block.num_refs == count >= 0
        assert self.pool.referenced_units == sum(block.size for block, count in self.refs.items() if count)

    @invariant()
    def pinned_units_are_those_of_the_pinned(self) -> None:
        assert self.pool.pinned_units == self._pinned_units()
        assert all(block.is_pinned == (key in self.pinned) for key, block in self.ready.items())

    @invariant()
    def no_block_that_is_in_use_moves(self) -> None:
        for block, count in self.refs.items():
            if count:
                assert (block.start, block.size) == self.places[block]
        for block in self.ready.values():
            assert (block.start, block.size) == self.places[block]

    @invariant()
    def each_index_holds_what_was_put_under_its_hashes(self) -> None:
        for space, index in enumerate(self.indexes):
            expected = {name: block for (number, name), block in (self.ready | self.pending).items() if number == space}
            assert index.blocks == expected
            assert all(index.presence(name) is self._presence(space, name) for name in NAMES)
            assert all(block.hash == name and block.index is index for name, block in index.blocks.items())

    @invariant()
    def the_policy_orders_exactly_what_may_be_evicted(self) -> None:
        assert len(self.pool._policy) == len(self._evictable())

    @invariant()
    def only_a_reservation_evicts(self) -> None:
        assert self.pool.num_evicted == self.num_evicted

    # --- the model -------------------------------------------------------------------------------------------------

    def _presence(self, space: int, name: BlockHash) -> Presence:
        if (space, name) in self.ready:
            return Presence.READY
        return Presence.PENDING if (space, name) in self.pending else Presence.MISS

    def _pinned_units(self) -> int:
        return sum(BLOCK_UNITS[space] for space, _ in self.pinned)

    def _evictable(self) -> set[Block]:
        return {block for key, block in self.ready.items() if key not in self.pinned and not self.refs[block]}

    def _note_evictions(self, own: set[Block]) -> None:
        """Blocks that left the indexes under a reservation: each must have been evictable and no block of its own."""
        gone = {key: block for key, block in self.ready.items() if self.indexes[key[0]].blocks.get(key[1]) is not block}
        assert set(gone.values()) <= self._evictable() - own
        for key in gone:
            del self.ready[key]
        self.num_evicted += len(gone)

    def _longest_run_without(self, own: set[Block]) -> int:
        """The most adjacent units that are free or could be made free without touching `own`."""
        evictable = self._evictable() - own
        longest = run = 0
        for region in self.pool._space.regions():
            run = run + region.size if region.is_free or region in evictable else 0
            longest = max(longest, run)
        return longest

    def _free(self, blocks: list[Block]) -> None:
        self.pool.free(blocks)

        for block in blocks:
            self.refs[block] -= 1
            if not self.refs[block]:
                for key in [key for key, pending in self.pending.items() if pending is block]:
                    del self.pending[key]


TestPoolAgainstModel = PoolAgainstModel.TestCase
TestPoolAgainstModel.settings = settings(max_examples=examples(100), stateful_step_count=60, deadline=None)


class AdaptivePoolAgainstModel(PoolAgainstModel):
    def policy(self) -> EvictionPolicy[Block]:
        return self.adaptive()


class FairPoolAgainstModel(PoolAgainstModel):
    def policy(self) -> EvictionPolicy[Block]:
        return FairPolicy(self.adaptive)

    def pinned_units_that_count(self, space: int) -> int:
        """Each index has a share of its own."""
        return BLOCK_UNITS[space] * sum(number == space for number, _ in self.pinned)


TestAdaptivePoolAgainstModel = AdaptivePoolAgainstModel.TestCase
TestAdaptivePoolAgainstModel.settings = TestPoolAgainstModel.settings
TestFairPoolAgainstModel = FairPoolAgainstModel.TestCase
TestFairPoolAgainstModel.settings = TestPoolAgainstModel.settings
