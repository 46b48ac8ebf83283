"""Requests share blocks only with requests of the same salt, in every tier, and salts are not revealed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
import torch

import kvtier
from kvtier import LLM
from kvtier.engine.answer import RequestOutput
from kvtier.engine.client import EngineClient
from kvtier.errors import InvalidParameter
from kvtier.testing.servers import cache_server
from kvtier.testing.tiny_models import save_tiny_model
from kvtier.tiers.explaining import explain_request
from kvtier.tiers.explanation import MatchEnd
from tests.support.tiered_engines import (
    GREEDY,
    Question,
    answers,
    cached,
    cold,
    open_engine,
    settled,
    tiers,
    tokens,
)
from tests.support.waiting import CALL_S, wait_until

torch.set_num_threads(1)

PROMPT = tokens(1, 100)
SECRET = "a tenant's secret"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_tiny_model(path, "qwen3")
    return path


def ask(llm: LLM, salt: str, prompt: Sequence[int] = PROMPT) -> RequestOutput:
    [output] = llm.generate([list(prompt)], GREEDY, progress=False, cache_salt=salt)
    return output


def cached_of(output: RequestOutput) -> dict[str, int]:
    return cached(output.outputs[0])


# --- on the device ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("manager", "num_cached"), [("prefix_caching", 96), ("yoco", 99)])
def test_on_the_device_only_requests_of_the_same_salt_share(model: Path, manager: str, num_cached: int) -> None:
    with open_engine(model, block_manager=manager) as llm:
        first = [cached_of(ask(llm, salt)) for salt in ("", "one", "other")]
        again = [cached_of(ask(llm, salt)) for salt in ("", "one", "other")]

    assert first == [{}, {}, {}]
    assert again == [{"device": num_cached}] * 3


def test_yoco_copies_no_part_of_a_block_from_another_salt(model: Path) -> None:
    with open_engine(model, block_manager="yoco") as llm:
        ask(llm, "one", PROMPT[:10])

        assert cached_of(ask(llm, "other", PROMPT[:10])) == {}
        assert cached_of(ask(llm, "", PROMPT[:10])) == {}
        assert cached_of(ask(llm, "one", PROMPT[:10])) == {"device": 9}


def test_streams_have_salts_too(model: Path) -> None:
    with EngineClient(open_engine(model).engine) as client:
        found = [cached(client.submit(PROMPT, GREEDY, salt=salt).wait()[0]) for salt in ("one", "other", "one")]

    assert found == [{}, {}, {"device": 96}]


@pytest.mark.parametrize("salt", [5, None, b"bytes"])
def test_what_is_no_text_is_no_salt(model: Path, salt: object) -> None:
    with open_engine(model) as llm:
        with pytest.raises(InvalidParameter, match="cache_salt must be text"):
            llm.engine.add("one", PROMPT, GREEDY, salt)
        assert not llm.engine.has_requests


# --- in the tiers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["unix", "tcp", "disk", "host+unix"])
def test_another_engine_finds_what_was_stored_with_the_same_salt_only(model: Path, kind: str) -> None:
    expected = answers(cold(model, [Question(PROMPT)]))
    with tiers(kind) as below:
        with open_engine(model, **below.settings) as llm:
            ask(llm, "a")
            settled(llm)
        with open_engine(model, **below.settings) as llm:
            other, plain, same = ask(llm, "b"), ask(llm, ""), ask(llm, "a")

    assert cached_of(other) == cached_of(plain) == {}
    assert cached_of(same) == {below.far: 96}
    assert answers([other]) == answers([plain]) == answers([same]) == expected


def test_what_was_stored_without_a_salt_is_for_those_without_one(model: Path) -> None:
    with cache_server() as server:
        with open_engine(model, cache_server=server.unix) as llm:
            ask(llm, "")
            settled(llm)
        with open_engine(model, cache_server=server.unix) as llm:
            assert cached_of(ask(llm, "a")) == {}
            assert cached_of(ask(llm, "")) == {"server": 96}


# --- why it missed ----------------------------------------------------------------------------------------------------


def test_an_explanation_says_that_there_is_a_salt_and_not_which(model: Path) -> None:
    with cache_server() as server:
        with open_engine(model, cache_server=server.unix, salt="another engine") as llm:
            ask(llm, "")  # the same tokens, in another namespace
            settled(llm)
        with open_engine(model, cache_server=server.unix) as llm:
            missed = ask(llm, SECRET)
            settled(llm)
            explained = llm.explain(missed.request_id)
            with kvtier.connect(server.unix, timeout_s=CALL_S) as operator:
                # The other engine's request has the same id, and its note comes when it likes.
                wait_until(lambda: explain_request(operator, missed.request_id) == explained)
                noted = explain_request(operator, missed.request_id)

    assert noted == explained
    assert (explained.reason, explained.ended_at_tokens) == (MatchEnd.NEVER_STORED, 0)
    assert explained.detail == "a cache_salt, or the API key, keeps its blocks apart"
    assert explained.first_tokens == ()
    assert SECRET not in explained.to_json()
    assert "was never stored (a cache_salt, or the API key, keeps its blocks apart)" in explained.sentence()


def test_a_salted_request_that_hits_says_so(model: Path) -> None:
    with cache_server() as server, open_engine(model, cache_server=server.unix, block_manager="naive") as llm:
        ask(llm, SECRET)
        settled(llm)
        explained = llm.explain(ask(llm, SECRET).request_id)

    assert (explained.reason, explained.ended_at_tokens, explained.detail) == (MatchEnd.ALL, 96, "")
    assert explained.cached_tokens == {"device": 0, "server": 96}


def test_a_request_with_several_answers_is_explained_by_the_id_that_its_caller_knows(model: Path) -> None:
    several = msgspec.structs.replace(GREEDY, n=2, temperature=1.0, seed=1)
    with cache_server() as server, open_engine(model, cache_server=server.unix) as llm:
        [output] = llm.generate([list(PROMPT)], several, progress=False)
        settled(llm)
        with kvtier.connect(server.unix, timeout_s=CALL_S) as client:
            wait_until(lambda: explain_request(client, output.request_id) is not None)
            explanation = explain_request(client, output.request_id)

    assert explanation is not None
    assert explanation.request_id == output.request_id
    assert explanation.prompt_tokens == len(PROMPT)
