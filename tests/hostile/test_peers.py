"""Peers that connect and do no good: others are served as if they were not there.

Each test has a peer that attacks and a client that behaves. What it costs in time is a benchmark's
(`benchmarks/remote_kv_cache/test_hostile.py`); here it must work at all, and bounds must hold.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtier.cacheserver.config import CacheServerConfig
from kvtier.cacheserver.guests import MAX_TCP_STRANGERS
from kvtier.cacheserver.server import CacheServer
from kvtier.errors import TierError, TierRefused
from kvtier.testing.servers import ServerProcess, cache_server
from kvtier.transport.address import TcpAddress, UnixAddress
from kvtier.wire import messages as wire
from kvtier.wire.frames import MAX_BODY_BYTES, encode_frame
from tests.support.actors import (
    BLOCK_BYTES,
    LAYOUT,
    NAMESPACE,
    chain,
    handshaken,
    open_client,
    payloads,
    raw_socket,
    read_all,
    receive_message,
)
from tests.support.waiting import wait_until

HASHES = chain(1, 12)


def num_threads(server: ServerProcess) -> int:
    return len(list(Path(f"/proc/{server.pid}/task").iterdir()))


def num_descriptors(server: ServerProcess) -> int:
    return len(list(Path(f"/proc/{server.pid}/fd").iterdir()))


def connected(address: str) -> socket.socket:
    """Connect as soon as the server has room in its queue."""
    found: list[socket.socket] = []

    def has_connected() -> bool:
        with contextlib.suppress(BlockingIOError):
            found.append(raw_socket(address))
        return bool(found)

    wait_until(has_connected, "a place in the server's queue")
    return found[0]


def comes_in(address: str, token: str | None = None) -> bool:
    """A client that behaves gets in, sooner or later, and is served."""
    served: list[bool] = []

    def is_served() -> bool:
        with contextlib.suppress(TierError):
            with open_client(address, token) as client:
                client.set(HASHES, payloads(HASHES))
                served.append(read_all(client, HASHES) == payloads(HASHES))
        return bool(served)

    wait_until(is_served, "a client gets in")
    return served[0]


@contextlib.contextmanager
def crowd(address: str, count: int, act: Callable[[socket.socket], None]) -> Iterator[list[socket.socket]]:
    """`count` connections that have done `act`."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(connected(address)) for _ in range(count)]
        for sock in sockets:
            with contextlib.suppress(OSError):
                act(sock)
        yield sockets


def silent(sock: socket.socket) -> None:
    pass


def begin_hello(sock: socket.socket) -> None:
    sock.send(encode_frame(0, wire.encode(wire.Hello("slow", bytes(16), bytes(16))))[:10])


def wrong_token(sock: socket.socket) -> None:
    with contextlib.suppress(TierRefused):
        handshaken(sock, "not the token at all")


@pytest.mark.parametrize("act", [silent, begin_hello])
@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_a_crowd_of_strangers_shuts_nobody_out(kind: str, act: Callable[[socket.socket], None]) -> None:
    with cache_server("--max-connections", "64", tcp=True) as server:
        before = num_threads(server)
        with crowd(server.addresses[kind], 300, act):
            assert comes_in(server.unix)
            assert comes_in(server.tcp, server.token)
            assert num_threads(server) <= before + MAX_TCP_STRANGERS + 16
        wait_until(lambda: num_threads(server) <= before + 2, "strangers have gone")


def test_clients_over_tcp_leave_places_to_this_host() -> None:
    with cache_server("--max-connections", "8", tcp=True) as server, contextlib.ExitStack() as stack:
        refused = 0
        for _ in range(12):
            sock = stack.enter_context(raw_socket(server.tcp))
            try:
                handshaken(sock, server.token)
            except TierError:
                refused += 1
        assert refused == 6
        with open_client(server.unix) as local:
            assert local.set(HASHES, payloads(HASHES)) == 12


def test_refused_peers_that_go_on_talking_are_cut_off() -> None:
    """A refusal is said, and then the socket is closed, whatever still comes."""
    with cache_server("--max-connections", "1", tcp=True) as server, contextlib.ExitStack() as stack:
        handshaken(stack.enter_context(raw_socket(server.unix)), None)
        threads, descriptors = num_threads(server), num_descriptors(server)
        sockets = [stack.enter_context(raw_socket(server.unix)) for _ in range(200)]
        failure = receive_message(sockets[-1])
        assert isinstance(failure, wire.Failure)
        assert "1 connections are open, which is the limit" in failure.sentence
        assert num_threads(server) <= threads + 2

        def are_closed() -> bool:
            for sock in sockets:
                with contextlib.suppress(OSError):
                    sock.send(b"x")
            return num_descriptors(server) <= descriptors + 2

        wait_until(are_closed, "the server has closed them")


def test_whoever_guesses_tokens_is_named_and_shuts_nobody_out(capfd: pytest.CaptureFixture[str]) -> None:
    said: list[str] = []

    def is_named() -> bool:
        said.append(capfd.readouterr().err)
        return re.search(r"127\.0\.0\.1:\d+ .*refused.*the token is not the server's", "".join(said)) is not None

    with cache_server(tcp=True) as server:
        with crowd(server.tcp, 5, wrong_token):
            with open_client(server.tcp, server.token) as remote:
                remote.ping()
        wait_until(is_named)


def test_accepting_outlives_every_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = CacheServerConfig(
        memory_bytes=1 << 20,
        unix=UnixAddress(str(tmp_path / "socket")),
        tcp=TcpAddress("127.0.0.1", 0),
        token=b"a token for tests",
    )
    server = CacheServer(config)
    try:
        with monkeypatch.context() as patch:
            start = threading.Thread.start

            def no_more_threads(thread: threading.Thread) -> None:
                if thread.name == "kvtier-connection":
                    raise RuntimeError("can't start new thread")
                start(thread)

            patch.setattr(threading.Thread, "start", no_more_threads)
            for address in (f"unix:{tmp_path / 'socket'}", f"tcp://127.0.0.1:{server.tcp_port}"):
                with raw_socket(address) as sock:
                    sock.settimeout(60)
                    assert sock.recv(1) == b""  # closed, and that is all
        with open_client(f"tcp://127.0.0.1:{server.tcp_port}", "a token for tests") as remote:
            remote.ping()
        with open_client(f"unix:{tmp_path / 'socket'}") as local:
            local.ping()
    finally:
        server.close()


def test_metrics_are_served_beside_a_crowd_that_asks_nothing() -> None:
    with cache_server("--metrics", "127.0.0.1:0") as server:
        before = num_threads(server)
        address = server.metrics.removeprefix("http:").removesuffix("/metrics").replace("//", "tcp://")
        with crowd(address, 200, silent):
            assert num_threads(server) <= before + 2
            with urllib.request.urlopen(server.metrics, timeout=60) as response:
                assert b"kvtier_server_memory_bytes" in response.read()
                assert response.headers["Content-Type"].startswith("text/plain")


@pytest.mark.parametrize(
    "request_bytes",
    [b"POST /metrics HTTP/1.1\r\n\r\n", b"\0" * 100_000, b"GET " + b"/" * 100_000, b"GET / HTTP/1.1\r\n" * 10_000],
)
def test_metrics_outlive_what_is_no_request(request_bytes: bytes) -> None:
    with cache_server("--metrics", "127.0.0.1:0") as server:
        address = server.metrics.removeprefix("http:").removesuffix("/metrics").replace("//", "tcp://")
        with raw_socket(address) as sock, contextlib.suppress(OSError):
            sock.sendall(request_bytes)
            answer = sock.recv(1 << 16)
            assert not answer or answer.startswith(b"HTTP/1.1 405")
        with urllib.request.urlopen(server.metrics, timeout=60) as response:
            assert response.status == 200


@pytest.mark.slow
def test_a_get_that_is_hardly_read_ends_and_gives_its_blocks_back() -> None:
    options = ("--lease-timeout", "1", "--max-frame", "64MiB")
    with cache_server(*options, tcp=True, memory="64MiB") as server, open_client(server.unix) as local:
        hashes = chain(2, 3000)
        local.set(hashes, payloads(hashes))
        with raw_socket(server.tcp) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            handshaken(sock, server.token)
            sock.sendall(encode_frame(1, wire.encode(wire.Open(NAMESPACE, "", BLOCK_BYTES, LAYOUT.block_tokens, ""))))
            opened = receive_message(sock)
            assert isinstance(opened, wire.Opened)
            sock.sendall(encode_frame(2, wire.encode(wire.GetRequest(opened.space, b"".join(hashes), 3000))))
            wait_until(lambda: local.stats()["held_bytes"], "it is being sent")

            def is_given_back() -> bool:
                with contextlib.suppress(OSError):
                    sock.recv(1)  # it reads, a byte at a time
                return local.stats()["held_bytes"] == 0

            wait_until(is_given_back, "its blocks are given back")


def test_a_frame_that_drips_ends_its_connection() -> None:
    with cache_server("--lease-timeout", "1", tcp=True) as server, raw_socket(server.tcp) as sock:
        handshaken(sock, server.token)
        frame = encode_frame(1, wire.encode(wire.NoteRequest("id", "x" * 10_000)))
        sock.sendall(frame[:100])

        def is_cut() -> bool:
            try:
                sock.send(b"x")
            except OSError:
                return True
            return False

        wait_until(is_cut, "the connection has ended")


@pytest.mark.slow
def test_bodies_that_never_end_take_little_memory() -> None:
    with cache_server(tcp=True, memory="16MiB") as server:
        before = server.resident_bytes()
        promised = encode_frame(1, bytes(MAX_BODY_BYTES))[:-1]

        def promise(sock: socket.socket) -> None:
            handshaken(sock, server.token)
            sock.settimeout(0.5)  # beyond what the server has room for, nothing is read
            sock.sendall(promised)

        with crowd(server.tcp, 16, promise):
            assert server.resident_bytes() < before + 10 * MAX_BODY_BYTES
            assert comes_in(server.tcp, server.token)
        wait_until(lambda: server.resident_bytes() < before + MAX_BODY_BYTES, "their memory has come back")


@pytest.mark.slow
def test_idle_connections_keep_nothing_of_large_requests() -> None:
    with cache_server(tcp=True, memory="16MiB") as server:
        before = server.resident_bytes()

        def ask(sock: socket.socket) -> None:
            handshaken(sock, server.token)
            sock.sendall(encode_frame(1, wire.encode(wire.Open(NAMESPACE, "", BLOCK_BYTES, 16, ""))))
            opened = receive_message(sock)
            assert isinstance(opened, wire.Opened)
            request = wire.MatchRequest(opened.space, bytes(32 * 500_000), 1, False)
            sock.sendall(encode_frame(2, wire.encode(request)))
            assert isinstance(receive_message(sock), wire.Matched)

        with crowd(server.tcp, 8, ask):
            wait_until(lambda: server.resident_bytes() < before + 5 * MAX_BODY_BYTES, "their memory has come back")


def test_namespaces_without_number_are_told_page_by_page() -> None:
    """Each takes a slot of memory; the description of all of them is more than a frame."""
    with cache_server(memory="64MiB") as server, raw_socket(server.unix) as sock:
        handshaken(sock, None)
        names = [number.to_bytes(32, "little") for number in range(2500)]
        spaces = []
        for number, namespace in enumerate(names):
            if number % 1000 == 0:
                connection = raw_socket(server.unix)
                spaces.append(connection)
                handshaken(connection, None)
            connection.sendall(encode_frame(1, wire.encode(wire.Open(namespace, "n" * 256, 1, 1, ""))))
            assert isinstance(receive_message(connection), wire.Opened)
        with open_client(server.unix) as client:
            assert len(json.dumps(client.info())) < 1 << 20
            assert len(client.namespaces()) == 2501
        for connection in spaces:
            connection.close()
