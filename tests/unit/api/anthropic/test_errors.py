"""Every error of Anthropic's paths has Anthropic's form, and is the exception that its client has for it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest

from kvtier.api.config import ApiKey
from kvtier.engine.grammar import DEAD_END
from kvtier.engine.process.messages import TOO_LONG, Submit
from tests.support.fake_engine import (
    DIE,
    MODEL,
    FakeEngine,
    Running,
    Step,
    accepted,
    config_of,
    echo,
    ending,
    fake_engine,
    held_once_accepted,
    http_client,
    refusing,
    running,
    said,
    words_then,
)
from tests.support.waiting import wait_until

_KEY = "secret"
_MESSAGES = "/v1/messages"
_COUNT = "/v1/messages/count_tokens"
_BODY: dict[str, Any] = {"model": MODEL, "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
_BOTH = pytest.mark.parametrize("path", [_MESSAGES, _COUNT])


@pytest.fixture(scope="module")
def _engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeEngine]:
    with fake_engine(tmp_path_factory.mktemp("errors")) as one:
        yield one


@pytest.fixture(scope="module")
def server(_engine: FakeEngine) -> Iterator[Running]:
    config = config_of(_engine, keys=(ApiKey(name="us", key=_KEY),), max_body_bytes=4096)
    with running("openai", config) as one:
        yield one


@pytest.fixture
def engine(_engine: FakeEngine) -> FakeEngine:
    _engine.script = echo
    return _engine


@pytest.fixture
def http(server: Running, engine: FakeEngine) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, headers={"x-api-key": _KEY}, timeout=60, trust_env=False) as one:
        yield one


def body_for(path: str, **values: object) -> dict[str, Any]:
    body = {**_BODY, **values}
    return body if path == _MESSAGES else {name: value for name, value in body.items() if name != "max_tokens"}


def check(reply: httpx.Response, status: int, kind: str, words: str = "") -> None:
    document = reply.json()
    assert (reply.status_code, document["error"]["type"]) == (status, kind)
    assert set(document) == {"type", "error", "request_id"}
    assert set(document["error"]) == {"type", "message"}
    assert document["type"] == "error"
    assert words in document["error"]["message"]
    assert document["request_id"]
    assert reply.headers["request-id"] == document["request_id"]
    assert reply.headers["content-type"] == "application/json"


@_BOTH
def test_the_official_client_learns_that_the_server_keeps_no_threads(http: httpx.Client, path: str) -> None:
    reply = http.post(path, json=body_for(path, thread={"type": "create"}))

    error = reply.json()["error"]
    assert (reply.status_code, error["type"]) == (400, "invalid_request_error")
    assert error["message"] == "thread is not supported here: send the whole conversation"
    assert error["details"] == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}


@_BOTH
def test_who_may_not_ask(http: httpx.Client, path: str) -> None:
    for headers in ({"x-api-key": "wrong"}, {"x-api-key": "", "authorization": "Bearer wrong"}):
        check(http.post(path, json=body_for(path), headers=headers), 401, "authentication_error")


@_BOTH
def test_a_page_that_may_not_ask(engine: FakeEngine, path: str) -> None:
    with running("openai", config_of(engine)) as server, http_client(server) as client:
        reply = client.post(path, json=body_for(path), headers={"origin": "https://evil.example"})

    check(reply, 403, "permission_error", "allow_origins")


@_BOTH
def test_what_cannot_be_read(http: httpx.Client, path: str) -> None:
    for content in (b"", b"{", b"[]", b'"text"', b"\xff", b"[" * 4000):
        check(http.post(path, content=content), 400, "invalid_request_error", "the body ")
    for wrong in ({"messages": []}, {"messages": "hi"}, {"tools": [{"name": ""}]}, {"model": 1}):
        check(http.post(path, json=body_for(path, **wrong)), 400, "invalid_request_error")
    check(http.post(path, json=body_for(path, system="x" * 5000)), 413, "request_too_large")


@_BOTH
def test_a_model_that_is_not_here(http: httpx.Client, path: str) -> None:
    check(http.post(path, json=body_for(path, model="other")), 404, "not_found_error", "available: tiny")


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_too_long(http: httpx.Client, engine: FakeEngine, stream: bool) -> None:
    engine.script = refusing(TOO_LONG, "the prompt has 9 tokens too many")

    check(
        http.post(_MESSAGES, json=body_for(_MESSAGES, stream=stream)), 400, "invalid_request_error", "9 tokens too many"
    )


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/messages/batches"),
        ("GET", "/v1/messages/batches"),
        ("GET", "/v1/messages/batches/one/results"),
        ("DELETE", "/v1/messages/batches/one"),
        ("POST", "/v1/messages/"),
    ],
)
def test_paths_that_are_not_served(http: httpx.Client, method: str, path: str) -> None:
    check(http.request(method, path), 404, "not_found_error", path)


@_BOTH
@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
def test_methods_that_are_not_served(http: httpx.Client, path: str, method: str) -> None:
    reply = http.request(method, path)

    check(reply, 405, "invalid_request_error", method)
    assert reply.headers["allow"] == "POST"


def test_other_paths_have_their_own_form(http: httpx.Client) -> None:
    for path in ("/v1/other", "/v1/messagesx"):
        assert set(http.get(path).json()) == {"error"}


@pytest.mark.parametrize("stream", [False, True])
def test_too_much_to_do(engine: FakeEngine, stream: bool) -> None:
    until = threading.Event()
    engine.script = held_once_accepted(until)
    num_before = len(engine.submits)
    with (
        running("openai", config_of(engine, max_requests=1)) as server,
        http_client(server) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        first = pool.submit(client.post, _MESSAGES, json=_BODY)
        wait_until(lambda: len(engine.submits) > num_before)
        replies = [client.post(path, json=body_for(path, stream=stream)) for path in (_MESSAGES, _COUNT)]
        until.set()
        first.result()

    for reply in replies:
        check(reply, 429, "rate_limit_error")
        assert reply.headers["retry-after"]


@_BOTH
def test_an_engine_that_is_away(tmp_path: Path, path: str) -> None:
    with fake_engine(tmp_path) as engine, running("openai", config_of(engine)) as server:
        engine.stop()
        wait_until(lambda: server.service.engines.models[0].hello is None)
        with http_client(server) as client:
            reply = client.post(path, json=body_for(path))

        check(reply, 503, "overloaded_error")
        assert reply.headers["retry-after"]


def test_a_bug(tmp_path: Path) -> None:
    """In a stream it is the last event."""
    with (
        fake_engine(tmp_path) as engine,
        running("openai", config_of(engine)) as server,
        http_client(server) as client,
    ):
        server.service.metrics = None  # type: ignore[assignment]
        whole = client.post(_MESSAGES, json=_BODY)
        streamed = client.post(_MESSAGES, json=body_for(_MESSAGES, stream=True))

    check(whole, 500, "api_error", "see its log")
    assert streamed.status_code == 200
    check_last_event(streamed, "api_error", "see its log")


def test_an_engine_that_dies_in_a_stream(tmp_path: Path) -> None:
    with (
        fake_engine(tmp_path, script=words_then(["one"], then=DIE)) as engine,
        running("openai", config_of(engine)) as server,
        http_client(server) as client,
    ):
        streamed = client.post(_MESSAGES, json=body_for(_MESSAGES, stream=True))

    check_last_event(streamed, "overloaded_error", "stopped before the answer was complete")


def test_an_answer_that_its_grammar_does_not_let_continue(http: httpx.Client, engine: FakeEngine) -> None:
    def script(submit: Submit) -> Iterator[Step]:
        yield accepted(submit)
        yield said(submit, "one", completion=ending("dead_end", 1))

    engine.script = script

    check(http.post(_MESSAGES, json=_BODY), 400, "invalid_request_error", DEAD_END)
    check_last_event(http.post(_MESSAGES, json=body_for(_MESSAGES, stream=True)), "invalid_request_error", DEAD_END)


def check_last_event(reply: httpx.Response, kind: str, words: str) -> None:
    last = reply.text.removesuffix("\n\n").split("\n\n")[-1].split("\n")
    assert last[0] == "event: error"
    document = json.loads(last[1].removeprefix("data: "))
    assert set(document) == {"type", "error", "request_id"}
    assert (document["type"], document["error"]["type"]) == ("error", kind)
    assert words in document["error"]["message"]
    assert document["request_id"] == reply.headers["request-id"]


_CLASSES: list[tuple[dict[str, Any], type[anthropic.APIStatusError]]] = [
    ({"model": "other"}, anthropic.NotFoundError),
    ({"messages": []}, anthropic.BadRequestError),
    ({"system": "x" * 5000}, anthropic.RequestTooLargeError),
]


@pytest.mark.parametrize(("values", "raised"), _CLASSES)
def test_the_client_raises_its_own_exceptions(
    server: Running, engine: FakeEngine, values: dict[str, Any], raised: type[anthropic.APIStatusError]
) -> None:
    with anthropic.Anthropic(base_url=server.url, api_key=_KEY, max_retries=0) as client:
        for ask in (client.messages.create, client.messages.count_tokens):
            body = body_for(_MESSAGES if ask == client.messages.create else _COUNT, **values)
            with pytest.raises(raised) as error:
                ask(**body)
            assert error.value.request_id == error.value.body["request_id"]  # type: ignore[index]
