"""Eviction by expected use, in the pool that it is made for."""

from __future__ import annotations

import random
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.blocks.adaptive_policy import AdaptivePolicy
from kvtier.blocks.ages import Rule
from kvtier.blocks.block import Block, PrefixIndex
from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.policies import LruPolicy
from kvtier.blocks.pool import BlockPool
from kvtier.blocks.retention import Retention
from kvtier.blocks.reuse_model import NEW_CLASS
from kvtier.simulate.replay import replay
from kvtier.simulate.trace import TracedRequest
from tests.support.examples import examples


def names(prompt: Sequence[int]) -> list[BlockHash]:
    return [BlockHash(number.to_bytes(8, "little")) for number in prompt]


class Cache:
    """One pool, a clock that is set by hand, and prompts of numbered blocks."""

    def __init__(self, num_blocks: int, *, declines: bool = True) -> None:
        self.now_s = 0.0
        self.policy: AdaptivePolicy[Block] = AdaptivePolicy(declines=declines, clock=lambda: self.now_s)
        self.pool = BlockPool(num_blocks, self.policy, clock=lambda: self.now_s)
        self.index = PrefixIndex(1)

    def ask(self, prompt: Sequence[int], at_s: float) -> int:
        """Use a prompt; how many of its blocks were cached."""
        self.now_s = at_s
        hashes = names(prompt)
        matched = self.pool.match(self.index, hashes).blocks
        granted = self.pool.reserve(self.index, hashes).blocks
        self.pool.commit(granted)
        self.pool.free(matched + granted)
        return len(matched)

    def cached(self, prompt: Sequence[int]) -> list[int]:
        return [number for number, name in zip(prompt, names(prompt), strict=True) if name in self.index.blocks]

    def blocks(self, prompt: Sequence[int]) -> list[Block]:
        return [self.index.blocks[name] for name in names(prompt)]

    def retain(self, prompt: Sequence[int], ttl_s: float) -> None:
        count = self.pool.retain(self.index, names(prompt), Retention(ttl_s), self.pool.num_units)
        assert count == len(prompt)


def request(at_s: float, hashes: Sequence[int]) -> TracedRequest:
    return TracedRequest(at_s, 512 * len(hashes), 1, tuple(hashes))


def rates(requests: Sequence[TracedRequest], num_blocks: int) -> tuple[float, float]:
    """The adaptive policy's share of hits, and LRU's."""
    ours = replay(requests, num_blocks, lambda clock: AdaptivePolicy(clock=clock))
    return ours.hit_rate, replay(requests, num_blocks, lambda clock: LruPolicy()).hit_rate


def test_before_anything_is_learned_the_oldest_goes_and_a_prompt_loses_its_end_first() -> None:
    cache = Cache(6)
    cache.ask([1, 2, 3], 0)
    cache.ask([11, 12, 13], 1)
    cache.ask([21, 22], 2)

    assert cache.cached([1, 2, 3]) == [1]
    assert cache.cached([11, 12, 13, 21, 22]) == [11, 12, 13, 21, 22]


def test_many_evictions_at_once_take_every_prompt_of_equal_worth_by_its_age() -> None:
    cache = Cache(400)
    for number in range(40):
        cache.ask(range(10 * number, 10 * number + 10), 60.0 * number)
    cache.policy._duel.rule = Rule.WORTH

    victims: list[Block] = []
    while popped := cache.policy.pop_several(400 - len(victims)):
        victims += popped

    order = [int.from_bytes(block.hash, "little") for block in victims]
    assert order == [10 * number + place for number in range(40) for place in reversed(range(10))]


def test_by_age_per_use_a_prompt_that_came_back_outlives_younger_ones_that_did_not() -> None:
    cache = Cache(30)
    cache.policy._duel.rule = Rule.AGE_PER_USE
    cache.ask(range(10), 0)
    cache.ask(range(10), 10)
    for number in (1, 2):
        cache.ask(range(100 * number, 100 * number + 10), 10.0 + 10 * number)

    cache.ask(range(300, 310), 35)  # ages are 25 / 3, 15 and 5
    assert [len(cache.cached(range(first, first + 10))) for first in (0, 100, 200, 300)] == [10, 0, 10, 10]
    cache.ask(range(400, 410), 60)  # 50 / 3, 30 and 25
    assert [len(cache.cached(range(first, first + 10))) for first in (0, 200, 300, 400)] == [10, 0, 10, 10]


def test_a_prompt_that_was_evicted_and_comes_back_was_used_twice() -> None:
    cache = Cache(20)
    cache.ask(range(10), 0)
    for number in (1, 2):
        cache.ask(range(100 * number, 100 * number + 10), number)
    assert cache.cached(range(10)) == []

    cache.ask(range(10), 3)

    assert {block.run.num_uses for block in cache.blocks(range(10)) if block.run is not None} == {2}


def test_a_prompt_keeps_its_beginning_when_it_does_not_fit() -> None:
    cache = Cache(4)
    cache.ask(list(range(9)), 0)

    assert cache.cached(range(9)) == [0, 1, 2, 3]


def test_a_prompt_of_parts_with_different_histories_loses_its_end_first() -> None:
    """All parts were last used at the same time."""
    cache = Cache(12)
    cache.ask([1, 2, 3, 4, 5, 6], 0)
    cache.ask([1, 2, 3, 4], 100)
    cache.ask([1, 2], 101)
    cache.ask([1, 2, 3, 4, 5, 6], 200)
    assert len({block.run for block in cache.blocks(range(1, 7))}) == 3

    cache.pool.evict(2)
    assert cache.cached(range(1, 7)) == [1, 2, 3, 4]
    cache.pool.evict(2)
    assert cache.cached(range(1, 7)) == [1, 2]


def test_a_shared_beginning_outlives_what_was_behind_it() -> None:
    cache = Cache(8)
    for number in range(12):
        cache.ask([1, 2, 100 + 2 * number, 101 + 2 * number], number)

    assert cache.cached([1, 2]) == [1, 2]
    assert cache.ask([1, 2, 999], 20) == 2


def test_prompts_in_a_loop_that_does_not_fit_hit_where_lru_never_does() -> None:
    requests = [request(turn * 5.0, range(turn % 10 * 10, turn % 10 * 10 + 10)) for turn in range(600)]

    ours, lru = rates(requests, 60)

    assert lru == 0
    assert ours > 0.25


def test_lru_is_given_no_more_room_than_there_is_after_a_pool_shrank() -> None:
    cache = Cache(100)
    cache.ask(range(1000, 1100), 0)
    cache.pool.drop(cache.index, names(range(1000, 1100)))
    assert cache.pool.shrink(50)

    hits = [cache.ask(range(turn % 7 * 10, turn % 7 * 10 + 10), 10 + turn * 5.0) for turn in range(1000)]

    assert sum(hits[500:]) > 0.25 * 5000


def test_a_scan_does_not_push_out_prompts_that_come_back() -> None:
    requests = []
    for turn in range(500):
        requests.append(request(turn * 10.0, range(turn % 4 * 10, turn % 4 * 10 + 10)))
        requests.append(request(turn * 10.0 + 1, range(10_000 + turn * 20, 10_020 + turn * 20)))

    ours, lru = rates(requests, 60)

    assert lru < 0.01
    assert ours > 0.25


def test_new_blocks_that_are_worth_less_are_declined_but_for_the_first() -> None:
    cache = Cache(20)
    for turn in range(200):
        cache.ask(range(20), turn * 1.0)
        if turn > 100:
            cache.ask(range(1000 + 30 * turn, 1030 + 30 * turn), turn + 0.5)

    assert len(cache.cached(range(20))) >= 18
    assert cache.cached(range(1000 + 30 * 199, 1030 + 30 * 199))[:1] == [1000 + 30 * 199]


def test_a_store_that_must_not_be_declined_gets_room() -> None:
    cache = busy_cache()
    new = names(range(1000, 1015))

    assert len(cache.pool.reserve(cache.index, new).blocks) < 15
    assert len(cache.pool.reserve(cache.index, names(range(2000, 2015)), may_decline=False).blocks) == 15


def test_nothing_is_declined_where_that_is_not_asked_for() -> None:
    cache = busy_cache(declines=False)
    cache.ask(range(1000, 1015), 200.5)

    assert len(cache.cached(range(1000, 1015))) == 15


def test_the_same_calls_evict_the_same_blocks() -> None:
    def run() -> list[int]:
        cache, chance = Cache(50), random.Random(7)
        for turn in range(400):
            first = chance.randrange(20) * 100
            cache.ask(range(first, first + chance.randint(1, 20)), turn * 1.0)
        return cache.cached(range(2000))

    assert run() == run()


def test_the_policys_memory_is_bounded_whatever_comes() -> None:
    cache = Cache(64)
    for turn in range(3_000):
        cache.ask([1, 2, 3, 4, 10_000 + turn], turn * 0.1)

    policy = cache.policy
    assert len(policy._ghosts) <= 64
    assert len(policy._expected) <= 1024
    assert len(policy._candidates.runs) <= 64
    assert sum(len(run.blocks) for run in policy._candidates.runs) <= 4 * 64


# --- blocks that are kept from eviction by others -------------------------------------------------------------------


def test_a_retained_end_of_a_prompt_stays_while_its_beginning_goes() -> None:
    cache = Cache(8)
    cache.ask(range(6), 0)
    cache.retain([4, 5], 3600)

    for turn in range(20):
        cache.ask([100 + turn], 10 + turn)

    assert cache.cached(range(6)) == [4, 5]
    assert len(cache.policy) == 6


def test_prompts_that_were_stored_together_do_not_answer_for_each_others_retention() -> None:
    cache = Cache(8)
    cache.ask([1, 2, 3, 11, 12, 13], 0)  # two prompts in one batch
    cache.retain([11, 12], 60)

    cache.pool.evict(8)

    assert cache.cached([1, 2, 3, 11, 12, 13]) == [11, 12]
    cache.now_s = 61
    assert cache.pool.retained_units() == 0
    cache.pool.evict(8)
    assert cache.cached([11, 12]) == []
    assert cache.pool.free_units == 8


def test_the_end_of_a_retention_is_no_use_and_leaves_a_prompt_whole() -> None:
    cache = Cache(8)
    cache.ask(range(6), 0)
    cache.retain(range(6), 60)

    cache.now_s = 61
    assert cache.pool.retained_units() == 0

    assert {block.run for block in cache.blocks(range(6))} == {cache.blocks([0])[0].run}
    assert all(block.run is not None and block.run.gap_class == NEW_CLASS for block in cache.blocks(range(6)))
    cache.pool.evict(2)
    assert cache.cached(range(6)) == [0, 1, 2, 3]


def test_a_prompt_that_is_no_longer_pinned_loses_its_end_first() -> None:
    cache = Cache(8)
    cache.ask(range(6), 0)
    cache.pool.pin(cache.index, names(range(6)), 8)
    cache.pool.unpin(cache.index, names(range(6)))

    cache.pool.evict(4)

    assert cache.cached(range(6)) == [0, 1]


# --- what is one use, and what is none ------------------------------------------------------------------------------


def test_a_match_and_what_follows_it_within_a_second_are_one_use() -> None:
    def hits(touches: bool) -> int:
        cache, found = Cache(60), 0
        for turn in range(600):
            prompt = range(turn % 10 * 10, turn % 10 * 10 + 10)
            found += cache.ask(prompt, turn * 5.0)
            for after_s in (0.01, 0.3, 0.9) if touches else ():
                cache.now_s = turn * 5.0 + after_s
                cache.pool.touch([cache.index.blocks[name] for name in names(prompt) if name in cache.index.blocks])
        return found

    assert hits(touches=True) > 0.95 * hits(touches=False) > 1000


def test_uses_at_almost_the_same_time_count_once() -> None:
    cache = Cache(8)
    for turn in range(40):
        cache.ask([1, 2], turn / 64)

    run = cache.blocks([1])[0].run
    assert run is not None
    assert run.log2_gap == -4


def test_blocks_that_are_found_where_others_are_stored_were_not_used() -> None:
    cache = Cache(8)
    cache.ask([1, 2], 0)
    cache.now_s = 100
    granted = cache.pool.reserve(cache.index, names([1, 2, 3])).blocks
    cache.pool.commit(granted)
    cache.pool.free(granted)

    assert all(block.run is not None and block.run.gap_class == NEW_CLASS for block in cache.blocks([1, 2]))


# --- what is declined -----------------------------------------------------------------------------------------------


def busy_cache(*, declines: bool = True) -> Cache:
    """Full of a prompt that is asked for every second, and has seen others that were not asked for again."""
    cache = Cache(20, declines=declines)
    for turn in range(200):
        cache.ask(range(20), turn * 1.0)
        if turn > 100:
            cache.ask(range(1000 + 30 * turn, 1030 + 30 * turn), turn + 0.5)
    cache.ask(range(20), 200.0)
    return cache


def test_a_declined_prompt_is_declined_whole_when_it_is_offered_in_batches() -> None:
    cache = busy_cache()
    prompt = range(90_000, 90_100)
    matched = cache.pool.match(cache.index, names(prompt))
    stored = 0
    for first in range(0, 100, 10):
        cache.now_s += 0.2
        grant = cache.pool.reserve(cache.index, names(prompt[first : first + 10]))
        stored += len(grant.blocks)
        assert grant.num_declined == grant.num_refused == 10 - len(grant.blocks)
        cache.pool.commit(grant.blocks)
        cache.pool.free(grant.blocks)

    assert matched.blocks == []
    assert stored == 1
    assert cache.cached(prompt) == [90_000]


def test_a_prompt_of_larger_blocks_is_weighed_like_any_other() -> None:
    cache = busy_cache()
    wide = PrefixIndex(2)
    for turn in range(20):
        cache.now_s = 200.1 + turn / 100
        hashes = names(range(5000 + 10 * turn, 5010 + 10 * turn))
        cache.pool.match(wide, hashes)
        granted = cache.pool.reserve(wide, hashes).blocks
        cache.pool.commit(granted)
        cache.pool.free(granted)

    assert len(cache.cached(range(20))) >= 16


prompts = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9), st.integers(0, 3)), max_size=60)


@settings(max_examples=40, deadline=None)
@given(prompts, st.integers(1, 24))
def test_policy_and_pool_agree_and_a_leased_block_stays(asked: list[tuple[int, int, int]], num_blocks: int) -> None:
    cache = Cache(num_blocks)
    held: list[list[Block]] = []
    for turn, (family, length, act) in enumerate(asked):
        prompt = [family * 100 + (place if place < 4 else 10 * turn + place) for place in range(length)]
        cache.ask(prompt, turn * 0.7)
        hashes = names(prompt)
        if act == 1:
            held.append(cache.pool.match(cache.index, hashes).blocks)
        elif act == 2 and held:
            cache.pool.free(held.pop())
        elif act == 3:
            cache.pool.drop(cache.index, hashes[-1:])
        leased = {block for blocks in held for block in blocks if block.is_ready}
        assert all(cache.index.blocks.get(block.hash) is block for block in leased)
        evictable = [block for block in cache.index.blocks.values() if not block.num_refs]
        assert len(cache.policy) == len(evictable)
        assert set(cache.policy.coldest(1000)) == set(evictable)
    for blocks in held:
        cache.pool.free(blocks)
    cache.pool.evict(num_blocks)
    assert len(cache.policy) == 0
    assert cache.pool.free_units == num_blocks


def chats(seed: int, num_requests: int) -> list[TracedRequest]:
    """Twelve chats that grow by a few blocks a turn, and begin anew after 40."""
    chance = random.Random(seed)
    chats: list[list[int]] = [[] for _ in range(12)]
    requests, next_block = [], 1000
    for turn in range(num_requests):
        chat = chance.choice(chats)
        grown = chance.randint(1, 4)
        chat.extend(range(next_block, next_block + grown))
        next_block += grown
        requests.append(request(turn * chance.uniform(0.5, 1.0), list(chat)))
        if len(chat) > 40:
            chat.clear()
    return sorted(requests, key=lambda each: each.arrived_s)


@settings(max_examples=examples(15), deadline=None)
@given(st.integers(0, 10**6), st.integers(20, 200))
def test_it_is_never_far_below_lru(seed: int, num_blocks: int) -> None:
    ours, lru = rates(chats(seed, 400), num_blocks)

    assert ours > lru - 0.03


def test_a_run_too_short_to_learn_from_is_no_worse_than_with_lru() -> None:
    losses = [lru - ours for ours, lru in (rates(chats(seed, 200), 180) for seed in range(8))]

    assert sum(losses) / len(losses) < 0.005
