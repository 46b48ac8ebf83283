"""What a prompt's way through the tiers looks like from the scheduler, one case at a time, with simulated tiers."""

from __future__ import annotations

from random import Random

import pytest

from kvtier.engine.schedule.block_manager import BlockManagerName
from kvtier.engine.schedule.request import Status
from kvtier.tiers.explanation import MatchEnd
from kvtier.transfer.load import LoadPlan, Order
from kvtier.transfer.matching import TierMatch
from kvtier.transfer.prefetch_state import PrefetchState
from tests.support.engine_building import CACHING_MANAGERS, endless_prompt, prompt_of
from tests.support.prefetch_cases import every_manager, tokens_loaded
from tests.support.simulated_traffic import HOST, SERVER, SimulatedSegments
from tests.support.tiered_engine import TieredEngine

every_order = pytest.mark.parametrize("order", list(Order))


# --- loading ----------------------------------------


@every_manager
@every_order
def test_a_prompt_that_a_tier_has_is_computed_from_where_the_tier_ends(manager: BlockManagerName, order: Order) -> None:
    engine = TieredEngine(manager, chunk=4)
    engine.traffic.is_smooth = True
    engine.traffic.is_forced = order
    prompt = endless_prompt(22, 3)
    engine.traffic.remember(prompt, HOST)
    request = engine.submit(prompt, 3)

    engine.run()

    assert tokens_loaded(request) == 20
    assert engine.num_computed(request) == 2 + 2


@every_manager
@pytest.mark.parametrize("length", [32, 33])
def test_a_prompt_of_which_all_was_found_says_so_though_its_end_is_computed(
    manager: BlockManagerName, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What meets from the back leaves out the last token's block, and computing it is faster than to load it."""
    engine = TieredEngine(manager)
    engine.traffic.is_forced = Order.BACK
    any_plan = engine.traffic.plan

    def from_back(fetch: TierMatch, position: int, prompt_tokens: int) -> LoadPlan | None:
        plan = any_plan(fetch, position, prompt_tokens)
        return plan if plan is None or plan.order is Order.BACK else None

    monkeypatch.setattr(engine.traffic, "plan", from_back)
    engine.traffic.is_smooth = True
    prompt = prompt_of(length)
    engine.traffic.remember(prompt, SERVER)
    request = engine.submit(prompt)
    engine.run()

    assert request.prefetch.ending is not None
    assert request.prefetch.ending.reason is MatchEnd.ALL


@every_manager
def test_a_request_holds_nothing_while_its_match_is_under_way(manager: BlockManagerName) -> None:
    engine = TieredEngine(manager)
    engine.traffic.is_smooth = True
    request = engine.submit(prompt_of(9))
    for _ in range(5):
        engine.step()

    assert request.status is Status.WAITING
    assert engine.block_manager.num_free_blocks == engine.block_manager.num_blocks


@every_manager
def test_others_are_served_while_one_waits_for_its_load(manager: BlockManagerName) -> None:
    engine = TieredEngine(manager)
    engine.traffic.is_smooth = True
    engine.traffic.is_forced = Order.FRONT
    slow = prompt_of(9)
    engine.traffic.remember(slow, SERVER)
    waiting = engine.submit(slow)
    engine.step()
    engine.traffic.deliver_all()
    engine.step()
    assert waiting.prefetch.load is not None
    engine.traffic.is_quick = True
    quick = engine.submit(prompt_of(5, seed=1))
    engine.step()

    assert quick.status is Status.FINISHED
    assert waiting.status is Status.RUNNING
    engine.run()


@every_manager
def test_an_aborted_request_lets_nothing_be_written_to_its_blocks(manager: BlockManagerName) -> None:
    engine = TieredEngine(manager)
    engine.traffic.is_smooth = True
    engine.traffic.is_forced = Order.FRONT
    prompt = prompt_of(17)
    engine.traffic.remember(prompt, SERVER)
    request = engine.submit(prompt)
    engine.step()
    engine.traffic.deliver_all()
    engine.step()
    assert request.prefetch.load is not None
    engine.traffic.deliver()
    engine.abort(request)

    assert engine.block_manager.num_free_blocks == engine.block_manager.num_blocks
    engine.submit(prompt_of(17, seed=1))
    engine.run()


def test_what_the_device_lost_since_the_match_is_looked_for_again() -> None:
    engine = TieredEngine("prefix_caching", num_blocks=8)
    engine.traffic.is_smooth = True
    prompt = prompt_of(9)
    engine.submit(prompt)
    engine.run()
    engine.traffic.is_forced = Order.FRONT
    engine.traffic.remember(prompt, HOST)
    request = engine.submit(prompt)
    engine.step()  # asked for what the device lacks: nothing
    assert request.prefetch.match is not None or request.status is Status.FINISHED
    engine.run()

    assert request.status is Status.FINISHED


def test_a_match_of_nothing_that_the_device_has_lost_for_good_ends_in_computing() -> None:
    """After the last rematch the device may lose blocks once more, and the tiers may have none of them."""
    engine = TieredEngine("prefix_caching")
    engine.traffic.is_smooth = True
    engine.traffic.is_quick = True
    request = engine.submit(prompt_of(13))
    hashes = engine.traffic.book.note(prompt_of(13))
    engine.traffic.learn(hashes)
    lost = engine.traffic.match(2, hashes[2:3])
    lost.num_rematches = 2
    request.prefetch.match, request.prefetch.state = lost, PrefetchState.MATCHING

    engine.run()

    assert request.prefetch.ending is not None


# --- storing ----------------------------------------


@every_manager
def test_every_full_block_is_offered_and_can_be_loaded_by_another_engine(manager: BlockManagerName) -> None:
    engine = TieredEngine(manager, chunk=3)
    engine.traffic.is_smooth = True
    prompt = endless_prompt(9, 5)
    engine.submit(prompt, 5)
    engine.run()

    known = {block_hash for memory in engine.traffic.offered for block_hash in memory}
    tokens = engine.requests[0].tokens
    assert known == set(engine.traffic.book.note(tokens[: len(tokens) - 1]))


@pytest.mark.parametrize("chunk", [3, 1 << 20])
@pytest.mark.parametrize("manager", CACHING_MANAGERS)
def test_documents_behind_one_beginning_offer_the_segment_in_which_they_part(
    manager: BlockManagerName, chunk: int
) -> None:
    engine = TieredEngine(manager, chunk=chunk)
    engine.traffic.is_smooth = True
    engine.traffic.segmented = SimulatedSegments(4, Random(0))
    engine.traffic.segmented.answers = (None,)
    beginning = prompt_of(24)
    documents = [beginning + prompt_of(24, seed=seed) for seed in (5, 6, 7)]
    for document in documents:
        engine.submit(document)
        engine.run()

    expected = [engine.traffic.book.note(document)[4:8] for document in documents[1:]]
    assert engine.traffic.segments == expected, "of the first all was offered as it was computed"


@pytest.mark.parametrize("is_there", [True, None])
def test_what_a_tier_brings_is_offered_whole_where_it_ends_unless_it_is_there(is_there: bool | None) -> None:
    engine = TieredEngine("prefix_caching")
    engine.traffic.is_smooth = True
    engine.traffic.segmented = SimulatedSegments(4, Random(0))
    engine.traffic.segmented.answers = (is_there,)
    prompt = prompt_of(49)
    engine.traffic.remember(prompt, SERVER, 0, 6)
    engine.submit(prompt)
    engine.run()

    assert engine.traffic.segments == ([] if is_there else [engine.traffic.book.note(prompt)[4:8]])


@every_manager
def test_blocks_that_are_copied_away_come_back_and_are_waited_for(manager: BlockManagerName) -> None:
    engine = TieredEngine(manager, num_blocks=7, block_tokens=2)
    engine.traffic.is_smooth = True
    engine.traffic.is_quick = True
    engine.submit(prompt_of(8, seed=1))
    engine.step()
    request = engine.submit(endless_prompt(7, 1))
    for _ in range(5):
        engine.step()
    assert request.status is Status.WAITING
    engine.traffic.finish_stores()
    engine.step()

    assert request.num_preemptions == 0
    assert request.was_admitted
    engine.run()


@every_manager
def test_stores_that_hold_blocks_for_too_long_are_given_up(manager: BlockManagerName) -> None:
    engine = TieredEngine(manager, num_blocks=7, block_tokens=2)
    engine.traffic.is_smooth = True
    engine.traffic.is_quick = True
    engine.submit(prompt_of(8, seed=1))
    engine.step()
    request = engine.submit(endless_prompt(7, 1))
    for _ in range(5):
        engine.now += 0.02
        engine.step()

    assert request.was_admitted
    engine.run()


@every_manager
@pytest.mark.parametrize("num_steps_ahead", [0, 1, 2, 3])
def test_an_answer_that_waits_for_room_goes_on(manager: BlockManagerName, num_steps_ahead: int) -> None:
    """All its tokens are known by the time there is room for the next."""
    engine = TieredEngine(manager, num_blocks=7, block_tokens=2, num_steps_ahead=num_steps_ahead)
    engine.traffic.is_smooth = True
    engine.traffic.is_quick = True
    engine.submit(prompt_of(8, seed=1))
    while engine.scheduler.has_requests:
        engine.step()
    assert len(engine.held_ids()) == 4
    request = engine.submit(endless_prompt(3, 8), 8)
    for _ in range(12):
        engine.step()
    assert request.status is Status.RUNNING
    engine.run()

    assert request.num_outputs == 8
