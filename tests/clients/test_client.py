"""The C client beside Python's: blocks of each read by the other, over a Unix socket and over TCP."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kvtier.testing.servers import ServerProcess, cache_server
from kvtier.wire.frames import VERSION, encode_frame
from tests.support.actors import (
    BLOCK_BYTES,
    LAYOUT,
    NOTHING_HELD,
    chain,
    held,
    hung,
    open_client,
    payloads,
    read_all,
    restarted,
)
from tests.support.c_programs import c_actor, c_program
from tests.support.hostile_server import HostileServer
from tests.support.lying_proxy import LIES, LyingProxy
from tests.support.waiting import wait_until

_MEMORY = str(128 * LAYOUT.slot_bytes)
_INVALID, _UNAVAILABLE, _TIMEOUT, _REFUSED, _FULL = range(1, 6)


@pytest.fixture(params=["unix", "tcp"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def _reach(server: ServerProcess, transport: str) -> tuple[str, str | None]:
    return (server.unix, None) if transport == "unix" else (server.tcp, server.token)


# --- blocks --------------------------------------------------------------------------------------------------------


def test_python_reads_what_c_stored_and_c_what_python_stored(sanitized_programs: Path, transport: str) -> None:
    with (
        cache_server(tcp=True) as server,
        open_client(server.unix) as python,
        c_actor(sanitized_programs, *_reach(server, transport), finds_leaks=True) as c,
    ):
        assert c.ask("set 1 40") == "stored 40"
        assert read_all(python, chain(1, 40)) == payloads(chain(1, 40))
        assert c.ask("set 1 40") == "stored 0", "what is there is not written again"

        python.set(chain(2, 40), payloads(chain(2, 40)))
        assert c.ask("get 2 41") == "got 40 wrong 0"
        assert c.ask("contains 2 42") == "flags " + "1" * 40 + "00"
        assert c.ask("drop 2 0") == "dropped 0", "no hashes are not all of them"
        assert c.ask("drop 2 10") == "dropped 10"
        assert c.ask("get 2 40") == "got 0 wrong 0"
        wait_until(lambda: held(python) == NOTHING_HELD)


def test_a_long_prompt_goes_through(programs: Path, transport: str) -> None:
    """More hashes than 16 bits of length hold, and more bytes than a frame of 32 MiB."""
    with cache_server(memory="128MiB", tcp=True) as server, c_actor(programs, *_reach(server, transport)) as c:
        assert c.ask("set 1 4000") == "stored 4000"
        assert c.ask("get 1 4000") == "got 4000 wrong 0"
        assert c.ask("views 1 4000") == "leased 4000 wrong 0 ended 0"


def test_a_lease_says_what_ended_it(sanitized_programs: Path) -> None:
    with cache_server(memory=_MEMORY) as server, c_actor(sanitized_programs, server.unix) as c:
        assert c.ask("views 1 4") == "leased 0 wrong 0 ended 1"
        assert c.ask("set 1 4") == "stored 4"
        assert c.ask("views 1 4") == "leased 4 wrong 0 ended 0"
        assert c.ask("views 1 5") == "leased 4 wrong 0 ended 1"
        assert c.ask("reserve 2 4").startswith("reserved 4 committed 1")
        assert c.ask("views 2 4") == "leased 1 wrong 0 ended 3", "the next is being written"
        assert c.ask("release") == "released"
        for seed in (3, 4, 5):
            assert c.ask(f"set {seed} 60") == "stored 60"
        assert c.ask("views 1 4") == "leased 0 wrong 0 ended 2", "evicted"


def test_what_is_leased_stays_and_there_is_no_room_for_more(sanitized_programs: Path) -> None:
    with (
        cache_server("--max-leased", "1GiB", memory=_MEMORY) as server,
        c_actor(sanitized_programs, server.unix) as c,
    ):
        assert c.ask("set 1 128") == "stored 128"
        assert c.ask("hold 1 128") == "held 128 wrong 0"
        assert c.ask("set 2 4").startswith(f"failed {_FULL} there is no room")
        assert c.ask("release") == "released"
        assert c.ask("set 2 4") == "stored 4"


def test_blocks_come_back_from_the_servers_disk(sanitized_programs: Path, tmp_path: Path, transport: str) -> None:
    options = ("--folder", str(tmp_path / "disk"), "--disk", "64MiB")
    with cache_server(*options, tcp=True) as server, c_actor(sanitized_programs, *_reach(server, transport)) as c:
        assert c.ask("set 1 300") == "stored 300"
        assert c.ask("flush") == "done"
    with cache_server(*options, tcp=True) as server, c_actor(sanitized_programs, *_reach(server, transport)) as c:
        assert c.ask("get 1 300") == "got 300 wrong 0"
    with cache_server(*options, tcp=True) as server, c_actor(sanitized_programs, server.unix) as c:
        assert c.ask("views 1 300") == "leased 300 wrong 0 ended 0"


# --- ends ----------------------------------------------------------------------------------------------------------


def test_all_that_a_killed_client_held_is_back(programs: Path) -> None:
    with cache_server(memory=_MEMORY) as server, open_client(server.unix) as python:
        python.set(chain(1, 16), payloads(chain(1, 16)))
        with c_actor(programs, server.unix) as c:
            assert c.ask("hold 1 16") == "held 16 wrong 0"
            assert c.ask("reserve 2 16") == "reserved 16 committed 1 pending 0 refused 0"
            wait_until(lambda: held(python) == (1, 1, 32 * LAYOUT.slot_bytes))
            c.kill()
            wait_until(lambda: held(python) == NOTHING_HELD)
        assert python.contains(chain(2, 16)) == [True] + [False] * 15, "a half-written block became visible"


def test_a_client_that_closes_holds_nothing(sanitized_programs: Path) -> None:
    with cache_server(memory=_MEMORY) as server, open_client(server.unix) as python:
        with c_actor(sanitized_programs, server.unix) as c:
            assert c.ask("set 1 16") == "stored 16"
            assert c.ask("hold 1 16") == "held 16 wrong 0"
            assert c.ask("reserve 2 16").startswith("reserved 16")
        wait_until(lambda: held(python) == NOTHING_HELD)
        wait_until(lambda: python.stats()["clients"] == 1)


def test_a_server_that_comes_back_is_used_again(sanitized_programs: Path, transport: str) -> None:
    with cache_server(tcp=True) as server, c_actor(sanitized_programs, *_reach(server, transport)) as c:
        assert c.ask("set 1 8") == "stored 8"
        assert c.ask("hold 1 8").startswith("held" if transport == "unix" else "held 8")
        server.kill()
        assert c.ask("get 1 8").startswith("failed")
        with restarted(server):
            wait_until(lambda: c.ask("ping") == "done")
            assert c.ask("get 1 8") == "got 0 wrong 0"
            assert c.ask("set 1 8") == "stored 8"
            assert c.ask("get 1 8") == "got 8 wrong 0"
            assert c.ask("release") == "released", "of a server that is gone"


def test_what_a_silent_server_was_asked_for_is_given_back_when_it_answers(sanitized_programs: Path) -> None:
    with cache_server(memory=_MEMORY) as server, open_client(server.unix) as python:
        python.set(chain(1, 8), payloads(chain(1, 8)))
        arguments = [server.unix, bytes(range(32)).hex(), str(BLOCK_BYTES), "16", "0.5"]
        with c_program(sanitized_programs / "actor", *arguments) as c:
            assert c.hear() == "done"
            with hung(server):
                assert c.ask("hold 1 8").startswith(f"failed {_TIMEOUT}")
                assert c.ask("reserve 2 8").startswith("failed")
            wait_until(lambda: c.ask("ping") == "done")
            wait_until(lambda: held(python) == NOTHING_HELD)


# --- strangers -----------------------------------------------------------------------------------------------------


def test_over_tcp_both_ends_must_know_the_token(sanitized_programs: Path) -> None:
    with cache_server(tcp=True) as server:
        refused = f"failed {_REFUSED}"
        with c_actor(sanitized_programs, server.tcp, answer=refused) as c:
            assert "wants a token" in c.ask("ping") or "down" in c.ask("ping")
        with c_actor(sanitized_programs, server.tcp, "another token", answer=refused):
            pass
        with c_actor(sanitized_programs, server.tcp, server.token) as c:
            assert c.ask("ping") == "done"


def test_a_server_that_encrypts_is_refused_with_a_sentence(programs: Path, tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    secret = tmp_path / "secret"
    secret.write_text("a secret of many characters")
    secret.chmod(0o600)
    with cache_server("--tcp-secret-file", str(secret), tcp=True) as server:
        with c_actor(programs, server.tcp, server.token, answer=f"failed {_REFUSED} the cache server encrypts"):
            pass


def test_arguments_that_cannot_be_meant_are_told(sanitized_programs: Path) -> None:
    namespace = bytes(32).hex()
    for arguments, sentence in (
        (["http://x", namespace, "4096", "16", "1"], "this is no address"),
        (["unix:" + "x" * 200, namespace, "4096", "16", "1"], "the path of a socket"),
        (["tcp://host:99999", namespace, "4096", "16", "1"], "tcp://host:port"),
        (["unix:/x", namespace, "0", "16", "1"], "block_bytes"),
        (["unix:/x", namespace, "4096", "0", "1"], "block_tokens"),
        (["unix:/x", namespace, "4096", "16", "nan"], "timeout_s"),
    ):
        with c_program(sanitized_programs / "actor", *arguments) as c:
            heard = c.hear()
            assert heard.startswith(f"failed {_INVALID}"), heard
            assert sentence in heard
            assert c.ask("get 1 1").startswith(f"failed {_INVALID}")
    with c_actor(sanitized_programs, "unix:/does/not/exist", answer=f"failed {_UNAVAILABLE}"):
        pass


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_another_users_server_is_refused(sanitized_programs: Path) -> None:
    """The socket is open to all, unlike those of our servers, and never answers."""
    code = (
        "import os, socket, sys; sock = socket.socket(socket.AF_UNIX); os.setuid(65534)\n"
        "sock.bind(sys.argv[1]); os.chmod(sys.argv[1], 0o777); sock.listen()\n"
        "print('ready', flush=True); sys.stdin.read()"
    )
    folder = Path(f"/tmp/kvtier-strangers-{os.getpid()}")
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    stranger = subprocess.Popen(
        [sys.executable, "-c", code, str(folder / "socket")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert stranger.stdout is not None
        assert stranger.stdout.readline() == "ready\n"
        with c_actor(sanitized_programs, f"unix:{folder / 'socket'}", answer=f"failed {_REFUSED}") as c:
            assert c.ask("ping").startswith("failed")
    finally:
        stranger.communicate("")
        (folder / "socket").unlink()
        folder.rmdir()


def test_a_server_of_another_version_is_told(sanitized_programs: Path, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "other.sock"))
        listener.listen()
        address = f"unix:{tmp_path / 'other.sock'}"
        arguments = [address, bytes(32).hex(), "4096", "16", "60"]
        with c_program(sanitized_programs / "actor", *arguments) as c:
            sock, _ = listener.accept()
            with sock:
                frame = bytearray(encode_frame(0, b"x"))
                frame[4:6] = (VERSION + 1).to_bytes(2, "little")
                sock.sendall(frame)
                assert f"the peer speaks version {VERSION + 1} of the protocol" in c.hear()


@pytest.mark.parametrize("name", LIES)
def test_lies_over_tcp_give_no_wrong_byte(sanitized_programs: Path, name: str) -> None:
    with cache_server(tcp=True) as server, open_client(server.unix) as python, LyingProxy(server.tcp) as proxy:
        python.set(chain(1, 16), payloads(chain(1, 16)))
        arguments = [proxy.address, bytes(range(32)).hex(), str(BLOCK_BYTES), "16", "2", server.token]
        with c_program(sanitized_programs / "actor", *arguments) as c:
            assert c.hear() == "done"
            proxy.lie = LIES[name]
            for command in ("get 1 16", "views 1 16", "set 2 4", "contains 1 16", "get 1 16"):
                heard = c.ask(command)
                assert "wrong" not in heard or "wrong 0" in heard, (command, heard)
            assert proxy.num_lies > 0
            proxy.heal()
            wait_until(lambda: c.ask("get 1 16") == "got 16 wrong 0")


@pytest.mark.parametrize(("seed", "num_replies"), [(1, 500), pytest.param(2, 5000, marks=pytest.mark.slow)])
def test_mutated_replies_do_the_client_no_harm(
    sanitized_programs: Path, tmp_path: Path, seed: int, num_replies: int
) -> None:
    commands = ("views 1 4", "get 1 4", "set 1 4", "contains 1 4", "drop 1 4", "ping")
    with HostileServer(tmp_path, seed) as server:
        arguments = [server.address, bytes(range(32)).hex(), str(BLOCK_BYTES), "16", "0.05"]
        with c_program(sanitized_programs / "actor", *arguments) as c:
            c.hear()
            number = 0
            while server.num_replies < num_replies:
                c.ask(commands[number % len(commands)])
                number += 1


# --- threads and forks ---------------------------------------------------------------------------------------------


def test_threads_share_a_client(sanitized_programs: Path, transport: str) -> None:
    with (
        cache_server(memory=_MEMORY, tcp=True) as server,
        open_client(server.unix) as python,
        c_actor(sanitized_programs, *_reach(server, transport)) as c,
    ):
        words = c.ask("threads 1 2 8 16").split()
        counts = dict(zip(words[::2], map(int, words[1::2]), strict=True))
        assert counts["operations"] > 0
        assert (counts["wrong"], counts["failures"]) == (0, 0)
        wait_until(lambda: held(python) == NOTHING_HELD)


def test_a_forked_child_leaves_its_parents_client_alone(programs: Path) -> None:
    with cache_server(memory=_MEMORY) as server, c_actor(programs, server.unix) as c:
        assert c.ask("set 1 8") == "stored 8"
        assert c.ask("hold 1 8") == "held 8 wrong 0"
        assert c.ask("fork") == "child 0"
        assert c.ask("get 1 8") == "got 8 wrong 0"
        assert c.ask("release") == "released"
