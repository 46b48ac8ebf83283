"""A server that nobody runs: one for all who ask, outliving them, back when it dies, gone when it is not needed."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvtier
from kvtier.client.client import CacheClient
from kvtier.errors import ConfigError, KvtierError
from kvtier.plugins.embedded_server import EmbeddedCluster, EmbeddedServer
from kvtier.plugins.runtime_folder import server_folder, try_lock
from kvtier.stores.valkey.config import ClusterConfig, ClusterUse
from kvtier.testing.servers import cache_server
from kvtier.testing.signals import send_signal
from tests.support.actors import chain, open_client, payloads, read_all, stays
from tests.support.waiting import LIMIT_S, wait_until

ROOT = Path(__file__).parents[3]
MEMORY = 8 << 20
DISK = 64 << 20
UNUSED_S = 0.5
HASHES = chain(1, 8)


@pytest.fixture(autouse=True)
def runtime(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[Path]:
    """Where servers of a test listen. Whatever it did, none of them lives on when it is over, and no socket is left."""
    caplog.set_level(logging.CRITICAL, logger="kvtier.client")  # records keep errors, and those what they refer to
    path = Path(tempfile.mkdtemp(prefix="kvtier-"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(path))
    try:
        yield path
        wait_until(lambda: not server_pids(path))
        assert not [left for left in path.rglob("*") if left.is_socket()]
    finally:
        for pid in server_pids(path):
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(path)


def server_pids(runtime: Path) -> list[int]:
    """Cache servers that listen somewhere in `runtime`; not what starts them, and has their words among its own."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                words = (entry / "cmdline").read_bytes().decode().split("\0")
                if words[1:5] == ["-P", "-m", "kvtier", "cache-server"] and any(
                    word.startswith(f"{runtime}/") for word in words
                ):
                    found.append(int(entry.name))
    return found


def server_pid(runtime: Path) -> int:
    (pid,) = server_pids(runtime)
    return pid


@contextlib.contextmanager
def embedded(folder: Path | None = None, *, memory: int = MEMORY, disk: int = DISK, **options: object) -> Iterator[str]:
    """The address of a server that is held meanwhile."""
    server = wanted(folder, memory=memory, disk=disk, **options)
    try:
        server.ensure()
        yield server.address
    finally:
        server.close()


def wanted(folder: Path | None = None, *, memory: int = MEMORY, disk: int = DISK, **options: object) -> EmbeddedServer:
    options = {"unused_s": UNUSED_S, **options}
    return EmbeddedServer(memory, folder, disk if folder else None, **options)  # type: ignore[arg-type]


class Actor:
    """Another process that wants a server."""

    def __init__(self, **settings: object) -> None:
        settings = {"memory": MEMORY, "unused_s": UNUSED_S, **settings}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.unit.plugins.embedded_actor", json.dumps(settings)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def hear(self) -> dict[str, str]:
        assert self.process.stdout is not None
        said: dict[str, str] = json.loads(self.process.stdout.readline())
        return said

    def end(self) -> None:
        self.process.communicate("")


@contextlib.contextmanager
def actors(count: int = 1, **settings: object) -> Iterator[list[Actor]]:
    started = [Actor(**settings) for _ in range(count)]
    try:
        yield started
    finally:
        for actor in started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(actor.process.pid, signal.SIGKILL)
            actor.end()


def set_blocks(address: str) -> None:
    with open_client(address) as client:
        assert client.set(HASHES, payloads(HASHES)) == len(HASHES)


def has_blocks(address: str) -> bool:
    with open_client(address) as client:
        return read_all(client, HASHES) == payloads(HASHES)


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not Path(f"/proc/{pid}").exists())


# --- one server for all who ask --------------------------------------------------------------------------------------


def test_a_server_is_there_while_it_is_wanted_and_ends_soon_after(runtime: Path) -> None:
    with embedded(unused_s=4 * UNUSED_S) as address:
        set_blocks(address)
        time.sleep(6 * UNUSED_S)
        assert has_blocks(address)
        pid = server_pid(runtime)

    assert server_pids(runtime) == [pid], "it waits a moment for somebody else"
    wait_until(lambda: not server_pids(runtime))


def test_who_asks_for_the_same_gets_the_same_server(runtime: Path) -> None:
    with embedded() as first, embedded() as second, embedded(name="another") as other, embedded(memory=1 << 20):
        set_blocks(first)

        assert second == first
        assert has_blocks(second)
        assert not has_blocks(other)
        assert len(server_pids(runtime)) == 3


def test_one_folder_is_one_server_whatever_its_path_looks_like(runtime: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "data")
    with (
        embedded(tmp_path / "data") as first,
        embedded(tmp_path / "link", name="another") as second,
        embedded(tmp_path / "x" / ".." / "data") as third,
    ):
        assert first == second == third
        assert len(server_pids(runtime)) == 1


def test_it_may_be_asked_for_again_after_it_was_closed(runtime: Path) -> None:
    server = wanted()
    for _ in range(2):
        server.ensure()
        server.ensure()
        assert not has_blocks(server.address)
        server.close()
        server.close()
    assert len(server_pids(runtime)) == 1


@pytest.mark.parametrize("with_folder", [False, True])
def test_four_processes_that_start_at_once_get_one_server(runtime: Path, tmp_path: Path, with_folder: bool) -> None:
    settings = {"folder": str(tmp_path / "data"), "disk": DISK} if with_folder else {}
    with actors(4, unused_s=LIMIT_S, **settings) as started:  # on a busy machine its first client may come late
        addresses = {actor.hear()["address"] for actor in started}
        assert len(addresses) == 1
        assert len(server_pids(runtime)) == 1
        starts = (Path(addresses.pop().removeprefix("unix:")).parent / "log").read_text().count("ready")
        assert starts == 1
    os.kill(server_pid(runtime), signal.SIGTERM)


# --- it outlives whoever started it ----------------------------------------------------------------------------------


def test_a_server_survives_the_kill_of_its_starter(runtime: Path) -> None:
    with actors() as (starter,):
        address = starter.hear()["address"]
        with open_client(address) as client:
            client.set(HASHES, payloads(HASHES))
            os.killpg(starter.process.pid, signal.SIGKILL)
            starter.process.wait()
            time.sleep(2 * UNUSED_S)

            assert read_all(client, HASHES) == payloads(HASHES)
            with embedded() as again:
                assert has_blocks(again)


@pytest.mark.parametrize("after_s", [0.1, 0.25, 0.4, 0.55])
def test_a_starter_killed_on_the_way_stands_in_nobodys_way(runtime: Path, tmp_path: Path, after_s: float) -> None:
    with actors(2, folder=str(tmp_path / "data"), disk=DISK) as (first, second):
        time.sleep(after_s)
        os.killpg(first.process.pid, signal.SIGKILL)

        assert "address" in second.hear()
        assert len(server_pids(runtime)) == 1


def test_a_server_is_no_child_of_its_starter_and_has_nothing_of_it(runtime: Path) -> None:
    with actors() as (starter,):
        starter.hear()
        pid = server_pid(runtime)
        parent, group, session = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1:4]
        descriptors = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()]

        assert starter.process.pid not in (int(parent), int(group), int(session))
        assert descriptors.count("/dev/null") == 1, "its standard input alone"
        assert not [each for each in descriptors if each.startswith("pipe:")]


def test_a_server_runs_where_any_thread_of_its_starter_may(runtime: Path) -> None:
    allowed = os.sched_getaffinity(0)
    done = threading.Event()
    free = threading.Thread(target=done.wait)
    free.start()
    os.sched_setaffinity(0, {min(allowed)})
    try:
        with embedded():
            assert os.sched_getaffinity(server_pid(runtime)) == allowed
    finally:
        os.sched_setaffinity(0, allowed)
        done.set()
        free.join()


def test_a_forked_child_does_not_hold_the_server(runtime: Path) -> None:
    with actors(forks=True) as (starter,):
        starter.hear()
        starter.end()
        wait_until(lambda: not server_pids(runtime))


# --- it comes back ---------------------------------------------------------------------------------------------------


def test_a_killed_server_is_started_again_while_it_is_wanted(runtime: Path) -> None:
    with embedded() as address, kvtier.connect(address) as client:
        for _ in range(2):
            pid = server_pid(runtime)
            kill(pid)

            wait_until(lambda: server_pids(runtime))
            assert server_pid(runtime) != pid
            wait_until(lambda: _answers(client))
    wait_until(lambda: not server_pids(runtime))
    assert stays(lambda: not server_pids(runtime), 1.0), "nobody wants it any more"


def _answers(client: CacheClient) -> bool:
    with contextlib.suppress(KvtierError):
        return bool(client.stats())
    return False


def test_several_who_want_a_killed_server_start_one(runtime: Path) -> None:
    with actors(3) as started:
        for actor in started:
            actor.hear()
        kill(server_pid(runtime))
        wait_until(lambda: server_pids(runtime))
        time.sleep(1)
        assert len(server_pids(runtime)) == 1


def test_blocks_come_back_from_disk_after_the_server_was_killed(runtime: Path, tmp_path: Path) -> None:
    with embedded(tmp_path / "data") as address:
        with open_client(address) as client:
            client.set(HASHES, payloads(HASHES))
            client.flush()
            pid = server_pid(runtime)
            kill(pid)
            wait_until(lambda: pid not in server_pids(runtime) and client.contains(HASHES) == [True] * len(HASHES))

        assert has_blocks(address)


def test_blocks_come_back_from_disk_after_everybody_had_gone(runtime: Path, tmp_path: Path) -> None:
    with embedded(tmp_path / "data") as address:
        set_blocks(address)
    wait_until(lambda: not server_pids(runtime))

    with embedded(tmp_path / "data") as address, open_client(address) as client:
        assert read_all(client, HASHES) == payloads(HASHES)
        assert client.stats()["disk_read_blocks"] == len(HASHES)


def test_who_comes_while_the_server_ends_waits_for_it_and_starts_the_next(runtime: Path, tmp_path: Path) -> None:
    with embedded(tmp_path / "data") as address:
        set_blocks(address)
    pid = server_pid(runtime)
    os.kill(pid, signal.SIGTERM)

    with embedded(tmp_path / "data") as address:
        wait_until(lambda: pid not in server_pids(runtime))  # one that had not heard of its end yet is started again
        with embedded(tmp_path / "data"):
            assert has_blocks(address)


def test_a_server_that_left_before_its_first_client_came_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = EmbeddedServer._connect

    def late(self: EmbeddedServer, deadline: float, is_patient: bool) -> object:
        has_left = self._place.log.exists() and b"stopping" in self._place.log.read_bytes()
        return connect(self, deadline, is_patient) if has_left else None

    monkeypatch.setattr(EmbeddedServer, "_connect", late)
    with embedded(tmp_path / "data") as address, open_client(address) as client:
        client.ping()


# --- what cannot be --------------------------------------------------------------------------------------------------


def test_other_settings_for_a_folder_in_use_are_refused_in_a_sentence(tmp_path: Path) -> None:
    with embedded(tmp_path / "data"):
        for other in ({"memory": 2 * MEMORY}, {"disk": 2 * DISK}):
            with pytest.raises(ConfigError) as caught:
                wanted(tmp_path / "data", **other).ensure()

            assert str(caught.value) == (
                f"the embedded cache server of {tmp_path / 'data'} is in use with memory 8MiB and disk 64MiB: "
                "give the same settings or another folder, or stop the engines that use it"
            )


def cluster_with(**settings: object) -> EmbeddedCluster:
    """A cluster whose nodes do not answer."""
    config = ClusterConfig(valkey=("tcp://127.0.0.1:1",), **{"timeout_s": 0.5, **settings})  # type: ignore[arg-type]
    options = ["--cluster", config.valkey[0], "--cluster-segment", str(config.segment)]
    options += ["--cluster-ttl", str(config.ttl_s), "--cluster-timeout", str(config.timeout_s)]
    return EmbeddedCluster(tuple(options), ClusterUse.of(config, "commit", None))


def test_another_use_of_the_cluster_for_a_folder_in_use_is_refused_and_named(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    with embedded(folder, cluster=cluster_with()), embedded(folder, cluster=cluster_with()):
        for other, named in (
            (cluster_with(segment=64), ", above the cluster tcp://127.0.0.1:1 with segment 128 and not 64"),
            (
                cluster_with(ttl_s=60.0, timeout_s=0.25),
                ", above the cluster tcp://127.0.0.1:1 with ttl_s 604800.0 and not 60.0, timeout_s 0.5 and not 0.25",
            ),
            (None, ", above the cluster tcp://127.0.0.1:1"),
        ):
            with pytest.raises(ConfigError) as caught:
                wanted(folder, cluster=other).ensure()

            assert str(caught.value) == (
                f"the embedded cache server of {folder} is in use with memory 8MiB and disk 64MiB{named}: "
                "give the same settings or another folder, or stop the engines that use it"
            )


def test_a_cluster_for_a_folder_in_use_without_one_is_refused_and_named(tmp_path: Path) -> None:
    with embedded(tmp_path / "data"), pytest.raises(ConfigError, match="disk 64MiB, without a cluster: give the same"):
        wanted(tmp_path / "data", cluster=cluster_with()).ensure()


def test_other_settings_replace_a_server_that_nobody_uses_any_more(runtime: Path, tmp_path: Path) -> None:
    with embedded(tmp_path / "data") as address:
        set_blocks(address)
    pid = server_pid(runtime)

    with embedded(tmp_path / "data", memory=2 * MEMORY) as address, open_client(address) as client:
        assert server_pid(runtime) != pid
        assert client.info()["memory_bytes"] == 2 * MEMORY
        assert read_all(client, HASHES) == payloads(HASHES)


def test_a_folder_of_a_server_that_was_started_by_hand_is_refused_in_a_sentence(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    with cache_server("--folder", str(folder), "--disk", "64MiB"), pytest.raises(ConfigError) as caught:
        wanted(folder).ensure()

    assert "give its address as `server`, or another folder" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_server_that_cannot_start_is_quoted(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"did not start: memory of 1048576TiB is more than the .* this machine"):
        wanted(memory=1 << 60).ensure()
    with pytest.raises(ConfigError, match="did not start: file space must be at least"):
        wanted(tmp_path / "data", disk=4096).ensure()


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file cannot be used"):
        wanted(tmp_path / "file").ensure()
    with pytest.raises(ConfigError, match="give `folder` and `disk`"):
        EmbeddedServer(MEMORY, tmp_path)


def test_a_hung_server_is_waited_for_so_long_and_no_longer(runtime: Path) -> None:
    with embedded():
        pid = server_pid(runtime)
        send_signal(pid, signal.SIGSTOP)
        try:
            with pytest.raises(ConfigError, match=r"no embedded cache server answered on .* within 1 s: see .*log"):
                wanted(start_timeout_s=1.0).ensure()
        finally:
            os.kill(pid, signal.SIGCONT)


def test_close_does_not_wait_for_a_start_that_takes_long(runtime: Path) -> None:
    with embedded() as address:
        first = wanted()
        lock_fd = try_lock(Path(address.removeprefix("unix:")).parent / "start")
        assert lock_fd is not None
        said: list[str] = []

        def ensure() -> None:
            try:
                first.ensure()
            except ConfigError as error:
                said.append(str(error))

        thread = threading.Thread(target=ensure)
        thread.start()
        time.sleep(0.1)
        first.close()
        thread.join(LIMIT_S)
        os.close(lock_fd)

    assert said == ["closed while the embedded cache server was starting"]


# --- where it listens ------------------------------------------------------------------------------------------------


def test_sockets_lie_in_folders_of_this_user_alone(runtime: Path) -> None:
    with embedded() as address:
        path = Path(address.removeprefix("unix:"))

        assert path.parents[1] == runtime / "kvtier"
        assert [folder.stat().st_mode & 0o777 for folder in path.parents[:2]] == [0o700, 0o700]
        assert path.stat().st_mode & 0o777 == 0o600


def test_a_folder_that_others_can_open_is_refused(runtime: Path) -> None:
    (runtime / "kvtier").mkdir(mode=0o755)
    with pytest.raises(ConfigError, match="only this user can open"):
        wanted().ensure()


def test_without_a_runtime_folder_it_is_a_short_one_for_temporary_files(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(runtime))
    for unusable in (None, "relative", str(runtime / "missing"), str(runtime / ("long" * 25))):
        if unusable is None:
            monkeypatch.delenv("XDG_RUNTIME_DIR")
        else:
            monkeypatch.setenv("XDG_RUNTIME_DIR", unusable)
        if unusable is not None and "long" in unusable:
            Path(unusable).mkdir()
        assert server_folder("0123456789abcdef").path == runtime / f"kvtier-{os.geteuid()}" / "0123456789abcdef"
    monkeypatch.setattr(tempfile, "tempdir", str(runtime / ("long" * 25)))
    assert server_folder("0123456789abcdef").path == Path(f"/tmp/kvtier-{os.geteuid()}/0123456789abcdef")


def test_what_killed_servers_left_is_removed_by_the_next_of_any(runtime: Path) -> None:
    with actors(name="killed") as (starter,):
        address = starter.hear()["address"]
        os.killpg(starter.process.pid, signal.SIGKILL)
        kill(server_pid(runtime))
        left = Path(address.removeprefix("unix:"))
        assert left.exists()

    with embedded() as address, embedded(name="another") as other:
        assert [folder.name for folder in sorted((runtime / "kvtier").iterdir())] == sorted(
            Path(each.removeprefix("unix:")).parent.name for each in (address, other)
        )
        assert not left.exists()
        assert not has_blocks(address)


def test_it_needs_no_torch() -> None:
    program = "import sys, kvtier.plugins.embedded_server; print({'torch', 'vllm', 'numpy'} & set(sys.modules))"
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert said.stdout == "set()\n"


def test_processes_that_say_different_things_of_a_cluster_share_no_server() -> None:
    addresses = [EmbeddedServer(8 << 20, cluster=cluster_with(segment=segment)).address for segment in (128, 64, 128)]

    assert addresses[0] == addresses[2] != addresses[1]
