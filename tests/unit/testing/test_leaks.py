"""The plugin really fails a test that leaves something behind. Inner runs are processes of their own."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.testing.leaks import held

pytest_plugins = ("pytester",)

SETTINGS = """
[pytest]
kvtier_leaks = {enabled}
addopts = -p no:cacheprovider
"""

IMPATIENT = """
from kvtier.testing import leaks

leaks._PATIENCE_S = 0.05
"""

LEAKS = """
import os
import signal
import socket
import subprocess
import sys
import threading

kept = []


def test_clean():
    with open(os.devnull):
        pass


def test_thread():
    done = threading.Event()
    thread = threading.Thread(target=done.wait, name="kvtier-left", daemon=True)
    thread.start()
    kept.append((thread, done))


def test_descriptor():
    kept.append(os.open("/etc/hostname", os.O_RDONLY))


def test_socket():
    kept.append(socket.socket())


def test_child():
    kept.append(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE))


def test_shared_memory():
    path = f"/dev/shm/kvtier-left-{os.getpid()}"
    os.close(os.open(path, os.O_CREAT | os.O_RDWR))
    kept.append(path)


def test_blocked_signal():
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])


def test_clean_again():
    pass


def teardown_module():
    kept[0][1].set()
    kept[3].communicate(b"end")
    os.unlink(kept[4])
"""

ENDING = """
import threading


def test_a_thread_that_is_about_to_end():
    go = threading.Event()
    threading.Thread(target=lambda: go.wait(0.2), name="kvtier-ending").start()
"""


def test_a_test_that_leaves_something_fails_and_names_it(pytester: pytest.Pytester) -> None:
    pytester.makeini(SETTINGS.format(enabled="true"))
    pytester.makeconftest(IMPATIENT)
    pytester.makepyfile(LEAKS)

    result = pytester.runpytest_subprocess("-v")

    result.assert_outcomes(passed=8, errors=6)
    result.stdout.fnmatch_lines(
        [
            "left behind: thread kvtier-left *",
            "left behind: fd * /etc/hostname",
            "left behind: fd * socket:*",
            "left behind: child *",
            "left behind: /dev/shm/kvtier-left-*",
            f"left behind: signal {int(signal.SIGUSR2)} blocked",
        ]
    )
    result.stdout.fnmatch_lines(["*::test_clean PASSED*", "*::test_clean_again PASSED*"])


def test_what_libraries_open_once_is_the_processs(tmp_path: Path) -> None:
    before = held()
    with open("/sys/devices/system/cpu/online"):
        assert not {name for name in held() - before if name.startswith("fd")}
    with open(tmp_path / f"perf-{os.getpid()}.map", "w"):
        assert not {name for name in held() - before if name.startswith("fd")}
    with open(tmp_path / f"perf-{os.getpid() + 1}.map", "w"):
        assert {name for name in held() - before if name.startswith("fd")}


def test_a_project_that_does_not_ask_is_left_alone(pytester: pytest.Pytester) -> None:
    pytester.makeini(SETTINGS.format(enabled="false"))
    pytester.makepyfile(LEAKS)

    pytester.runpytest_subprocess().assert_outcomes(passed=8)


def test_what_is_ending_is_waited_for(pytester: pytest.Pytester) -> None:
    pytester.makeini(SETTINGS.format(enabled="true"))
    pytester.makepyfile(ENDING)

    pytester.runpytest_subprocess().assert_outcomes(passed=1)


@pytest.mark.parametrize(
    "name",
    [
        "kvtier-other",
        pytest.param(
            "kvtier-twin",
        ),
    ],
)
def test_a_thread_more_is_something_more_to_hold(name: str) -> None:
    done = threading.Event()
    threads = [threading.Thread(target=done.wait, name=each) for each in ("kvtier-twin", name)]
    threads[0].start()
    before = held()
    threads[1].start()
    try:
        assert held() - before
    finally:
        done.set()
        for thread in threads:
            thread.join()


CREATE = "import os, sys; os.close(os.open(sys.argv[1], os.O_CREAT | os.O_RDWR))"
MAP = """
import mmap, os, sys
memory = mmap.mmap(os.open(sys.argv[1], os.O_RDWR), 4096)
print("mapped", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def shared_file() -> Iterator[Path]:
    """In shared memory, created by another program."""
    path = Path(f"/dev/shm/psm_test_{os.getpid()}")
    subprocess.run([sys.executable, "-c", CREATE, str(path)], check=True)
    try:
        yield path
    finally:
        path.unlink()


def test_shared_memory_of_another_program_is_not_ours(shared_file: Path) -> None:
    assert str(shared_file) not in held()


def test_shared_memory_that_this_process_maps_is_ours(shared_file: Path) -> None:
    with shared_file.open("r+b") as file:
        file.truncate(4096)
        with mmap.mmap(file.fileno(), 4096):
            assert str(shared_file) in held()
    assert str(shared_file) not in held()


def test_shared_memory_that_a_descendant_maps_is_ours(shared_file: Path) -> None:
    os.truncate(shared_file, 4096)
    command = [sys.executable, "-c", MAP, str(shared_file)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"mapped\n"
        assert str(shared_file) in held()
        child.communicate(b"")
    assert str(shared_file) not in held()
