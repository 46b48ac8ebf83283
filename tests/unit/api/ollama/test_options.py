"""Ollama's options: what each becomes, which are accepted for having no effect, and which are refused."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.api.http_error import HttpError
from kvtier.api.json_body import JsonBody
from kvtier.api.ollama.options import sampling_params
from kvtier.engine.sampling_params import SamplingParams


def params_of(
    options: dict[str, object], *, defaults: dict[str, object] | None = None, logprobs: int | None = None
) -> SamplingParams:
    return sampling_params(JsonBody(options, "options."), defaults or {}, logprobs=logprobs)


def refusal_of(options: dict[str, object], *, defaults: dict[str, object] | None = None) -> str:
    with pytest.raises(HttpError) as caught:
        params_of(options, defaults=defaults)
    assert caught.value.status == 400
    return caught.value.sentence


def test_without_options_ollamas_defaults_hold_and_there_is_no_penalty() -> None:
    assert params_of({}) == SamplingParams(max_tokens=None, temperature=0.8, top_k=40, top_p=0.9)


def test_each_option_becomes_its_sampling_parameter() -> None:
    options: dict[str, object] = {
        "num_predict": 7,
        "temperature": 0,
        "top_k": 5,
        "top_p": 0.5,
        "min_p": 0.1,
        "seed": 42,
        "stop": ["\n", "user:"],
        "repeat_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
    }

    assert params_of(options) == SamplingParams(
        max_tokens=7,
        temperature=0.0,
        top_k=5,
        top_p=0.5,
        min_p=0.1,
        seed=42,
        stop=("\n", "user:"),
        repetition_penalty=1.2,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
    )


def test_the_request_goes_before_the_models_defaults_and_these_before_ollamas() -> None:
    defaults: dict[str, object] = {"temperature": 0.3, "top_p": 0.7, "max_tokens": 9, "n": 4, "stop": ["end"]}

    found = params_of({"temperature": 0.1}, defaults=defaults)

    assert (found.temperature, found.top_p, found.max_tokens, found.top_k) == (0.1, 0.7, 9, 40)
    assert found.stop_strings == ("end",)
    assert found.n == 1


@pytest.mark.parametrize("num_predict", [0, -1, -2, -1.0])
def test_no_positive_num_predict_is_as_much_as_there_is_room(num_predict: float) -> None:
    assert params_of({"num_predict": num_predict}, defaults={"max_tokens": 9}).max_tokens is None


def test_a_seed_of_minus_one_is_any_seed() -> None:
    assert params_of({"seed": -1}, defaults={"seed": 5}).seed is None


@pytest.mark.parametrize("top_k", [0, -1])
def test_no_positive_top_k_keeps_all_tokens(top_k: int) -> None:
    assert params_of({"top_k": top_k}).top_k == 0


def test_one_stop_may_be_a_text() -> None:
    assert params_of({"stop": "end"}).stop_strings == ("end",)


@pytest.mark.parametrize(
    "options",
    [
        {"num_gpu": -1, "main_gpu": 0, "num_thread": 8, "num_batch": 512, "num_keep": 4},
        {"use_mmap": True, "use_mlock": False, "numa": True, "low_vram": True, "f16_kv": True},
        {"num_ctx": 1},
        {"num_ctx": 1 << 20},
        {"mirostat": 0, "mirostat_tau": 5.0, "mirostat_eta": 0.1, "typical_p": 1.0, "tfs_z": 1},
        {"repeat_last_n": 64, "repeat_penalty": 1.0, "penalize_newline": False},
        {"repeat_last_n": 0},
        {"vocab_only": False, "logits_all": False, "embedding_only": False},
        {"temperature": None, "unheard_of": None},
    ],
)
def test_what_changes_nothing_is_accepted(options: dict[str, object]) -> None:
    assert params_of(options) == params_of({})


def test_a_penalty_on_the_whole_text_is_what_there_is() -> None:
    found = params_of({"repeat_penalty": 1.1, "repeat_last_n": -1, "penalize_newline": True})

    assert found.repetition_penalty == 1.1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mirostat": 1}, ["options.mirostat", "only 0"]),
        ({"typical_p": 0.7}, ["options.typical_p", "only 1"]),
        ({"tfs_z": 0.5}, ["options.tfs_z"]),
        ({"vocab_only": True}, ["options.vocab_only"]),
        ({"repeat_penalty": 1.1, "repeat_last_n": 64}, ["options.repeat_last_n", "-1"]),
        ({"presence_penalty": 0.5, "repeat_last_n": 64}, ["options.repeat_last_n"]),
        ({"repeat_penalty": 1.1, "penalize_newline": False}, ["options.penalize_newline"]),
        ({"num_ctx": 0}, ["options.num_ctx", "positive"]),
        ({"num_ctx": -1}, ["options.num_ctx"]),
        ({"num_ctx": "all"}, ["options.num_ctx"]),
        ({"temprature": 1}, ["options.temprature", "did you mean temperature"]),
        ({"top_k": "many"}, ["options.top_k", '"many"']),
        ({"top_k": 1.5}, ["options.top_k"]),
        ({"seed": 1 << 70}, ["options.seed"]),
        ({"temperature": 10**400}, ["options.temperature"]),
        ({"temperature": -1}, ["options.temperature"]),
        ({"top_p": 0}, ["options.top_p", "more than 0"]),
        ({"repeat_penalty": 0}, ["options.repeat_penalty"]),
        ({"stop": ""}, ["options.stop"]),
        ({"stop": ["a", 1]}, ["options.stop"]),
        ({"num_gpu": "all"}, ["options.num_gpu"]),
        ({"use_mmap": 1}, ["options.use_mmap"]),
    ],
)
def test_what_cannot_be_done_is_refused_by_its_name(options: dict[str, object], words: list[str]) -> None:
    sentence = refusal_of(options)

    assert [word for word in words if word not in sentence] == []


def test_a_span_of_penalties_that_only_the_model_has_is_passed_over() -> None:
    found = params_of({"repeat_last_n": 64, "penalize_newline": False}, defaults={"repetition_penalty": 1.1})

    assert found.repetition_penalty == 1.1


def test_logprobs_are_as_many_as_asked_for() -> None:
    assert params_of({}, logprobs=3).logprobs == 3


def test_too_many_logprobs_are_refused_by_ollamas_name() -> None:
    with pytest.raises(HttpError, match="top_logprobs must be"):
        params_of({}, logprobs=21)


_OPTIONS = [
    *["num_predict", "temperature", "top_k", "top_p", "min_p", "seed", "stop", "repeat_penalty", "presence_penalty"],
    *["frequency_penalty", "repeat_last_n", "penalize_newline", "num_ctx", "num_gpu", "use_mmap", "mirostat", "tfs_z"],
]
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from(_OPTIONS), _VALUES, max_size=4))
def test_any_values_give_parameters_or_a_problem(options: dict[str, object]) -> None:
    with contextlib.suppress(HttpError):
        params_of(options)
