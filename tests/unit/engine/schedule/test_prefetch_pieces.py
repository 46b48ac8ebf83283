"""Long prompts are hashed, matched and loaded in pieces, with simulated tiers."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import pytest

from kvtier.blocks.hashing import BlockHash
from kvtier.engine.schedule.block_manager import BlockManagerName
from kvtier.engine.schedule.request import Request, Status
from kvtier.tiers.explanation import MatchEnd
from kvtier.transfer.device_lease import DeviceLease
from kvtier.transfer.load import Order
from kvtier.transfer.matching import TierMatch
from kvtier.transfer.prefetch import Prefetch
from kvtier.transfer.prefetch_state import PrefetchState
from tests.support.engine_building import prompt_of
from tests.support.prefetch_cases import every_manager, slow_matches, tokens_loaded
from tests.support.simulated_traffic import HOST
from tests.support.tiered_engine import TieredEngine


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
    assert tokens_loaded(request) == 80
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
    assert tokens_loaded(request) == 80


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
    assert tokens_loaded(request) == 80


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
    matched = slow_matches(engine, 0.004, monkeypatch)
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
    assert tokens_loaded(request) == 80


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
    assert all(tokens_loaded(request) == 80 for request in (first, second, third))


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

    assert tokens_loaded(request) == 120
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
    assert tokens_loaded(request) < 80
