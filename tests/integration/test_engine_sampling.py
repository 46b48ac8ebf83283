"""Sampling through the engine: ends, log-probabilities, several answers, seeds."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from kvtier import LLM, SamplingParams
from kvtier.engine.answer import Completion
from kvtier.models.loading import load_model
from kvtier.testing.tiny_models import make_tiny_tokenizer, save_tiny_model
from tests.support.dense import all_logits

torch.set_num_threads(1)

PROMPT = list(range(40, 60))
MAX_TOKENS = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_tiny_model(path, "qwen3")
    return path


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return open_llm(folder)


def open_llm(folder: Path, **settings: object) -> LLM:
    return LLM(str(folder), device="cpu", dtype="float32", kv_cache_space=1 << 20, **settings)


def ask(llm: LLM, **settings: object) -> Completion:
    return ask_all(llm, **settings)[0]


def ask_all(llm: LLM, **settings: object) -> list[Completion]:
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": MAX_TOKENS, "ignore_eos": True, **settings})
    [output] = llm.generate(PROMPT, params, progress=False)
    assert output.error is None
    return output.outputs


# --- ends -------------------------------------------------------------------------------------------------------------


def test_an_answer_ends_at_max_tokens(llm: LLM) -> None:
    answer = ask(llm, max_tokens=7)

    assert len(answer.token_ids) == 7
    assert answer.finish_reason == "length"


def test_without_max_tokens_an_answer_ends_at_the_longest_length(folder: Path) -> None:
    with open_llm(folder, max_model_len=50) as llm:
        answer = ask(llm, max_tokens=None)

    assert len(PROMPT) + len(answer.token_ids) == 50
    assert answer.finish_reason == "length"


def test_a_stop_token_ends_the_answer_and_is_its_last_token(llm: LLM) -> None:
    whole = ask(llm).token_ids
    stop = whole[9]

    answer = ask(llm, stop_token_ids=(stop,))

    assert answer.token_ids == whole[: whole.index(stop) + 1]
    assert answer.finish_reason == "stop"


def test_the_end_of_text_ends_the_answer_unless_it_is_ignored(tmp_path: Path, llm: LLM) -> None:
    whole = ask(llm).token_ids
    end = whole[5]
    save_tiny_model(tmp_path, "qwen3", eos_token_id=end)
    with open_llm(tmp_path) as ending:
        answer, unending = ask(ending, ignore_eos=False), ask(ending)

    assert answer.token_ids == whole[: whole.index(end) + 1]
    assert answer.finish_reason == "stop"
    assert unending.token_ids == whole


def test_no_end_comes_before_min_tokens(tmp_path: Path, llm: LLM) -> None:
    end = ask(llm).token_ids[5]
    save_tiny_model(tmp_path, "qwen3", eos_token_id=end)

    with open_llm(tmp_path) as ending:
        answer = ask(ending, ignore_eos=False, min_tokens=15)

    assert len(answer.token_ids) >= 15
    assert end not in answer.token_ids[:15]


def test_the_tokenizers_own_end_does_not_come_before_min_tokens(tmp_path: Path, llm: LLM) -> None:
    """It is in no config of the model, and still ends answers."""
    whole = ask(llm).token_ids
    end = next(token for token in whole if token < 256)
    save_tiny_model(tmp_path, "qwen3", with_tokenizer=False)
    tokenizer = make_tiny_tokenizer()
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(end)
    tokenizer.save_pretrained(tmp_path)
    with open_llm(tmp_path) as ending:
        assert ask(ending, ignore_eos=False).token_ids == whole[: whole.index(end) + 1]

        answer = ask(ending, ignore_eos=False, min_tokens=20)

    assert end not in answer.token_ids[:20]


def test_a_stop_string_ends_the_text_before_it(llm: LLM) -> None:
    whole = ask(llm)
    text = whole.text
    stop = text[8:11]

    answer = ask(llm, stop=stop)

    assert answer.text == text[: text.index(stop)]
    assert answer.finish_reason == "stop"
    assert answer.token_ids == whole.token_ids[: len(answer.token_ids)]
    assert len(answer.token_ids) < len(whole.token_ids)


def test_the_first_of_several_stop_strings_counts(llm: LLM) -> None:
    text = ask(llm).text

    answer = ask(llm, stop=("never to be seen", text[12:15], text[6:8]))

    assert answer.text == text[: text.index(text[6:8])]


def test_a_stop_string_before_min_tokens_does_not_cut_the_text(llm: LLM) -> None:
    whole = ask(llm)
    stop = whole.text[2:4]

    answer = ask(llm, stop=stop, min_tokens=MAX_TOKENS)

    assert answer.token_ids == whole.token_ids
    assert answer.text == whole.text


# --- log-probabilities ------------------------------------------------------------------------------------------------


def test_logprobs_are_those_of_the_model(llm: LLM, folder: Path) -> None:
    model = load_model(folder, dtype="float32", device="cpu").model

    answer = ask(llm, logprobs=4, temperature=1.0, seed=5)

    with torch.inference_mode():
        expected = all_logits(model, torch.tensor(PROMPT + answer.token_ids)).log_softmax(-1)[len(PROMPT) - 1 :]
    assert answer.logprobs is not None
    assert len(answer.logprobs) == len(answer.token_ids)
    for found, row, token_id in zip(answer.logprobs, expected, answer.token_ids, strict=False):
        wanted = {*row.topk(4).indices.tolist(), token_id}
        assert found == pytest.approx({one: row[one].item() for one in wanted}, abs=1e-4)


def test_logprobs_of_none_but_the_token_itself(llm: LLM) -> None:
    answer = ask(llm, logprobs=0)

    assert answer.logprobs is not None
    assert [list(one) for one in answer.logprobs] == [[token_id] for token_id in answer.token_ids]


def test_who_asks_for_no_logprobs_gets_none_beside_one_who_does(llm: LLM) -> None:
    with_logprobs = SamplingParams(temperature=0.0, logprobs=2)
    without = SamplingParams(temperature=0.0)

    some, none = llm.generate([PROMPT, PROMPT], [with_logprobs, without], progress=False)

    assert some.outputs[0].logprobs is not None
    assert none.outputs[0].logprobs is None


# --- seeds and several answers ----------------------------------------------------------------------------------------


def test_a_seed_gives_the_same_answer_in_any_company(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=11, max_tokens=MAX_TOKENS, ignore_eos=True)
    others = [SamplingParams(temperature=1.0, max_tokens=number) for number in (1, 5, 30)]

    [alone] = llm.generate(PROMPT, params, progress=False)
    among = llm.generate([PROMPT[:3], PROMPT, PROMPT[:9], PROMPT], [others[0], params, *others[1:]], progress=False)

    assert among[1].outputs[0].token_ids == alone.outputs[0].token_ids


def test_answers_without_a_seed_differ(llm: LLM) -> None:
    answers = ask_all(llm, temperature=1.0, n=4)

    assert len({tuple(answer.token_ids) for answer in answers}) == 4


def test_each_of_n_answers_is_that_of_its_own_seed(llm: LLM) -> None:
    params = SamplingParams(n=3, temperature=1.0, seed=21, max_tokens=MAX_TOKENS, ignore_eos=True)

    [together] = llm.generate(PROMPT, params, progress=False)
    alone = llm.generate([PROMPT] * 3, [params.choice(index) for index in range(3)], progress=False)

    assert [answer.index for answer in together.outputs] == [0, 1, 2]
    assert [answer.token_ids for answer in together.outputs] == [output.outputs[0].token_ids for output in alone]


@pytest.mark.parametrize("manager", ["prefix_caching", "yoco"])
def test_n_answers_share_the_prompts_blocks(folder: Path, manager: str) -> None:
    with open_llm(folder, block_manager=manager) as llm:
        answers = ask_all(llm, n=3, temperature=1.0)

    shared = len(PROMPT) - 1 if manager == "yoco" else 16
    assert [answer.cached_tokens["device"] for answer in answers] == [0, shared, shared]


def test_greedy_answers_of_one_prompt_are_equal(llm: LLM) -> None:
    answers = ask_all(llm, n=3)

    assert [dataclasses.replace(answer, index=0).token_ids for answer in answers] == [answers[0].token_ids] * 3


# --- figures ----------------------------------------------------------------------------------------------------------


def test_an_answer_says_how_long_it_took(llm: LLM) -> None:
    answer = ask(llm)

    assert answer.ttft_s > 0
    assert answer.time_per_output_token_s > 0


def test_a_text_prompt_gets_a_text_answer(llm: LLM) -> None:
    tokenizer = make_tiny_tokenizer()

    [output] = llm.generate("on the other hand", SamplingParams(temperature=0.0, ignore_eos=True), progress=False)

    assert output.prompt_token_ids == tokenizer.encode("on the other hand")
    assert output.outputs[0].text == tokenizer.decode(output.outputs[0].token_ids, skip_special_tokens=True)


# --- bias -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["sync", "async-1", "async-3"])
def test_a_banned_token_never_comes_and_a_forced_one_always_does(folder: Path, schedule: str) -> None:
    with open_llm(folder, schedule=schedule) as llm:
        banned = ask(llm).token_ids[0]
        without = ask(llm, logit_bias={banned: -100.0})
        answers = ask_all(llm, n=3, temperature=1.5, seed=3, logit_bias={11: 100.0})

    assert banned not in without.token_ids
    assert [answer.token_ids for answer in answers] == [[11] * MAX_TOKENS] * 3


def test_a_bias_of_an_id_that_is_no_token_is_refused(llm: LLM) -> None:
    [output] = llm.generate(PROMPT, SamplingParams(logit_bias={320: 1.0}), progress=False)

    assert output.error == "logit_bias must only name tokens of the vocabulary of 320, not 320"
