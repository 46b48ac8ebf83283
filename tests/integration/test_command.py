"""`kvtier cache-server` as its operator meets it: help, metrics, stop."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvtier import BlockHash, KvLayout, Namespace, connect
from kvtier.blocks.hashing import join_hashes
from kvtier.cli.cache import cache
from kvtier.stores.disk import DiskStore
from kvtier.testing.servers import ServerProcess, cache_server
from kvtier.wire import messages as wire
from kvtier.wire.frames import encode_frame
from tests.support.actors import (
    BLOCK_BYTES,
    NAMESPACE,
    OTHER_NAMESPACE,
    actor,
    chain,
    handshaken,
    open_client,
    payloads,
    raw_socket,
    read_all,
    receive_message,
)
from tests.support.waiting import LIMIT_S, wait_until


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvtier", *arguments], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )


def _metrics(server: ServerProcess) -> dict[str, float]:
    with urllib.request.urlopen(server.metrics, timeout=LIMIT_S) as reply:
        assert reply.headers["Content-Type"].startswith("text/plain")
        lines = reply.read().decode().splitlines()
    pairs = (line.rpartition(" ") for line in lines if line and not line.startswith("#"))
    return {name: float(value) for name, _, value in pairs}


def test_help_names_every_option_in_plain_words() -> None:
    help_text = _run("cache-server", "--help")
    assert help_text.returncode == 0
    for word in ("--memory", "--socket", "--tcp", "--token-file", "--tls-cert", "--tls-key", "--metrics"):
        assert word in help_text.stdout
    for word in ("--max-leased", "--max-frame", "--max-connections", "--lease-timeout", "--touch-memory"):
        assert word in help_text.stdout
    words = " ".join(help_text.stdout.split())
    for sentence in ("20GiB", "Start it once per host", "secret that TCP clients must know", "SIGTERM stops it"):
        assert sentence in words


def test_help_shows_its_examples_on_lines_of_their_own() -> None:
    lines = [line.strip() for line in _run("cache-server", "--help").stdout.splitlines()]
    assert "kvtier cache-server --memory 20GiB" in lines


def test_an_unknown_option_is_said_so() -> None:
    ended = _run("cache-server", "--memori", "1GiB")
    assert ended.returncode == 2
    assert "No such option" in ended.stderr


def test_metrics_move_with_what_the_server_does() -> None:
    hashes = chain(1, 8)
    with (
        cache_server("--metrics", "127.0.0.1:0", tcp=True) as server,
        open_client(server.unix) as local,
        open_client(server.tcp, server.token) as remote,
    ):
        before = _metrics(server)
        remote.set(hashes, payloads(hashes))
        read_all(remote, hashes)
        remote.contains(hashes)
        with local.match(chain(2, 4)):
            pass
        with local.match(hashes):
            during = _metrics(server)
        after = _metrics(server)

    assert before["kvtier_server_blocks"] == 0
    assert during["kvtier_server_leases"] == 1
    assert after["kvtier_server_leases"] == 0
    assert after["kvtier_server_blocks"] == 8
    assert after["kvtier_server_memory_bytes"] == 64 << 20
    assert after["kvtier_server_stored_blocks_total"] == 8
    assert after["kvtier_server_hit_blocks_total"] == 16
    assert after["kvtier_server_missed_blocks_total"] == 4
    assert after["kvtier_server_received_bytes_total"] == 8 * BLOCK_BYTES
    assert after["kvtier_server_sent_bytes_total"] == 8 * BLOCK_BYTES
    assert after['kvtier_server_requests_total{operation="match"}'] == 2
    assert after['kvtier_server_request_seconds_count{operation="match"}'] == 2


def test_sigterm_ends_an_idle_server_at_once_and_takes_its_files_away() -> None:
    with cache_server("--metrics", "127.0.0.1:0", tcp=True) as server, open_client(server.unix) as client:
        client.set(chain(1, 4), payloads(chain(1, 4)))
        assert server.stop() == 0
        assert [path.name for path in server.folder.iterdir()] == ["token"]


def test_sigint_ends_it_as_well() -> None:
    with cache_server() as server:
        server.send_signal(signal.SIGINT)
        assert server.process.wait(LIMIT_S) == 0
        assert list(server.folder.iterdir()) == []


def test_sigterm_under_load_ends_cleanly_for_server_and_clients() -> None:
    with cache_server(tcp=True, memory="2MiB") as server:
        mixers = [
            actor(
                "mix",
                address=address,
                token=server.token,
                seed=seed,
                seconds=60,
                num_prompts=16,
                num_blocks=24,
                may_fail=True,
            )
            for seed, address in enumerate((server.unix, server.tcp, server.unix, server.tcp))
        ]
        with mixers[0] as first, mixers[1] as second, mixers[2] as third, mixers[3] as fourth:
            actors = (first, second, third, fourth)
            for each in actors:
                assert each.hear() == {"ready": True}
                each.go_on()
            with open_client(server.unix) as watcher:
                wait_until(lambda: watcher.stats()["evicted_blocks"] > 200)  # type: ignore[operator]
            assert server.stop() == 0
            assert not os.path.exists(server.unix.removeprefix("unix:"))
            for each in actors:
                each.go_on()
            heard = [each.hear() for each in actors]
            assert [each.wait() for each in actors] == [0] * 4
        assert [each["wrong"] for each in heard] == [0] * 4
        assert sum(each["read"] for each in heard) > 0  # type: ignore[misc]


def test_a_get_under_way_at_sigterm_is_answered_whole() -> None:
    """One reply is larger than all socket buffers, so that it is under way when the signal comes."""
    layout = KvLayout(layers=28, kv_heads=4, head_dim=128)
    hashes = chain(1, 64)
    with cache_server("--max-leased", "64MiB", memory="64MiB", tcp=True) as server:
        with connect(server.unix, layout=layout, namespace=NAMESPACE) as local, local.reserve(hashes) as reservation:
            for number, view in enumerate(reservation.views()):
                view[:] = bytes([number]) * layout.block_bytes
            assert reservation.commit() == 64
        with raw_socket(server.tcp) as sock:
            handshaken(sock, server.token)
            sock.sendall(encode_frame(1, wire.encode(wire.Open(NAMESPACE, "", layout.block_bytes, 16, ""))))
            opened = receive_message(sock)
            assert isinstance(opened, wire.Opened)
            sock.sendall(encode_frame(2, wire.encode(wire.GetRequest(opened.space, join_hashes(hashes), 64))))
            blocks = receive_message(sock)
            assert isinstance(blocks, wire.Blocks)
            assert (blocks.count, blocks.is_last) == (64, True)
            stopping = threading.Thread(target=server.stop)
            stopping.start()
            wait_until(lambda: not os.path.exists(server.unix.removeprefix("unix:")))
            for number in range(64):
                block = bytearray(layout.block_bytes)
                left = memoryview(block)
                while left:
                    received = sock.recv_into(left)
                    assert received, f"cut in block {number}"
                    left = left[received:]
                assert block == bytes([number]) * layout.block_bytes
            stopping.join()
        assert server.process.returncode == 0


def test_sigterm_in_the_middle_of_a_payload_ends_with_status_0() -> None:
    with cache_server(tcp=True) as server, raw_socket(server.tcp) as sock:
        handshaken(sock, server.token)
        sock.sendall(encode_frame(1, wire.encode(wire.Open(OTHER_NAMESPACE, "", BLOCK_BYTES, 16, ""))))
        opened = receive_message(sock)
        assert isinstance(opened, wire.Opened)
        sock.sendall(encode_frame(2, wire.encode(wire.ReserveRequest(opened.space, join_hashes(chain(1, 4)), 1))))
        assert isinstance(receive_message(sock), wire.Reserved)
        sock.sendall(encode_frame(3, wire.encode(wire.Fill(1, 0, 4)), 4 * BLOCK_BYTES) + bytes(1000))
        with open_client(server.unix) as watcher:
            wait_until(lambda: watcher.stats()["received_bytes"])

        assert server.stop() == 0


def test_the_default_socket_is_said_and_is_in_the_users_own_folder(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root's default is /run")
    (tmp_path / "run").mkdir(mode=0o700)
    process = subprocess.Popen(
        [sys.executable, "-m", "kvtier", "cache-server", "--memory", "1MiB"],
        env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path / "run")},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        said = [process.stdout.readline() for _ in range(2)]
        assert f"unix:{tmp_path}/run/kvtier.sock" in said[1]
        assert (tmp_path / "run" / "kvtier.sock").stat().st_mode & 0o077 == 0
    finally:
        process.terminate()
        process.wait(LIMIT_S)
        process.stdout.close()  # type: ignore[union-attr]


def test_a_name_with_control_characters_is_shown_and_not_obeyed(tmp_path: Path) -> None:
    name = "\x1b]0;title\x07\x1b[31mred\u202e\n"
    with contextlib.closing(DiskStore(tmp_path / "blocks", 1 << 20)) as store:
        space = store.open(Namespace(bytes(32)), name, 4096, 16)
        store.write(space, [BlockHash(bytes(32))], [memoryview(bytes(4096))])
    for arguments in (["stat"], ["verify"], ["ls", "nobody"]):
        done = CliRunner().invoke(cache, [*arguments, "--folder", str(tmp_path / "blocks")])
        assert "\\x1b]0;title" in done.output
        assert all(line.isprintable() for line in done.output.splitlines()), done.output
