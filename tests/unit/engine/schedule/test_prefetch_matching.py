"""How many waiting prompts are matched beside a step, and in which order, with simulated tiers."""

from __future__ import annotations

import pytest

from kvtier.engine.schedule.block_manager import BlockManagerName
from kvtier.transfer.load import Order
from tests.support.engine_building import prompt_of
from tests.support.prefetch_cases import every_manager, slow_matches, tokens_loaded
from tests.support.simulated_traffic import HOST
from tests.support.tiered_engine import TieredEngine


@every_manager
def test_what_is_found_first_is_loaded_before_others_are_matched(manager: BlockManagerName) -> None:
    engine = TieredEngine(manager)
    engine.traffic.is_smooth = True
    engine.traffic.is_quick = True
    engine.traffic.is_forced = Order.FRONT
    prompts = [prompt_of(17, seed=number) for number in range(3)]
    for prompt in prompts:
        engine.traffic.remember(prompt, HOST)
    first, second, third = [engine.submit(prompt) for prompt in prompts]
    engine.step()

    assert first.prefetch.load is not None
    assert second.prefetch.match is None
    assert third.prefetch.match is None
    assert engine.scheduler.has_unmatched
    engine.run()
    assert all(tokens_loaded(request) == 16 for request in (first, second, third))


@every_manager
def test_prompts_that_no_tier_has_are_matched_at_once_and_computed_together(manager: BlockManagerName) -> None:
    engine = TieredEngine(manager)
    engine.traffic.is_smooth = True
    engine.traffic.is_quick = True
    requests = [engine.submit(prompt_of(17, seed=number)) for number in range(3)]
    engine.step()

    assert all(request.num_computed == 17 for request in requests)
    assert not engine.scheduler.has_unmatched
    engine.run()


def _engine_beside_a_request(num_waiting: int, *, is_known: bool = False) -> TieredEngine:
    """One request has had its first step, and others wait, of which no tier knows anything unless they are known."""
    engine = TieredEngine(max_num_requests=8, num_blocks=256)
    engine.traffic.is_smooth = True
    engine.traffic.is_quick = True
    engine.traffic.is_forced = Order.FRONT
    engine.submit(prompt_of(5), 40)
    engine.step()
    for number in range(num_waiting):
        prompt = prompt_of(17, seed=number + 1)
        if is_known:
            engine.traffic.remember(prompt, HOST)
        engine.submit(prompt)
    return engine


@every_manager
@pytest.mark.parametrize("is_known", [True, False])
def test_beside_a_running_request_matching_takes_a_share_of_the_time_of_a_step(
    manager: BlockManagerName, is_known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = TieredEngine(manager)
    engine.traffic.is_smooth = True
    engine.traffic.is_quick = True
    engine.traffic.is_forced = Order.FRONT
    engine.submit(prompt_of(5), 40)
    engine.step()
    engine.now += 0.036
    engine.step()
    prompts = [prompt_of(17, seed=number) for number in range(1, 6)]
    for prompt in prompts if is_known else ():
        engine.traffic.remember(prompt, HOST)
    for prompt in prompts:
        engine.submit(prompt)
    matched = slow_matches(engine, 0.004, monkeypatch)
    engine.now += 0.04  # the two steps took so long: 9 ms of the next one may be spent on matching
    engine.step()

    assert len(matched) == 2, "a third would end after 12 ms"
    assert engine.scheduler.has_unmatched
    engine.run()
    assert len(matched) >= len(prompts)


@pytest.mark.parametrize(("num_waiting", "most"), [(31, 2), (64, 7)])
def test_matching_takes_more_of_a_step_if_many_wait_and_no_more_for_what_it_took_before(
    num_waiting: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of steps of 10 ms without it, a quarter or three."""
    engine = _engine_beside_a_request(num_waiting)
    matched = slow_matches(engine, 0.001, monkeypatch)
    counts = []
    for _ in range(4):
        engine.now += 0.01
        matched.clear()
        engine.step()
        counts.append(len(matched))

    assert counts == [1, most, most, most], "of two steps before the first nothing is known"
    engine.run()


@pytest.mark.parametrize(("is_known", "num_loads", "most"), [(True, 0, 4), (True, 2, 4), (True, 3, 2), (False, 0, 2)])
def test_matching_takes_more_of_a_step_if_few_loads_are_under_way_and_prompts_are_found(
    is_known: bool, num_loads: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of steps of 10 ms without it, half and not a quarter: else the bus would have too little to do."""
    engine = _engine_beside_a_request(31, is_known=is_known)
    matched = slow_matches(engine, 0.001, monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(type(engine.traffic), "num_loads", num_loads)
        counts = []
        for _ in range(4):
            engine.now += 0.01
            matched.clear()
            engine.step()
            counts.append(len(matched))

    assert counts == [1, most, most, most]
    engine.run()


@pytest.mark.parametrize(("taken_in_s", "counts"), [(0.0, [2, 2]), (0.0015, [1, 2]), (0.003, [0, 2])])
def test_a_step_that_took_prompts_in_has_less_time_for_matching(
    taken_in_s: float, counts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of steps of 10 ms a quarter is for both."""
    engine = _engine_beside_a_request(num_waiting=8)
    matched = slow_matches(engine, 0.001, monkeypatch)
    engine.now += 0.01
    engine.step()
    engine.scheduler.note_taken_in(taken_in_s)
    found = []
    for _ in counts:
        engine.now += 0.01
        matched.clear()
        engine.step()
        assert engine.scheduler.has_unmatched
        found.append(len(matched))
    assert found == counts
    engine.run()


def test_prompts_that_take_long_to_take_in_every_time_are_matched_every_other_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = _engine_beside_a_request(num_waiting=0)
    matched = slow_matches(engine, 0.001, monkeypatch)
    counts = []
    for number in range(6):
        engine.submit(prompt_of(17, seed=number + 1))
        engine.scheduler.note_taken_in(1.0)
        engine.now += 0.01
        engine.step()
        counts.append(len(matched))
    assert counts[0] == 0
    assert counts[1] > counts[0]
    assert counts[2] == counts[1]
    assert counts[3] > counts[2]
    assert counts[4] == counts[3]
    assert counts[5] > counts[4]
    engine.run()


def test_matching_that_is_put_off_leaves_nobody_unmatched_if_nobody_waits() -> None:
    engine = _engine_beside_a_request(num_waiting=0)
    engine.scheduler.note_taken_in(1.0)
    engine.step()
    assert not engine.scheduler.has_unmatched
    engine.run()


def test_the_device_is_busy_for_a_step_while_steps_are_full() -> None:
    engine = TieredEngine(chunk=16)
    engine.submit(prompt_of(60), 10)
    engine.step()
    engine.traffic.answer_all()
    found = []
    for _ in range(6):
        engine.now += 0.05
        engine.step()
        found.append(engine.traffic.busy_s)

    assert found == pytest.approx([0.0, 0.05, 0.05, 0.05, 0.0, 0.0]), "three full steps, 12 tokens and decodes"
    engine.run()


def test_the_device_is_not_busy_after_a_pause() -> None:
    engine = TieredEngine(chunk=16)
    engine.submit(prompt_of(16), 1)
    engine.run()
    engine.now += 100.0
    engine.submit(prompt_of(16, seed=1), 1)
    engine.step()

    assert engine.traffic.busy_s == 0.0
    engine.run()


def test_nothing_is_started_early_while_more_could_be_loaded() -> None:
    engine = TieredEngine("prefix_caching")
    engine.traffic.is_smooth = True
    engine.traffic.is_quick = True
    engine.traffic.is_forced = Order.FRONT
    prompts = [prompt_of(17, seed=number) for number in range(3)]
    for prompt in prompts:
        engine.traffic.remember(prompt, HOST)
    requests = [engine.submit(prompt) for prompt in prompts]
    engine.step()
    engine.traffic.submit_loads()
    engine.step()
    assert requests[0].prefetch.load is not None, "it waits for its load"
    engine.traffic.submit_loads()
    engine.step()

    assert not engine.scheduler.has_unmatched
    assert requests[0].prefetch.load is None, "it was started early"
    engine.run()
