"""A request's parameters are valid, or are refused with one sentence that names the parameter."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest

from kvtier.engine.sampling_params import (
    MAX_CHOICES,
    MAX_LOGPROBS,
    MAX_STOP_CHARACTERS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MAX_TOKENS,
    SamplingParams,
)
from kvtier.errors import InvalidParameter, RequestError

NAN = float("nan")


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("temperature", -0.1, "temperature must be at least 0 and at most 1000, not -0.1"),
        ("temperature", NAN, "temperature must be a finite number, not nan"),
        ("temperature", float("inf"), "temperature must be a finite number, not inf"),
        ("temperature", "hot", "temperature must be a finite number, not 'hot'"),
        ("temperature", True, "temperature must be a finite number, not True"),
        ("temperature", None, "temperature must be a finite number, not None"),
        ("top_p", 0.0, "top_p must be more than 0 and at most 1, not 0.0"),
        ("top_p", 1.5, "top_p must be more than 0 and at most 1, not 1.5"),
        ("top_p", NAN, "top_p must be a finite number, not nan"),
        ("top_k", -1, "top_k must be at least 0 and at most 2147483647, not -1"),
        ("top_k", 2.0, "top_k must be a whole number, not 2.0"),
        ("top_k", True, "top_k must be a whole number, not True"),
        ("min_p", 1.01, "min_p must be at least 0 and at most 1, not 1.01"),
        ("repetition_penalty", 0, "repetition_penalty must be at least 0.001 and at most 1000, not 0"),
        ("presence_penalty", 2.5, "presence_penalty must be at least -2 and at most 2, not 2.5"),
        ("frequency_penalty", -3, "frequency_penalty must be at least -2 and at most 2, not -3"),
        ("seed", 1.0, "seed must be a whole number, not 1.0"),
        ("max_tokens", 0, "max_tokens must be at least 1 and at most 2147483647, not 0"),
        ("max_tokens", "9", "max_tokens must be a whole number, not '9'"),
        ("min_tokens", -1, "min_tokens must be at least 0 and at most 2147483647, not -1"),
        ("min_tokens", None, "min_tokens must be a whole number, not None"),
        ("min_tokens", 17, "min_tokens must not exceed max_tokens, but 17 is more than 16"),
        ("n", 0, "n must be at least 1 and at most 128, not 0"),
        (
            "logprobs",
            MAX_LOGPROBS + 1,
            f"logprobs must be at least 0 and at most {MAX_LOGPROBS}, not {MAX_LOGPROBS + 1}",
        ),
        ("logprobs", True, "logprobs must be a whole number, not True"),
        ("stop", "", "stop must be a string or a list of strings, none of them empty, not ''"),
        ("stop", ["a", 1], "stop must be a string or a list of strings, none of them empty, not ['a', 1]"),
        ("stop", 5, "stop must be a string or a list of strings, none of them empty, not 5"),
        ("stop_token_ids", "12", "stop_token_ids must be a list of token ids, not '12'"),
        ("stop_token_ids", [-1], "each of stop_token_ids must be at least 0 and at most 2147483647, not -1"),
        ("ignore_eos", 1, "ignore_eos must be true or false, not 1"),
        ("skip_special_tokens", "no", "skip_special_tokens must be true or false, not 'no'"),
    ],
)
def test_a_parameter_that_cannot_work_is_refused_with_one_sentence(name: str, value: object, sentence: str) -> None:
    with pytest.raises(InvalidParameter) as refused:
        SamplingParams(**{name: value})

    assert str(refused.value) == sentence
    assert isinstance(refused.value, RequestError)


@pytest.mark.parametrize(
    ("name", "most", "more"),
    [
        ("max_tokens", MAX_TOKENS, MAX_TOKENS + 1),
        ("max_tokens", MAX_TOKENS, 1 << 63),
        ("max_tokens", MAX_TOKENS, 10**4000),
        ("top_k", MAX_TOKENS, MAX_TOKENS + 1),
        ("top_k", MAX_TOKENS, 1 << 64),
        ("n", MAX_CHOICES, MAX_CHOICES + 1),
        ("temperature", 1000.0, 1000.1),
        ("temperature", 1000, 10**4000),
        ("seed", (1 << 64) - 1, 1 << 64),
        ("seed", -(1 << 63), -(1 << 63) - 1),
        ("stop", ["x"] * MAX_STOP_STRINGS, ["x"] * (MAX_STOP_STRINGS + 1)),
        ("stop", "x" * MAX_STOP_CHARACTERS, "x" * (MAX_STOP_CHARACTERS + 1)),
        ("stop_token_ids", [1] * MAX_STOP_TOKEN_IDS, [1] * (MAX_STOP_TOKEN_IDS + 1)),
        ("stop_token_ids", [MAX_TOKENS], [MAX_TOKENS + 1]),
    ],
)
def test_every_parameter_has_a_bound_and_a_short_sentence_about_it(name: str, most: object, more: object) -> None:
    SamplingParams(**{name: most})

    with pytest.raises(InvalidParameter, match=name) as refused:
        SamplingParams(**{name: more})
    assert len(str(refused.value)) < 200


def test_the_least_tokens_have_a_bound_of_their_own() -> None:
    assert SamplingParams(min_tokens=MAX_TOKENS, max_tokens=None).min_tokens == MAX_TOKENS
    with pytest.raises(InvalidParameter, match="min_tokens must be at least 0 and at most"):
        SamplingParams(min_tokens=1 << 63, max_tokens=None)


@pytest.mark.parametrize("seed", [0, -1, -(1 << 63), (1 << 64) - 1])
def test_any_seed_of_64_bits_is_taken(seed: int) -> None:
    assert SamplingParams(seed=seed).seed == seed


def test_whole_numbers_stand_for_numbers() -> None:
    params = SamplingParams(temperature=0, top_p=1, presence_penalty=-2)

    assert params.is_greedy
    assert not SamplingParams().is_greedy


def test_one_stop_string_and_a_list_become_tuples() -> None:
    assert SamplingParams(stop="END").stop_strings == ("END",)
    assert SamplingParams(stop=["a", "b"], stop_token_ids=[3]).stop == ("a", "b")
    assert msgspec.json.decode(b'{"stop": "END", "stop_token_ids": [7]}', type=SamplingParams) == SamplingParams(
        stop=("END",), stop_token_ids=(7,)
    )


def test_decoding_makes_the_same_checks_and_refuses_unknown_names() -> None:
    with pytest.raises(msgspec.ValidationError, match="top_p must be more than 0"):
        msgspec.json.decode(b'{"top_p": 0}', type=SamplingParams)
    with pytest.raises(msgspec.ValidationError, match="top_q"):
        msgspec.json.decode(b'{"top_q": 1}', type=SamplingParams)


def test_parameters_are_frozen_and_survive_a_round_trip() -> None:
    params = SamplingParams(stop="x", seed=3, logprobs=2, max_tokens=None)

    with pytest.raises(AttributeError):
        params.seed = 4
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


def test_each_choice_has_a_seed_of_its_own_and_the_first_has_the_requests() -> None:
    params = SamplingParams(n=3, seed=5)

    seeds = [params.choice(index).seed for index in range(3)]

    assert seeds[0] == 5
    assert len(set(seeds)) == 3
    assert all(params.choice(index).n == 1 for index in range(3))
    assert SamplingParams(n=2).choice(1).seed is None


def test_only_penalties_that_change_something_count() -> None:
    assert not SamplingParams().has_penalties
    assert SamplingParams(repetition_penalty=1.1).has_penalties
    assert SamplingParams(presence_penalty=0.1).has_penalties
    assert SamplingParams(frequency_penalty=-0.1).has_penalties


def test_the_parameters_need_no_torch() -> None:
    code = "import sys, kvtier.engine.sampling_params; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("bias", "sentence"),
    [
        ([1], "logit_bias must be a number for each of some token ids, not [1]"),
        ({"5": 1.0}, "logit_bias must map token ids, but '5' is not one"),
        ({-1: 1.0}, "logit_bias must map token ids, but -1 is not one"),
        ({5: 101}, "logit_bias must be from -100 to 100, but that of the token 5 is 101"),
        ({5: float("nan")}, "logit_bias must be from -100 to 100, but that of the token 5 is nan"),
        ({5: True}, "logit_bias must be from -100 to 100, but that of the token 5 is True"),
        (dict.fromkeys(range(301), 1.0), "logit_bias must not be more than 300, but is 301"),
    ],
)
def test_a_bias_that_cannot_work_is_refused(bias: object, sentence: str) -> None:
    with pytest.raises(InvalidParameter) as refused:
        SamplingParams(logit_bias=bias)  # type: ignore[arg-type]

    assert str(refused.value) == sentence


def test_no_tokens_can_be_asked_for_only_with_the_prompts_logprobs() -> None:
    assert SamplingParams(max_tokens=0, prompt_logprobs=0).max_tokens == 0
    with pytest.raises(InvalidParameter, match="max_tokens must be at least 1"):
        SamplingParams(max_tokens=0)


def test_bias_and_prompt_logprobs_are_sent_and_read_as_they_are() -> None:
    params = SamplingParams(logit_bias={7: -100.0, 9: 1.5}, prompt_logprobs=2, n=2)

    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
    assert params.choice(1).logit_bias == {7: -100.0, 9: 1.5}
