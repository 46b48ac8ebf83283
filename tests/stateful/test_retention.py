"""Two owners retain blocks of one pool, in any order with leases, pins, drops and floods, while time passes.

Nobody has more than his budget, what was granted stays until its time is over, and nothing is left behind after that.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvtier.blocks.adaptive_policy import AdaptivePolicy
from kvtier.blocks.block import Block, PrefixIndex, Presence
from kvtier.blocks.fair_policy import FairPolicy
from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.policies import EvictionPolicy, LruPolicy
from kvtier.blocks.pool import BlockPool
from kvtier.blocks.retention import Retention
from kvtier.blocks.share import Share
from tests.support.examples import examples

NUM_UNITS = 24
QUOTA = 12
BUDGET = 6
ACCOUNT_UNITS = 4
TTL_S = 100.0

owners = st.sampled_from(["alice", "bob"])
ACCOUNTS = ("one", "two")
accounts = st.sampled_from(ACCOUNTS)
prompts = st.tuples(st.integers(0, 3), st.integers(1, 6)).map(
    lambda one: [BlockHash(f"{one[0]}.{number}".encode().ljust(32)) for number in range(one[1])]
)


class Retentions(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.pool = BlockPool(NUM_UNITS, FairPolicy(self.order), clock=lambda: self.now)
        self.indexes = {name: PrefixIndex(1, Share(name, QUOTA)) for name in ("alice", "bob")}
        self.leases: list[list[Block]] = []
        self.granted: dict[tuple[str, BlockHash, str], tuple[float, int]] = {}
        """The retentions granted to an account: until when, with which priority."""

    def order(self) -> EvictionPolicy[Block]:
        return LruPolicy()

    @rule(owner=owners, hashes=prompts)
    def store(self, owner: str, hashes: list[BlockHash]) -> None:
        grant = self.pool.reserve(self.indexes[owner], hashes)
        self.pool.commit(grant.blocks)
        self.pool.free(grant.blocks)

    @rule(owner=owners, hashes=prompts, account=accounts, priority=st.integers(1, 3))
    def retain(self, owner: str, hashes: list[BlockHash], account: str, priority: int) -> None:
        index = self.indexes[owner]
        asked = Retention(TTL_S, priority, account, ACCOUNT_UNITS)
        count = self.pool.retain(index, hashes, asked, BUDGET)
        assert 0 <= count <= min(len(hashes), BUDGET)
        for key, (_, other) in list(self.granted.items()):
            if (key[0], key[2]) == (owner, account) and other < priority:  # it may have made place
                del self.granted[key]
        for block_hash in hashes[:count]:
            if index.presence(block_hash) is Presence.READY:
                known = self.granted.get((owner, block_hash, account), (0.0, 0))
                self.granted[owner, block_hash, account] = (self.now + TTL_S, max(known[1], priority))

    @rule(owner=owners, hashes=prompts)
    def drop(self, owner: str, hashes: list[BlockHash]) -> None:
        self.pool.drop(self.indexes[owner], hashes)
        for block_hash in hashes:
            for account in ACCOUNTS:
                self.granted.pop((owner, block_hash, account), None)

    @rule(owner=owners, hashes=prompts, account=accounts)
    def end(self, owner: str, hashes: list[BlockHash], account: str) -> None:
        self.pool.end_retention(self.indexes[owner], hashes, account)
        for block_hash in hashes:
            self.granted.pop((owner, block_hash, account), None)

    @rule(owner=owners, hashes=prompts)
    @precondition(lambda self: len(self.leases) < 2)
    def lease(self, owner: str, hashes: list[BlockHash]) -> None:
        blocks = self.pool.match(self.indexes[owner], hashes).blocks
        if blocks:
            self.leases.append(blocks)

    @rule()
    @precondition(lambda self: self.leases)
    def release(self) -> None:
        self.pool.free(self.leases.pop())

    @rule(owner=owners, hashes=prompts, keep=st.booleans())
    def pin(self, owner: str, hashes: list[BlockHash], keep: bool) -> None:
        index = self.indexes[owner]
        if keep:
            self.pool.pin(index, hashes, 3)
        else:
            self.pool.unpin(index, hashes)

    @rule(owner=owners)
    def flood(self, owner: str) -> None:
        self.pool.evict(NUM_UNITS, self.indexes[owner].share)

    @rule(seconds=st.sampled_from([1.0, 40.0, TTL_S]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def nobody_has_more_than_his_budget(self) -> None:
        for index in self.indexes.values():
            assert self.pool.retained_units(index.share) <= BUDGET

    @invariant()
    def what_was_granted_is_there(self) -> None:
        for (owner, block_hash, _), (until, _) in self.granted.items():
            if self.now < until:
                assert self.indexes[owner].presence(block_hash) is Presence.READY

    @invariant()
    def leased_blocks_stay(self) -> None:
        assert all(block.num_refs for blocks in self.leases for block in blocks)

    def teardown(self) -> None:
        while self.leases:
            self.pool.free(self.leases.pop())
        self.now += 10_000.0
        assert self.pool.retained_units() == 0
        for index in self.indexes.values():
            self.pool.drop(index, list(index.blocks))
        assert self.pool.free_units == NUM_UNITS


TestRetentions = Retentions.TestCase
TestRetentions.settings = settings(max_examples=examples(100), stateful_step_count=40, deadline=None)


class AdaptiveRetentions(Retentions):
    def order(self) -> EvictionPolicy[Block]:
        return AdaptivePolicy(clock=lambda: self.now)

    @invariant()
    def what_may_be_evicted_is_counted(self) -> None:
        self.pool.retained_units()  # ends what is over
        blocks = [block for index in self.indexes.values() for block in index.blocks.values()]
        assert len(self.pool._policy) == sum(not block.num_refs and not block.is_pinned for block in blocks)


TestAdaptiveRetentions = AdaptiveRetentions.TestCase
TestAdaptiveRetentions.settings = TestRetentions.settings
