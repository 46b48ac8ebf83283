"""TCP that is encrypted with a secret of both ends: nothing readable goes over the wire, and nothing altered passes."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import kvtier
from kvtier.client.client import CacheClient
from kvtier.errors import ConfigError, TierRefused
from kvtier.testing.servers import ServerProcess, cache_server
from tests.support.actors import LAYOUT, NAMESPACE, chain, open_client, payloads, raw_socket, read_all
from tests.support.waiting import CALL_S, wait_until

SECRET = "a secret of both ends"
HASHES = chain(1, 12)


@contextlib.contextmanager
def serving(tmp_path: Path) -> Iterator[ServerProcess]:
    (tmp_path / "secret").write_text(SECRET)
    with cache_server("--tcp-secret-file", str(tmp_path / "secret"), tcp=True) as server:
        yield server


def encrypted(address: str, token: str, secret: str | None = SECRET) -> CacheClient:
    return kvtier.connect(
        address, token=token, secret=secret, layout=LAYOUT, namespace=NAMESPACE, timeout_s=CALL_S, max_connections=4
    )


class Wire:
    """Passes bytes on between a client and a server, and keeps them. `alter` may change what passes, once it is set."""

    def __init__(self, server: ServerProcess) -> None:
        self._server = server
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.seen = bytearray()
        self.alter: Callable[[bytes], bytes] = lambda piece: piece
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = raw_socket(self._server.tcp)
                for source, target in ((near, far), (far, near)):
                    thread = threading.Thread(target=self._pass_on, args=(source, target))
                    self._threads.append(thread)
                    thread.start()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        source.settimeout(None)
        with contextlib.suppress(OSError):
            while piece := source.recv(1 << 16):
                self.seen += piece
                target.sendall(self.alter(piece))
        for sock in (source, target):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        source.close()


def test_blocks_go_there_and_back_and_nothing_on_the_way_is_readable(tmp_path: Path) -> None:
    with serving(tmp_path) as server, contextlib.closing(Wire(server)) as wire:
        with encrypted(wire.address, server.token) as client:
            assert client.set(HASHES, payloads(HASHES)) == 12
            assert read_all(client, HASHES) == payloads(HASHES)
            assert [bytes(view) for _, view in client.stream_get(HASHES)] == payloads(HASHES)
            with client.match(HASHES) as lease:
                assert lease.num_blocks == 12
        with open_client(server.unix) as local:
            assert read_all(local, HASHES) == payloads(HASHES)
        for block_hash, payload in zip(HASHES, payloads(HASHES), strict=True):
            assert block_hash not in wire.seen
            assert payload[:64] not in wire.seen
        assert len(wire.seen) > 3 * 12 * LAYOUT.block_bytes


def test_blocks_larger_than_a_sealed_piece_arrive_whole(tmp_path: Path) -> None:
    layout = kvtier.KvLayout(layers=40, kv_heads=8, head_dim=128, dtype="float32")
    blocks = [bytes([number]) * layout.block_bytes for number in range(1, 4)]
    assert layout.block_bytes > 2 << 20
    with (
        serving(tmp_path) as server,
        kvtier.connect(
            server.tcp, token=server.token, secret=SECRET, layout=layout, namespace=NAMESPACE, timeout_s=CALL_S
        ) as client,
    ):
        assert client.set(HASHES[:3], blocks) == 3
        into = [bytearray(layout.block_bytes) for _ in blocks]
        assert client.get(HASHES[:3], into) == 3
        assert into == blocks


@pytest.mark.parametrize(
    ("secret", "sentence"),
    [(None, "the cache server encrypts what it sends: pass its secret"), ("quite another secret", "secret")],
)
def test_whoever_lacks_the_secret_is_told(tmp_path: Path, secret: str | None, sentence: str) -> None:
    with serving(tmp_path) as server:
        with pytest.raises(kvtier.errors.KvtierError, match=sentence):
            encrypted(server.tcp, server.token, secret)
        with encrypted(server.tcp, server.token) as client:
            client.ping()


def test_a_client_that_wants_encryption_takes_nothing_less() -> None:
    with cache_server(tcp=True) as server:
        with pytest.raises(TierRefused, match="does not encrypt what it sends"):
            encrypted(server.tcp, server.token)


def test_one_altered_bit_ends_the_connection_and_costs_no_wrong_byte(tmp_path: Path) -> None:
    with serving(tmp_path) as server, contextlib.closing(Wire(server)) as wire:
        with encrypted(wire.address, server.token) as client:
            client.set(HASHES, payloads(HASHES))
            altered = threading.Event()

            def alter(piece: bytes) -> bytes:
                if len(piece) < 5000 or altered.is_set():
                    return piece
                altered.set()
                return piece[:4000] + bytes([piece[4000] ^ 1]) + piece[4001:]

            wire.alter = alter
            found = read_all(client, HASHES)
            assert altered.is_set()
            assert found == payloads(HASHES)[: len(found)]
            assert len(found) < 12
            wait_until(lambda: read_all(client, HASHES) == payloads(HASHES))  # over another connection


def test_a_secret_that_is_too_short_or_beside_tls_is_refused() -> None:
    with pytest.raises(ConfigError, match="too short: use 16 characters or more"):
        kvtier.connect("tcp://127.0.0.1:1", secret="short")
    with pytest.raises(ConfigError, match="without TLS"):
        kvtier.connect("tcp://127.0.0.1:1", secret=SECRET, ca_file="ca.pem")
