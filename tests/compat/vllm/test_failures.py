"""A cache server that is dead, hung, restarted or holds damaged bytes changes latency, never an answer."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm import LLM

from kvtier.testing.servers import ServerProcess, cache_server
from tests.compat.vllm.engines import (
    add_noise,
    answers_without_cache,
    ask,
    ask_one,
    begin,
    counter,
    drive,
    engine,
    forget_prefixes,
    model_folder,
    tokens_of,
    wait_until,
    wait_until_stored,
)
from tests.support.lying_proxy import LIES, LyingProxy

_PROMPTS = [tokens_of(300, seed=number) for number in range(1, 5)]
_TIMEOUT_S = 1.0
"""The longest time of a request on this machine, without the cache."""

_LONG_S = 500.0
"""Longer than answers take on the busiest machine, and shorter than a test may take."""

_SETTINGS: dict[str, object] = {"timeout_s": _TIMEOUT_S, "match_timeout_s": 0.25}
"""A match is waited for as long as users wait for it unless they say otherwise."""


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return answers_without_cache(model_folder(), _PROMPTS)


def _assert_answers(llm: LLM, expected: list[list[int]]) -> None:
    for prompt, tokens in zip(_PROMPTS, expected, strict=True):
        assert ask_one(llm, prompt).tokens == tokens


def test_without_a_server_the_engine_starts_and_answers(tmp_path: Path, expected: list[list[int]]) -> None:
    with engine(model_folder(), f"unix:{tmp_path}/nobody", settings=_SETTINGS) as llm:
        _assert_answers(llm, expected)


def test_a_server_that_comes_after_the_engine_is_used(tmp_path: Path, expected: list[list[int]]) -> None:
    with engine(model_folder(), f"unix:{tmp_path}/kvtier.sock", settings=_SETTINGS) as llm:
        ask_one(llm, _PROMPTS[0])
        with cache_server(folder=tmp_path):

            def hits() -> bool:
                forget_prefixes(llm)
                answer = ask_one(llm, _PROMPTS[0])
                assert answer.tokens == expected[0]
                return answer.num_cached > 0

            wait_until(hits, "a hit")


def test_the_server_killed_while_the_engine_runs(server: ServerProcess, expected: list[list[int]]) -> None:
    with engine(model_folder(), server.unix, settings=_SETTINGS) as llm:
        ask(llm, _PROMPTS[:2])
        wait_until_stored(server.unix, _PROMPTS[1])
        forget_prefixes(llm)
        server.kill()

        _assert_answers(llm, expected)


def test_the_server_hung_while_the_engine_runs(server: ServerProcess, expected: list[list[int]]) -> None:
    with engine(model_folder(), server.unix, settings=_SETTINGS) as llm:
        ask(llm, _PROMPTS[:2])
        wait_until_stored(server.unix, _PROMPTS[1])
        forget_prefixes(llm)
        server.send_signal(signal.SIGSTOP)

        _assert_answers(llm, expected)


def test_the_server_hung_before_the_engine_starts(server: ServerProcess, expected: list[list[int]]) -> None:
    server.send_signal(signal.SIGSTOP)

    with engine(model_folder(), server.unix, settings=_SETTINGS) as llm:
        _assert_answers(llm, expected)


def test_requests_that_come_together_wait_for_a_hung_server_together(
    server: ServerProcess, expected: list[list[int]]
) -> None:
    with engine(model_folder(), server.unix, settings=_SETTINGS) as llm:
        ask_one(llm, tokens_of(40, seed=99))
        server.send_signal(signal.SIGSTOP)
        answers = ask(llm, _PROMPTS)

    assert [answer.tokens for answer in answers] == expected


def test_a_step_is_not_held_by_a_hung_server(server: ServerProcess) -> None:
    """One request is being answered while another waits for the server: the first one's tokens keep coming."""
    with engine(model_folder(), server.unix, settings={"timeout_s": _LONG_S, "match_timeout_s": _LONG_S}) as llm:
        ask_one(llm, _PROMPTS[0])
        begin(llm, "a", _PROMPTS[1], max_tokens=64)
        while not llm.llm_engine.step():
            pass
        server.send_signal(signal.SIGSTOP)
        begin(llm, "b", _PROMPTS[2], max_tokens=64)
        heard: set[str] = set()
        is_answered = False
        while not is_answered:
            outputs = llm.llm_engine.step()
            heard |= {output.request_id for output in outputs}
            is_answered = any(output.finished for output in outputs)
        server.send_signal(signal.SIGCONT)
        drive(llm)

    assert heard == {"a"}, "a step has waited for the server until it gave up"


def test_a_step_is_not_held_by_a_hung_server_when_requests_are_preempted(server: ServerProcess) -> None:
    """Their pages are given away, so what is being saved of them is given up or waited for, but not for long."""
    few_pages = {"num_gpu_blocks_override": 24, "max_model_len": 512}
    with engine(model_folder(), server.unix, settings=_SETTINGS, **few_pages) as llm:
        ask_one(llm, tokens_of(40, seed=99))
        server.send_signal(signal.SIGSTOP)
        for number in range(5):
            begin(llm, str(number), tokens_of(180 + 8 * number, seed=1 + number), max_tokens=120)
        drive(llm)
        num_preemptions = counter(llm, "vllm:num_preemptions")

    assert num_preemptions > 0


def test_a_server_that_hangs_between_match_and_load(server: ServerProcess, expected: list[list[int]]) -> None:
    with engine(model_folder(), server.unix, settings=_SETTINGS) as llm:
        _store_all(llm, server)
        for number, prompt in enumerate(_PROMPTS):
            begin(llm, str(number), prompt)
        time.sleep(0.2)  # the matches are there
        server.send_signal(signal.SIGSTOP)
        driven = drive(llm)

    assert [driven.tokens[str(number)] for number in range(len(_PROMPTS))] == expected


def test_a_request_given_up_while_it_loads_writes_into_nobody_elses_pages(
    server: ServerProcess, expected: list[list[int]]
) -> None:
    few_pages = {"num_gpu_blocks_override": 24, "max_model_len": 512}
    others = [tokens_of(300, seed=20 + number) for number in range(2)]
    others_expected = answers_without_cache(model_folder(), others)
    with engine(model_folder(), server.unix, settings={**_SETTINGS, "timeout_s": 5.0}, **few_pages) as llm:
        _store_all(llm, server)
        for name, prompt in zip("ab", _PROMPTS[:2], strict=True):
            begin(llm, name, prompt)
        time.sleep(0.1)  # the matches are there
        server.send_signal(signal.SIGSTOP)
        llm.llm_engine.step()
        llm.llm_engine.abort_request(["a", "b"])
        for number, prompt in enumerate(others):
            begin(llm, str(number), prompt)
        with _continued_after(server, 0.4):
            driven = drive(llm)
        forget_prefixes(llm)
        again = [ask_one(llm, prompt).tokens for prompt in _PROMPTS]

    assert [driven.tokens[str(number)] for number in range(len(others))] == others_expected
    assert again == expected


@contextlib.contextmanager
def _continued_after(server: ServerProcess, delay_s: float) -> Iterator[None]:
    """The server hangs for `delay_s` of what is done inside."""
    timer = threading.Timer(delay_s, server.send_signal, [signal.SIGCONT])
    timer.start()
    try:
        yield
    finally:
        timer.join()


def test_a_slow_server_changes_no_answer(tmp_path: Path, expected: list[list[int]]) -> None:
    with cache_server(folder=tmp_path, tcp=True) as server, LyingProxy(server.tcp) as proxy:
        settings = {**_SETTINGS, "token_file": str(tmp_path / "token")}
        with engine(model_folder(), proxy.address, settings=settings) as llm:
            _store_all(llm, server)
            proxy.delay_s = 0.2

            _assert_answers(llm, expected)
            forget_prefixes(llm)
            _assert_answers(llm, expected)


def test_a_server_that_answers_with_errors_and_lies_changes_no_answer(
    tmp_path: Path, expected: list[list[int]]
) -> None:
    with cache_server(folder=tmp_path, tcp=True) as server, LyingProxy(server.tcp) as proxy:
        settings = {**_SETTINGS, "token_file": str(tmp_path / "token")}
        with engine(model_folder(), proxy.address, settings=settings) as llm:
            _store_all(llm, server)
            for lie in LIES.values():
                proxy.lie = lie
                assert ask_one(llm, _PROMPTS[0]).tokens == expected[0], lie.__name__
                forget_prefixes(llm)

    assert proxy.num_lies > 0


def test_the_server_restarted_while_the_engine_runs(tmp_path: Path, expected: list[list[int]]) -> None:
    options = ("--folder", str(tmp_path / "cache"), "--disk", "64MiB")
    with cache_server(*options, folder=tmp_path) as first:
        with engine(model_folder(), first.unix, settings=_SETTINGS) as llm:
            ask(llm, _PROMPTS)
            wait_until_stored(first.unix, _PROMPTS[-1])
            first.stop()
            forget_prefixes(llm)
            _assert_answers(llm, expected)
            with cache_server(*options, folder=tmp_path):
                forget_prefixes(llm)
                _assert_answers(llm, expected)

                def hits() -> bool:
                    forget_prefixes(llm)
                    answer = ask_one(llm, _PROMPTS[0])
                    assert answer.tokens == expected[0]
                    return answer.num_cached >= 288

                wait_until(hits, "a hit")


def test_a_server_killed_in_the_middle_of_requests(server: ServerProcess, expected: list[list[int]]) -> None:
    with engine(model_folder(), server.unix, settings=_SETTINGS) as llm:
        _store_all(llm, server)
        for number, prompt in enumerate(_PROMPTS):
            begin(llm, str(number), prompt)
        server.kill()
        driven = drive(llm)

    assert [driven.tokens[str(number)] for number in range(len(_PROMPTS))] == expected


def test_a_server_without_room_changes_no_answer(tmp_path: Path, expected: list[list[int]]) -> None:
    with cache_server(folder=tmp_path, memory="1MiB") as server, engine(model_folder(), server.unix) as llm:
        first = ask(llm, _PROMPTS)
        forget_prefixes(llm)
        second = ask(llm, _PROMPTS)

    assert [answer.tokens for answer in first] == expected
    assert [answer.tokens for answer in second] == expected


def test_noise_in_the_disk_store_is_caught_and_computed_again(tmp_path: Path, expected: list[list[int]]) -> None:
    options = ("--folder", str(tmp_path / "cache"), "--disk", "64MiB")
    with cache_server(*options, folder=tmp_path) as server, engine(model_folder(), server.unix) as llm:
        _store_all(llm, server)
    add_noise(tmp_path / "cache" / "blocks.kvtier")

    with cache_server(*options, folder=tmp_path) as server, engine(model_folder(), server.unix) as llm:
        answers = [ask_one(llm, prompt) for prompt in _PROMPTS]
        for prompt in _PROMPTS:
            wait_until_stored(server.unix, prompt)
        forget_prefixes(llm)
        again = [ask_one(llm, prompt) for prompt in _PROMPTS]

    assert [answer.tokens for answer in answers] == expected
    assert min(answer.num_cached for answer in answers) < 288
    assert [answer.tokens for answer in again] == expected
    assert [answer.num_cached for answer in again] == [288] * len(_PROMPTS)


def test_a_prompt_of_full_pages_with_noise_in_it_is_computed_where_it_is_lost(tmp_path: Path) -> None:
    prompts = [prompt[:288] for prompt in _PROMPTS]
    whole = answers_without_cache(model_folder(), prompts)
    options = ("--folder", str(tmp_path / "cache"), "--disk", "64MiB")
    with (
        cache_server(*options, folder=tmp_path) as server,
        engine(model_folder(), server.unix, settings={"whole_prompts": True}) as llm,
    ):
        ask(llm, prompts)
        for prompt in prompts:
            wait_until_stored(server.unix, prompt, count=288)
    add_noise(tmp_path / "cache" / "blocks.kvtier")

    with (
        cache_server(*options, folder=tmp_path) as server,
        engine(model_folder(), server.unix, settings={"whole_prompts": True}) as llm,
    ):
        answers = [ask_one(llm, prompt) for prompt in prompts]

    assert [answer.tokens for answer in answers] == whole
    assert min(answer.num_cached for answer in answers) < 288


def _store_all(llm: LLM, server: ServerProcess) -> None:
    """Everything is in the server, and nothing in vLLM's own prefix cache."""
    ask(llm, _PROMPTS)
    for prompt in _PROMPTS:
        wait_until_stored(server.unix, prompt)
    forget_prefixes(llm)
