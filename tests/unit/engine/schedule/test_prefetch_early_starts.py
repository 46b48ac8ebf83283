"""Prompts whose loads are still arriving begin early, with simulated tiers."""

from __future__ import annotations

import pytest

from kvtier.engine.schedule.block_manager import BlockManagerName
from kvtier.engine.schedule.request import Request, Status
from kvtier.tiers.explanation import MatchEnd
from kvtier.transfer.load import Order
from tests.support.engine_building import prompt_of
from tests.support.prefetch_cases import every_manager
from tests.support.simulated_traffic import HOST, SERVER
from tests.support.tiered_engine import TieredEngine


@every_manager
def test_a_step_that_is_started_early_comes_after_the_arrival(manager: BlockManagerName) -> None:
    engine = TieredEngine(manager)
    engine.traffic.is_smooth = True
    engine.traffic.is_forced = Order.FRONT
    prompt = prompt_of(9)
    engine.traffic.remember(prompt, HOST)
    request = engine.submit(prompt)
    engine.step()
    engine.traffic.answer_all()
    engine.step()
    engine.traffic.submit_loads()
    engine.step()

    assert request.status is Status.FINISHED
    assert engine.steps[-1].arrivals
    engine.run()


@every_manager
def test_a_step_waits_for_the_first_of_several_loads_only(manager: BlockManagerName) -> None:
    engine = TieredEngine(manager)
    engine.traffic.is_smooth = True
    engine.traffic.is_quick = True
    engine.traffic.is_forced = Order.FRONT
    prompts = [prompt_of(9, seed=number) for number in range(3)]
    for prompt in prompts:
        engine.traffic.remember(prompt, HOST)
    requests = [engine.submit(prompt) for prompt in prompts]
    while engine.scheduler.has_unmatched or any(request.prefetch.load is None for request in requests):
        engine.step()
    engine.traffic.submit_loads()
    num_steps = len(engine.steps)

    while len(engine.steps) == num_steps:
        engine.step()

    assert [row.request for row in engine.steps[-1].rows] == requests[:1]
    assert engine.steps[-1].arrivals
    engine.run()
    assert all(request.status is Status.FINISHED for request in requests)


def _engine_that_decodes(manager: BlockManagerName, num_steps_ahead: int = 1, num_blocks: int = 64) -> TieredEngine:
    """Its steps take 20 ms, and what it is asked for next is all in the host's memory."""
    engine = TieredEngine(manager, num_steps_ahead=num_steps_ahead, num_blocks=num_blocks)
    engine.traffic.is_smooth = True
    engine.traffic.is_quick = True
    engine.traffic.is_forced = Order.FRONT
    engine.submit(prompt_of(5, seed=1), 40)
    for _ in range(3):
        engine.now += 0.02
        engine.step()
    return engine


def _submit_known(engine: TieredEngine, length: int, seed: int = 0) -> Request:
    """All of it is handed to the device, and nothing has arrived."""
    prompt = prompt_of(length, seed=seed)
    engine.traffic.remember(prompt, HOST)
    request = engine.submit(prompt)
    engine.now += 0.02
    engine.step()
    assert request.prefetch.load is not None
    engine.traffic.submit_loads()
    return request


@every_manager
@pytest.mark.parametrize(
    ("left_s", "step_s", "joins"),
    [(0.008, 0.02, True), (0.012, 0.02, False), (None, 0.02, False), (0.005, 0.004, True), (0.007, 0.004, False)],
)
def test_a_prompt_joins_others_when_the_rest_of_it_comes_while_the_device_does_other_things(
    manager: BlockManagerName, left_s: float | None, step_s: float, joins: bool
) -> None:
    engine = _engine_that_decodes(manager)
    request = _submit_known(engine, 12)
    engine.traffic.copies_left_s = left_s
    engine.now += step_s
    engine.step()

    rows = [row.request for row in engine.steps[-1].rows]
    assert rows == [engine.requests[0], *([request] if joins else [])]
    assert bool(engine.steps[-1].arrivals) == joins
    assert (request.prefetch.load is None) == joins
    engine.run()
    assert request.status is Status.FINISHED


@every_manager
def test_a_prompt_joins_nobody_early_if_the_device_has_no_step_to_do_before(manager: BlockManagerName) -> None:
    engine = _engine_that_decodes(manager, num_steps_ahead=0)
    request = _submit_known(engine, 12)
    engine.traffic.copies_left_s = 0.001
    engine.now += 0.02
    engine.step()

    assert [row.request for row in engine.steps[-1].rows] == engine.requests[:1]
    engine.run()
    assert request.status is Status.FINISHED


@every_manager
def test_nobody_joins_others_early_who_comes_behind_one_that_does_not(manager: BlockManagerName) -> None:
    """Copies run one after the other: how much is left of one says nothing of when it begins."""
    engine = _engine_that_decodes(manager)
    far, near = _submit_known(engine, 40, seed=2), _submit_known(engine, 8, seed=3)
    engine.traffic.left_s = lambda loads: 0.001 * len(loads[0].hashes)  # type: ignore[method-assign]
    engine.now += 0.003
    engine.step()

    assert far.prefetch.load is not None
    assert near.prefetch.load is not None
    engine.run()
    assert near.status is far.status is Status.FINISHED


@every_manager
def test_who_joins_others_early_takes_nobodys_blocks(manager: BlockManagerName) -> None:
    engine = _engine_that_decodes(manager, num_blocks=5)
    request = _submit_known(engine, 9)  # two blocks of five are the first one's
    while len(engine.requests[0].blocks.ids) < 3:
        engine.now += 0.02
        engine.step()
    engine.traffic.copies_left_s = 0.001
    engine.now += 0.02
    engine.step()

    assert request.prefetch.load is None, "it goes on as if all had arrived"
    assert engine.steps[-1].arrivals
    assert [row.request for row in engine.steps[-1].rows] == engine.requests[:1]
    assert not engine.scheduler.num_preemptions
    engine.run()
    assert request.status is Status.FINISHED


@every_manager
def test_what_was_started_early_is_waited_for_when_the_next_part_does_not_come(manager: BlockManagerName) -> None:
    """The first span is handed to the device, the second is lost: the step that computes it reads the first."""
    engine = TieredEngine(manager)
    engine.traffic.is_smooth = True
    engine.traffic.is_forced = Order.FRONT
    prompt = prompt_of(13)
    engine.traffic.remember(prompt, HOST, 0, 1)
    engine.traffic.remember(prompt, SERVER, 1)
    request = engine.submit(prompt)
    engine.step()
    engine.traffic.answer_all()
    engine.step()
    engine.traffic.submit_loads()
    engine.step()  # nothing to compute: the second span is next
    engine.step()
    engine.traffic.is_failing = True
    engine.traffic.lose_loads()
    while request.status is not Status.FINISHED:
        engine.step()

    engine.run()
    assert request.prefetch.ending is not None
    assert request.prefetch.ending.reason is MatchEnd.LOST


@every_manager
def test_a_request_that_was_started_early_and_waits_for_room_waits_for_its_arrival_too(
    manager: BlockManagerName,
) -> None:
    """Blocks are held for stores, so there is no room for the row that would have waited for the arrival."""
    engine = TieredEngine(manager, num_blocks=6)
    engine.traffic.is_smooth = True
    engine.traffic.is_quick = True
    engine.traffic.is_forced = Order.FRONT
    engine.submit(prompt_of(16, seed=1))
    engine.step()
    assert len(engine.held_ids()) == 4
    prompt = prompt_of(9)
    engine.traffic.remember(prompt, HOST)
    request = engine.submit(prompt)
    engine.step()
    assert request.prefetch.load is not None
    engine.traffic.submit_loads()
    engine.step()  # two blocks are there, and none for the third
    assert request in engine.scheduler.running
    engine.traffic.finish_stores()
    while engine.scheduler.has_requests:
        engine.step()

    engine.run()
