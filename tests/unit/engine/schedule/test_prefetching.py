"""What a prompt's way through the tiers looks like from the scheduler, one case at a time, with simulated tiers."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from random import Random

import pytest

from kvtier.blocks.hashing import BlockHash
from kvtier.engine.schedule.block_manager import BlockManagerName
from kvtier.engine.schedule.request import Request, Status
from kvtier.tiers.explanation import MatchEnd
from kvtier.transfer.device_lease import DeviceLease
from kvtier.transfer.load import LoadPlan, Order
from kvtier.transfer.matching import TierMatch
from kvtier.transfer.prefetch import Prefetch, PrefetchState
from tests.support.engine_building import CACHING_MANAGERS, MANAGERS, endless_prompt, prompt_of
from tests.support.tier_simulation import HOST, SERVER, SimulatedSegments, TieredEngine

every_manager = pytest.mark.parametrize("manager", MANAGERS)
every_order = pytest.mark.parametrize("order", list(Order))


def _tokens_loaded(request: Request) -> int:
    return sum(request.prefetch.history.loaded_tokens.values())


# --- matching ----------------------------------------


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
    assert all(_tokens_loaded(request) == 16 for request in (first, second, third))


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


def _slow_matches(engine: TieredEngine, seconds: float, monkeypatch: pytest.MonkeyPatch) -> list[TierMatch]:
    """Each match takes so long from now on. Those that were made."""
    at_once = engine.traffic.match
    matched: list[TierMatch] = []

    def match(first: int, hashes: Sequence[BlockHash], num_more: int) -> TierMatch:
        engine.now += seconds
        matched.append(at_once(first, hashes, num_more))
        return matched[-1]

    monkeypatch.setattr(engine.traffic, "match", match)
    return matched


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
    matched = _slow_matches(engine, 0.004, monkeypatch)
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
    matched = _slow_matches(engine, 0.001, monkeypatch)
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
    matched = _slow_matches(engine, 0.001, monkeypatch)
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
    matched = _slow_matches(engine, 0.001, monkeypatch)
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
    matched = _slow_matches(engine, 0.001, monkeypatch)
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


# --- in pieces ----------------------------------------


def _engine_in_pieces(manager: BlockManagerName, piece_blocks: int = 4, num_blocks: int = 64) -> TieredEngine:
    engine = TieredEngine(manager, num_blocks=num_blocks, piece_blocks=piece_blocks)
    engine.traffic.is_smooth = True
    engine.traffic.is_quick = True
    engine.traffic.is_forced = Order.FRONT
    return engine


def _is_growing(request: Request) -> bool:
    return request.prefetch.state is PrefetchState.LOADING and request.prefetch.load is None


def _running_and_growing(engine: TieredEngine) -> tuple[Request, Request]:
    """A request that decodes, and one that has not all blocks yet for what it loads."""
    running = engine.submit(prompt_of(5), 40)
    engine.step()
    prompt = prompt_of(81, seed=1)
    engine.traffic.remember(prompt, HOST)
    engine.traffic.is_quick = False
    growing = engine.submit(prompt)
    while not _is_growing(growing):
        engine.traffic.answer_all()
        engine.step()
    return running, growing


@every_manager
def test_the_first_load_of_a_long_prompt_begins_before_the_rest_of_it_is_hashed(manager: BlockManagerName) -> None:
    engine = _engine_in_pieces(manager, piece_blocks=4)
    prompt = prompt_of(81)
    engine.traffic.remember(prompt, HOST)
    request = engine.submit(prompt)
    engine.step()

    assert request.prefetch.load is not None
    assert request.prefetch.load.num_blocks == len(request.blocks.hashes) == 2, "half a piece: nothing else is to do"
    assert engine.scheduler.has_unmatched
    engine.step()
    assert [load.plan.first for load in request.prefetch.next_loads] == [2], "handed over while the first is on its way"
    assert len(request.blocks.hashes) == 6
    engine.run()
    assert _tokens_loaded(request) == 80
    assert len(request.blocks.hashes) == len(request.tokens) // 4


@every_manager
def test_beside_a_running_request_a_long_prompt_takes_its_blocks_a_few_at_a_time(manager: BlockManagerName) -> None:
    engine = _engine_in_pieces(manager, piece_blocks=3)
    engine.traffic.is_quick = False
    engine.submit(prompt_of(5), 40)
    engine.step()
    prompt = prompt_of(81, seed=1)
    engine.traffic.remember(prompt, HOST)
    request = engine.submit(prompt)
    num_hashed, num_taken = [0], [0]
    while request.prefetch.load is None:
        engine.traffic.answer_all()
        engine.step()
        num_hashed.append(len(request.blocks.hashes))
        num_taken.append(len(request.blocks.ids))

    assert max(after - before for before, after in itertools.pairwise(num_hashed)) == 3
    assert max(after - before for before, after in itertools.pairwise(num_taken)) == 12
    assert request.prefetch.load.num_blocks == 20
    engine.run()
    assert _tokens_loaded(request) == 80


@every_manager
@pytest.mark.parametrize("num_known", [0, 1, 2, 5, 6, 7, 19, 20])
def test_a_match_in_pieces_ends_as_one_of_the_whole_prompt_does(manager: BlockManagerName, num_known: int) -> None:
    found = []
    for piece_blocks in (4, 256):
        engine = _engine_in_pieces(manager, piece_blocks)
        prompt = prompt_of(81)
        engine.traffic.remember(prompt, HOST, 0, num_known)
        request = engine.submit(prompt)
        engine.run()
        found.append((request.prefetch.ending, request.prefetch.history.loaded_tokens, request.tokens))

    assert found[0] == found[1]


@every_manager
def test_beside_a_running_request_pieces_are_looked_for_as_long_as_the_step_allows(manager: BlockManagerName) -> None:
    engine = _engine_in_pieces(manager)
    engine.submit(prompt_of(5), 40)
    engine.step()
    prompt = prompt_of(81, seed=1)
    engine.traffic.remember(prompt, HOST)
    request = engine.submit(prompt)
    engine.step()  # the first piece
    assert request.prefetch.load is not None
    assert len(request.blocks.hashes) == 4
    engine.now += 10.0
    engine.step()
    assert len(request.blocks.hashes) == 12, "one piece: that step was long, but the one before was not"
    engine.now += 10.0  # half of it is more than all others take
    engine.step()

    assert len(request.blocks.hashes) == 20
    assert sum(load.num_blocks for load in (request.prefetch.load, *request.prefetch.next_loads)) == 20
    engine.run()
    assert _tokens_loaded(request) == 80


def test_who_waits_for_room_for_its_load_gets_it_before_many_others_are_looked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Though nothing can be computed: of others that no tier has, each would be hashed as a whole."""
    engine = _engine_in_pieces("naive", num_blocks=512)
    running, request = _running_and_growing(engine)
    engine.traffic.is_quick = True
    engine.abort(running)
    for number in range(20):
        engine.submit(prompt_of(17, seed=number + 2))
    matched = _slow_matches(engine, 0.004, monkeypatch)
    while request.prefetch.load is None:
        engine.step()

    assert len(matched) <= 2
    engine.run()


@pytest.mark.parametrize(("is_quick", "has_few"), [(True, True), (False, False)])
def test_matches_of_tiers_that_do_not_answer_at_once_say_nothing_of_the_bus(is_quick: bool, has_few: bool) -> None:
    engine = _engine_in_pieces("naive")
    engine.traffic.is_quick = is_quick
    prompt = prompt_of(17)
    engine.traffic.remember(prompt, HOST)
    request = engine.submit(prompt)
    while request.prefetch.load is None:
        engine.traffic.answer_all()
        engine.step()
    engine.step()

    assert engine.transfer._shared.budget.has_few_loads is has_few
    engine.run()


@every_manager
@pytest.mark.parametrize(("num_loads", "num_hashed"), [(1, 12), (2, 12), (3, 8)])
def test_beside_a_running_request_pieces_are_larger_while_few_loads_are_under_way(
    manager: BlockManagerName, num_loads: int, num_hashed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = _engine_in_pieces(manager)
    engine.submit(prompt_of(5), 40)
    engine.step()
    prompt = prompt_of(81, seed=1)
    engine.traffic.remember(prompt, HOST)
    request = engine.submit(prompt)
    engine.step()
    assert len(request.blocks.hashes) == 4
    with monkeypatch.context() as patch:
        patch.setattr(type(engine.traffic), "num_loads", num_loads)
        engine.step()

    assert len(request.blocks.hashes) == num_hashed
    engine.run()
    assert _tokens_loaded(request) == 80


@every_manager
def test_while_nothing_can_be_computed_a_prompt_takes_all_blocks_for_its_load_at_once(
    manager: BlockManagerName,
) -> None:
    """Also behind another that is being loaded, and the next one is looked for as a whole."""
    engine = _engine_in_pieces(manager, num_blocks=128)
    prompts = [prompt_of(81, seed=number) for number in range(3)]
    for prompt in prompts:
        engine.traffic.remember(prompt, HOST)
    first, second, third = [engine.submit(prompt) for prompt in prompts]
    num_blocks: dict[Request, int] = {}
    while third.prefetch.load is None:
        engine.step()
        assert not any(map(_is_growing, (first, second, third)))
        num_blocks |= {one: one.prefetch.load.num_blocks for one in (second, third) if one.prefetch.load is not None}

    assert num_blocks == {second: 20, third: 20}
    engine.run()
    assert all(_tokens_loaded(request) == 80 for request in (first, second, third))


@every_manager
def test_who_waits_for_room_for_its_load_keeps_nobody_from_being_looked_for(manager: BlockManagerName) -> None:
    """It cannot be computed either."""
    engine = _engine_in_pieces(manager, piece_blocks=4)
    running, request = _running_and_growing(engine)

    assert request.prefetch.load is None
    assert request.prefetch.state is PrefetchState.LOADING
    assert running.prefetch.state is not PrefetchState.LOADING
    engine.run()
    assert request.prefetch.state is not PrefetchState.LOADING


@every_manager
def test_a_prompt_that_was_found_in_pieces_while_it_waited_has_room_for_all_of_them(manager: BlockManagerName) -> None:
    """Or waits: it is not admitted for its first piece to compute the others."""
    engine = _engine_in_pieces(manager, num_blocks=40)
    engine.submit(prompt_of(60), 30)
    engine.step()
    prompt = prompt_of(121, seed=1)
    engine.traffic.remember(prompt, HOST)
    request = engine.submit(prompt)
    for _ in range(10):
        engine.step()
    assert request.prefetch.match is not None
    assert len(request.prefetch.match.spans) > 1
    assert request.status is Status.WAITING
    engine.run()

    assert _tokens_loaded(request) == 120
    assert not engine.scheduler.num_preemptions


@every_manager
def test_a_match_of_a_piece_may_end_between_the_poll_and_the_turn_of_its_request(
    manager: BlockManagerName, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody was computing the piece, and gave it up. The rest is computed, for which all its hashes are needed."""
    engine = _engine_in_pieces(manager, piece_blocks=2)
    engine.submit(prompt_of(5), 40)
    engine.run()
    prompt = [*prompt_of(12, seed=1), *prompt_of(38, seed=2)]
    engine.submit(prompt[:12])
    engine.run()
    engine.submit(prompt_of(6, seed=3), 40)
    engine.step()
    match, poll = engine.traffic.match, engine.transfer.poll

    def match_later(first: int, hashes: Sequence[BlockHash], num_more: int = 0) -> TierMatch:
        engine.traffic.is_quick = False
        fetch = match(first, hashes, num_more)
        engine.traffic.is_quick = True
        return fetch

    def poll_and_answer(waiting: Iterable[Prefetch], *, is_idle: bool, taken_in_s: float) -> list[DeviceLease]:
        copied = poll(waiting, is_idle=is_idle, taken_in_s=taken_in_s)
        engine.traffic.answer_all()
        return copied

    monkeypatch.setattr(engine.traffic, "match", match_later)
    monkeypatch.setattr(engine.transfer, "poll", poll_and_answer)
    request = engine.submit(prompt)
    for _ in range(10):
        engine.now += 0.01
        engine.step()
    assert request.was_admitted, "in the step whose poll it did not know of"
    monkeypatch.undo()
    engine.run()
    assert request.status is Status.FINISHED
    assert len(request.blocks.hashes) == len(request.tokens) // 4


@every_manager
@pytest.mark.parametrize("num_steps", range(1, 5))
def test_an_abort_between_the_pieces_leaves_nothing_held(manager: BlockManagerName, num_steps: int) -> None:
    engine = _engine_in_pieces(manager)
    prompt = prompt_of(81)
    engine.traffic.remember(prompt, HOST)
    request = engine.submit(prompt)
    for _ in range(num_steps):
        engine.step()
    engine.abort(request)

    engine.run()
    assert not request.prefetch.next_loads


@every_manager
@pytest.mark.parametrize("num_steps", range(1, 5))
def test_what_is_lost_between_the_pieces_is_computed(manager: BlockManagerName, num_steps: int) -> None:
    engine = _engine_in_pieces(manager)
    prompt = prompt_of(81)
    engine.traffic.remember(prompt, HOST)
    request = engine.submit(prompt)
    for _ in range(num_steps):
        engine.step()
    engine.traffic.lose_loads()
    engine.traffic.forget(HOST, 100)

    engine.run()
    assert request.prefetch.ending is not None
    assert request.prefetch.ending.reason is MatchEnd.LOST
    assert _tokens_loaded(request) < 80


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

    assert _tokens_loaded(request) == 20
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


# --- early start ----------------------------------------


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
