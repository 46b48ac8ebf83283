"""Requests that vLLM preempts for want of pages, or that are given up: nothing wrong is stored or loaded."""

from __future__ import annotations

from kvtier.testing.servers import ServerProcess
from tests.compat.vllm.engines import (
    answers_without_cache,
    ask,
    ask_and_abort,
    ask_one,
    counter,
    engine,
    forget_prefixes,
    model_folder,
    num_held,
    tokens_of,
    wait_until,
)

_PROMPTS = [tokens_of(180 + 8 * number, seed=1 + number) for number in range(5)]
_FEW_PAGES = {"num_gpu_blocks_override": 24, "max_model_len": 512}
"""For little more than two of the prompts with their answers."""
_MAX_TOKENS = 120


def test_preempted_requests_are_answered_as_without_the_plug_in(server: ServerProcess) -> None:
    expected = answers_without_cache(model_folder(), _PROMPTS, max_tokens=_MAX_TOKENS)

    with engine(model_folder(), server.unix, **_FEW_PAGES) as llm:
        rounds = []
        for _ in range(3):
            rounds.append([answer.tokens for answer in ask(llm, _PROMPTS, max_tokens=_MAX_TOKENS)])
            forget_prefixes(llm)
        num_preemptions = counter(llm, "vllm:num_preemptions")

    assert num_preemptions > 0
    assert rounds == [expected] * 3


def test_aborted_requests_change_no_later_answer(server: ServerProcess) -> None:
    expected = answers_without_cache(model_folder(), _PROMPTS)

    with engine(model_folder(), server.unix, **_FEW_PAGES) as llm:
        for num_steps in (0, 1, 2, 3, 5, 20, 1, 0):
            ask_and_abort(llm, _PROMPTS, num_steps=num_steps)
            forget_prefixes(llm)
            answers = ask(llm, _PROMPTS[:3])
            assert [answer.tokens for answer in answers] == expected[:3]
            forget_prefixes(llm)
        answers = [ask_one(llm, prompt) for prompt in _PROMPTS]

    assert [answer.tokens for answer in answers] == expected


def test_pages_that_are_evicted_come_back_from_the_server(server: ServerProcess) -> None:
    """The prompts together do not fit into vLLM's pages, so each one evicts the pages of those before it."""
    expected = answers_without_cache(model_folder(), _PROMPTS)

    with engine(model_folder(), server.unix, **_FEW_PAGES) as llm:
        for prompt in _PROMPTS:
            ask_one(llm, prompt)
        answers = [ask_one(llm, prompt) for prompt in _PROMPTS]

    assert [answer.tokens for answer in answers] == expected
    assert [answer.num_cached for answer in answers] == [(len(prompt) - 1) // 32 * 32 for prompt in _PROMPTS]


def test_no_lease_is_left_when_all_requests_are_gone(server: ServerProcess) -> None:
    with engine(model_folder(), server.unix, **_FEW_PAGES) as llm:
        ask(llm, _PROMPTS)
        for num_steps in (0, 1, 2):
            forget_prefixes(llm)
            ask_and_abort(llm, _PROMPTS, num_steps=num_steps)

        def is_given_back() -> bool:
            llm.llm_engine.step()  # as with pages, a step tells that a load is over whose request was given up
            return num_held(server.unix) == 0

        wait_until(is_given_back, "the leases given back")
