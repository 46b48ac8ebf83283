"""What the block managers share: each block is computed once, and `yoco` computes one token of a repeated prompt."""

from __future__ import annotations

import pytest

from kvtier.engine.sampling_params import SamplingParams
from kvtier.engine.schedule.block_manager import BlockManagerName, make_block_manager
from kvtier.engine.schedule.request import Request
from kvtier.engine.schedule.yoco_blocks import YocoBlocks
from tests.support.engine_building import (
    CACHING_MANAGERS,
    MANAGERS,
    NAMESPACE,
    SCORED,
    SimulatedEngine,
    checksums,
    endless_prompt,
    prompt_of,
)

BLOCK_TOKENS = 4
every_manager = pytest.mark.parametrize("manager", MANAGERS)
every_caching_manager = pytest.mark.parametrize("manager", CACHING_MANAGERS)
every_chunk = pytest.mark.parametrize("chunk", [1, 2, 3, 4, 5, 7, 8, 11, 1000])
every_length = pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 7, 8, 9, 11, 12, 13, 16, 17, 23])


def request_of(prompt: list[int]) -> Request:
    return Request("request", prompt, SamplingParams(), max_tokens=1)


# --- without a cache --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("manager", ["naive", "disable_prefix_caching"])
def test_managers_without_a_cache_compute_every_token(manager: BlockManagerName) -> None:
    engine = SimulatedEngine(manager)
    requests = [engine.submit(prompt_of(13)) for _ in range(3)]

    engine.run()

    assert [engine.num_computed(request) for request in requests] == [13, 13, 13]
    assert [request.cached_tokens for request in requests] == [0, 0, 0]


@pytest.mark.parametrize("manager", ["naive", "disable_prefix_caching"])
def test_blocks_that_are_free_for_longest_are_taken_first(manager: BlockManagerName) -> None:
    """Others may still be in use by steps that are with the device."""
    blocks = make_block_manager(manager, 8, BLOCK_TOKENS, NAMESPACE)
    first, second, third = (request_of(prompt_of(12)) for _ in range(3))
    for request in (first, second):
        assert blocks.grow(request, 12)
    blocks.free(first)
    assert blocks.grow(third, 12)

    assert second.blocks.ids == [3, 4, 5]
    assert third.blocks.ids == [6, 7, 0]


def test_hashing_alone_hashes_every_full_block() -> None:
    engine = SimulatedEngine("disable_prefix_caching")
    request = engine.submit(prompt_of(13))

    engine.run()

    assert len(request.blocks.hashes) == 3


# --- prompts that are scored ------------------------------------------------------------------------------------------


@every_manager
@pytest.mark.parametrize("chunk", [1, 3, 8, 1000])
def test_a_prompt_that_is_scored_is_computed_whole_beside_the_same_one(manager: BlockManagerName, chunk: int) -> None:
    prompt = endless_prompt(17, 2)
    engine = SimulatedEngine(manager, chunk=chunk)
    engine.submit(prompt, 2)
    engine.run()
    beside = [engine.submit(prompt, 2), engine.submit(prompt, 2, params=SCORED), engine.submit(prompt, 2)]

    engine.run()

    assert engine.num_computed(beside[1]) == 18
    assert beside[1].cached_tokens == 0
    if manager in CACHING_MANAGERS:
        assert all(one.cached_tokens >= 16 for one in (beside[0], beside[2]))


@every_caching_manager
def test_the_blocks_of_a_scored_prompt_are_cached(manager: BlockManagerName) -> None:
    engine = SimulatedEngine(manager)
    engine.submit(prompt_of(13), params=SCORED)
    engine.run()

    later = engine.submit(prompt_of(13))
    engine.run()

    assert later.cached_tokens == 12


# --- prefix caching ---------------------------------------------------------------------------------------------------


@pytest.mark.sampled(together=2)
@every_length
@every_chunk
def test_prefix_caching_computes_only_the_tail_of_a_finished_prompt(length: int, chunk: int) -> None:
    engine = SimulatedEngine("prefix_caching", chunk=chunk)
    engine.submit(prompt_of(length))
    engine.run()

    again = engine.submit(prompt_of(length))
    engine.run()

    cached = min(length // BLOCK_TOKENS * BLOCK_TOKENS, length - 1)
    assert again.cached_tokens == cached
    assert engine.num_computed(again) == length - cached


@pytest.mark.sampled(together=2)
@every_length
@every_chunk
@pytest.mark.parametrize("num_steps_ahead", [0, 2])
def test_prefix_caching_computes_only_the_tail_beside_the_first_request(
    length: int, chunk: int, num_steps_ahead: int
) -> None:
    engine = SimulatedEngine("prefix_caching", chunk=chunk, num_steps_ahead=num_steps_ahead)
    engine.submit(prompt_of(length))
    again = engine.submit(prompt_of(length + 3))

    engine.run()

    shared = min(length // BLOCK_TOKENS, (length + 2) // BLOCK_TOKENS) * BLOCK_TOKENS
    assert engine.num_computed(again) == length + 3 - shared
    assert again.cached_tokens == shared


def test_prompts_that_differ_in_the_first_token_share_nothing() -> None:
    engine = SimulatedEngine("prefix_caching")
    engine.submit([1, *prompt_of(12)])
    other = engine.submit([2, *prompt_of(12)])

    engine.run()

    assert engine.num_computed(other) == 13


@pytest.mark.sampled(together=2)
@every_caching_manager
@pytest.mark.parametrize("num_steps_ahead", [0, 1, 2, 3])
@every_chunk
def test_every_full_block_of_many_overlapping_prompts_is_computed_once(
    manager: BlockManagerName, num_steps_ahead: int, chunk: int
) -> None:
    engine = SimulatedEngine(manager, num_blocks=400, chunk=chunk, num_steps_ahead=num_steps_ahead)
    trunk = prompt_of(30)
    prompts = [trunk[:stem] + prompt_of(tail, seed=stem) for stem in (5, 8, 17, 30) for tail in (1, 6, 9, 14)]
    for prompt in prompts:
        engine.submit(prompt)

    engine.run()

    once = set()
    for prompt in prompts:
        once |= ends_of_full_blocks(prompt)
    assert {engine.device.num_times_computed[place] for place in once} == {1}


def ends_of_full_blocks(prompt: list[int]) -> set[tuple[int, int]]:
    """The last position of each full block with a token after it, as the device counts them."""
    return set(list(enumerate(checksums(prompt)))[BLOCK_TOKENS - 1 : -1 : BLOCK_TOKENS])


@every_caching_manager
def test_blocks_of_an_answer_serve_the_next_turn(manager: BlockManagerName) -> None:
    engine = SimulatedEngine(manager)
    first = engine.submit(endless_prompt(9, 12), 12)
    engine.run()

    follow_up = engine.submit([*first.tokens, 7, 8, 9])
    engine.run()

    known = 9 + 12 - 1
    reusable = known if manager == "yoco" else known // BLOCK_TOKENS * BLOCK_TOKENS
    assert follow_up.cached_tokens == reusable
    assert engine.num_computed(follow_up) == 24 - reusable


def test_cached_tokens_count_what_the_request_did_not_compute() -> None:
    """Also what it found only after it had begun: here block 0 was evicted, and block 1 was not."""
    engine = SimulatedEngine("prefix_caching")
    engine.submit(prompt_of(13))
    engine.run()
    manager = engine.block_manager
    hashes = engine.requests[0].blocks.hashes
    manager._pool.drop(manager._index, hashes[:1])

    again = engine.submit(prompt_of(13))
    engine.run()

    assert engine.num_computed(again) == 4 + 1
    assert again.cached_tokens == 8


# --- yoco -------------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(together=2)
@every_length
@every_chunk
def test_yoco_computes_one_token_of_a_prompt_that_is_done(length: int, chunk: int) -> None:
    engine = SimulatedEngine("yoco", chunk=chunk)
    engine.submit(prompt_of(length))
    engine.run()

    again = engine.submit(prompt_of(length))
    engine.run()

    assert engine.num_computed(again) == 1
    assert again.cached_tokens == length - 1


@pytest.mark.sampled(together=2)
@every_length
@every_chunk
@pytest.mark.parametrize("num_steps_ahead", [0, 2])
def test_yoco_computes_one_token_of_a_prompt_that_is_under_way(length: int, chunk: int, num_steps_ahead: int) -> None:
    engine = SimulatedEngine("yoco", chunk=chunk, num_steps_ahead=num_steps_ahead)
    first = engine.submit(endless_prompt(length, 40), 40)
    prompt = first.tokens[:length]

    together = engine.submit(prompt)
    for _ in range(length + 4):
        engine.step()
    later = engine.submit(prompt)
    engine.run()

    assert engine.num_computed(together) == 1
    assert engine.num_computed(later) == 1


@every_length
def test_yoco_computes_one_token_beside_the_first_when_the_prefix_was_cached(length: int) -> None:
    engine = SimulatedEngine("yoco")
    engine.submit(prompt_of(8) + prompt_of(3, seed=1))
    engine.run()
    prompt = prompt_of(8) + prompt_of(length, seed=2)
    engine.submit(prompt)

    again = engine.submit(prompt)
    engine.run()

    assert engine.num_computed(again) == 1


@every_length
def test_yoco_computes_one_token_of_the_beginning_of_a_known_prompt(length: int) -> None:
    engine = SimulatedEngine("yoco")
    engine.submit(prompt_of(30))
    engine.run()

    beginning = engine.submit(prompt_of(length))
    engine.run()

    assert engine.num_computed(beginning) == 1


def test_yoco_goes_on_where_two_prompts_part_within_a_block() -> None:
    engine = SimulatedEngine("yoco", block_tokens=8)
    engine.submit(prompt_of(15))
    engine.run()

    other = engine.submit([*prompt_of(14), 2000, 2001, 2002])
    engine.run()

    assert engine.num_computed(other) == 3


@pytest.mark.parametrize("num_shared", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("num_prefix", [0, 16], ids=["first block", "behind a prefix"])
def test_yoco_computes_no_token_again_however_few_a_block_shares(num_shared: int, num_prefix: int) -> None:
    engine = SimulatedEngine("yoco", block_tokens=8)
    stem = prompt_of(num_prefix + num_shared)
    first = engine.submit([*stem, *range(3000, 3012)])
    engine.run()

    request = engine.submit([*stem, *range(4000, 4012)])
    engine.run()

    assert engine.num_computed(first) == len(stem) + 12
    assert engine.num_computed(request) == 12


def test_yoco_takes_the_continuation_that_agrees_longest() -> None:
    engine = SimulatedEngine("yoco", block_tokens=8)
    stem = prompt_of(16)
    for tail in ([1, 2, 3, 4, 9, 9], [1, 2, 3, 4, 5, 9], [1, 8, 8, 8]):
        engine.submit([*stem, *tail, 5])
    engine.run()

    request = engine.submit([*stem, 1, 2, 3, 4, 5, 6, 7])
    engine.run()

    assert engine.num_computed(request) == 2


def test_a_block_that_is_copied_from_is_not_evicted_for_the_copy() -> None:
    engine = SimulatedEngine("yoco", num_blocks=4, block_tokens=8)
    engine.submit(prompt_of(15))
    engine.run()

    again = engine.submit([*prompt_of(14), 3000, 3001, 3002, 3003])
    engine.run()

    assert engine.num_computed(again) == 4


# --- n answers --------------------------------------------------------------------------------------------------------


@every_caching_manager
def test_answers_to_one_prompt_share_its_full_blocks(manager: BlockManagerName) -> None:
    engine = SimulatedEngine(manager)
    answers = [engine.submit(endless_prompt(14, 8), 8) for _ in range(4)]
    for _ in range(3):
        engine.step()

    shared = {tuple(answer.blocks.ids[:3]) for answer in answers}

    assert len(shared) == 1
    assert len({answer.blocks.ids[3] for answer in answers}) == 4
    engine.run()


# --- the managers themselves ------------------------------------------------------------------------------------------


@every_caching_manager
def test_a_block_under_way_is_waited_for_until_its_producer_leaves(manager: BlockManagerName) -> None:
    blocks = make_block_manager(manager, 16, BLOCK_TOKENS, NAMESPACE)
    producer, follower = request_of(prompt_of(9)), request_of(prompt_of(9))
    assert blocks.extend(producer)
    assert blocks.grow(producer, 9)
    assert not blocks.extend(follower)

    blocks.free(producer)

    assert blocks.extend(follower)
    assert follower.num_computed == 0
    assert blocks.num_free_blocks == 16


@every_caching_manager
def test_a_block_under_way_is_there_once_the_step_was_handed_over(manager: BlockManagerName) -> None:
    blocks = make_block_manager(manager, 16, BLOCK_TOKENS, NAMESPACE)
    producer, follower = request_of(prompt_of(9)), request_of(prompt_of(9))
    blocks.extend(producer)
    blocks.grow(producer, 9)
    producer.num_computed = 9
    assert not blocks.extend(follower)

    blocks.note_computed(producer)
    blocks.note_submitted()

    assert blocks.extend(follower)
    assert follower.num_computed == 8
    assert follower.blocks.ids[:2] == producer.blocks.ids[:2]


@every_manager
def test_growing_without_room_changes_nothing(manager: BlockManagerName) -> None:
    blocks = make_block_manager(manager, 3, BLOCK_TOKENS, NAMESPACE)
    request = request_of(prompt_of(20))
    blocks.extend(request)
    assert blocks.grow(request, 5)
    ids = list(request.blocks.ids)

    assert not blocks.grow(request, 13)

    assert request.blocks.ids == ids
    assert blocks.num_free_blocks == 1


@every_caching_manager
def test_shared_blocks_outlive_the_request_that_computed_them(manager: BlockManagerName) -> None:
    engine = SimulatedEngine(manager, num_blocks=8)
    engine.submit(prompt_of(9), 1)
    sharer = engine.submit(endless_prompt(9, 6, stem=prompt_of(8)), 6)
    engine.step()
    engine.step()
    engine.submit(prompt_of(14, seed=7), 2)

    engine.run()

    assert sharer.num_outputs == 6


def test_a_copy_that_was_never_made_is_shown_to_nobody() -> None:
    """A block is preempted after it was promised a copy of a whole block, and before the step."""
    blocks = YocoBlocks(6, 4, NAMESPACE)
    prompt = list(range(1, 9))

    def request(name: str, tokens: list[int]) -> Request:
        return Request(name, tokens, SamplingParams(), max_tokens=9)

    def compute(one: Request) -> None:
        assert blocks.extend(one)
        assert blocks.grow(one, len(one.tokens))
        one.num_computed = len(one.tokens)
        blocks.take_copies()
        blocks.note_computed(one)
        blocks.note_submitted()

    first = request("first", prompt)
    compute(first)
    blocks.free(first)
    twin = request("twin", prompt[:-1])
    compute(twin)
    twin.tokens.append(prompt[-1])
    compute(twin)  # has a block of its own with the same tokens as the cached one
    large = request("large", [77] * 16)
    compute(large)  # for which the cached one is evicted
    blocks.free(large)
    longer = request("longer", prompt + [9] * 4)
    assert blocks.extend(longer)
    blocks.take_copies()
    blocks.note_computed(longer)
    blocks.free(longer)  # preempted: the copy is not made

    last = request("last", prompt + [9] * 4)
    assert blocks.extend(last)
    assert last.num_computed <= 7, "the second block of the prompt is in nobody's cache"
