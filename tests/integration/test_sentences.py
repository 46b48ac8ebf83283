"""Errors are reported in one sentence, change nothing, and the server continues."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvtier
from kvtier import KvLayout
from kvtier.blocks.match_end import MatchEnd
from kvtier.errors import ConfigError, TierError, TierFull, TierRefused, TierUnavailable
from kvtier.testing.servers import ServerProcess, cache_server, start_cache_server
from tests.support.actors import LAYOUT, NAMESPACE, chain, handshaken, open_client, payloads, raw_socket, read_all
from tests.support.waiting import CALL_S, LIMIT_S, wait_until

_BLOCKS = 64
_MEMORY = str(_BLOCKS * LAYOUT.slot_bytes)


def _refused_start(*arguments: str) -> str:
    """Start a server that cannot start. Returns what it said."""
    ended = subprocess.run(
        [sys.executable, "-m", "kvtier", "cache-server", *arguments],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert ended.returncode != 0
    assert "Traceback" not in ended.stderr
    assert "ready" not in ended.stdout
    return ended.stderr


@contextlib.contextmanager
def _serving() -> Iterator[ServerProcess]:
    """A server with a token that has to serve on, whatever the test does to it."""
    hashes = chain(1, 4)
    with cache_server("--metrics", "127.0.0.1:0", memory=_MEMORY, tcp=True) as server:
        with open_client(server.unix) as client:
            client.set(hashes, payloads(hashes))
        yield server
        for address in (server.unix, server.tcp):
            with open_client(address, server.token) as client:
                assert read_all(client, hashes) == payloads(hashes)


# --- clients ---------------------------------------------------------------------------------------------------------


def test_a_wrong_token_is_refused() -> None:
    with _serving() as server, pytest.raises(TierRefused, match="the token is not the server's"):
        open_client(server.tcp, "another token")


def test_a_missing_token_is_asked_for() -> None:
    with _serving() as server, pytest.raises(TierRefused, match="wants a token: pass token="):
        open_client(server.tcp)


def test_another_block_size_under_the_same_namespace_is_refused() -> None:
    other = KvLayout(layers=3, kv_heads=1, head_dim=80, dtype="float16")
    with _serving() as server, open_client(server.unix):
        for address in (server.unix, server.tcp):
            with pytest.raises(TierRefused, match="has blocks of 10240 bytes here; this client's have 15360"):
                kvtier.connect(address, token=server.token, layout=other, namespace=NAMESPACE, timeout_s=CALL_S)


def test_a_block_larger_than_the_arena_is_refused() -> None:
    huge = KvLayout(layers=64, kv_heads=8, head_dim=128)
    with _serving() as server, pytest.raises(TierRefused, match="does not fit into this server's memory of 768KiB"):
        kvtier.connect(server.unix, layout=huge, namespace=b"h" * 32, timeout_s=CALL_S)


@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_an_arena_full_of_leased_blocks_says_so(transport: str) -> None:
    everything = chain(1, _BLOCKS)
    with (
        cache_server("--max-leased", _MEMORY, memory=_MEMORY, tcp=True) as server,
        open_client(server.unix) as holder,
        open_client(getattr(server, transport), server.token) as client,
    ):
        holder.set(everything, payloads(everything))
        with holder.match(everything):
            with pytest.raises(TierFull, match="all of the server's 768KiB is leased, pinned or being written"):
                client.set(chain(2, 3), payloads(chain(2, 3)))
            assert client.metrics.value(client.metrics.refused_blocks) == 3
            assert client.get(everything, [bytearray(LAYOUT.block_bytes) for _ in everything]) == _BLOCKS
        assert client.set(chain(2, 3), payloads(chain(2, 3))) == 3


def test_a_client_at_its_limit_is_told_so_and_others_are_not_held_up() -> None:
    with (
        cache_server("--max-leased", str(8 * LAYOUT.slot_bytes), memory=_MEMORY) as server,
        open_client(server.unix) as greedy,
        open_client(server.unix) as other,
    ):
        for first in range(0, 32, 8):
            greedy.set(chain(1, 32)[first : first + 8], payloads(chain(1, 32)[first : first + 8]))
        with greedy.match(chain(1, 32)) as lease:
            assert (lease.num_blocks, lease.ended) == (8, MatchEnd.LIMIT)
            with pytest.raises(TierFull, match="this client may hold at most 96KiB at once"):
                greedy.set(chain(2, 1), payloads(chain(2, 1)))
            assert other.set(chain(2, 1), payloads(chain(2, 1))) == 1


def test_more_pinned_than_allowed_is_refused() -> None:
    everything = chain(1, _BLOCKS)
    with cache_server("--max-leased", _MEMORY, memory=_MEMORY) as server, open_client(server.unix) as client:
        client.set(everything, payloads(everything))
        with pytest.raises(TierRefused, match="pinned 32 of 64 blocks: at most 384KiB may be pinned"):
            client.pin(everything)
        assert client.set(chain(2, 1), payloads(chain(2, 1))) == 1


def test_blocks_go_through_a_server_whose_frames_are_smaller_than_the_clients() -> None:
    hashes = chain(1, 32)
    with (
        cache_server("--max-frame", "40KiB", memory=_MEMORY, tcp=True) as server,
        open_client(server.tcp, server.token) as client,
    ):
        assert client.set(hashes, payloads(hashes)) == 32
        assert read_all(client, hashes) == payloads(hashes)
        assert client.metrics.value(client.metrics.failures) == 0


def test_over_too_many_connections_the_server_goes_on() -> None:
    with cache_server("--max-connections", "2", memory=_MEMORY, tcp=True) as server, open_client(server.unix) as first:
        with raw_socket(server.unix) as other:
            handshaken(other, None)
            wait_until(lambda: first.stats()["connections"] == 2)
            for address in (server.unix, server.tcp):
                with pytest.raises(TierError):
                    open_client(address, server.token)
            assert first.set(chain(1, 2), payloads(chain(1, 2))) == 2
        wait_until(lambda: first.stats()["connections"] == 1)
        with open_client(server.tcp, server.token) as second:
            assert read_all(second, chain(1, 1)) == payloads(chain(1, 1))


def test_one_connection_too_many_is_told_why() -> None:
    with cache_server("--max-connections", "1", memory=_MEMORY) as server, open_client(server.unix):
        with pytest.raises(TierError, match="connections"):
            open_client(server.unix)


def test_connect_to_nobody_says_who_did_not_answer(tmp_path: Path) -> None:
    with pytest.raises(TierUnavailable, match=r"no cache server answers on unix:.*/nobody.sock: No such file"):
        open_client(f"unix:{tmp_path}/nobody.sock")
    with socket.create_server(("127.0.0.1", 0)) as once:
        port = once.getsockname()[1]
    with pytest.raises(TierUnavailable, match=f"no cache server answers on tcp://127.0.0.1:{port}: Connection refused"):
        open_client(f"tcp://127.0.0.1:{port}", "a token for tests")


def test_an_address_that_is_none_is_a_config_error() -> None:
    for address in ("kvtier.sock", "http://localhost:80", "tcp://localhost", "tcp://localhost:99999", "unix:"):
        with pytest.raises(ConfigError):
            open_client(address)
    for addresses in ([], ["tcp://a:1", "tcp://b:1"]):
        with pytest.raises(ConfigError, match=r"connect\(\) takes one address.*cluster:"):
            kvtier.connect(addresses)  # type: ignore[arg-type]


# --- starting --------------------------------------------------------------------------------------------------------


def test_a_unix_socket_in_use_is_left_to_its_server() -> None:
    with _serving() as server:
        path = server.unix.removeprefix("unix:")
        assert f"unix:{path} is in use by another cache server" in _refused_start("--socket", path, "--memory", "1MiB")


def test_a_tcp_port_in_use_is_left_to_its_server_and_nothing_stays_behind(tmp_path: Path) -> None:
    with _serving() as server:
        address = server.tcp.removeprefix("tcp://")
        said = _refused_start(
            *("--socket", f"{tmp_path}/s", "--memory", "1MiB", "--tcp", address),
            *("--token-file", str(server.folder / "token")),
        )
        assert f"cannot listen on tcp://{address}: it is in use" in said
        assert list(tmp_path.iterdir()) == []


def test_a_metrics_port_in_use_is_left_to_its_server_and_nothing_stays_behind(tmp_path: Path) -> None:
    with _serving() as server:
        address = server.metrics.removeprefix("http://").removesuffix("/metrics")
        said = _refused_start("--socket", f"{tmp_path}/s", "--memory", "1MiB", "--metrics", address)
        assert f"cannot serve metrics on {address}: it is in use" in said
        assert list(tmp_path.iterdir()) == []


def test_the_socket_file_of_a_killed_server_is_replaced(tmp_path: Path) -> None:
    killed = start_cache_server(tmp_path, memory="1MiB", tcp=False)
    killed.kill()
    assert killed.process.stdout is not None
    killed.process.stdout.close()
    assert stat.S_ISSOCK((tmp_path / "kvtier.sock").stat().st_mode)

    with cache_server(memory=_MEMORY, folder=tmp_path) as server, open_client(server.unix) as client:
        assert client.set(chain(1, 2), payloads(chain(1, 2))) == 2


def test_a_path_that_is_not_a_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "precious"
    path.write_text("bytes of somebody")
    said = _refused_start("--socket", str(path), "--memory", "1MiB")
    assert f"{path} exists and is not a socket: remove it, or choose another path" in said
    assert path.read_text() == "bytes of somebody"


def test_a_failed_start_leaves_no_lock_file(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("bytes of somebody")
    _refused_start("--socket", f"{tmp_path}/precious", "--memory", "1MiB")
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


def test_a_socket_path_that_is_too_long_is_said_so(tmp_path: Path) -> None:
    said = _refused_start("--socket", f"{tmp_path}/{'x' * 120}", "--memory", "1MiB")
    assert "107 bytes" in said


def test_a_socket_in_no_folder_is_said_so(tmp_path: Path) -> None:
    said = _refused_start("--socket", f"{tmp_path}/missing/s", "--memory", "1MiB")
    assert f"cannot listen on unix:{tmp_path}/missing/s: No such file or directory" in said


@pytest.mark.parametrize("memory", ["plenty", "20GB", "-1GiB", "0", "1.5.5GiB", ""])
def test_a_memory_that_is_no_size_is_said_so(memory: str, tmp_path: Path) -> None:
    assert "is not a size" in _refused_start("--socket", f"{tmp_path}/s", "--memory", memory)


def test_a_memory_of_endless_digits_is_said_so(tmp_path: Path) -> None:
    said = _refused_start("--socket", f"{tmp_path}/s", "--memory", "9" * 400 + "GiB")
    assert "Error" in said


def test_more_memory_than_the_machine_has_is_refused(tmp_path: Path) -> None:
    said = _refused_start("--socket", f"{tmp_path}/s", "--memory", "900TiB")
    assert "memory of 900TiB is more than the" in said
    assert list(tmp_path.iterdir()) == []


def test_tcp_without_a_token_is_refused_on_loopback_too(tmp_path: Path) -> None:
    said = _refused_start("--socket", f"{tmp_path}/s", "--memory", "1MiB", "--tcp", "127.0.0.1:0")
    assert "TCP needs a token, even on loopback: set one with --token-file" in said


@pytest.mark.parametrize(
    ("token", "sentence"), [("", "TCP needs a token"), ("\n \n", "TCP needs a token"), ("short", "too short: use 8")]
)
def test_a_token_that_protects_nothing_is_refused(token: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(token)
    arguments = ("--socket", f"{tmp_path}/s", "--memory", "1MiB", "--tcp", "127.0.0.1:0")
    assert sentence in _refused_start(*arguments, "--token-file", f"{tmp_path}/token")


def test_a_token_file_that_cannot_be_read_is_said_so(tmp_path: Path) -> None:
    arguments = ("--socket", f"{tmp_path}/s", "--memory", "1MiB", "--tcp", "127.0.0.1:0", "--token-file")
    assert "does not exist" in _refused_start(*arguments, f"{tmp_path}/missing")
    assert "is a directory" in _refused_start(*arguments, str(tmp_path))
    assert "cannot read the token in /proc/self/mem" in _refused_start(*arguments, "/proc/self/mem")


def test_tls_files_that_cannot_be_used_are_said_so(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("a token for tests")
    (tmp_path / "nonsense.pem").write_text("nonsense")
    nonsense = f"{tmp_path}/nonsense.pem"
    arguments = ("--socket", f"{tmp_path}/s", "--memory", "1MiB", "--tcp", "127.0.0.1:0")
    with_token = (*arguments, "--token-file", f"{tmp_path}/token")

    assert "cannot use the TLS certificate" in _refused_start(
        *with_token, "--tls-cert", nonsense, "--tls-key", nonsense
    )
    missing = f"{tmp_path}/missing.pem"
    said = _refused_start(*with_token, "--tls-cert", missing, "--tls-key", missing)
    assert f"cannot use the TLS certificate {missing}" in said
    assert "TLS needs both a certificate and a key" in _refused_start(*with_token, "--tls-cert", nonsense)
    assert not os.path.exists(f"{tmp_path}/s")


def test_a_host_and_port_that_are_none_are_said_so(tmp_path: Path) -> None:
    said = _refused_start("--socket", f"{tmp_path}/s", "--memory", "1MiB", "--tcp", "7700")
    assert "'7700' is not host:port" in said
