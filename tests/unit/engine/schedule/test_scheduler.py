"""What the scheduler decides, over every block manager, on a device that notices wrong KV."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvtier.engine.schedule.block_manager import BlockManagerName
from kvtier.engine.schedule.request import FinishReason, Request, Status
from tests.support.engine_building import (
    CACHING_MANAGERS,
    MANAGERS,
    SimulatedEngine,
    answer_to,
    endless_prompt,
    prompt_of,
)

every_manager = pytest.mark.parametrize("manager", MANAGERS)
every_caching_manager = pytest.mark.parametrize("manager", CACHING_MANAGERS)
every_schedule = pytest.mark.parametrize("num_steps_ahead", [0, 1, 2, 3], ids=["sync", "async-1", "async-2", "async-3"])


def step_until(engine: SimulatedEngine, has_happened: Callable[[], bool]) -> None:
    for _ in range(100):
        if has_happened():
            return
        engine.step()
    raise AssertionError("it never happened")


def rows_of(engine: SimulatedEngine, request: Request) -> list[int]:
    """How many tokens of the request each step computed, steps without any left out."""
    return [row.count for step in engine.steps for row in step.rows if row.request is request]


def first_step_of(engine: SimulatedEngine, request: Request) -> int:
    return next(number for number, step in enumerate(engine.steps) if request in [row.request for row in step.rows])


# --- batching ------------------------------------------------------------------------------------------------------


@every_manager
@every_schedule
def test_requests_of_all_lengths_run_together_and_get_the_answers_they_get_alone(
    manager: BlockManagerName, num_steps_ahead: int
) -> None:
    engine = SimulatedEngine(manager, num_blocks=200, chunk=16, num_steps_ahead=num_steps_ahead)
    for length in (1, 2, 3, 4, 5, 8, 9, 17, 40):
        engine.submit(prompt_of(length, seed=length), 12)
        engine.submit(prompt_of(length), 12)

    engine.run()

    assert any(len(step.rows) > 4 for step in engine.steps)


@every_manager
def test_no_step_takes_more_tokens_than_allowed(manager: BlockManagerName) -> None:
    engine = SimulatedEngine(manager, chunk=7)
    for seed in range(6):
        engine.submit(prompt_of(20, seed=seed), 6)

    engine.run()

    assert max(step.num_tokens for step in engine.steps) == 7


@every_manager
def test_no_more_requests_run_than_allowed(manager: BlockManagerName) -> None:
    engine = SimulatedEngine(manager, max_num_requests=3)
    for seed in range(10):
        engine.submit(prompt_of(5, seed=seed), 6)

    engine.run()

    assert max(len(step.rows) for step in engine.steps) == 3


@every_manager
def test_a_client_does_not_wait_for_all_that_another_has_asked(manager: BlockManagerName) -> None:
    engine = SimulatedEngine(manager, max_num_requests=1)
    many = [engine.submit(prompt_of(5, seed=seed), 6, client="many") for seed in range(6)]
    engine.step()
    one = engine.submit(prompt_of(5, seed=9), 6, client="one")

    engine.run()

    begins = [first_step_of(engine, request) for request in (many[0], one, *many[1:])]
    assert begins == sorted(begins)


@every_manager
def test_decodes_go_on_while_a_long_prompt_is_computed_in_chunks(manager: BlockManagerName) -> None:
    engine = SimulatedEngine(manager, chunk=8)
    short = engine.submit(endless_prompt(3, 20), 20)
    engine.step()
    long = engine.submit(prompt_of(60, seed=1))

    engine.run()

    assert rows_of(engine, long) == [7] * 8 + [4]
    assert all(row.request is short for step in engine.steps[1:9] for row in step.rows[:1])


@every_manager
def test_a_request_computes_no_token_beyond_its_last(manager: BlockManagerName) -> None:
    engine = SimulatedEngine(manager, num_steps_ahead=3)
    request = engine.submit(endless_prompt(6, 5), 5)

    engine.run()

    assert engine.num_computed(request) == 6 + 5 - 1


def test_tokens_sampled_after_a_stop_are_dropped() -> None:
    prompt = next(prompt_of(5, seed=seed) for seed in range(99) if len(answer_to(prompt_of(5, seed=seed), 50)) == 3)
    engine = SimulatedEngine("yoco", num_steps_ahead=3)
    request = engine.submit(prompt, 50)

    engine.run()

    assert request.num_outputs == 3
    assert request.finish_reason is FinishReason.STOP
    assert engine.num_computed(request) == 5 + 5


# --- order -----------------------------------------------------------------------------------------------------------


@every_manager
def test_first_come_is_first_served(manager: BlockManagerName) -> None:
    engine = SimulatedEngine(manager, chunk=5, max_num_requests=2)
    requests = [engine.submit(prompt_of(7, seed=seed)) for seed in range(6)]

    engine.run()

    served = [row.request for step in engine.steps for row in step.rows if row.samples]
    assert served == requests


@every_caching_manager
def test_who_waits_for_a_block_lets_others_pass(manager: BlockManagerName) -> None:
    engine = SimulatedEngine(manager)
    first = engine.submit(prompt_of(9))
    same = engine.submit(prompt_of(9))
    other = engine.submit(prompt_of(9, seed=1))

    step = engine.step()

    assert [row.request for row in step.rows] == [first, other]
    assert list(engine.scheduler.waiting) == [same]
    engine.run()


@every_manager
def test_a_request_without_room_is_not_overtaken(manager: BlockManagerName) -> None:
    engine = SimulatedEngine(manager, num_blocks=8)
    engine.submit(endless_prompt(12, 6), 6)
    large = engine.submit(prompt_of(27, seed=1))
    small = engine.submit(prompt_of(1, seed=2))

    step = engine.step()

    assert len(step.rows) == 1
    assert list(engine.scheduler.waiting) == [large, small]
    engine.run()
    assert first_step_of(engine, large) <= first_step_of(engine, small)


# --- preemption ------------------------------------------------------------------------------------------------------


@every_manager
@every_schedule
def test_when_blocks_run_out_the_last_gives_way_and_comes_back(manager: BlockManagerName, num_steps_ahead: int) -> None:
    engine = SimulatedEngine(manager, num_blocks=9, num_steps_ahead=num_steps_ahead)
    requests = [engine.submit(endless_prompt(length, 16), 16) for length in (7, 8, 9)]

    engine.run()

    assert requests[0].num_preemptions == 0
    assert requests[-1].num_preemptions > 0
    assert [request.num_outputs for request in requests] == [16] * 3


@every_caching_manager
def test_a_preempted_request_resumes_from_its_cached_blocks(manager: BlockManagerName) -> None:
    engine = SimulatedEngine(manager, num_blocks=8)
    engine.submit(endless_prompt(4, 12), 12)
    second = engine.submit(endless_prompt(15, 12), 12)
    step_until(engine, lambda: second.num_preemptions > 0)
    computed_before, needed = engine.num_computed(second), 15 + 12 - 1

    engine.run()

    assert engine.num_computed(second) - needed < computed_before // 2, "it started over"
    assert second.num_outputs == 12


@every_manager
def test_one_request_may_have_every_block_but_the_spare_one(manager: BlockManagerName) -> None:
    engine = SimulatedEngine(manager, num_blocks=6)
    prompt = endless_prompt(3, 17)
    for _ in range(2):
        engine.submit(prompt, 17)

    engine.run()

    assert all(len(request.tokens) == engine.max_model_len for request in engine.requests)


@every_manager
@every_schedule
def test_nobody_starves_in_the_smallest_pool(manager: BlockManagerName, num_steps_ahead: int) -> None:
    engine = SimulatedEngine(manager, num_blocks=3, chunk=3, num_steps_ahead=num_steps_ahead)
    for seed in range(12):
        engine.submit(prompt_of(1 + seed % 7, seed=seed % 3), 7)

    engine.run()


@every_caching_manager
def test_a_request_that_finds_no_room_evicts_nothing(manager: BlockManagerName) -> None:
    engine = SimulatedEngine(manager, num_blocks=10)
    engine.submit(prompt_of(9, seed=1))
    engine.run()
    engine.submit(endless_prompt(15, 5), 5)
    engine.step()
    engine.submit(prompt_of(35, seed=2))

    engine.step()

    again = engine.submit(prompt_of(9, seed=1))
    assert engine.block_manager.extend(again)
    assert again.num_computed == 8
    engine.block_manager.free(again)


# --- aborts ----------------------------------------------------------------------------------------------------------


@pytest.mark.sampled
@every_manager
@every_schedule
@pytest.mark.parametrize("num_steps", range(6))
def test_an_abort_at_any_time_gives_all_blocks_back(
    manager: BlockManagerName, num_steps_ahead: int, num_steps: int
) -> None:
    engine = SimulatedEngine(manager, chunk=6, num_steps_ahead=num_steps_ahead)
    request = engine.submit(endless_prompt(14, 8), 8)
    for _ in range(num_steps):
        engine.step()

    engine.abort(request)

    assert engine.block_manager.num_free_blocks == engine.block_manager.num_blocks
    assert not engine.scheduler.has_requests
    engine.run()


@every_manager
def test_a_second_end_changes_nothing(manager: BlockManagerName) -> None:
    engine = SimulatedEngine(manager)
    request = engine.submit(prompt_of(5))
    engine.run()
    reason = request.finish_reason

    engine.abort(request)

    assert request.finish_reason is reason
    assert request.status is Status.FINISHED


@every_manager
def test_a_preempted_request_can_be_aborted_while_its_tokens_are_on_the_device(manager: BlockManagerName) -> None:
    engine = SimulatedEngine(manager, num_blocks=9, num_steps_ahead=3)
    requests = [engine.submit(endless_prompt(length, 16), 16) for length in (7, 8, 9)]
    step_until(
        engine,
        lambda: any(request.status is Status.WAITING and request.num_in_flight for request in requests),
    )

    engine.abort(next(request for request in requests if request.status is Status.WAITING))

    engine.run()


@every_caching_manager
@pytest.mark.parametrize("end", ["abort", "preempt"])
def test_waiting_ends_with_the_producer(manager: BlockManagerName, end: str) -> None:
    engine = SimulatedEngine(manager, chunk=7)
    engine.submit(endless_prompt(3, 9), 9)
    producer = engine.submit(prompt_of(20))
    follower = engine.submit(prompt_of(21))
    step_until(engine, lambda: producer.num_computed > 9)

    if end == "abort":
        engine.abort(producer)
    else:
        engine.scheduler._preempt(producer)

    engine.run()
    assert follower.num_outputs == 1


# --- nothing to do ----------------------------------------------------------------------------------------------------


@every_manager
def test_an_idle_scheduler_schedules_nothing(manager: BlockManagerName) -> None:
    engine = SimulatedEngine(manager)

    step = engine.scheduler.schedule()

    assert step.is_empty
    assert not engine.has_work


@every_manager
def test_when_all_wait_for_tokens_a_step_is_empty_and_the_next_is_not(manager: BlockManagerName) -> None:
    engine = SimulatedEngine(manager, num_steps_ahead=3, max_num_requests=1)
    engine.submit(prompt_of(3))
    later = engine.submit(prompt_of(3, seed=1))
    engine.step()

    step = engine.step()

    assert step.is_empty
    assert [row.request for row in engine.step().rows] == [later]
