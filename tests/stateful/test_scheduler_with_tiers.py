"""Scheduler, prompt loading and block managers over tiers that answer, fail and come late in any order.

The simulated device and tiers fail at the first wrong byte: see `tests/support/simulated_traffic`. At the end every
answer is the one that its prompt gets alone, every block and every lease was given back, and nobody waits.
"""

from __future__ import annotations

from random import Random

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtier.engine.schedule.block_manager import BlockManagerName
from kvtier.engine.schedule.request import Request, Status
from kvtier.engine.schedule.shared_blocks import SharedBlocks
from kvtier.transfer.load import Order
from tests.support.engine_building import CACHING_MANAGERS, MANAGERS, SCORED, checksums
from tests.support.examples import examples
from tests.support.simulated_traffic import TIERS, SimulatedSegments
from tests.support.tiered_engine import TieredEngine

MAX_PROMPT = 22

tokens = st.integers(1, 2)
stems = st.sampled_from([[], [1] * 9, [1, 2] * 9, [1] * 6 + [2] * 6, [2] * 14])
prompts = st.builds(lambda stem, tail: (stem + tail)[:MAX_PROMPT], stems, st.lists(tokens, min_size=1, max_size=10))
chunks = st.sampled_from([1, 2, 3, 5, 8, 13, 1000])
block_sizes = st.sampled_from([1, 2, 3, 4, 8])
tiers = st.sampled_from(TIERS)
chances = st.randoms(use_true_random=False)
piece_sizes = st.sampled_from([2, 3, 4, 256])

_PHASES = (Phase.explicit, Phase.generate)
"""Shrinking takes minutes, longer than a test may: add `Phase.shrink` and `--timeout 0` by hand when one fails."""


class SchedulerWithTiersUnderAnyOrder(RuleBasedStateMachine):
    engine: TieredEngine

    @initialize(
        manager=st.sampled_from(MANAGERS),
        block_tokens=block_sizes,
        num_spare_blocks=st.integers(1, 12),
        chunk=chunks,
        num_steps_ahead=st.integers(0, 3),
        max_num_requests=st.integers(1, 5),
        chance=chances,
        order=st.sampled_from([None, Order.FRONT, Order.BACK]),
        is_quick=st.booleans(),
        piece_blocks=piece_sizes,
        segment_blocks=st.sampled_from([None, 1, 2, 3]),
    )
    def start(
        self,
        manager: BlockManagerName,
        block_tokens: int,
        num_spare_blocks: int,
        chunk: int,
        num_steps_ahead: int,
        max_num_requests: int,
        chance: Random,
        order: Order | None,
        is_quick: bool,
        piece_blocks: int,
        segment_blocks: int | None,
    ) -> None:
        self.engine = TieredEngine(
            manager,
            chance=chance,
            num_blocks=-(-(MAX_PROMPT + 1) // block_tokens) + num_spare_blocks,
            block_tokens=block_tokens,
            chunk=chunk,
            num_steps_ahead=num_steps_ahead,
            max_num_requests=max_num_requests,
            piece_blocks=piece_blocks,
        )
        self.engine.traffic.is_forced = order
        self.engine.traffic.is_quick = is_quick
        if segment_blocks is not None:
            self.engine.traffic.segmented = SimulatedSegments(segment_blocks, chance)
        self.has_cache = manager in CACHING_MANAGERS

    # --- requests ----------------------------------------

    @rule(prompt=prompts, max_tokens=st.integers(1, 14))
    def submit(self, prompt: list[int], max_tokens: int) -> None:
        self.engine.submit(prompt, max_tokens)

    @rule(prompt=prompts, max_tokens=st.integers(1, 14))
    def submit_one_that_is_scored(self, prompt: list[int], max_tokens: int) -> None:
        self.engine.submit(prompt, max_tokens, params=SCORED)

    @rule(prompt=prompts, max_tokens=st.integers(1, 8), count=st.integers(2, 4))
    def submit_the_same_several_times(self, prompt: list[int], max_tokens: int, count: int) -> None:
        for _ in range(count):
            self.engine.submit(prompt, max_tokens)

    @rule(data=st.data())
    @precondition(lambda self: self.engine.requests)
    def submit_what_another_has_by_now(self, data: st.DataObject) -> None:
        known = data.draw(st.sampled_from(self.engine.requests)).tokens
        self.engine.submit(known[:MAX_PROMPT], data.draw(st.integers(1, 6)))

    @rule(prompt=prompts, max_tokens=st.integers(1, 6), tier=tiers, data=st.data())
    def submit_what_a_tier_has(self, prompt: list[int], max_tokens: int, tier: str, data: st.DataObject) -> None:
        num_blocks = len(prompt) // self.engine.block_manager.block_tokens
        first = data.draw(st.sampled_from([0, 0, 1]))
        self.engine.traffic.remember(prompt, tier, first, data.draw(st.integers(0, num_blocks)))
        self.engine.submit(prompt, max_tokens)

    @rule(data=st.data())
    @precondition(lambda self: self.engine.scheduler.has_requests)
    def abort(self, data: st.DataObject) -> None:
        unfinished = [request for request in self.engine.requests if request.status is not Status.FINISHED]

        self.engine.abort(data.draw(st.sampled_from(unfinished)))

    # --- tiers ----------------------------------------

    @rule(prompt=prompts, tier=tiers, num_blocks=st.integers(1, 8))
    def a_tier_has(self, prompt: list[int], tier: str, num_blocks: int) -> None:
        self.engine.traffic.remember(prompt, tier, 0, num_blocks)

    @rule(tier=tiers, count=st.integers(1, 4))
    def a_tier_loses(self, tier: str, count: int) -> None:
        self.engine.traffic.forget(tier, count)

    @rule()
    def a_tier_comes_back_empty(self) -> None:
        self.engine.traffic.forget("server", 1000)
        self.engine.traffic.generation += 1

    @rule(is_failing=st.booleans())
    def the_tiers_fail_or_recover(self, is_failing: bool) -> None:
        self.engine.traffic.is_failing = is_failing

    @rule(count=st.integers(1, 6))
    def the_tiers_go_on(self, count: int) -> None:
        for _ in range(count):
            self.engine.traffic.deliver()

    @rule()
    def the_tiers_finish(self) -> None:
        self.engine.traffic.deliver_all()

    @rule()
    def time_passes(self) -> None:
        self.engine.now += 0.1

    # --- steps ----------------------------------------

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.engine.step()

    @rule(num_turns=st.integers(1, 10), num_events=st.integers(1, 4))
    def step_while_the_tiers_go_on(self, num_turns: int, num_events: int) -> None:
        for _ in range(num_turns):
            for _ in range(num_events):
                self.engine.traffic.deliver()
            self.engine.step()

    @rule()
    def run_until_idle(self) -> None:
        self.engine.run()

    # --- laws ----------------------------------------

    @invariant()
    def blocks_add_up(self) -> None:
        self.engine.check_blocks()

    @invariant()
    def no_block_serves_two_requests_unless_it_is_full_and_the_same_for_both(self) -> None:
        owners: dict[int, tuple[int, int]] = {}
        block_tokens = self.engine.block_manager.block_tokens
        for request in self.engine.scheduler.running:
            sums = checksums(request.tokens)
            for position, block_id in enumerate(request.blocks.ids):
                end = (position + 1) * block_tokens
                meaning = (position, sums[end - 1]) if end <= len(sums) else (position, -1 - hash(request))
                assert self.has_cache or block_id not in owners
                assert owners.setdefault(block_id, meaning) == meaning

    @invariant()
    def references_are_those_of_the_running_and_of_stores(self) -> None:
        if not self.has_cache:
            return
        manager = self.engine.block_manager
        assert isinstance(manager, SharedBlocks)
        for request in self.engine.scheduler.running:
            assert [block.start for block in request.blocks.blocks] == request.blocks.ids
            for block in request.blocks.blocks:
                num_having = sum(block in one.blocks.blocks for one in self.engine.scheduler.running)
                assert block.num_refs >= num_having
                if block.start not in self.engine.held_ids():
                    assert block.num_refs == num_having

    @invariant()
    def requests_are_in_one_place(self) -> None:
        scheduler = self.engine.scheduler
        for status, place in ((Status.WAITING, scheduler.waiting), (Status.RUNNING, scheduler.running)):
            assert set(place) == {request for request in self.engine.requests if request.status is status}
        slots = [request.slot for request in scheduler.running]
        assert sorted(slots + scheduler._free_slots) == list(range(scheduler.max_num_requests))

    @invariant()
    def only_the_running_load_and_the_finished_hold_nothing(self) -> None:
        for request in self.engine.requests:
            if request.status is not Status.RUNNING:
                assert request.prefetch.load is None
            if request.prefetch.load is None:
                assert not request.prefetch.next_loads
            if request.status is Status.FINISHED:
                assert request.prefetch.match is None
                assert not request.prefetch.is_announced

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.engine.run()


TestSchedulerWithTiersUnderAnyOrder = SchedulerWithTiersUnderAnyOrder.TestCase
TestSchedulerWithTiersUnderAnyOrder.settings = settings(
    max_examples=examples(60),
    stateful_step_count=30,
    deadline=None,
    phases=_PHASES,
    suppress_health_check=[HealthCheck.too_slow],
)


# --- whole runs ----------------------------------------

any_run = settings(
    max_examples=examples(60), deadline=None, phases=_PHASES, suppress_health_check=[HealthCheck.too_slow]
)


def _engine(
    manager: BlockManagerName, chance: Random, num_blocks: int, block_tokens: int, chunk: int, num_steps_ahead: int
) -> TieredEngine:
    engine = TieredEngine(
        manager,
        chance=chance,
        num_blocks=num_blocks,
        block_tokens=block_tokens,
        chunk=chunk,
        num_steps_ahead=num_steps_ahead,
        max_num_requests=4,
        piece_blocks=chance.choice([2, 3, 256]),
    )
    engine.traffic.is_quick = chance.random() < 0.5
    return engine


@given(
    manager=st.sampled_from(MANAGERS),
    several=st.lists(st.tuples(prompts, st.integers(1, 6), tiers, st.integers(0, 12)), min_size=1, max_size=8),
    num_spare_blocks=st.integers(1, 6),
    block_tokens=block_sizes,
    chunk=chunks,
    num_steps_ahead=st.integers(0, 3),
    order=st.sampled_from([None, Order.FRONT, Order.BACK]),
    pace=st.integers(0, 4),
    chance=chances,
)
@any_run
def test_requests_end_with_their_answers_in_a_small_pool(
    manager: BlockManagerName,
    several: list[tuple[list[int], int, str, int]],
    num_spare_blocks: int,
    block_tokens: int,
    chunk: int,
    num_steps_ahead: int,
    order: Order | None,
    pace: int,
    chance: Random,
) -> None:
    num_blocks = -(-(MAX_PROMPT + 1) // block_tokens) + num_spare_blocks
    engine = _engine(manager, chance, num_blocks, block_tokens, chunk, num_steps_ahead)
    engine.traffic.is_forced = order
    for prompt, max_tokens, tier, num_known in several:
        engine.traffic.remember(prompt, tier, 0, num_known)
        engine.submit(prompt, max_tokens)

    engine.run_slowly(lambda: chance.randint(0, pace))


@given(
    manager=st.sampled_from(MANAGERS),
    prompt=prompts,
    block_tokens=block_sizes,
    chunk=chunks,
    num_steps_ahead=st.integers(0, 3),
    order=st.sampled_from(list(Order)),
    split=st.integers(0, 12),
    chance=chances,
)
@any_run
def test_what_the_tiers_have_is_loaded_and_the_rest_is_computed_once(
    manager: BlockManagerName,
    prompt: list[int],
    block_tokens: int,
    chunk: int,
    num_steps_ahead: int,
    order: Order,
    split: int,
    chance: Random,
) -> None:
    engine = _engine(manager, chance, 100, block_tokens, chunk, num_steps_ahead)
    engine.traffic.is_forced = order
    engine.traffic.remember(prompt, "host", 0, split)
    engine.traffic.remember(prompt, "server", split)
    request = engine.submit(prompt, 3)

    engine.run_slowly(lambda: chance.randint(0, 3))

    num_loaded = sum(request.prefetch.history.loaded_tokens.values())
    num_decoded = max(0, request.num_outputs - 1)
    assert num_loaded <= min(len(prompt) // block_tokens * block_tokens, len(prompt) - 1)
    assert request.cached_tokens == 0
    assert engine.num_computed(request) >= len(prompt) - num_loaded + num_decoded
    assert engine.num_computed(request) <= len(prompt) - num_loaded + num_decoded + num_steps_ahead


def _loads_of(request: Request) -> int:
    return sum(request.prefetch.history.loaded_tokens.values())


@given(manager=st.sampled_from(MANAGERS), prompt=prompts, block_tokens=block_sizes, num_steps_ahead=st.integers(0, 3))
@any_run
def test_a_prompt_whose_blocks_the_tiers_were_offered_is_loaded_by_an_engine_that_starts_anew(
    manager: BlockManagerName, prompt: list[int], block_tokens: int, num_steps_ahead: int
) -> None:
    first = _engine(manager, Random(1), 100, block_tokens, 1000, num_steps_ahead)
    first.submit(prompt, 5)
    first.run()
    second = _engine(manager, Random(2), 100, block_tokens, 1000, num_steps_ahead)
    second.traffic.is_forced = Order.FRONT
    known = {**first.traffic.memory["host"], **first.traffic.memory["server"]}
    second.traffic.memory["host"] = known
    request = second.submit(prompt, 5)

    second.run()

    assert _loads_of(request) <= len(known) * block_tokens
