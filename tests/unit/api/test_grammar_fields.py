"""A grammar that an engine cannot follow is refused by the name of the field that asked for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from kvtier.api.limits import INLINE_BODY_BYTES
from kvtier.engine.process.messages import GRAMMAR, INVALID
from tests.support.chat_templates import THINKING
from tests.support.fake_engine import MODEL, FakeEngine, config_of, fake_engine, http_client, refusing, running
from tests.support.openai_asking import CHAT, COMPLETIONS, error_of
from tests.support.scripted_chat import hello_with

SCHEMA = {"type": "object"}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
STRICT = [{"type": "function", "function": {"name": "f", "strict": True, "parameters": SCHEMA}}]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeEngine]:
    with fake_engine(tmp_path_factory.mktemp("grammar"), hello=hello_with(THINKING)) as one:
        yield one


@pytest.fixture(scope="module")
def client(engine: FakeEngine) -> Iterator[httpx.Client]:
    with running("openai", config_of(engine)) as server, http_client(server) as one:
        yield one


@pytest.mark.parametrize(
    ("path", "fields", "expected"),
    [
        (CHAT, {"response_format": FORMAT}, "response_format"),
        (CHAT, {"response_format": FORMAT, "stream": True}, "response_format"),
        (CHAT, {"guided_json": SCHEMA}, "guided_json"),
        (CHAT, {"response_format": {"type": "text"}, "structured_outputs": {"regex": "a+"}}, "structured_outputs"),
        (CHAT, {"response_format": {"type": "text"}, "tools": STRICT}, "tools"),
        (COMPLETIONS, {"guided_regex": "a+"}, "guided_regex"),
        ("/v1/responses", {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}}, "text.format"),
    ],
)
def test_the_field_is_named(
    client: httpx.Client, engine: FakeEngine, path: str, fields: dict[str, Any], expected: str
) -> None:
    engine.script = refusing(GRAMMAR, "the grammar cannot be compiled: too deep")
    prompts: dict[str, Any] = {
        CHAT: {"messages": [{"role": "user", "content": "hi"}]},
        COMPLETIONS: {"prompt": "hi"},
        "/v1/responses": {"input": "hi"},
    }
    response = client.post(path, json={"model": MODEL, **prompts[path], **fields})

    assert response.status_code == 400
    assert error_of(response)["param"] == expected
    assert error_of(response)["message"] == "the grammar cannot be compiled: too deep"


def test_also_in_a_large_body(client: httpx.Client, engine: FakeEngine) -> None:
    engine.script = refusing(GRAMMAR, "the grammar cannot be compiled: too deep")
    messages = [{"role": "user", "content": "x" * INLINE_BODY_BYTES}]
    response = client.post(CHAT, json={"model": MODEL, "messages": messages, "response_format": FORMAT})

    assert (response.status_code, error_of(response)["param"]) == (400, "response_format")


def test_a_bias_of_no_token_is_named(client: httpx.Client, engine: FakeEngine) -> None:
    engine.script = refusing(INVALID, "logit_bias must only name tokens of the vocabulary of 320, not 999")
    response = client.post(COMPLETIONS, json={"model": MODEL, "prompt": "hi", "logit_bias": {"999": 1}})

    assert (response.status_code, error_of(response)["param"]) == (400, "logit_bias")
