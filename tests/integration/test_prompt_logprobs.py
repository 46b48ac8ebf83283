"""How likely prompts are, through the engine: equal to what transformers computes of the same checkpoint."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from kvtier import LLM, SamplingParams
from kvtier.engine.answer import Completion, StreamPiece
from kvtier.engine.client import EngineClient
from kvtier.engine.prompt_token import PromptToken
from kvtier.testing.tiny_models import save_tiny_model
from tests.support.tiered_engines import assert_nothing_held, cached, open_engine, settled, tiers

torch.set_num_threads(1)

PROMPTS = [list(range(40, 90)), [7, 7, 7], [300, 1, 2, *range(100, 133)], [5], list(range(40, 90))]
NUM_TOP = 3
ATOL = 1e-4
SETTINGS: dict[str, dict[str, object]] = {
    "whole prompts": {},
    "chunks": {"max_num_batched_tokens": 8},
    "chunks of one token": {"max_num_batched_tokens": 1},
    "three steps ahead": {"max_num_batched_tokens": 12, "schedule": "async-3"},
    "one request at a time": {"max_num_requests": 1},
    "partial blocks": {"block_manager": "yoco"},
    "no cache": {"block_manager": "naive"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def reference(folder: Path) -> PreTrainedModel:
    return save_tiny_model(folder, "qwen3")


@pytest.fixture(scope="module")
def llm(folder: Path, reference: PreTrainedModel) -> LLM:
    return open_llm(folder)


def open_llm(folder: Path, **settings: object) -> LLM:
    whole: dict[str, Any] = {"device": "cpu", "dtype": "float32", "kv_cache_space": 1 << 20, **settings}
    return LLM(str(folder), **whole)


def score(llm: LLM, prompts: Sequence[Sequence[int]], **settings: object) -> list[Completion]:
    whole: dict[str, Any] = {"temperature": 0.0, "max_tokens": 1, "prompt_logprobs": NUM_TOP, **settings}
    params = SamplingParams(**whole)
    outputs = llm.generate([list(prompt) for prompt in prompts], params, progress=False)
    assert [output.error for output in outputs] == [None] * len(prompts)
    return [output.outputs[0] for output in outputs]


def check(model: PreTrainedModel, prompt: Sequence[int], found: list[PromptToken] | None) -> None:
    """Against transformers' log-probabilities; tokens within `ATOL` of each other may change places."""
    assert found is not None
    assert [token.token_id for token in found] == list(prompt)
    assert found[0] == PromptToken(prompt[0], 0, {})
    with torch.no_grad():
        expected = model(torch.tensor([list(prompt)])).logits[0].log_softmax(-1)
    for position, token in enumerate(found[1:], 1):
        row = expected[position - 1]
        own, least = float(row[token.token_id]), float(row.topk(NUM_TOP).values[-1])
        likeliest = [token_id for token_id in token.logprobs if float(row[token_id]) >= least - ATOL]
        assert len(likeliest) >= NUM_TOP
        assert {*token.logprobs} == {token.token_id, *likeliest}
        assert len(token.logprobs) <= NUM_TOP + 1
        for token_id, logprob in token.logprobs.items():
            assert logprob == pytest.approx(float(row[token_id]), abs=ATOL)
        assert int((row > own + ATOL).sum()) < token.rank <= int((row > own - ATOL).sum()) + 1


@pytest.mark.parametrize("name", SETTINGS)
def test_scores_are_those_of_transformers(folder: Path, reference: PreTrainedModel, name: str) -> None:
    with open_llm(folder, **SETTINGS[name]) as llm:
        answers = score(llm, PROMPTS)

    for prompt, answer in zip(PROMPTS, answers, strict=True):
        check(reference, prompt, answer.prompt_logprobs)


def test_a_prompt_that_is_cached_is_computed_whole_all_the_same(llm: LLM, reference: PreTrainedModel) -> None:
    prompt = list(range(140, 200))
    [plain] = llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=1), progress=False)

    [first] = score(llm, [prompt])
    [again] = score(llm, [prompt])

    assert plain.outputs[0].prompt_logprobs is None
    for answer in (first, again):
        check(reference, prompt, answer.prompt_logprobs)
        assert sum(answer.cached_tokens.values()) == 0
        assert answer.token_ids == plain.outputs[0].token_ids


def test_a_scored_prompt_is_cached_for_others(llm: LLM) -> None:
    prompt = list(range(200, 264))
    [scored] = score(llm, [prompt])

    [plain] = llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=1), progress=False)

    assert plain.outputs[0].cached_tokens["device"] >= 48
    assert plain.outputs[0].token_ids == scored.token_ids


@pytest.mark.parametrize("mode", ["sync", "async-2"])
def test_others_beside_it_get_what_they_get_alone(folder: Path, reference: PreTrainedModel, mode: str) -> None:
    plain = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    scored = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, prompt_logprobs=NUM_TOP)
    prompts = [list(range(start, start + 40)) for start in (0, 60, 120, 180)]
    with open_llm(folder, schedule=mode, max_num_batched_tokens=24) as llm:
        alone = [llm.generate(prompt, plain, progress=False)[0].outputs[0].token_ids for prompt in prompts]
    with open_llm(folder, schedule=mode, max_num_batched_tokens=24) as llm:
        together = llm.generate(prompts, [plain, scored, plain, scored], progress=False)

    assert [output.outputs[0].token_ids for output in together] == alone
    for number in (1, 3):
        check(reference, prompts[number], together[number].outputs[0].prompt_logprobs)


@pytest.mark.parametrize("schedule", ["sync", "async-2"])
def test_a_prompt_that_starts_over_halfway_is_scored_once(
    folder: Path, reference: PreTrainedModel, schedule: str
) -> None:
    growing = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    scored = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=NUM_TOP)
    prompts = [list(range(64)), list(range(100, 170))]
    nine_blocks = 9 * 8192
    with open_llm(folder, schedule=schedule, max_num_batched_tokens=2, kv_cache_space=nine_blocks) as llm:
        outputs = llm.generate(prompts, [growing, scored], progress=False)
        num_preemptions = llm.engine.scheduler.num_preemptions

    assert num_preemptions > 0
    check(reference, prompts[1], outputs[1].outputs[0].prompt_logprobs)


def test_tiers_are_given_a_scored_prompt_and_not_asked_for_it(folder: Path, reference: PreTrainedModel) -> None:
    prompt = list(range(100, 164))
    with tiers("host") as below, open_engine(folder, block_manager="naive", **below.settings) as llm:
        [first] = score(llm, [prompt])
        settled(llm)
        [plain] = llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=1), progress=False)
        [again] = score(llm, [prompt])
        assert_nothing_held(llm)

    assert cached(plain.outputs[0]) == {"host": 63}
    assert plain.outputs[0].token_ids == first.token_ids
    for answer in (first, again):
        check(reference, prompt, answer.prompt_logprobs)
        assert cached(answer) == {}


def test_only_the_first_of_several_answers_has_the_prompt(llm: LLM, reference: PreTrainedModel) -> None:
    params = SamplingParams(n=3, temperature=1.0, seed=1, max_tokens=4, prompt_logprobs=NUM_TOP)

    [output] = llm.generate(PROMPTS[0], params, progress=False)

    check(reference, PROMPTS[0], output.outputs[0].prompt_logprobs)
    assert [answer.prompt_logprobs for answer in output.outputs[1:]] == [None, None]


def test_without_tokens_to_generate_only_the_prompt_is_scored(llm: LLM, reference: PreTrainedModel) -> None:
    [answer] = score(llm, [PROMPTS[2]], max_tokens=0)

    assert (answer.token_ids, answer.text, answer.finish_reason) == ([], "", "length")
    check(reference, PROMPTS[2], answer.prompt_logprobs)


def test_no_alternatives_are_kept_if_none_are_asked_for(llm: LLM) -> None:
    [answer] = score(llm, [PROMPTS[0]], prompt_logprobs=0)

    assert answer.prompt_logprobs is not None
    assert [list(token.logprobs) for token in answer.prompt_logprobs[1:]] == [[one] for one in PROMPTS[0][1:]]


def test_the_scores_of_a_long_prompt_come_chunk_by_chunk(folder: Path, reference: PreTrainedModel) -> None:
    prompt = list(range(64))
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, prompt_logprobs=NUM_TOP)
    llm = open_llm(folder, max_num_batched_tokens=16)

    with EngineClient(llm.engine) as client:
        pieces: list[StreamPiece] = list(client.submit(prompt, params))

    assert [len(piece.prompt or ()) for piece in pieces] == [17, 16, 16, 15, 0]
    assert [len(piece.token_ids) for piece in pieces] == [0, 0, 0, 1, 1]
    check(reference, prompt, list(itertools.chain.from_iterable(piece.prompt or () for piece in pieces)))


def test_more_scores_than_are_kept_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    monkeypatch.setattr("kvtier.engine.request_checks.MAX_PROMPT_SCORES", 100)

    [output] = llm.generate(PROMPTS[0], SamplingParams(prompt_logprobs=NUM_TOP), progress=False)

    assert output.error is not None
    assert output.error.startswith("prompt_logprobs must not be 3 for a prompt of 50 tokens")
