"""Every limit of docs/limits.md at its edge: what is just within it is served, what is just over is refused."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvtier.api import generation
from kvtier.api.engine_connection import Answers
from kvtier.api.limits import (
    INLINE_BODY_BYTES,
    MAX_CACHE_SALT_CHARACTERS,
    MAX_MESSAGES,
    MAX_METADATA,
    MAX_PARTS,
    MAX_PROMPTS,
    MAX_RECORD_CHARACTERS,
    MAX_SCHEMA_DEPTH,
    MAX_TEMPLATE_CHARACTERS,
    MAX_TEMPLATE_DEPTH,
    MAX_TEMPLATE_VALUES,
    MAX_UNREAD_PIECES,
)
from kvtier.api.logprobs import SampledToken
from kvtier.api.open_bodies import OpenBodies
from kvtier.api.streaming import StreamedAnswer
from kvtier.engine.grammar import MAX_GRAMMAR_CHARACTERS
from kvtier.engine.process.messages import Submit
from kvtier.engine.sampling_params import (
    MAX_BIAS,
    MAX_CHOICES,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_STOP_CHARACTERS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MAX_TOKENS,
)
from tests.support.fake_engine import (
    MAX_MODEL_LEN,
    MODEL,
    FakeEngine,
    Running,
    Step,
    accepted,
    config_of,
    ending,
    fake_engine,
    http_client,
    running,
    said,
)
from tests.support.openai_asking import CHAT, COMPLETIONS, body_for, chat_body, completion_body, raw_post
from tests.support.waiting import LIMIT_S, wait_until

_MAX_BODY_BYTES = 4 << 20


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvt") as name:
        yield Path(name)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[FakeEngine]:
    with fake_engine(folder) as one:
        yield one


@pytest.fixture(scope="module")
def servers(engine: FakeEngine) -> Iterator[dict[str, Running]]:
    config = config_of(engine, max_body_bytes=_MAX_BODY_BYTES)
    with running("openai", config) as openai, running("ollama", config) as ollama:
        yield {"openai": openai, "ollama": ollama}


@pytest.fixture
def server(servers: dict[str, Running]) -> Running:
    return servers["openai"]


def nested(depth: int) -> object:
    return {"x": nested(depth - 1)} if depth else 1


def texts(count: int) -> list[object]:
    return [{"type": "text", "text": "a"}] * count


_Bodies = tuple[str, dict[str, Any], dict[str, Any]]

_EDGES: dict[str, _Bodies] = {
    "max_tokens": (COMPLETIONS, completion_body(max_tokens=MAX_TOKENS), completion_body(max_tokens=MAX_TOKENS + 1)),
    "min_tokens": (
        COMPLETIONS,
        completion_body(min_tokens=MAX_TOKENS, max_tokens=MAX_TOKENS),
        completion_body(min_tokens=1 << 63, max_tokens=1 << 63),
    ),
    "n": (COMPLETIONS, completion_body(n=MAX_CHOICES), completion_body(n=MAX_CHOICES + 1)),
    "top_k": (COMPLETIONS, completion_body(top_k=MAX_TOKENS), completion_body(top_k=MAX_TOKENS + 1)),
    "logprobs": (COMPLETIONS, completion_body(logprobs=MAX_LOGPROBS), completion_body(logprobs=MAX_LOGPROBS + 1)),
    "seed": (COMPLETIONS, completion_body(seed=(1 << 64) - 1), completion_body(seed=1 << 64)),
    "stop": (
        COMPLETIONS,
        completion_body(stop=["x" * MAX_STOP_CHARACTERS] * MAX_STOP_STRINGS),
        completion_body(stop=["x"] * (MAX_STOP_STRINGS + 1)),
    ),
    "stop, one": (
        COMPLETIONS,
        completion_body(stop="x" * MAX_STOP_CHARACTERS),
        completion_body(stop="x" * (MAX_STOP_CHARACTERS + 1)),
    ),
    "stop_token_ids": (
        COMPLETIONS,
        completion_body(stop_token_ids=[1] * MAX_STOP_TOKEN_IDS),
        completion_body(stop_token_ids=[1] * (MAX_STOP_TOKEN_IDS + 1)),
    ),
    "logit_bias": (
        COMPLETIONS,
        completion_body(logit_bias={str(number): 100 for number in range(MAX_LOGIT_BIAS)}),
        completion_body(logit_bias={str(number): 100 for number in range(MAX_LOGIT_BIAS + 1)}),
    ),
    "logit_bias, one": (
        COMPLETIONS,
        completion_body(logit_bias={"5": -MAX_BIAS}),
        completion_body(logit_bias={"5": -MAX_BIAS - 1}),
    ),
    "prompt_logprobs": (
        COMPLETIONS,
        completion_body(prompt_logprobs=MAX_LOGPROBS),
        completion_body(prompt_logprobs=MAX_LOGPROBS + 1),
    ),
    "cache_salt": (
        COMPLETIONS,
        completion_body(cache_salt="s" * MAX_CACHE_SALT_CHARACTERS),
        completion_body(cache_salt="s" * (MAX_CACHE_SALT_CHARACTERS + 1)),
    ),
    "user": (
        COMPLETIONS,
        completion_body(user="u" * MAX_RECORD_CHARACTERS),
        completion_body(user="u" * (MAX_RECORD_CHARACTERS + 1)),
    ),
    "metadata": (
        COMPLETIONS,
        completion_body(metadata={str(number): "" for number in range(MAX_METADATA)}),
        completion_body(metadata={str(number): "" for number in range(MAX_METADATA + 1)}),
    ),
    "prompt": (COMPLETIONS, completion_body(["a"] * MAX_PROMPTS), completion_body(["a"] * (MAX_PROMPTS + 1))),
    "prompt of tokens": (
        COMPLETIONS,
        completion_body([1] * (MAX_MODEL_LEN - 1)),
        completion_body([1] * MAX_MODEL_LEN),
    ),
    "prompt of text": (
        COMPLETIONS,
        completion_body("a" * (1024 * MAX_MODEL_LEN)),
        completion_body("a" * (1024 * MAX_MODEL_LEN + 1)),
    ),
    "prompt of names": (
        CHAT,
        {"model": MODEL, "messages": [{"role": "user", "content": "a", "name": "n" * (1024 * MAX_MODEL_LEN - 1)}]},
        {"model": MODEL, "messages": [{"role": "user", "content": "a", "name": "n" * (1024 * MAX_MODEL_LEN)}]},
    ),
    "messages": (
        CHAT,
        {"model": MODEL, "messages": [{"role": "user", "content": "a"}] * MAX_MESSAGES},
        {"model": MODEL, "messages": [{"role": "user", "content": "a"}] * (MAX_MESSAGES + 1)},
    ),
    "content": (CHAT, chat_body(texts(MAX_PARTS)), chat_body(texts(MAX_PARTS + 1))),
    "chat_template_kwargs": (
        CHAT,
        chat_body(chat_template_kwargs={"x": nested(MAX_TEMPLATE_DEPTH - 1)}),
        chat_body(chat_template_kwargs={"x": nested(MAX_TEMPLATE_DEPTH)}),
    ),
    "chat_template_kwargs, values": (
        CHAT,
        chat_body(chat_template_kwargs={"x": [1] * (MAX_TEMPLATE_VALUES - 1)}),
        chat_body(chat_template_kwargs={"x": [1] * MAX_TEMPLATE_VALUES}),
    ),
    "chat_template_kwargs, characters": (
        CHAT,
        chat_body(chat_template_kwargs={"x": "a" * (MAX_TEMPLATE_CHARACTERS - 1)}),
        chat_body(chat_template_kwargs={"x": "a" * MAX_TEMPLATE_CHARACTERS}),
    ),
}


@pytest.mark.parametrize("name", _EDGES)
def test_a_field_at_its_limit_is_served_and_over_it_refused(server: Running, name: str) -> None:
    path, within, over = _EDGES[name]
    with http_client(server) as client:
        served, refused = client.post(path, json=within), client.post(path, json=over)

    assert served.status_code == 200, served.text
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert len(error["message"]) < 300
    assert not name.startswith("prompt of") or error["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("within", "over"),
    [
        ({"num_predict": MAX_TOKENS}, {"num_predict": MAX_TOKENS + 1}),
        ({"top_k": MAX_TOKENS}, {"top_k": 1 << 40}),
        ({"stop": ["x"] * MAX_STOP_STRINGS}, {"stop": ["x"] * (MAX_STOP_STRINGS + 1)}),
        ({"stop": "x" * MAX_STOP_CHARACTERS}, {"stop": "x" * (MAX_STOP_CHARACTERS + 1)}),
        ({"seed": (1 << 64) - 1}, {"seed": 1 << 64}),
        ({"num_ctx": (1 << 64) - 1}, {"num_ctx": 1 << 64}),
        ({"temperature": 1000}, {"temperature": 1001}),
    ],
    ids=["num_predict", "top_k", "stop", "stop, one", "seed", "num_ctx", "temperature"],
)
def test_an_option_of_ollama_has_the_same_limits(
    servers: dict[str, Running], within: dict[str, object], over: dict[str, object]
) -> None:
    body = {"model": MODEL, "prompt": "one two", "stream": False, "raw": True}
    with http_client(servers["ollama"]) as client:
        served = client.post("/api/generate", json={**body, "options": within})
        refused = client.post("/api/generate", json={**body, "options": over})

    assert served.status_code == 200, served.text
    assert refused.status_code == 400
    assert refused.json()["error"].startswith(f"options.{next(iter(over))} ")
    assert len(refused.json()["error"]) < 300


# --- bodies -----------------------------------------------------------------------------------------------------------


def padded(num_bytes: int) -> bytes:
    body = b'{"model":"tiny","prompt":"one two"}'
    return body + b" " * (num_bytes - len(body))


@pytest.mark.parametrize("num_bytes", [INLINE_BODY_BYTES, INLINE_BODY_BYTES + 1, _MAX_BODY_BYTES])
def test_a_body_up_to_the_limit_is_served_wherever_it_is_read(server: Running, num_bytes: int) -> None:
    with http_client(server) as client:
        answer = client.post(COMPLETIONS, content=padded(num_bytes))

    assert answer.json()["choices"][0]["text"] == "one two"


def test_a_body_over_the_limit_is_refused_before_it_is_sent(server: Running) -> None:
    with http_client(server) as client:
        assert client.post(COMPLETIONS, content=padded(_MAX_BODY_BYTES + 1)).status_code == 413
    with connected(server) as connection:
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {_MAX_BODY_BYTES + 1}\r\n\r\n"
        connection.sendall(head.encode())
        assert connection.recv(65536).startswith(b"HTTP/1.1 413 ")


@contextlib.contextmanager
def connected(server: Running) -> Iterator[socket.socket]:
    with socket.create_connection(server.address, timeout=LIMIT_S) as connection:
        yield connection


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"tiny","prompt":[' + b"[]," * 20_000 + b"[]]}",
        b'{"model":"tiny","prompt":[' + b"1.2345678901234567e-300," * 3_000 + b"1]}",
        b'{"model":"tiny","prompt":"a",' + b",".join(b'"%x":1' % number for number in range(10_000)) + b"}",
        b"[" * 100_000,
        b'"' + b"a" * 100_000,
        b'{"model":"' + b"a" * 100_000 + b'","prompt":"a"}',
    ],
    ids=["lists", "numbers", "names", "depth", "text", "model"],
)
def test_a_large_body_that_is_wrong_gets_the_same_sentence_as_a_small_one(server: Running, body: bytes) -> None:
    with http_client(server) as client:
        refused = client.post(COMPLETIONS, content=body)

    assert refused.status_code in (400, 404)
    assert 0 < len(refused.json()["error"]["message"]) < 300
    assert refused.headers["x-request-id"]


def test_a_body_that_takes_too_long_to_read_is_refused_and_the_next_is_read(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    with http_client(server) as client:
        with monkeypatch.context() as patched:
            patched.setattr(server.service.large_bodies, "timeout_s", 0.0)
            refused = client.post(COMPLETIONS, content=padded(INLINE_BODY_BYTES + 1))
        served = client.post(COMPLETIONS, content=padded(INLINE_BODY_BYTES + 1))

    assert refused.status_code == 413
    assert refused.json()["error"]["message"] == "the body takes too long to read"
    assert served.status_code == 200


def test_a_body_that_drips_has_a_deadline_however_often_it_drips(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OpenBodies, "timeout_s", 1.0)
    with raw_post(server, CHAT, chat_body("x" * 1000), num_sent=1) as connection:
        connection.settimeout(0.05)
        answer = b""
        while not answer:
            with contextlib.suppress(OSError):
                connection.sendall(b" ")
            with contextlib.suppress(TimeoutError):
                answer = connection.recv(65536)

    assert answer.startswith(b"HTTP/1.1 408 ")


def test_the_slowest_body_gives_way_to_others(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OpenBodies, "slow_s", 0.0)
    monkeypatch.setattr(OpenBodies, "max_slow", 2)
    bodies = server.service.open_bodies
    with (
        raw_post(server, CHAT, chat_body("x" * 200_000), num_sent=190_000),
        http_client(server) as client,
    ):
        wait_until(lambda: bodies.num_open == 1)
        with raw_post(server, CHAT, chat_body(), num_sent=5) as slowest:
            wait_until(lambda: bodies.num_open == 2)

            assert client.post(CHAT, json=chat_body("one two")).status_code == 200
            assert slowest.recv(65536).startswith(b"HTTP/1.1 408 ")
            assert bodies.num_open == 1
    wait_until(lambda: bodies.num_open == 0)


def test_bodies_that_have_just_begun_do_not_count_as_slow(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OpenBodies, "slow_s", 1000.0)
    monkeypatch.setattr(OpenBodies, "max_slow", 1)
    bodies = server.service.open_bodies
    with raw_post(server, CHAT, chat_body(), num_sent=5), http_client(server) as client:
        wait_until(lambda: bodies.num_open == 1)

        assert client.post(CHAT, json=chat_body("one two")).status_code == 200
    wait_until(lambda: bodies.num_open == 0)


def test_if_no_body_is_slow_the_newest_is_refused(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OpenBodies, "slow_s", 1000.0)
    monkeypatch.setattr(OpenBodies, "max_slow", 1)
    monkeypatch.setattr(OpenBodies, "max_open", 1)
    bodies = server.service.open_bodies
    with raw_post(server, CHAT, chat_body(), num_sent=5), http_client(server) as client:
        wait_until(lambda: bodies.num_open == 1)

        refused = client.post(CHAT, json=chat_body("one two"))
    assert refused.status_code == 429
    assert refused.headers["retry-after"]
    wait_until(lambda: bodies.num_open == 0)


def test_bodies_that_arrive_hold_no_more_than_their_share_of_memory(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OpenBodies, "slow_s", 0.0)
    bodies = server.service.open_bodies
    with contextlib.ExitStack() as stack:
        held = []
        for number in range(5):
            connection = stack.enter_context(connected(server))
            connection.sendall(
                f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {_MAX_BODY_BYTES}\r\n\r\n".encode()
                + b" " * (_MAX_BODY_BYTES - 1)
            )
            held.append(connection)
            wait_until(lambda number=number: bodies.num_open == min(4, number + 1))

        assert sum(_is_answered(connection) for connection in held) == 1
    wait_until(lambda: bodies.num_open == 0)


def _is_answered(connection: socket.socket) -> bool:
    connection.settimeout(0.5)
    try:
        return connection.recv(65536).startswith(b"HTTP/1.1 408 ")
    except TimeoutError:
        return False


# --- logprobs of whole answers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_logprobs_of_a_whole_answer_are_not_kept_as_objects(
    engine: FakeEngine, server: Running, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    held = threading.Event()

    def script(submit: Submit) -> Iterator[Step]:
        yield accepted(submit)
        for _ in range(300):
            yield said(submit, "word ")
        yield held
        yield said(submit, "end", completion=ending("stop", 301))

    num_shaped = 0
    shape = generation.sampled_tokens

    def counting(*args: Any) -> Any:
        nonlocal num_shaped
        num_shaped += 1
        return shape(*args)

    monkeypatch.setattr(engine, "script", script)
    monkeypatch.setattr(generation, "sampled_tokens", counting)
    fields = {"logprobs": 20} if path == COMPLETIONS else {"logprobs": True, "top_logprobs": 20}
    with http_client(server) as client, ThreadPoolExecutor(1, "kvtier-test") as pool:
        try:
            asked = pool.submit(client.post, path, json=body_for(path, max_tokens=None, **fields))
            wait_until(lambda: num_shaped == 300)
            num_kept = sum(type(one) is SampledToken for one in gc.get_objects())
        finally:
            held.set()
        [choice] = asked.result().json()["choices"]

    assert num_kept < 20
    if path == CHAT:
        assert [one["token"] for one in choice["logprobs"]["content"]] == ["word "] * 300 + ["end"]
        assert all(len(one["top_logprobs"]) == 20 for one in choice["logprobs"]["content"])
    else:
        assert choice["logprobs"]["tokens"] == ["word "] * 300 + ["end"]
        assert choice["logprobs"]["text_offset"] == [5 * number for number in range(301)]
        assert all(len(one) == 20 for one in choice["logprobs"]["top_logprobs"])
        assert len(choice["logprobs"]["token_logprobs"]) == 301


@pytest.mark.parametrize("is_streamed", [False, True])
def test_others_have_their_turn_while_logprobs_are_shaped(
    engine: FakeEngine, server: Running, monkeypatch: pytest.MonkeyPatch, is_streamed: bool
) -> None:
    in_a_row = longest = 0
    shape = generation.sampled_tokens

    def next_turn() -> None:
        nonlocal in_a_row
        in_a_row = 0

    def counting(*args: Any) -> Any:
        nonlocal in_a_row, longest
        if not in_a_row:
            asyncio.get_running_loop().call_soon(next_turn)
        in_a_row += 1
        longest = max(longest, in_a_row)
        return shape(*args)

    monkeypatch.setattr(generation, "sampled_tokens", counting)
    with http_client(server) as client:
        body = completion_body("one two", logprobs=20, n=MAX_CHOICES, stream=is_streamed)
        assert client.post(COMPLETIONS, json=body).status_code == 200

    assert 1 <= longest <= 20


def test_logprobs_of_a_whole_answer_have_a_bound(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "MAX_WHOLE_LOGPROBS_BYTES", 2000)
    with http_client(server) as client:
        served = client.post(COMPLETIONS, json=completion_body("one two", logprobs=20))
        refused = client.post(COMPLETIONS, json=completion_body("one " * 20, logprobs=20, max_tokens=20))
        streamed = client.post(COMPLETIONS, json=completion_body("one " * 20, logprobs=20, max_tokens=20, stream=True))

    assert served.status_code == streamed.status_code == 200
    assert streamed.text.endswith("[DONE]\n\n")
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "logprobs"
    assert refused.json()["error"]["message"].startswith("logprobs must take less than ")


# --- streams that are not read ----------------------------------------------------------------------------------------


def endless(stop: threading.Event) -> Any:
    def script(submit: Submit) -> Iterator[Step]:
        yield accepted(submit)
        while not stop.is_set():
            yield said(submit, "word " * 200)

    return script


def test_a_stream_that_is_not_read_is_ended_and_the_engine_stops_computing(
    engine: FakeEngine, servers: dict[str, Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StreamedAnswer, "stall_s", 0.5)
    stop = threading.Event()
    monkeypatch.setattr(engine, "script", endless(stop))
    server, before = servers["openai"], len(engine.aborts)
    try:
        with raw_post(server, COMPLETIONS, completion_body(stream=True, max_tokens=None)) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            wait_until(lambda: len(engine.aborts) > before)
            wait_until(lambda: server.service.num_requests == 0)
    finally:
        stop.set()


def test_what_waits_for_a_slow_reader_is_bounded(
    engine: FakeEngine, servers: dict[str, Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    longest = 0
    put = Answers.put

    def noting(answers: Answers, reply: Any) -> None:
        nonlocal longest
        put(answers, reply)
        longest = max(longest, answers._replies.qsize())

    monkeypatch.setattr(Answers, "put", noting)
    stop = threading.Event()
    monkeypatch.setattr(engine, "script", endless(stop))
    before = len(engine.aborts)
    try:
        with raw_post(servers["openai"], COMPLETIONS, completion_body(stream=True, max_tokens=None)):
            wait_until(lambda: len(engine.aborts) > before)
    finally:
        stop.set()
    assert longest <= MAX_UNREAD_PIECES + 2


def test_prompts_wait_until_the_engine_reads(folder: Path) -> None:
    """The common part of a request's prompts is encoded once, and only as much as the socket takes."""
    with fake_engine(folder, name="frozen") as frozen, running("openai", config_of(frozen)) as server:
        frozen.freeze()
        body = completion_body(["a" * 500] * MAX_PROMPTS, stop=["x" * MAX_STOP_CHARACTERS] * MAX_STOP_STRINGS)
        connection = server.service.engines.connections[0]
        with http_client(server) as client:
            asking = threading.Thread(target=lambda: client.post(COMPLETIONS, json=body), name="asking")
            asking.start()
            wait_until(lambda: connection.num_requests > 0)
            writer = connection._writer
            assert writer is not None
            most = max(writer.transport.get_write_buffer_size() for _ in range(200))
            frozen.thaw()
            asking.join(LIMIT_S)
        assert len(frozen.submits) == MAX_PROMPTS
    assert most < 1 << 20


# --- schemas of answers -----------------------------------------------------------------------------------------------

_LONG_SCHEMA = {"type": "object", "description": "d" * MAX_GRAMMAR_CHARACTERS}
_DEEP_SCHEMA: dict[str, Any] = functools.reduce(lambda inner, _: {"items": inner}, range(MAX_SCHEMA_DEPTH), {})
_ASKING_FOR_SCHEMA = [
    (
        CHAT,
        lambda form: chat_body(response_format={"type": "json_schema", "json_schema": form}),
        "response_format.json_schema",
    ),
    (
        "/v1/responses",
        lambda form: {"model": MODEL, "input": "x", "text": {"format": {"type": "json_schema", "name": "s", **form}}},
        "text.format",
    ),
    (
        "/v1/messages",
        lambda form: chat_body(max_tokens=2, output_config={"format": {"type": "json_schema", **form}}),
        "output_config.format",
    ),
]


@pytest.mark.parametrize(
    ("path", "body_with", "field"), _ASKING_FOR_SCHEMA, ids=lambda one: one if isinstance(one, str) else ""
)
def test_a_schema_out_of_bounds_is_told_by_its_field_in_every_api(
    server: Running, path: str, body_with: Callable[[dict[str, Any]], dict[str, Any]], field: str
) -> None:
    with http_client(server) as client:
        for schema, bound in ((_LONG_SCHEMA, MAX_GRAMMAR_CHARACTERS), (_DEEP_SCHEMA, MAX_SCHEMA_DEPTH)):
            response = client.post(path, json=body_with({"schema": schema}))

            assert response.status_code == 400
            sentence = response.json()["error"]["message"]
            assert sentence.startswith(f"{field}.schema must ")
            assert f"at most {bound} " in sentence
        missing = client.post(path, json=body_with({}))
        assert missing.status_code == 400
        assert f"{field}.schema " in missing.json()["error"]["message"]
