"""Scheduler and block managers under any order of submissions, aborts and steps, in pools that are mostly too small.

The simulated device fails a step that reads foreign KV or writes where another request reads; after every call the
blocks add up; at the end every answer is the one that its prompt gets alone.
"""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtier.engine.schedule.block_manager import BlockManagerName
from kvtier.engine.schedule.request import Request, Status
from kvtier.engine.schedule.shared_blocks import SharedBlocks
from tests.support.engine_building import CACHING_MANAGERS, MANAGERS, SCORED, SimulatedEngine, checksums
from tests.support.examples import examples

MAX_PROMPT = 22

tokens = st.integers(1, 2)
stems = st.sampled_from([[], [1] * 9, [1, 2] * 9, [1] * 6 + [2] * 6, [2] * 14])
prompts = st.builds(lambda stem, tail: (stem + tail)[:MAX_PROMPT], stems, st.lists(tokens, min_size=1, max_size=10))
chunks = st.sampled_from([1, 2, 3, 5, 8, 13, 1000])
block_sizes = st.sampled_from([1, 2, 3, 4, 8])
salts = st.sampled_from(["", "one", "other"])


class SchedulerUnderAnyOrder(RuleBasedStateMachine):
    engine: SimulatedEngine

    @initialize(
        manager=st.sampled_from(MANAGERS),
        block_tokens=block_sizes,
        num_spare_blocks=st.integers(1, 12),
        chunk=chunks,
        num_steps_ahead=st.integers(0, 3),
        max_num_requests=st.integers(1, 5),
    )
    def start(
        self,
        manager: BlockManagerName,
        block_tokens: int,
        num_spare_blocks: int,
        chunk: int,
        num_steps_ahead: int,
        max_num_requests: int,
    ) -> None:
        self.engine = SimulatedEngine(
            manager,
            num_blocks=-(-(MAX_PROMPT + 1) // block_tokens) + num_spare_blocks,
            block_tokens=block_tokens,
            chunk=chunk,
            num_steps_ahead=num_steps_ahead,
            max_num_requests=max_num_requests,
        )
        self.has_cache = manager in CACHING_MANAGERS

    @rule(prompt=prompts, max_tokens=st.integers(1, 14))
    def submit(self, prompt: list[int], max_tokens: int) -> None:
        self.engine.submit(prompt, max_tokens)

    @rule(prompt=prompts, max_tokens=st.integers(1, 14), salt=salts)
    def submit_with_a_salt(self, prompt: list[int], max_tokens: int, salt: str) -> None:
        self.engine.submit(prompt, max_tokens).salt = salt

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

    @rule(data=st.data())
    @precondition(lambda self: self.engine.scheduler.has_requests)
    def abort(self, data: st.DataObject) -> None:
        unfinished = [request for request in self.engine.requests if request.status is not Status.FINISHED]

        self.engine.abort(data.draw(st.sampled_from(unfinished)))

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.engine.step()

    @rule()
    def run_until_idle(self) -> None:
        self.engine.run()

    # --- laws ------------------------------------------------------------------------------------------------------

    @invariant()
    def blocks_add_up(self) -> None:
        self.engine.check_blocks()

    @invariant()
    def no_block_serves_two_requests_unless_it_is_full_and_the_same_for_both(self) -> None:
        owners: dict[int, tuple[int, int, str]] = {}
        block_tokens = self.engine.block_manager.block_tokens
        for request in self.engine.scheduler.running:
            sums = checksums(request.tokens)
            for position, block_id in enumerate(request.blocks.ids):
                end = (position + 1) * block_tokens
                meaning = (position, sums[end - 1] if end <= len(sums) else -1 - hash(request), request.salt)
                assert owners.setdefault(block_id, meaning) == meaning
                assert self.has_cache or list(owners).count(block_id) == 1

    @invariant()
    def references_are_those_of_the_running(self) -> None:
        if not self.has_cache:
            return
        manager = self.engine.block_manager
        assert isinstance(manager, SharedBlocks)
        for request in self.engine.scheduler.running:
            assert [block.start for block in request.blocks.blocks] == request.blocks.ids
            for block in request.blocks.blocks:
                assert block.num_refs == sum(block in one.blocks.blocks for one in self.engine.scheduler.running)

    @invariant()
    def requests_are_in_one_place(self) -> None:
        scheduler = self.engine.scheduler
        for status, place in ((Status.WAITING, scheduler.waiting), (Status.RUNNING, scheduler.running)):
            assert set(place) == {request for request in self.engine.requests if request.status is status}
        slots = [request.slot for request in scheduler.running]
        assert sorted(slots + scheduler._free_slots) == list(range(scheduler.max_num_requests))

    @invariant()
    def without_a_cache_nobody_is_overtaken(self) -> None:
        if self.has_cache:
            return
        begun = [request.was_admitted for request in self.engine.requests if not _was_aborted_early(request)]
        assert begun == sorted(begun, reverse=True)

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.engine.run()


def _was_aborted_early(request: Request) -> bool:
    return request.status is Status.FINISHED and not request.was_admitted


TestSchedulerUnderAnyOrder = SchedulerUnderAnyOrder.TestCase
TestSchedulerUnderAnyOrder.settings = settings(max_examples=examples(200), stateful_step_count=40, deadline=None)


# --- each block once --------------------------------------------------------------------------------------------------


@given(
    manager=st.sampled_from(CACHING_MANAGERS),
    several=st.lists(prompts, min_size=1, max_size=12),
    block_tokens=block_sizes,
    chunk=chunks,
    num_steps_ahead=st.integers(0, 3),
    num_steps_between=st.lists(st.integers(0, 3), min_size=12, max_size=12),
)
@settings(max_examples=examples(300), deadline=None)
def test_with_room_for_all_every_shared_full_block_is_computed_once(
    manager: BlockManagerName,
    several: list[list[int]],
    block_tokens: int,
    chunk: int,
    num_steps_ahead: int,
    num_steps_between: list[int],
) -> None:
    engine = SimulatedEngine(
        manager, num_blocks=400, block_tokens=block_tokens, chunk=chunk, num_steps_ahead=num_steps_ahead
    )
    for prompt, num_steps in zip(several, num_steps_between, strict=False):
        engine.submit(prompt)
        for _ in range(num_steps):
            engine.step()

    engine.run()

    for prompt in several:
        for end in range(block_tokens, len(prompt), block_tokens):
            place = (end - 1, checksums(prompt)[end - 1])
            # A prompt that ends with the block must compute its last token, which the next token is sampled from.
            num_ending = several.count(prompt[:end])
            assert engine.device.num_times_computed[place] <= 1 + num_ending
            if not num_ending:
                assert engine.device.num_times_computed[place] == 1


@given(
    prompt=prompts,
    others=st.lists(prompts, max_size=4),
    count=st.integers(2, 4),
    block_tokens=block_sizes,
    chunk=chunks,
    num_steps_ahead=st.integers(0, 3),
    num_steps_between=st.integers(0, 30),
)
@settings(max_examples=examples(300), deadline=None)
def test_yoco_computes_one_token_of_every_repeated_prompt(
    prompt: list[int],
    others: list[list[int]],
    count: int,
    block_tokens: int,
    chunk: int,
    num_steps_ahead: int,
    num_steps_between: int,
) -> None:
    engine = SimulatedEngine(
        "yoco", num_blocks=400, block_tokens=block_tokens, chunk=chunk, num_steps_ahead=num_steps_ahead
    )
    for other in others:
        engine.submit(other, 2)
    repeated = []
    for _ in range(count):
        repeated.append(engine.submit(prompt, 5))
        for _ in range(num_steps_between):
            engine.step()

    engine.run()

    num_decoded = [max(0, request.num_outputs - 1) for request in repeated]
    overshoot = num_steps_ahead
    for request, decoded in zip(repeated[1:], num_decoded[1:], strict=True):
        assert 1 <= engine.num_computed(request) - decoded <= 1 + overshoot
        assert request.cached_tokens == len(prompt) - 1


# --- salts ------------------------------------------------------------------------------------------------------------


@given(
    manager=st.sampled_from(MANAGERS),
    several=st.lists(st.tuples(prompts, salts), min_size=1, max_size=12),
    block_tokens=block_sizes,
    chunk=chunks,
    num_steps_ahead=st.integers(0, 3),
)
@settings(max_examples=examples(300), deadline=None)
def test_every_salt_is_like_a_device_of_its_own(
    manager: BlockManagerName,
    several: list[tuple[list[int], str]],
    block_tokens: int,
    chunk: int,
    num_steps_ahead: int,
) -> None:
    def make() -> SimulatedEngine:
        return SimulatedEngine(
            manager, num_blocks=400, block_tokens=block_tokens, chunk=chunk, num_steps_ahead=num_steps_ahead
        )

    shared, own = make(), {salt: make() for _, salt in several}
    for prompt, salt in several:
        request = shared.submit(prompt, 3)
        request.salt = salt
        shared.run()
        alone = own[salt].submit(prompt, 3)
        own[salt].run()

        assert request.cached_tokens == alone.cached_tokens
        assert shared.num_computed(request) == own[salt].num_computed(alone)


@given(
    manager=st.sampled_from(CACHING_MANAGERS),
    prompt=prompts,
    salt=st.sampled_from(["one", "other"]),
    block_tokens=block_sizes,
    chunk=chunks,
    num_steps_ahead=st.integers(0, 3),
    num_steps_between=st.integers(0, 30),
)
@settings(max_examples=examples(300), deadline=None)
def test_requests_of_one_salt_share_what_requests_without_one_share(
    manager: BlockManagerName,
    prompt: list[int],
    salt: str,
    block_tokens: int,
    chunk: int,
    num_steps_ahead: int,
    num_steps_between: int,
) -> None:
    def cached(salt: str) -> list[int]:
        engine = SimulatedEngine(
            manager, num_blocks=400, block_tokens=block_tokens, chunk=chunk, num_steps_ahead=num_steps_ahead
        )
        requests = []
        for _ in range(3):
            request = engine.submit(prompt, 2)
            request.salt = salt
            requests.append(request)
            for _ in range(num_steps_between):
                engine.step()
        engine.run()
        return [request.cached_tokens for request in requests]

    assert cached(salt) == cached("")
