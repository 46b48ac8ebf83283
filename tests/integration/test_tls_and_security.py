"""Who gets in, over what, and what they get to see."""

from __future__ import annotations

import contextlib
import re
import socket
import stat
import threading
from pathlib import Path

import pytest

import kvtier
from kvtier.client.client import CacheClient
from kvtier.errors import ConfigError, TierError, TierRefused
from kvtier.testing.servers import cache_server
from kvtier.wire import messages as wire
from kvtier.wire.frames import encode_frame
from tests.support.actors import (
    LAYOUT,
    NAMESPACE,
    ROOT,
    chain,
    empty_buffers,
    handshaken,
    hung,
    open_client,
    payloads,
    raw_socket,
    read_all,
)
from tests.support.certificates import make_certificate, needs_openssl
from tests.support.waiting import CALL_S, FOR_EVER_S, LIMIT_S

_HASHES = chain(1, 12)


def _tls_options(folder: Path) -> tuple[str, ...]:
    certificate, key = make_certificate(folder, "server")
    return ("--tls-cert", certificate, "--tls-key", key)


def _tls_client(address: str, token: str, ca_file: Path, timeout_s: float = CALL_S) -> CacheClient:
    return kvtier.connect(
        address, token=token, ca_file=ca_file, layout=LAYOUT, namespace=NAMESPACE, timeout_s=timeout_s
    )


@needs_openssl
def test_blocks_go_over_tls(tmp_path: Path) -> None:
    with (
        cache_server(*_tls_options(tmp_path), tcp=True) as server,
        _tls_client(server.tcp, server.token, tmp_path / "server.pem") as client,
    ):
        assert client.set(_HASHES, payloads(_HASHES)) == 12
        assert read_all(client, _HASHES) == payloads(_HASHES)
        assert [bytes(view) for _, view in client.stream_get(_HASHES)] == payloads(_HASHES)
        with client.match(_HASHES) as lease:
            into = empty_buffers(12)
            assert lease.fetch(into) == 12
        with open_client(server.unix) as local:
            assert read_all(local, _HASHES) == payloads(_HASHES)


@needs_openssl
def test_blocks_larger_than_a_tls_record_arrive_whole(tmp_path: Path) -> None:
    layout = kvtier.KvLayout(layers=28, kv_heads=4, head_dim=128)
    blocks = [bytes([number]) * layout.block_bytes for number in range(12)]
    with (
        cache_server(*_tls_options(tmp_path), tcp=True) as server,
        kvtier.connect(
            server.tcp,
            token=server.token,
            ca_file=tmp_path / "server.pem",
            layout=layout,
            namespace=NAMESPACE,
            timeout_s=CALL_S,
        ) as client,
    ):
        assert client.set(_HASHES, blocks) == 12
        into = [bytearray(layout.block_bytes) for _ in blocks]
        assert client.get(_HASHES, into) == 12
        assert into == blocks


@needs_openssl
def test_a_client_that_trusts_somebody_else_is_told_why(tmp_path: Path) -> None:
    with cache_server(*_tls_options(tmp_path), tcp=True) as server:
        make_certificate(tmp_path, "other")
        with pytest.raises(TierRefused, match=r"TLS with .* failed: CERTIFICATE_VERIFY_FAILED"):
            _tls_client(server.tcp, server.token, tmp_path / "other.pem")
        with _tls_client(server.tcp, server.token, tmp_path / "server.pem") as client:
            client.ping()


@needs_openssl
def test_a_token_is_wanted_over_tls_too(tmp_path: Path) -> None:
    with cache_server(*_tls_options(tmp_path), tcp=True) as server:
        with pytest.raises(TierRefused, match="the token is not the server's"):
            _tls_client(server.tcp, "another token", tmp_path / "server.pem")


@needs_openssl
def test_a_plain_client_on_a_tls_port_gets_an_error_and_no_wait(tmp_path: Path) -> None:
    with cache_server(*_tls_options(tmp_path), tcp=True) as server:
        with pytest.raises(TierError):
            open_client(server.tcp, server.token, timeout_s=FOR_EVER_S)
        with _tls_client(server.tcp, server.token, tmp_path / "server.pem") as client:
            client.ping()


@needs_openssl
def test_a_tls_client_on_a_plain_port_gets_an_error_and_no_wait(tmp_path: Path) -> None:
    make_certificate(tmp_path, "server")
    with cache_server(tcp=True) as server:
        with pytest.raises(TierRefused, match=r"TLS with .* failed"):
            _tls_client(server.tcp, server.token, tmp_path / "server.pem", timeout_s=FOR_EVER_S)
        with open_client(server.tcp, server.token) as client:
            client.ping()


@needs_openssl
def test_a_silent_peer_on_a_tls_port_keeps_nobody_waiting(tmp_path: Path) -> None:
    with cache_server(*_tls_options(tmp_path), tcp=True) as server, raw_socket(server.tcp):
        with _tls_client(server.tcp, server.token, tmp_path / "server.pem") as client:
            assert client.set(_HASHES, payloads(_HASHES)) == 12


@needs_openssl
def test_a_call_over_tls_to_a_hung_server_returns_within_its_deadline(tmp_path: Path) -> None:
    with (
        cache_server(*_tls_options(tmp_path), tcp=True) as server,
        _tls_client(server.tcp, server.token, tmp_path / "server.pem") as client,
    ):
        client.set(_HASHES, payloads(_HASHES))
        with hung(server):
            assert client.match(_HASHES, timeout_s=0.4).num_blocks == 0


def test_certificates_that_cannot_be_read_are_said_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot use the certificates in"):
        kvtier.connect("tcp://127.0.0.1:1", token="a token for tests", ca_file=tmp_path / "missing.pem")


def test_only_the_owner_can_open_the_socket() -> None:
    with cache_server(tcp=True) as server:
        path = Path(server.unix.removeprefix("unix:"))
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_ISSOCK(path.stat().st_mode)


def test_a_local_client_gets_one_descriptor_and_a_remote_one_gets_no_arena() -> None:
    with cache_server(tcp=True) as server:
        with raw_socket(server.unix) as sock:
            sock.sendall(encode_frame(0, wire.encode(wire.Hello("test", bytes(16), bytes(16)))))
            data, fds, _, _ = socket.recv_fds(sock, 4096, 8)
            welcome = wire.decode(data[24:])
            assert isinstance(welcome, wire.Welcome)
            assert welcome.arena_bytes == 64 << 20
            assert len(fds) == 1
            socket.close(fds[0])
        with raw_socket(server.tcp) as sock:
            handshaken(sock, server.token)
        with open_client(server.tcp, server.token) as client:
            client.set(_HASHES, payloads(_HASHES))
            with client.match(_HASHES) as lease:
                assert not lease.has_views
            with pytest.raises(ConfigError, match="only on a server of this host"):
                client.reserve(chain(2, 1))


def test_a_welcome_over_tcp_names_no_arena() -> None:
    with cache_server(tcp=True) as server, raw_socket(server.tcp) as sock:
        sock.sendall(encode_frame(0, wire.encode(wire.Hello("test", bytes(16), bytes(16)))))
        challenge, fds, _, _ = socket.recv_fds(sock, 4096, 8)
        assert isinstance(wire.decode(challenge[24:]), wire.Challenge), "no word of the arena before the proof"
        assert fds == []


class _FalseServer:
    """Takes one connection and sends `answers`, one to each frame; keeps what it heard."""

    def __init__(self, *answers: wire.Message) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(LIMIT_S)
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._answers = answers
        self.heard: list[bytes] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        self._thread.join()
        self._listener.close()

    def _run(self) -> None:
        connection, _ = self._listener.accept()
        with connection:
            connection.settimeout(LIMIT_S)
            for answer in self._answers:
                self.heard.append(connection.recv(4096))
                connection.sendall(encode_frame(0, wire.encode(answer)))
            self.heard.append(connection.recv(4096))


def test_the_token_itself_never_travels() -> None:
    token = "a token that nobody sees"
    with contextlib.closing(_FalseServer(wire.Challenge(bytes(16)), wire.Failure("refused", "enough"))) as spy:
        with pytest.raises(TierRefused, match="refused: enough"):
            open_client(spy.address, token)
    assert len(spy.heard[1]) > 32, "the proof"
    assert token.encode() not in b"".join(spy.heard)


@pytest.mark.parametrize("answers", [(), (wire.Challenge(bytes(16)),)])
def test_a_server_that_cannot_prove_that_it_knows_the_token_is_not_used(answers: tuple[wire.Message, ...]) -> None:
    welcome = wire.Welcome("kvtier", bytes(16), bytes(32), 0, 1 << 20, False)
    with contextlib.closing(_FalseServer(*answers, welcome)) as false:
        with pytest.raises(TierRefused, match="did not prove that it knows the token"):
            open_client(false.address, "a token for tests")


def test_there_is_no_pickle_in_the_source() -> None:
    sources = list((ROOT / "src").rglob("*.py"))
    assert len(sources) > 20
    found = [
        path for path in sources if re.search(r"^\s*(import|from)\s+(pickle|marshal|shelve)", path.read_text(), re.M)
    ]
    assert found == []
