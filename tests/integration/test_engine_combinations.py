"""Every way of running gives the same tokens: manager, schedule, chunk, block size, room.

`make test` runs a selection in which every two settings meet; `make soak` runs them all.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from kvtier import LLM, SamplingParams
from kvtier.engine.answer import Completion
from kvtier.testing.tiny_models import VOCAB_SIZE, save_tiny_model
from tests.support.engine_building import MANAGERS

torch.set_num_threads(1)

SCHEDULES = ("sync", "async-1", "async-2", "async-3")
CHUNKS = (1, 7, 64, 4096)
BLOCK_SIZES = (8, 16, 32)
ROOMS = ("plenty", "tiny")
ALL = list(itertools.product(MANAGERS, SCHEDULES, CHUNKS, BLOCK_SIZES, ROOMS))

BYTES_PER_TOKEN = 2 * 2 * 2 * 16 * 4
MAX_TOKENS = 20
LONGEST_PROMPT = 75

Combination = tuple[str, str, int, int, str]


def pairwise_selection(several: list[Combination]) -> Iterator[Combination]:
    """A few of them in which every pair of settings of two kinds occurs, the most useful first."""
    left = {pair for one in several for pair in pairs_of(one)}
    while left:
        best = max(several, key=lambda one: len(left & pairs_of(one)))
        left -= pairs_of(best)
        yield best


def pairs_of(one: Combination) -> set[tuple[tuple[int, object], ...]]:
    return set(itertools.combinations(enumerate(one), 2))


@dataclass(frozen=True)
class Question:
    prompt: list[int]
    params: SamplingParams


def questions() -> list[Question]:
    """Shared prefixes, repeated prompts, lengths around block sizes; every sampling parameter somewhere."""
    chance = random.Random(3)
    trunk = [chance.randrange(VOCAB_SIZE) for _ in range(LONGEST_PROMPT)]
    other = [chance.randrange(VOCAB_SIZE) for _ in range(33)]

    def asking(**settings: object) -> SamplingParams:
        return SamplingParams(**{"temperature": 0.0, "max_tokens": MAX_TOKENS, "ignore_eos": True, **settings})

    return [
        Question(trunk[:40], asking()),
        Question(trunk[:40], asking(temperature=1.0, seed=1)),
        Question(trunk, asking(temperature=0.8, top_p=0.9, top_k=40, seed=2)),
        Question(trunk[:32], asking(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.25)),
        Question(trunk[:40] + other[:9], asking(temperature=1.3, min_p=0.02, seed=3, frequency_penalty=1.0)),
        Question(other, asking(n=3, temperature=1.0, seed=4)),
        Question(other[:1], asking(logprobs=3)),
        Question(other[:16], asking(ignore_eos=False, stop_token_ids=tuple(range(0, 60)))),
        Question(other[:17], asking(stop_token_ids=tuple(range(256)), min_tokens=9)),
        Question(trunk, asking(max_tokens=1)),
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_tiny_model(path, "qwen3")
    return path


def ask(folder: Path, combination: Combination) -> list[list[Completion]]:
    manager, schedule, chunk, block_size, room = combination
    longest = -(-(LONGEST_PROMPT + MAX_TOKENS) // block_size) * block_size
    num_tokens = longest + block_size if room == "tiny" else 4096
    with LLM(
        str(folder),
        device="cpu",
        dtype="float32",
        block_manager=manager,
        schedule=schedule,
        max_num_batched_tokens=chunk,
        block_size=block_size,
        kv_cache_space=num_tokens * BYTES_PER_TOKEN,
    ) as llm:
        asked = questions()
        outputs = llm.generate([one.prompt for one in asked], [one.params for one in asked], progress=False)
        blocks = llm.engine.scheduler.blocks
        assert blocks.num_free_blocks == blocks.num_blocks, "blocks were leaked"
        if room == "tiny" and chunk >= 64:
            assert llm.engine.scheduler.num_preemptions > 0, "the pool was not tiny enough"
        return [output.outputs for output in outputs]


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[Completion]]:
    return ask(folder, ("naive", "sync", 4096, 16, "plenty"))


def assert_equal_answers(found: list[list[Completion]], expected: list[list[Completion]]) -> None:
    for some, others in zip(found, expected, strict=True):
        for one, other in zip(some, others, strict=True):
            assert one.token_ids == other.token_ids
            assert (one.index, one.text, one.finish_reason) == (other.index, other.text, other.finish_reason)
            assert (one.logprobs is None) == (other.logprobs is None)
            for mine, its in zip(one.logprobs or [], other.logprobs or [], strict=True):
                assert mine == pytest.approx(its, abs=1e-4)


def test_the_reference_asks_for_what_it_should(expected: list[list[Completion]]) -> None:
    assert [len(some) for some in expected] == [1, 1, 1, 1, 1, 3, 1, 1, 1, 1]
    assert len({tuple(one.token_ids) for one in expected[5]}) == 3
    assert [some[0].finish_reason for some in expected] == ["length"] * 7 + ["stop", "stop", "length"]
    assert expected[0][0].token_ids != expected[1][0].token_ids


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("combination", list(pairwise_selection(ALL)), ids=str)
def test_a_selection_gives_the_tokens_of_naive_sync(
    folder: Path, expected: list[list[Completion]], combination: Combination
) -> None:
    assert_equal_answers(ask(folder, combination), expected)


@pytest.mark.soak
@pytest.mark.parametrize("combination", ALL, ids=str)
def test_every_combination_gives_the_tokens_of_naive_sync(
    folder: Path, expected: list[list[Completion]], combination: Combination
) -> None:
    assert_equal_answers(ask(folder, combination), expected)


def test_a_second_call_is_served_from_the_cache_with_the_same_tokens(folder: Path) -> None:
    prompt = questions()[2].prompt
    greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    with LLM(str(folder), device="cpu", dtype="float32", block_manager="yoco", kv_cache_space=1 << 20) as llm:
        [first] = llm.generate(prompt, greedy, progress=False)

        [second] = llm.generate(prompt, greedy, progress=False)

    assert first.outputs[0].cached_tokens == {"device": 0}
    assert second.outputs[0].cached_tokens == {"device": LONGEST_PROMPT - 1}
    assert first.outputs[0].token_ids == second.outputs[0].token_ids
