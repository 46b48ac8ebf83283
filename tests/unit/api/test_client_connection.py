"""Clients that send too much, too little, or too slowly; and how many there may be."""

from __future__ import annotations

import contextlib
import logging
import resource
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvtier.api.client_connection import ClientConnection
from kvtier.api.limits import CHUNK_BYTES, MAX_HEAD_BYTES, MAX_HEADERS, MAX_PIPELINED, NUM_FREE_CHUNKS
from kvtier.api.open_bodies import OpenBodies
from kvtier.api.server import raise_file_limit
from kvtier.engine.process.messages import ChatPrompt
from tests.support.fake_engine import FakeEngine, Running, config_of, fake_engine, http_client, running, words_then
from tests.support.openai_asking import CHAT, chat_body, raw_post, receive_until
from tests.support.waiting import LIMIT_S

_GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
_SHORT_S = 0.5


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[FakeEngine]:
    with fake_engine(tmp_path) as one:
        yield one


@pytest.fixture
def server(engine: FakeEngine) -> Iterator[Running]:
    with running("openai", config_of(engine)) as one:
        yield one


@pytest.fixture
def is_impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ClientConnection, "head_timeout_s", _SHORT_S)
    monkeypatch.setattr(OpenBodies, "timeout_s", _SHORT_S)


@contextlib.contextmanager
def connected(server: Running) -> Iterator[socket.socket]:
    with socket.create_connection(server.address, timeout=LIMIT_S) as connection:
        yield connection


def rest_of(connection: socket.socket) -> bytes:
    """The bytes until the server hangs up, which it must."""
    received = b""
    with contextlib.suppress(ConnectionError):
        while came := connection.recv(65536):
            received += came
    return received


# --- long heads -------------------------------------------------------------------------------------------------------


def test_a_head_up_to_the_limit_is_answered_and_so_is_a_large_body_behind_it(server: Running) -> None:
    with http_client(server) as client:
        assert client.get("/health", headers={"x-long": "x" * (MAX_HEAD_BYTES - 1024)}).status_code == 200
        assert client.post(CHAT, json=chat_body("x" * 4 * MAX_HEAD_BYTES)).status_code == 200


@pytest.mark.parametrize(
    "head",
    [
        _GET + b"x-long: " + b"x" * MAX_HEAD_BYTES,
        _GET + b"x-long: " + b"x" * MAX_HEAD_BYTES + b"\r\n\r\n",
        _GET + b"x-many: x\r\n" * (MAX_HEAD_BYTES // 8),
        _GET + b"x: y\r\n" * (MAX_HEADERS + 2),
        b"GET /" + b"x" * 2 * MAX_HEAD_BYTES,
        b"\r\n" * MAX_HEAD_BYTES,
    ],
    ids=["unfinished", "finished", "many long headers", "many headers", "a long path", "empty lines"],
)
def test_a_longer_head_is_431_and_the_connection_is_closed(server: Running, head: bytes) -> None:
    with connected(server) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(head)
        answer = rest_of(connection)

    assert answer.startswith(b"HTTP/1.1 431 ")
    assert b"connection: close" in answer
    with http_client(server) as client:
        assert client.get("/health").status_code == 200


def test_trailers_are_no_way_around_the_limit(server: Running) -> None:
    head = b"POST /health HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nx-long: "
    with connected(server) as connection:
        connection.sendall(head)
        with pytest.raises(ConnectionError):
            connection.sendall(b"x" * 1024 * MAX_HEAD_BYTES)


# --- the form of errors -----------------------------------------------------------------------------------------------

_LONG = b"x-long: " + b"x" * MAX_HEAD_BYTES
_BROKEN = {
    "a long head": (b"POST %s HTTP/1.1\r\nHost: localhost\r\n" + _LONG, 431),
    "no header": (b"POST %s HTTP/1.1\r\nHost: localhost\r\nthis is none\r\n\r\n", 400),
    "a wrong length": (b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: ten\r\n\r\n", 400),
    "a wrong chunk": (b"POST %s HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
    "small chunks": (b"POST %s HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1\r\n \r\n" * 9000, 400),
}


def _error_in(server: Running, sent: bytes, status: int) -> dict[str, Any]:
    """The document of an answer with this status, after which the connection is closed."""
    with connected(server) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(sent)
        head, _, body = rest_of(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status)
    assert b"\r\ncontent-type: application/json\r\n" in head
    assert b"\r\ncontent-length: %d\r\n" % len(body) in head
    document: dict[str, Any] = msgspec.json.decode(body)
    return document


@pytest.mark.parametrize(("sent", "status"), _BROKEN.values(), ids=_BROKEN)
def test_what_is_no_request_gets_an_error_in_the_form_of_its_path(server: Running, sent: bytes, status: int) -> None:
    plain = _error_in(server, sent % b"/v1/chat/completions?x=y", status)
    assert plain["error"]["type"] == "invalid_request_error"
    assert plain["error"]["message"]
    message = _error_in(server, sent % b"/v1/messages", status)
    assert (message["type"], message["error"]["type"]) == ("error", "invalid_request_error")
    assert message["request_id"]
    with http_client(server) as client:
        assert client.get("/health").status_code == 200


def test_ollamas_port_has_both_forms(engine: FakeEngine) -> None:
    sent, status = _BROKEN["no header"]
    with running("ollama", config_of(engine)) as server:
        assert isinstance(_error_in(server, sent % b"/api/chat", status)["error"], str)
        assert isinstance(_error_in(server, b"what is this?\r\n\r\n", status)["error"], str)
        assert isinstance(_error_in(server, sent % b"/v1/chat/completions", status)["error"], dict)


def test_too_many_requests_get_an_error_in_the_form_of_their_path(server: Running) -> None:
    request = b"POST /v1/messages HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}"
    with connected(server) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(request * 500)
        last = rest_of(connection).rpartition(b"HTTP/1.1 ")[2]

    assert last.startswith(b"429")
    assert msgspec.json.decode(last.partition(b"\r\n\r\n")[2])["error"]["type"] == "rate_limit_error"


def test_a_broken_request_does_not_speak_into_an_answer_that_has_begun(server: Running, engine: FakeEngine) -> None:
    body = msgspec.json.encode(chat_body("x", stream=True))
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    is_over = threading.Event()
    engine.script = words_then(["one"], then=is_over)
    with connected(server) as connection:
        connection.sendall(head + body)
        answer = receive_until(connection, b"data: ")
        connection.sendall(b"what is this?\r\n\r\n")
        answer += rest_of(connection)
    is_over.set()

    assert answer.count(b"HTTP/1.1 ") == 1


# --- many small pieces ------------------------------------------------------------------------------------------------

_CHUNKED = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n".encode()


def in_chunks(body: bytes, num_bytes: int) -> bytes:
    pieces = [body[start : start + num_bytes] for start in range(0, len(body), num_bytes)]
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)


@pytest.mark.parametrize(
    "sizes",
    [[1] * NUM_FREE_CHUNKS, [CHUNK_BYTES] * 20_000, [4096] * 64, [100_000] * 4],
    ids=["a few of a byte", "many small ones", "some KiB", "large ones"],
)
def test_a_body_may_come_in_chunks(server: Running, engine: FakeEngine, sizes: list[int]) -> None:
    text = "x" * (sum(sizes) - 200)
    body = msgspec.json.encode(chat_body(text))
    with connected(server) as connection:
        connection.sendall(_CHUNKED + in_chunks(body, sizes[0]) + b"0\r\n\r\n")
        answer = receive_until(connection, b'"usage"')

    assert answer.startswith(b"HTTP/1.1 200 ")
    assert isinstance(engine.last.prompt, ChatPrompt)
    assert engine.last.prompt.messages[0].content == text


def test_a_client_that_sends_each_piece_as_it_has_it_is_served(server: Running) -> None:
    body = msgspec.json.encode(chat_body("x" * 5000))
    with http_client(server) as client:
        answer = client.post(CHAT, content=(body[start : start + 3] for start in range(0, len(body), 3)))

    assert answer.status_code == 200


@pytest.mark.parametrize(
    "chunks",
    [b"1\r\n \r\n" * 200_000, b"2;why=not\r\n  \r\n" * 100_000, in_chunks(b" " * 1_000_000, 7)],
    ids=["of a byte", "with extensions", "of seven bytes"],
)
def test_a_body_in_too_many_small_chunks_is_refused_with_a_sentence(
    server: Running, monkeypatch: pytest.MonkeyPatch, chunks: bytes
) -> None:
    num_passed_on = 0
    on_body = ClientConnection.on_body

    def counting(connection: ClientConnection, body: bytes) -> None:
        nonlocal num_passed_on
        num_passed_on += 1
        on_body(connection, body)

    monkeypatch.setattr(ClientConnection, "on_body", counting)
    with connected(server) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(_CHUNKED + chunks)
        answer = rest_of(connection)

    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"the body has too many small chunks: send chunks of at least 16 bytes" in answer
    assert num_passed_on < 20_000  # most were never looked at
    with http_client(server) as client:
        assert client.get("/health").status_code == 200


def test_chunks_behind_an_answer_close_the_connection(server: Running) -> None:
    with connected(server) as connection:
        connection.sendall(_CHUNKED.replace(CHAT.encode(), b"/nowhere"))
        answer = receive_until(connection, b"unknown_url")
        with contextlib.suppress(ConnectionError):
            connection.sendall(b"1\r\n \r\n" * 200_000)
        answer += rest_of(connection)

    assert answer.count(b"HTTP/1.1 ") == 1


def test_a_few_requests_may_follow_each_other_without_waiting(server: Running) -> None:
    for _ in range(2):
        with connected(server) as connection:
            connection.sendall((_GET + b"\r\n") * (MAX_PIPELINED + 1))
            received = b""
            while received.count(b'{"status":"ok"}') < MAX_PIPELINED + 1:
                received += connection.recv(65536)
            connection.sendall(_GET + b"\r\n")

            assert receive_until(connection, b'{"status":"ok"}').startswith(b"HTTP/1.1 200 ")


def test_more_requests_than_that_are_refused_once_those_before_them_are_answered(server: Running) -> None:
    with connected(server) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall((_GET + b"\r\n") * 5000)
        answers = rest_of(connection).split(b"HTTP/1.1 ")[1:]

    assert [answer[:3] for answer in answers] == [b"200"] * (MAX_PIPELINED + 1) + [b"429"]
    assert b"\r\nretry-after: " in answers[-1].lower()
    assert b"\r\nconnection: close\r\n" in answers[-1]
    error = msgspec.json.decode(answers[-1].partition(b"\r\n\r\n")[2])["error"]
    assert error["message"] == "more than 16 requests wait on this connection: wait for their answers"
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    with http_client(server) as client:
        assert client.get("/health").status_code == 200


# --- slow ones --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("is_impatient")
@pytest.mark.parametrize("sent", [b"", _GET], ids=["nothing", "half a head"])
def test_a_connection_without_a_whole_head_is_closed(server: Running, sent: bytes) -> None:
    with connected(server) as connection:
        connection.sendall(sent)

        assert rest_of(connection) == b""


@pytest.mark.usefixtures("is_impatient")
def test_dripping_headers_wins_no_time(server: Running) -> None:
    with connected(server) as connection, contextlib.suppress(ConnectionError):
        while True:  # until the server hangs up
            connection.sendall(b"G")
            time.sleep(_SHORT_S / 10)


@pytest.mark.usefixtures("is_impatient")
@pytest.mark.parametrize("sent", [b"GET /heal", b"\r\n"], ids=["half a head", "an empty line"])
def test_a_later_request_has_no_more_time_but_idling_is_free(server: Running, sent: bytes) -> None:
    with connected(server) as connection:
        for _ in range(2):
            connection.sendall(_GET + b"\r\n")
            receive_until(connection, b'{"status":"ok"}')
            time.sleep(2 * _SHORT_S)
        connection.sendall(sent)

        assert rest_of(connection) == b""


@pytest.mark.usefixtures("is_impatient")
def test_a_body_that_stalls_is_408(server: Running, engine: FakeEngine) -> None:
    with raw_post(server, CHAT, chat_body(), num_sent=10) as connection:
        answer = rest_of(connection)

    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b'"type":"invalid_request_error"' in answer
    assert not engine.submits


# --- open files -------------------------------------------------------------------------------------------------------


def test_as_many_files_may_be_open_as_the_process_may_have(caplog: pytest.LogCaptureFixture) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
    try:
        raise_file_limit()

        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert bool(caplog.records) == (hard != resource.RLIM_INFINITY and hard < 4096)


def test_a_low_limit_of_files_is_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (256, 1024))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: None)

    with caplog.at_level(logging.WARNING):
        raise_file_limit()

    assert "at most 1024 files" in caplog.text
