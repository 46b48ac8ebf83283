"""Vineyard's file cache over real processes and filesystems: many writers and readers, kills, full disks."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.errors import ConfigError
from tests.support.vineyard_files import (
    CHUNK,
    FILE_BYTES,
    SHARED_CAPACITY,
    TEMP,
    chunk_paths,
    found,
    open_files,
    store,
    temp_names,
)
from tests.support.waiting import LIMIT_S, wait_until

_ROOT = Path(__file__).parents[2]
_EXAMPLE = _ROOT / "examples" / "vineyard" / "files.py"
_needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")
_BOUND_BYTES = SHARED_CAPACITY // CHUNK * FILE_BYTES


class Actor:
    """Another process on the folder. What it says goes to a file of its own."""

    def __init__(self, act: str, root: Path, logs: Path, seed: int) -> None:
        self._log = logs / f"{act}-{seed}"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.vineyard_files", act, str(root), str(seed)],
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=_ROOT,
            )

    @property
    def total(self) -> int:
        """How many tokens it has stored or found so far."""
        lines = self._log.read_text().splitlines()
        return int(lines[-1]) if lines and lines[-1].isdigit() else 0

    @property
    def is_at_work(self) -> bool:
        return "begun" in self._log.read_text()

    def kill(self) -> None:
        """Fails with what it said if it has ended by itself."""
        assert self._process.poll() is None, self._log.read_text()
        self._process.kill()
        self._process.wait()

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.mark.slow
def test_eight_writers_and_eight_readers_agree_while_some_are_killed(tmp_path: Path) -> None:
    root, logs = tmp_path / "cache", tmp_path / "logs"
    logs.mkdir()
    dice = random.Random(1)
    num_killed = 0
    most_bytes = 0
    with contextlib.ExitStack() as stack:
        started: dict[str, list[Actor]] = {"write": [], "read": []}

        def start(act: str, seed: int) -> Actor:
            actor = Actor(act, root, logs, seed)
            stack.callback(actor.end)
            started[act].append(actor)
            return actor

        def has_seen_enough() -> bool:
            """However slow the machine is, it comes to that; what must never be seen has until then to show itself."""
            return (
                num_killed >= 5
                and all(sum(actor.total for actor in actors) > 50 * CHUNK for actors in started.values())
                and most_bytes > _BOUND_BYTES // 2
            )

        writers = [start("write", seed) for seed in range(8)]
        readers = [start("read", seed) for seed in range(8)]
        wait_until(lambda: all(actor.is_at_work for actor in (*writers, *readers)))
        begun_at = time.monotonic()
        while time.monotonic() < begun_at + 6 or not has_seen_enough():
            assert time.monotonic() < begun_at + LIMIT_S, (num_killed, most_bytes, "stored and found too little")
            most_bytes = max(most_bytes, _used_bytes(root))
            if dice.random() < 0.05:
                actors, act = dice.choice([(writers, "write"), (writers, "write"), (readers, "read")])
                victim = dice.randrange(8)
                actors[victim].kill()
                num_killed += 1
                actors[victim] = start(act, 100 + num_killed)
            time.sleep(0.01)
        for actor in (*writers, *readers):
            actor.kill()

    assert most_bytes <= _BOUND_BYTES
    with contextlib.closing(open_files(root, capacity=SHARED_CAPACITY)) as cache:
        cache.collect()
        assert temp_names(root) == []
        (left,) = os.listdir(root / TEMP)
        assert left.startswith(f"{cache._store.owner}-")
        assert store(cache, range(5 * CHUNK)) == 5 * CHUNK, "nothing that the dead held is lost for good"


def _used_bytes(root: Path) -> int:
    """Of chunks that were in the folder all at one instant: when the last was opened and none looked at yet.

    A chunk has one name and never gets another: one that has a name in the end has had it since it was opened.
    """
    with contextlib.ExitStack() as opened:
        fds = []
        for path in chunk_paths(root):
            with contextlib.suppress(FileNotFoundError):
                fds.append(os.open(path, os.O_PATH))
                opened.callback(os.close, fds[-1])
        statuses = [os.fstat(fd) for fd in fds]
    return sum(status.st_size for status in statuses if status.st_nlink)


def test_the_last_of_a_writer_that_was_killed_goes_with_the_next_listing(tmp_path: Path) -> None:
    root, logs = tmp_path / "cache", tmp_path / "logs"
    logs.mkdir()
    writer = Actor("write", root, logs, 1)
    wait_until(lambda: writer.total > 0)
    writer.kill()
    assert [name for name in os.listdir(root / TEMP) if name.endswith(".room")]
    with contextlib.closing(open_files(root)) as cache:
        cache.collect()

        (left,) = os.listdir(root / TEMP)
        assert left.startswith(f"{cache._store.owner}-")


def test_vineyards_program_runs_and_leaves_its_folders(tmp_path: Path) -> None:
    program = _EXAMPLE.read_text().replace("/tmp/vineyard/llm_cache", str(tmp_path / "llm_cache"))
    subprocess.run([sys.executable, "-c", program], check=True, cwd=_ROOT)

    assert sorted(os.listdir(tmp_path / "llm_cache")) == ["44", "__temp", "c3"]
    assert os.listdir(tmp_path / "llm_cache" / TEMP) == []
    again = subprocess.run([sys.executable, "-c", program], cwd=_ROOT, capture_output=True, text=True)
    assert "by an earlier run: remove the folder" in again.stderr


@contextlib.contextmanager
def _mounted(path: Path, options: str) -> Iterator[Path]:
    path.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "kvtier-test", str(path)], capture_output=True)
    if done.returncode:
        pytest.skip("no tmpfs can be mounted here")
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)


@_needs_root
def test_a_read_only_folder_is_an_error_at_construction_and_misses_afterwards(tmp_path: Path) -> None:
    with _mounted(tmp_path / "disk", "size=4m") as disk:
        with contextlib.closing(open_files(disk)) as cache:
            assert store(cache, range(4 * CHUNK)) == 4 * CHUNK
            subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)

            assert found(cache, range(4 * CHUNK)) == 4 * CHUNK
            assert store(cache, range(100, 100 + CHUNK)) == 0
            assert cache.stats()["write_failures"] == 1
            with pytest.raises(ConfigError, match="cannot be used: Read-only file system"):
                open_files(disk)
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)


@_needs_root
def test_a_cache_that_was_closed_while_its_folder_was_read_only_takes_no_room(tmp_path: Path) -> None:
    with _mounted(tmp_path / "disk", "size=4m") as disk:
        with contextlib.closing(open_files(disk, capacity=64 * CHUNK)) as cache:
            assert store(cache, range(CHUNK)) == CHUNK
            subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
        (left,) = (disk / TEMP).glob("*.room")
        assert left.stat().st_size

        with contextlib.closing(open_files(disk, capacity=64 * CHUNK)) as cache:
            assert store(cache, range(64 * CHUNK)) == 64 * CHUNK
            assert not left.exists()
            assert cache.stats()["stale_temps"] == 1


@_needs_root
def test_a_full_disk_is_a_short_count_and_an_error_at_construction(tmp_path: Path) -> None:
    with _mounted(tmp_path / "disk", "size=1m") as disk, contextlib.closing(open_files(disk)) as cache:
        stored = store(cache, range(200 * CHUNK))

        assert CHUNK < stored < 200 * CHUNK
        assert found(cache, range(200 * CHUNK)) == stored
        assert temp_names(disk) == []
        (disk / "filler").write_bytes(bytes(os.statvfs(disk).f_bavail * 4096))
        with pytest.raises(ConfigError, match="cannot be used: No space left on device"):
            open_files(disk)
        (disk / "filler").unlink()
        for path in chunk_paths(disk)[-5:]:
            path.unlink()
        assert store(cache, range(9000, 9000 + CHUNK)) == CHUNK


def test_the_keeper_collects_by_itself(tmp_path: Path) -> None:
    with contextlib.closing(open_files(tmp_path, ttl=0.2, client_gc_interval=0.1)) as cache:
        store(cache, range(4 * CHUNK))
        wait_until(lambda: cache.stats()["expired_chunks"] >= 4)  # counted when all are gone
        assert cache.stats()["expired_chunks"] == 4
        assert not chunk_paths(tmp_path)
    with contextlib.closing(open_files(tmp_path)) as other:
        store(other, range(4 * CHUNK))
    with contextlib.closing(
        open_files(tmp_path, enable_global_gc=True, global_ttl=0.2, global_gc_interval=0.1)
    ) as cache:
        wait_until(lambda: cache.stats()["expired_chunks"] >= 4)  # counted when all are gone
        assert cache.stats()["expired_chunks"] == 4
        assert not chunk_paths(tmp_path)
