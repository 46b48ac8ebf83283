"""Bytes that no client of ours sends: the server answers, closes that connection, and serves the others on."""

from __future__ import annotations

import os
import socket
import time
import urllib.request

import pytest

from kvtier.blocks.hashing import join_hashes
from kvtier.memory.checksum import checksum_of
from kvtier.testing.servers import ServerProcess, cache_server
from kvtier.wire import messages as wire
from kvtier.wire.frames import encode_frame
from tests.support.actors import (
    BLOCK_BYTES,
    NOTHING_HELD,
    OTHER_NAMESPACE,
    actor,
    anonymous_bytes,
    chain,
    handshaken,
    held,
    open_client,
    payloads,
    raw_socket,
    read_all,
    receive_message,
)
from tests.support.waiting import LIMIT_S, wait_until


@pytest.mark.parametrize(
    ("num_frames", "num_sent", "seed"),
    [
        (2_000, 5_000, 1),
        pytest.param(100_000, 250_000, 3, marks=pytest.mark.slow),
        *[pytest.param(800_000, 2_000_000, seed, marks=pytest.mark.soak) for seed in (11, 13, 15, 17, 19)],
    ],
)
def test_mutated_frames_hurt_nobody_else(num_frames: int, num_sent: int, seed: int) -> None:
    hashes = chain(1, 16)
    with (
        cache_server("--metrics", "127.0.0.1:0", tcp=True) as server,
        open_client(server.unix) as local,
        open_client(server.tcp, server.token) as remote,
    ):
        local.set(hashes, payloads(hashes))
        assert local.pin(hashes) == 16
        with (
            actor("send_mutants", address=server.unix, token=None, seed=seed, num_frames=num_sent // 2) as near,
            actor(
                "send_mutants", address=server.tcp, token=server.token, seed=seed + 1, num_frames=num_sent // 2
            ) as far,
        ):
            num_reads = 0
            while not (near.has_spoken() and far.has_spoken()):
                assert read_all(local, hashes) == payloads(hashes)
                assert read_all(remote, hashes) == payloads(hashes)
                num_reads += 1
                time.sleep(0.02)  # leave the machine to the mutants
            heard = [near.hear(), far.hear()]

        assert [each["hanging"] for each in heard] == [0, 0]
        assert num_reads > 10
        num_read = _metric(server, "kvtier_server_requests_total") - 4 * num_reads
        num_read += _metric(server, 'kvtier_server_refusals_total{kind="protocol"}')
        assert num_read >= num_frames, "frames behind one that ends the connection do not count"
        assert server.process.poll() is None
        assert anonymous_bytes(server) < 200 << 20
        assert local.metrics.value(local.metrics.failures) == 0
        assert remote.metrics.value(remote.metrics.failures) == 0
        wait_until(lambda: held(local) == NOTHING_HELD)
        wait_until(lambda: local.stats()["clients"] == 2)


def _metric(server: ServerProcess, name: str) -> float:
    """The sum of a metric over its labels."""
    with urllib.request.urlopen(server.metrics, timeout=LIMIT_S) as reply:
        lines = reply.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


@pytest.fixture(params=["unix", "tcp"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def _opened(server: ServerProcess, transport: str) -> tuple[socket.socket, int]:
    """A raw connection past the handshake, and the number of a namespace of its own."""
    sock = raw_socket(getattr(server, transport))
    handshaken(sock, server.token if transport == "tcp" else None)
    opened = _ask(sock, wire.Open(OTHER_NAMESPACE, "raw", BLOCK_BYTES, 16, ""))
    assert isinstance(opened, wire.Opened)
    return sock, opened.space


def _ask(sock: socket.socket, request: wire.Message, data: bytes = b"") -> wire.Message:
    sock.sendall(encode_frame(7, wire.encode(request), len(data)) + data)
    return receive_message(sock)


def _is_closed(sock: socket.socket) -> bool:
    """By the peer, with or without bytes of ours that it never read."""
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


def test_a_frame_over_the_limit_is_refused_with_a_sentence(transport: str) -> None:
    with cache_server("--max-frame", "1MiB", tcp=True) as server, open_client(server.unix) as other:
        sock, _ = _opened(server, transport)
        with sock:
            sock.sendall(encode_frame(7, wire.encode(wire.Fill(1, 0, 1)), 2 << 20))
            failure = receive_message(sock)
            assert isinstance(failure, wire.Failure)
            assert failure.kind == "protocol"
            assert "2MiB payload is over the limit of 16MiB and 1MiB" in failure.sentence
            assert _is_closed(sock)
        assert other.set(chain(1, 2), payloads(chain(1, 2))) == 2


def test_before_the_handshake_frames_are_small(transport: str) -> None:
    with cache_server(tcp=True) as server, open_client(server.unix) as other:
        with raw_socket(getattr(server, transport)) as sock:
            sock.sendall(encode_frame(0, b"x" * 5000)[:24])
            failure = receive_message(sock)
            assert isinstance(failure, wire.Failure)
            assert "over the limit" in failure.sentence
        other.ping()


def test_a_request_before_the_handshake_is_out_of_order(transport: str) -> None:
    with cache_server(tcp=True) as server, open_client(server.unix) as other:
        with raw_socket(getattr(server, transport)) as sock:
            failure = _ask(sock, wire.StatsRequest())
            assert isinstance(failure, wire.Failure)
            assert "out of order" in failure.sentence
            assert _is_closed(sock)
        other.ping()


def test_bytes_that_are_not_ours_are_told_so(transport: str) -> None:
    with cache_server(tcp=True) as server, open_client(server.unix) as other:
        with raw_socket(getattr(server, transport)) as sock:
            sock.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"[:24])
            failure = receive_message(sock)
            assert isinstance(failure, wire.Failure)
            assert "does not speak kvtier's protocol" in failure.sentence
        other.ping()


def test_a_connection_that_says_nothing_keeps_nobody_waiting(transport: str) -> None:
    with cache_server(tcp=True) as server, raw_socket(getattr(server, transport)) as silent:
        silent.sendall(encode_frame(0, b"half a frame")[:20])
        with open_client(getattr(server, transport), server.token) as other:
            assert other.set(chain(1, 2), payloads(chain(1, 2))) == 2


def test_a_number_in_use_cannot_be_leased_again(transport: str) -> None:
    hashes = chain(1, 2)
    with cache_server(tcp=True) as server:
        sock, space = _opened(server, transport)
        with sock:
            assert isinstance(_ask(sock, wire.ReserveRequest(space, join_hashes(hashes), 5)), wire.Reserved)
            failure = _ask(sock, wire.ReserveRequest(space, join_hashes(chain(2, 2)), 5))
            assert isinstance(failure, wire.Failure)
            assert "number 5 is in use" in failure.sentence
            assert isinstance(_ask(sock, wire.Ping()), wire.Done), "the connection goes on after a refusal"


def test_a_block_that_a_remote_client_has_not_sent_cannot_be_committed() -> None:
    """The slot may still hold bytes of another tenant."""
    secret = b"secret of another tenant" * (BLOCK_BYTES // 24 + 1)
    hashes = chain(1, 8)
    with cache_server(memory=str(8 * 12288), tcp=True) as server, open_client(server.unix) as tenant:
        tenant.set(hashes, [secret[:BLOCK_BYTES]] * 8)
        tenant.drop()
        sock, space = _opened(server, "tcp")
        with sock:
            assert isinstance(_ask(sock, wire.ReserveRequest(space, join_hashes(hashes[:4]), 1)), wire.Reserved)
            _ask(sock, wire.Commit(1, 0, 4))
            contained = _ask(sock, wire.ContainsRequest(space, join_hashes(hashes[:4])))
            assert isinstance(contained, wire.Contained)
            assert not any(contained.flags)


def test_a_committed_block_is_not_written_again_by_the_client_that_sent_it() -> None:
    hashes = chain(1, 1)
    expected = wire.pack_numbers([checksum_of(OTHER_NAMESPACE, hashes[0], memoryview(b"a" * BLOCK_BYTES))])
    with cache_server(tcp=True) as server:
        sock, space = _opened(server, "tcp")
        with sock:
            _ask(sock, wire.ReserveRequest(space, join_hashes(hashes), 1))
            assert _ask(sock, wire.Fill(1, 0, 1), b"a" * BLOCK_BYTES) == wire.Counted(1)
            sock.sendall(encode_frame(8, wire.encode(wire.Fill(1, 0, 1)), BLOCK_BYTES) + b"b" * BLOCK_BYTES)
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(1 << 16):
                pass
        sock, space = _opened(server, "tcp")
        with sock:
            request = encode_frame(7, wire.encode(wire.GetRequest(space, join_hashes(hashes), 1)))
            sock.sendall(request)
            blocks = receive_message(sock)
            assert blocks == wire.Blocks(0, 1, True, expected)
            assert sock.recv(BLOCK_BYTES, socket.MSG_WAITALL) == b"a" * BLOCK_BYTES


def test_a_payload_cut_short_never_becomes_visible() -> None:
    hashes = chain(1, 2)
    with cache_server(tcp=True) as server, open_client(server.unix) as watcher:
        sock, space = _opened(server, "tcp")
        with sock:
            _ask(sock, wire.ReserveRequest(space, join_hashes(hashes), 1))
            sock.sendall(encode_frame(7, wire.encode(wire.Fill(1, 0, 2)), 2 * BLOCK_BYTES) + os.urandom(BLOCK_BYTES))
        wait_until(lambda: held(watcher) == NOTHING_HELD)
        sock, space = _opened(server, "tcp")
        with sock:
            contained = _ask(sock, wire.ContainsRequest(space, join_hashes(hashes)))
            assert contained == wire.Contained(b"\0\0")


def test_a_local_client_that_left_without_a_word_and_held_nothing_is_forgotten() -> None:
    with cache_server(tcp=True) as server, open_client(server.unix) as watcher:
        for _ in range(50):
            sock, _ = _opened(server, "unix")
            sock.close()
        wait_until(lambda: watcher.stats()["connections"] == 1)
        wait_until(lambda: watcher.stats()["clients"] == 1)
