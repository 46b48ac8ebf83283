"""Whatever tiers are below the device, the tokens are those of an engine without any; and hits are really theirs.

`make test` runs a selection in which every two settings meet; `make soak` runs them all.
"""

from __future__ import annotations

import itertools
import logging
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvtier import LLM, SamplingParams
from kvtier.engine.answer import RequestOutput
from kvtier.engine.client import EngineClient
from kvtier.engine.schedule.request import Status
from kvtier.latency_guard import LatencyGuard
from kvtier.testing.tiny_models import save_tiny_model
from tests.support.engine_building import MANAGERS
from tests.support.tiered_engines import (
    BLOCK_BYTES,
    BLOCK_TOKENS,
    GREEDY,
    LONGEST_PROMPT,
    MAX_TOKENS,
    TIERS,
    Question,
    Tiers,
    answers,
    ask,
    assert_nothing_held,
    assert_same_answers,
    cached,
    cached_by_tier,
    cold,
    full_blocks,
    num_given_up,
    open_engine,
    questions,
    settled,
    tiers,
    tokens,
)

torch.set_num_threads(1)

Combination = tuple[str, str, str, int, str, str]

SCHEDULES = ("sync", "async-2")
CHUNKS = (24, 4096)
ROOMS = ("plenty", "tiny")
DECISIONS = ("always", "measured")
ALL: list[Combination] = list(itertools.product(TIERS, MANAGERS, SCHEDULES, CHUNKS, ROOMS, DECISIONS))
CACHELESS = ("naive", "disable_prefix_caching")


def pairwise_selection(several: list[Combination]) -> Iterator[Combination]:
    """A few of them in which every pair of settings of two kinds occurs, the most useful first."""
    left = {pair for one in several for pair in _pairs_of(one)}
    while left:
        best = max(several, key=lambda one: len(left & _pairs_of(one)))
        left -= _pairs_of(best)
        yield best


def _pairs_of(one: Combination) -> set[tuple[tuple[int, object], ...]]:
    return set(itertools.combinations(enumerate(one), 2))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_tiny_model(path, "qwen3")
    return path


@pytest.fixture(scope="module")
def expected(model: Path) -> list[RequestOutput]:
    return cold(model, questions())


@pytest.fixture(autouse=True)
def no_errors_in_the_log(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """A thread of the tiers that fails says so in the log, and nowhere else."""
    caplog.set_level(logging.ERROR, logger="kvtier")
    yield
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    caplog.clear()
    assert said == []


def _settings(combination: Combination) -> dict[str, Any]:
    _, manager, schedule, chunk, room, decision = combination
    longest = -(-(LONGEST_PROMPT + MAX_TOKENS) // BLOCK_TOKENS) + 2
    return {
        "block_manager": manager,
        "schedule": schedule,
        "max_num_batched_tokens": chunk,
        "kv_cache_space": (longest if room == "tiny" else 512) * BLOCK_BYTES,
        "always_load": decision == "always",
    }


def _check(model: Path, expected: list[RequestOutput], combination: Combination) -> None:
    kind, manager, _, _, room, decision = combination
    asked = questions()
    settings = _settings(combination)
    with tiers(kind) as below:
        with open_engine(model, **settings, **below.settings) as llm:
            assert_same_answers(ask(llm, asked), expected)
            settled(llm)

            again = ask(llm, asked)

            assert_same_answers(again, expected)
            if decision == "always" and manager in CACHELESS and room == "plenty":
                for _ in range(5):  # what the tier refused or failed at, as on a busy machine, is stored again
                    if all(sum(cached(one.outputs[0]).values()) == full_blocks(one.prompt_token_ids) for one in again):
                        break
                    assert num_given_up(llm), "blocks were computed again, and nothing was given up"
                    settled(llm)
                    again = ask(llm, asked)
                else:
                    pytest.fail("some blocks are computed every time")
                assert cached_by_tier(again).keys() <= {below.first, "server" if kind == "disk" else below.first}
            if room == "tiny":
                assert llm.engine.scheduler.num_preemptions > 0, "the pool was not tiny enough"
            assert_nothing_held(llm)
            below.assert_nothing_held()
        if below.server is not None:
            with open_engine(model, **settings, **below.settings) as llm:
                [first] = ask(llm, asked[:1])  # alone: another may be computed while this one is looked for
                afterwards = ask(llm, asked)

                assert_same_answers([first], expected[:1])
                assert_same_answers(afterwards, expected)
                if decision == "always":
                    assert cached(first.outputs[0]) == {below.far: full_blocks(first.prompt_token_ids)}
                assert_nothing_held(llm)
            below.assert_nothing_held()


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("combination", list(pairwise_selection(ALL)), ids=str)
def test_a_selection_gives_the_tokens_of_an_engine_without_tiers(
    model: Path, expected: list[RequestOutput], combination: Combination
) -> None:
    _check(model, expected, combination)


@pytest.mark.soak
@pytest.mark.parametrize("combination", ALL, ids=str)
def test_every_combination_gives_the_tokens_of_an_engine_without_tiers(
    model: Path, expected: list[RequestOutput], combination: Combination
) -> None:
    _check(model, expected, combination)


@pytest.mark.parametrize(("kind", "schedule"), list(zip(TIERS, itertools.cycle(SCHEDULES), strict=False)))
def test_a_request_that_was_preempted_comes_back_from_the_tiers(model: Path, kind: str, schedule: str) -> None:
    """Without a cache on the device, a preempted request finds its own blocks where they were swapped out to."""
    rounds = [[Question(tokens(seed, 100)) for seed in range(first, first + 6)] for first in range(0, 60, 6)]
    with tiers(kind) as below:
        with open_engine(
            model, block_manager="naive", schedule=schedule, kv_cache_space=22 * BLOCK_BYTES, **below.settings
        ) as llm:
            for asked in rounds:  # where tiers answer slowly, one request may end before the next ones begin
                assert_same_answers(ask(llm, asked), cold(model, asked))
                if llm.engine.scheduler.num_preemptions:
                    break
            assert llm.engine.scheduler.num_preemptions > 0
            assert_nothing_held(llm)
            traffic = llm.engine.transfer.traffic
            assert traffic is not None
            assert traffic.hierarchy.metrics.value(traffic.hierarchy.metrics.loaded_bytes) > 0, (
                "preempted requests computed all again"
            )
        below.assert_nothing_held()


def test_what_a_preempted_request_loads_back_does_not_count_as_cached_before(model: Path) -> None:
    asked = [Question(tokens(seed, 100)) for seed in range(6)]
    with tiers("host") as below:
        with open_engine(model, block_manager="naive", kv_cache_space=22 * BLOCK_BYTES, **below.settings) as llm:
            outputs = ask(llm, asked)
            assert llm.engine.scheduler.num_preemptions > 0
            for output in outputs:
                assert cached(output.outputs[0]) == {}, llm.engine.explain(output.request_id).sentence()


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize("kind", TIERS)
def test_a_tier_that_is_far_too_small_changes_nothing(model: Path, expected: list[RequestOutput], kind: str) -> None:
    with tiers(kind, host_bytes=5 * BLOCK_BYTES, memory="1MiB", disk="2MiB") as below:
        with open_engine(model, kv_cache_space=64 * BLOCK_BYTES, **below.settings) as llm:
            for seed in range(4):
                assert answers(ask(llm, questions())) == answers(expected)
                ask(llm, questions(seed + 50))
            assert_nothing_held(llm)
        below.assert_nothing_held()


def test_of_a_prompt_that_no_tier_can_keep_whole_the_beginning_is_kept(model: Path) -> None:
    """Its end would evict it, and nothing would be found again."""
    asked = [Question(tokens(1, LONGEST_PROMPT))]
    with tiers("host", host_bytes=8 * BLOCK_BYTES) as below:
        with open_engine(model, block_manager="naive", max_num_batched_tokens=32, **below.settings) as llm:
            for _ in range(2):
                ask(llm, asked)
                settled(llm)
            [again] = ask(llm, asked)
            assert_nothing_held(llm)
    assert answers([again]) == answers(cold(model, asked))
    assert cached(again.outputs[0]) == {"host": 7 * BLOCK_TOKENS}


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(("kind", "manager"), list(zip(TIERS, itertools.cycle(MANAGERS), strict=False)))
def test_requests_aborted_at_any_step_leave_nothing_behind(
    model: Path, expected: list[RequestOutput], kind: str, manager: str
) -> None:
    """While they match, load, compute or store: step by step through a request's life."""
    _abort_at_any_step(model, expected, kind, manager)


@pytest.mark.soak
@pytest.mark.parametrize("kind", TIERS)
@pytest.mark.parametrize("manager", MANAGERS)
def test_requests_aborted_at_any_step_leave_nothing_behind_whatever_the_manager(
    model: Path, expected: list[RequestOutput], kind: str, manager: str
) -> None:
    _abort_at_any_step(model, expected, kind, manager)


def _abort_at_any_step(model: Path, expected: list[RequestOutput], kind: str, manager: str) -> None:
    asked = questions()
    with tiers(kind) as below:
        with open_engine(model, block_manager=manager, max_num_batched_tokens=64, **below.settings) as llm:
            engine = llm.engine
            for num_steps in (*range(12), 20, 30):
                if num_steps % 4 == 0:
                    _forget_all(below, llm)
                for number, one in enumerate(asked):
                    engine.add(f"{num_steps}-{number}", one.prompt, one.params)
                for _ in range(num_steps):
                    engine.step()
                for number in range(len(asked)):
                    engine.abort(f"{num_steps}-{number}")
                    engine.forget(f"{num_steps}-{number}")
                while engine.has_requests:
                    engine.step()
            assert_same_answers(ask(llm, asked), expected)
            assert_nothing_held(llm)
        below.assert_nothing_held()


def _forget_all(below: Tiers, llm: LLM) -> None:
    """The tiers are empty: what comes next is computed and stored again."""
    settled(llm)
    traffic = llm.engine.transfer.traffic
    assert traffic is not None
    for guard in traffic.hierarchy.guards:
        guard.tier.drop()


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("kind", ["host", "unix", "tcp", "disk"])
def test_streams_that_come_and_go_leave_nothing_behind(model: Path, expected: list[RequestOutput], kind: str) -> None:
    asked = questions()
    with tiers(kind) as below:
        with open_engine(model, kv_cache_space=40 * BLOCK_BYTES, **below.settings) as llm:
            with EngineClient(llm.engine) as client:
                for round_ in range(10):
                    streams = [client.submit(one.prompt, one.params) for one in asked]
                    for number, stream in enumerate(streams):
                        if number % 3 == round_ % 3:
                            time.sleep(0.003)
                            stream.abort()
                    for number, stream in enumerate(streams):
                        completions = stream.wait()
                        if number % 3 != round_ % 3:
                            found = [completion.token_ids for completion in completions]
                            assert found == answers(expected)[number]
            assert_nothing_held(llm)
        below.assert_nothing_held()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["host", "unix", "tcp", "disk"])
def test_an_interrupted_call_leaves_an_engine_that_can_be_used(
    model: Path, expected: list[RequestOutput], kind: str
) -> None:
    """Like an interrupt between any two lines of a step: the tiers have no block that was never computed."""
    asked = questions()
    with tiers(kind) as below:
        with open_engine(model, max_num_batched_tokens=64, **below.settings) as llm:
            engine = llm.engine
            for num_steps in range(0, 24, 3):
                for number, one in enumerate(asked):
                    engine.add(f"{num_steps}-{number}", one.prompt, one.params)
                for _ in range(num_steps):
                    engine.step()
                submit = engine.runner.submit
                engine.runner.submit = _interrupted  # type: ignore[method-assign,assignment]
                with pytest.raises(KeyboardInterrupt):
                    _step_for_ever(llm)
                engine.runner.submit = submit  # type: ignore[method-assign]
                for number in range(len(asked)):
                    assert all(
                        request.status is Status.FINISHED for request in engine.requests_of(f"{num_steps}-{number}")
                    )
                    engine.forget(f"{num_steps}-{number}")
                assert_same_answers(ask(llm, asked), expected)
            assert_nothing_held(llm)
        below.assert_nothing_held()


def _step_for_ever(llm: LLM) -> None:
    while True:
        llm.engine.step()


def _interrupted(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("kind", TIERS)
def test_an_engine_closed_with_work_under_way_leaves_nothing_behind(model: Path, kind: str) -> None:
    with tiers(kind) as below:
        for num_steps in range(8):
            with open_engine(model, max_num_batched_tokens=64, **below.settings) as llm:
                for number, one in enumerate(questions(num_steps % 3)):
                    llm.engine.add(f"{number}", one.prompt, one.params)
                for _ in range(num_steps):
                    llm.engine.step()
            below.assert_nothing_held()


@pytest.mark.parametrize("kind", TIERS)
def test_a_request_says_where_its_prompt_came_from(model: Path, kind: str) -> None:
    prompt = tokens(5, 100)
    with tiers(kind) as below:
        with open_engine(model, block_manager="naive", **below.settings) as llm:
            [first] = ask(llm, [Question(prompt)])
            settled(llm)
            below.write_out()
            [second] = ask(llm, [Question(prompt)])

            assert cached(first.outputs[0]) == {}
            assert cached(second.outputs[0]) == {below.first: 96}
            assert llm.engine.explain(first.request_id).reason.value == "never stored"
            explained = llm.engine.explain(second.request_id)
            assert (explained.reason.value, explained.ended_at_tokens) == ("all", 96)
            assert explained.cached_tokens == {"device": 0, below.first: 96}


@pytest.mark.parametrize("manager", ["prefix_caching", "yoco"])
@pytest.mark.parametrize("schedule", ["sync", "async-2"])
def test_of_a_prompt_of_whole_blocks_that_the_device_has_one_token_is_computed_and_nothing_written(
    model: Path, manager: str, schedule: str
) -> None:
    asked = [Question(tokens(8, 5 * BLOCK_TOKENS), SamplingParams(temperature=0.0, max_tokens=1))]
    with open_engine(model, block_manager=manager, schedule=schedule) as llm:
        first = ask(llm, asked)
        blocks = llm.engine.arena.blocks.clone()
        second = ask(llm, asked * 3)

        assert [cached(output.outputs[0]) for output in second] == 3 * [{"device": 5 * BLOCK_TOKENS - 1}]
        assert answers(second) == 3 * answers(first)
        assert torch.equal(llm.engine.arena.blocks, blocks)


def test_blocks_of_an_answer_are_found_too(model: Path) -> None:
    """A conversation goes on: the next prompt begins with the last one and its answer."""
    prompt = tokens(6, 50)
    with tiers("unix") as below:
        with open_engine(model, **below.settings) as llm:
            [first] = ask(llm, [Question(prompt)])
        longer = prompt + first.outputs[0].token_ids + tokens(7, 10)
        with open_engine(model, **below.settings) as llm:
            [second] = ask(llm, [Question(longer)])
        assert cached(second.outputs[0]) == {"server": (50 + MAX_TOKENS - 1) // BLOCK_TOKENS * BLOCK_TOKENS}
        assert answers([second]) == answers(cold(model, [Question(longer)]))


@pytest.mark.soak
@pytest.mark.parametrize("kind", TIERS)
@pytest.mark.parametrize("manager", MANAGERS)
def test_thousands_of_requests_over_little_room_everywhere(model: Path, kind: str, manager: str) -> None:
    asked = [Question(tokens(seed % 7, 100 + seed % 50) + tokens(seed, seed % 40), GREEDY) for seed in range(60)]
    expected = answers(cold(model, asked))
    with tiers(kind, host_bytes=64 * BLOCK_BYTES, memory="2MiB", disk="2MiB") as below:
        for decision in (True, False):
            with open_engine(
                model,
                block_manager=manager,
                always_load=decision,
                kv_cache_space=40 * BLOCK_BYTES,
                max_num_batched_tokens=96,
                **below.settings,
            ) as llm:
                for _ in range(15):
                    assert answers(ask(llm, asked)) == expected
                assert_nothing_held(llm)
            below.assert_nothing_held()


@pytest.mark.parametrize(
    ("kind", "threads", "places"),
    [
        ("host", {"load", "store"}, {"Loader._bring_in_place", "Storer._run"}),
        ("unix", {"match", "load", "store"}, {"Stream.send", "Stream.receive", "Loader._bring_in_place"}),
        ("disk", {"match", "load", "store"}, {"Stream.send", "Stream.receive", "Loader._bring_unit"}),
        ("host+tcp", {"push", "transfer"}, {"Stream.send", "Stream.receive"}),
    ],
)
def test_the_tiers_threads_let_the_engine_hand_out_tokens_first(
    model: Path, monkeypatch: pytest.MonkeyPatch, kind: str, threads: set[str], places: set[str]
) -> None:
    """And never the engine's own, which says when it hands some out."""
    asked: set[str] = set()
    asked_in: set[str] = set()
    handed_out: set[str] = set()

    def let_pass(self: LatencyGuard) -> None:
        asked.add(threading.current_thread().name.split("_")[0].removeprefix("kvtier-"))
        asked_in.add(sys._getframe(2).f_code.co_qualname)

    def note_handed_out(self: LatencyGuard) -> None:
        handed_out.add(threading.current_thread().name)

    monkeypatch.setattr(LatencyGuard, "let_pass", let_pass)
    monkeypatch.setattr(LatencyGuard, "note_handed_out", note_handed_out)
    with tiers(kind) as below, open_engine(model, block_manager="disable_prefix_caching", **below.settings) as llm:
        ask(llm, questions()[:2])
        settled(llm)
        ask(llm, questions()[:2])

    assert threads <= asked
    assert places <= asked_in
    assert threading.current_thread().name not in asked
    assert handed_out == {threading.current_thread().name}
