"""Requests that cannot be served are refused with one sentence, and all others continue."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from kvtier import LLM, SamplingParams
from kvtier.engine.client import EngineClient
from kvtier.errors import ConfigError, InvalidParameter, PromptTooLong, RequestError
from kvtier.testing.tiny_models import VOCAB_SIZE, save_tiny_model

torch.set_num_threads(1)

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
MAX_MODEL_LEN = 100

BAD_PROMPTS = {
    "empty": ([], "the prompt is empty"),
    "empty text": ("", "the prompt is empty"),
    "too long": ([1] * MAX_MODEL_LEN, "100 tokens, but at most 99 leave room"),
    "too large an id": ([1, VOCAB_SIZE], f"token id {VOCAB_SIZE} is not in the vocabulary of {VOCAB_SIZE}"),
    "a negative id": ([-1], "token id -1 is not in the vocabulary"),
    "a boolean": ([1, True], "but True is not one"),
    "a fraction": ([1, 2.0], "but 2.0 is not one"),
    "text among ids": ([1, "2"], "but '2' is not one"),
    "nothing": ([1, None], "but None is not one"),
    "no prompt": (None, "a prompt is text or a list of token ids, not None"),
    "a number": (5, "a prompt is text or a list of token ids, not 5"),
    "an array of no dimension": (np.array(5), "a prompt is text or a list of token ids"),
    "bytes": (b"abc", "a prompt is text or a list of token ids"),
    "half a character": ("broken \ud800 text", "text"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_tiny_model(path, "qwen2", num_layers=1)
    return path


def open_llm(folder: Path, **settings: object) -> LLM:
    defaults = {"device": "cpu", "dtype": "float32", "kv_cache_space": 1 << 20, "max_model_len": MAX_MODEL_LEN}
    return LLM(str(folder), **{**defaults, **settings})


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return open_llm(folder)


def assert_is_one_sentence(text: str) -> None:
    assert text
    assert "\n" not in text
    assert len(text) < 300


# --- prompts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("prompt", "sentence"), BAD_PROMPTS.values(), ids=BAD_PROMPTS)
def test_a_bad_prompt_gets_a_sentence_and_the_others_their_answers(llm: LLM, prompt: object, sentence: str) -> None:
    [expected] = llm.generate([5, 6], GREEDY, progress=False)

    before, bad, after = llm.generate([[5, 6], prompt, [5, 6]], GREEDY, progress=False)

    assert sentence in bad.error
    assert_is_one_sentence(bad.error)
    assert bad.outputs == []
    for good in (before, after):
        assert good.error is None
        assert good.outputs[0].token_ids == expected.outputs[0].token_ids


@pytest.mark.parametrize(("prompt", "sentence"), BAD_PROMPTS.values(), ids=BAD_PROMPTS)
def test_a_bad_prompt_ends_only_its_own_stream(folder: Path, prompt: object, sentence: str) -> None:
    with EngineClient(open_llm(folder).engine) as client:
        before = client.submit([5, 6], GREEDY)
        bad = client.submit(prompt, GREEDY)
        after = client.submit([5, 6], GREEDY)

        with pytest.raises(RequestError) as found:
            bad.wait()
        assert sentence in str(found.value)
        assert before.wait()[0].token_ids == after.wait()[0].token_ids


@pytest.mark.parametrize("prompt", [5, None, 2.5, object()], ids=["int", "None", "float", "object"])
def test_what_is_no_prompt_at_all_is_refused(folder: Path, prompt: object) -> None:
    with EngineClient(open_llm(folder).engine) as client:
        bad = client.submit(prompt, GREEDY)
        after = client.submit([5, 6], GREEDY)

        with pytest.raises(InvalidParameter, match="a prompt is text or a list of token ids"):
            bad.wait()
        assert len(after.wait()[0].token_ids) == 4


def test_the_longest_prompt_leaves_room_for_one_token(llm: LLM) -> None:
    [output] = llm.generate([[7] * (MAX_MODEL_LEN - 1)], GREEDY, progress=False)

    assert output.error is None
    assert len(output.outputs[0].token_ids) == 1


def test_a_prompt_that_is_too_long_for_the_cache_is_refused(folder: Path) -> None:
    with open_llm(folder, kv_cache_space=4 * 16 * 256, max_model_len=None) as llm:
        long, short = llm.generate([[1] * 48, [1] * 47], GREEDY, progress=False)

    assert "at most 47 leave room" in long.error
    assert short.error is None


def test_no_prompts_have_no_answers(llm: LLM) -> None:
    assert llm.generate([], GREEDY, progress=False) == []


def test_one_list_of_parameters_is_for_as_many_prompts(llm: LLM) -> None:
    with pytest.raises(InvalidParameter, match="1 sampling parameters for 2 prompts"):
        llm.generate([[1], [2]], [GREEDY], progress=False)


def test_text_is_refused_where_there_is_no_tokenizer(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "qwen2", num_layers=1, with_tokenizer=False)
    stopping = SamplingParams(temperature=0.0, max_tokens=4, stop="end", ignore_eos=True)
    with open_llm(tmp_path) as llm:
        text, stop, good = llm.generate(["text", [1], [1]], [GREEDY, stopping, GREEDY], progress=False)

    assert "token ids" in text.error
    assert "stop strings need a tokenizer" in stop.error
    assert good.error is None
    assert len(good.outputs[0].token_ids) == 4


def test_a_second_request_of_the_same_id_is_refused_and_the_first_goes_on(folder: Path) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    with EngineClient(open_llm(folder).engine) as client:
        first = client.submit([5, 6], params, request_id="one")
        second = client.submit([5, 6], params, request_id="one")

        with pytest.raises(InvalidParameter, match="id one is being served already"):
            second.wait()
        second.abort()
        [answer] = first.wait()

    assert answer.finish_reason == "length"
    assert len(answer.token_ids) == 40


def test_an_id_can_be_used_again_after_its_request(folder: Path) -> None:
    with EngineClient(open_llm(folder).engine) as client:
        answers = [client.submit([5, 6], GREEDY, request_id="one").wait() for _ in range(2)]

    assert answers[0][0].token_ids == answers[1][0].token_ids


# --- parameters -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", -0.5), ("top_p", 0.0), ("max_tokens", 0), ("n", 0), ("stop", ""), ("logprobs", 1000)],
)
def test_a_bad_parameter_is_named(name: str, value: object) -> None:
    with pytest.raises(InvalidParameter, match=name) as found:
        SamplingParams(**{name: value})

    assert_is_one_sentence(str(found.value))


def test_an_unknown_parameter_is_named() -> None:
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1.0)
    with pytest.raises(msgspec.ValidationError, match="temprature"):
        msgspec.json.decode(b'{"temprature": 1.0}', type=SamplingParams)


# --- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"block_sise": 16}, "unknown settings: block_sise; did you mean block_size?"),
        ({"schedule": "async"}, "schedule must be auto, sync or async-N"),
        ({"schedule": "async-0"}, "schedule must be auto, sync or async-N"),
        ({"schedule": "later"}, "schedule must be auto, sync or async-N"),
        ({"block_manager": "best"}, "block_manager must be one of naive"),
        ({"block_size": 0}, "block_size must be a positive whole number"),
        ({"block_size": True}, "block_size must be a positive whole number"),
        ({"max_num_requests": -1}, "max_num_requests must be a positive whole number"),
        ({"max_num_batched_tokens": 1.5}, "max_num_batched_tokens must be a positive whole number"),
        ({"kv_cache_space": "1 GiB"}, "kv_cache_space must be a positive whole number"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization must be more than 0"),
        ({"device": "abacus"}, "device"),
        ({"dtype": "float7"}, "dtype"),
        ({"quantization": "fp3"}, "quantization"),
        ({"load_format": "carefully"}, "load_format"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_bad_setting_gets_a_sentence(folder: Path, settings: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError) as found:
        open_llm(folder, **settings)

    assert sentence in str(found.value)
    assert_is_one_sentence(str(found.value))


def test_a_model_that_is_not_there_gets_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as found:
        open_llm(tmp_path / "nowhere")

    assert_is_one_sentence(str(found.value))


def test_too_little_room_for_kv_gets_a_sentence(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"kv_cache_space leaves .* for KV, but 2 blocks take") as found:
        open_llm(folder, kv_cache_space=4096)

    assert_is_one_sentence(str(found.value))


def test_start_up_says_what_the_weights_take_and_how_many_blocks_are_left(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="kvtier"):
        open_llm(folder, kv_cache_space=64 * 16 * 256).close()

    assert any("weights" in line and "64 KV blocks of 16 tokens" in line for line in caplog.messages)


def test_the_errors_of_requests_are_told_apart(folder: Path) -> None:
    with EngineClient(open_llm(folder).engine) as client, pytest.raises(PromptTooLong):
        client.submit([1] * 1000, GREEDY).wait()


def test_endless_text_is_refused_by_its_beginning(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_llm(folder) as llm:
        tokenizer = llm.engine.tokenizer
        assert tokenizer is not None
        encoded: list[int] = []
        encode = tokenizer.encode

        def noting(text: str, **settings: bool) -> list[int]:
            encoded.append(len(text))
            return encode(text, **settings)

        monkeypatch.setattr(tokenizer, "encode", noting)
        with pytest.raises(PromptTooLong, match=r"more than [0-9]+ tokens, but at most 99 leave room"):
            llm.engine.encode("no end " * 100_000)

        assert sum(encoded) < 10_000


def test_text_just_too_long_is_counted_to_its_end(llm: LLM) -> None:
    (output,) = llm.generate(["x" * MAX_MODEL_LEN], GREEDY, progress=False)

    assert output.error == "the prompt has 100 tokens, but at most 99 leave room for an answer"


def test_more_tokens_than_the_model_has_positions_are_refused_at_start(folder: Path) -> None:
    with pytest.raises(ConfigError, match="max_model_len is 513, but the model has 512 positions"):
        open_llm(folder, max_model_len=513)
