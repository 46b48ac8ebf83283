"""Clients that send too much, too little, or too slowly; and how many there may be."""

from __future__ import annotations

import contextlib
import logging
import resource
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.api.client_connection import MAX_HEAD_BYTES, ClientConnection
from kvtier.api.open_bodies import OpenBodies
from kvtier.api.server import raise_file_limit
from tests.support.fake_engine import FakeEngine, Running, config_of, fake_engine, http_client, running
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
    """What comes until the server hangs up, which it must."""
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
        b"GET /" + b"x" * 2 * MAX_HEAD_BYTES,
        b"\r\n" * MAX_HEAD_BYTES,
    ],
    ids=["unfinished", "finished", "many headers", "a long path", "empty lines"],
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

    assert "only 1024 files" in caplog.text
