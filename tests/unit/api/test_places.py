"""How much is served at a time, of all clients and of one key."""

from __future__ import annotations

import contextlib
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.api.config import ApiConfig, ApiKey, EngineAddress, ServedModelConfig
from kvtier.api.http_error import HttpError
from kvtier.api.places import Places
from tests.support.fake_engine import FakeEngine, config_of, fake_engine, held_once_accepted, http_client, running
from tests.support.openai_asking import COMPLETIONS, completion_body, raw_post
from tests.support.waiting import wait_until

_MODEL = ServedModelConfig(names=("tiny",), engines=(EngineAddress("e", "e.sock"),))
_KEYS = (ApiKey(name="ann", key="key-a"), ApiKey(name="bob", key="key-b"))


def places(*keys: ApiKey) -> Places:
    """For 10 requests, 40 answers and 2,000 bytes."""
    return Places(ApiConfig(models=(_MODEL,), keys=keys, max_requests=10, max_body_bytes=1000))


def refusal(of: Places, key: str, num_answers: int = 1, prompt_bytes: int = 1) -> str:
    """Empty if there is room."""
    try:
        with of.take(key, num_answers, prompt_bytes):
            return ""
    except HttpError as error:
        return error.sentence


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as one:
        yield one


def test_answers_and_prompts_have_a_bound_each(stack: contextlib.ExitStack) -> None:
    of = places()
    stack.enter_context(of.take("", 30, 1500))

    assert refusal(of, "", num_answers=10) == refusal(of, "", prompt_bytes=500) == ""
    assert refusal(of, "", num_answers=11) == "30 answers of at most 40 are being computed"
    assert refusal(of, "", prompt_bytes=501).startswith("prompts that are being served would take more than ")


def test_requests_have_a_bound_and_places_come_back(stack: contextlib.ExitStack) -> None:
    of = places()
    for _ in range(10):
        stack.enter_context(of.take("", 1, 1))

    assert refusal(of, "") == "10 requests are being served, which is the limit"
    stack.close()
    assert refusal(of, "", 40, 2000) == ""
    assert of.num_requests == 0


def test_a_request_that_is_alone_is_served_however_large(stack: contextlib.ExitStack) -> None:
    assert refusal(places(), "", num_answers=1024, prompt_bytes=1 << 20) == ""


def test_of_several_keys_none_takes_more_than_half(stack: contextlib.ExitStack) -> None:
    of = places(*_KEYS)
    stack.enter_context(of.take("ann", 20, 1000))

    assert refusal(of, "ann") == "20 answers of this API key of at most 20 are being computed"
    assert refusal(of, "bob", 20, 1000) == ""
    for _ in range(5):
        stack.enter_context(of.take("bob", 1, 1))
    assert refusal(of, "bob") == "5 requests of this API key are being served, which is the limit"


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    with tempfile.TemporaryDirectory(prefix="kvt") as name, fake_engine(Path(name)) as one:
        yield one


@pytest.mark.parametrize(
    ("prompts", "sentence"),
    [
        (["a"] * 100, "200 answers of at most 256 are being computed"),
        (["a" * 20_000] * 4, "prompts that are being served would take more than "),
        ([[300] * 900] * 27, "prompts that are being served would take more than "),
    ],
    ids=["answers", "text", "token ids"],
)
def test_while_many_prompts_wait_no_more_of_them_are_taken(
    engine: FakeEngine, stack: contextlib.ExitStack, prompts: list[object], sentence: str
) -> None:
    until = threading.Event()
    engine.script = held_once_accepted(until)
    server = stack.enter_context(running("openai", config_of(engine, max_requests=64, max_body_bytes=100_000)))
    client = stack.enter_context(http_client(server))
    for number in (1, 2):
        stack.enter_context(raw_post(server, COMPLETIONS, completion_body(prompts)))
        wait_until(lambda number=number: len(engine.submits) == number * len(prompts))

    refused = client.post(COMPLETIONS, json=completion_body(prompts))
    assert refused.status_code == 429
    assert refused.headers["retry-after"]
    assert refused.json()["error"]["message"].startswith(sentence)

    until.set()
    wait_until(lambda: server.service.num_requests == 0)
    assert client.post(COMPLETIONS, json=completion_body(prompts)).status_code == 200
