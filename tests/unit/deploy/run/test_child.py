"""One process of a deployment as its supervisor holds it: what it says, how it ends, what it leaves alone."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.api.config import ApiConfig
from kvtier.cacheserver.config import CacheServerConfig
from kvtier.deploy.plan.parts import CachePart, HttpPart
from kvtier.deploy.run.child import Child, ChildState
from kvtier.deploy.run.reports import Failed, Ready, Report
from kvtier.transport.address import UnixAddress

_PART = HttpPart(name="http", api=ApiConfig(models=()), listeners=())


@contextlib.contextmanager
def _running(program: str, runtime_folder: Path = Path("/nowhere")) -> Iterator[Child]:
    """A child whose process runs this program; it is killed in the end, if it runs then."""
    child = Child("http", _PART, runtime_folder, command=(sys.executable, "-I", "-S", "-c", program))
    with _started(child):
        yield child


@contextlib.contextmanager
def _started(child: Child) -> Iterator[Child]:
    child.start()
    try:
        yield child
    finally:
        if child.is_running:
            child.signal(signal.SIGKILL)
            child.reap()


def _all_output(child: Child) -> list[str]:
    lines: list[str] = []
    while _is_readable(child.output_fd) and child.read_output(lines.append):
        pass
    return lines


def _all_reports(child: Child) -> list[Report]:
    reports: list[Report] = []
    is_open = True
    while is_open:
        _is_readable(child.report_fd)
        came, is_open = child.read_reports()
        reports += came
    return reports


def _is_readable(fd: int) -> bool:
    return bool(select.select([fd], [], [], 20)[0])


def _ended(child: Child) -> str:
    assert _is_readable(child.pidfd)
    return child.reap()


def test_the_process_gets_its_kind_name_folder_and_settings() -> None:
    with _running("import sys; print(sys.argv[1:4]); print(sys.stdin.readline())", Path("/run/kvtier-1")) as child:
        argv, settings = _all_output(child)

    assert argv == "['http', 'http', '/run/kvtier-1']"
    assert settings.startswith('{"name":"http"')


def test_lines_come_whole_however_they_were_written() -> None:
    program = """
import sys, time
for piece in ("one\\ntw", "o\\n\\n  \\nlast"):
    sys.stdout.write(piece); sys.stdout.flush(); time.sleep(0.05)
"""
    with _running(program) as child:
        assert _all_output(child) == ["one", "two", "last"]


def test_each_state_of_a_progress_bar_is_a_line() -> None:
    with _running(r"import sys; sys.stderr.write('\r10%\r50%\r100%\ndone\n')") as child:
        assert _all_output(child) == ["10%", "50%", "100%", "done"]


def test_what_is_no_text_and_what_has_no_end_is_shown_nonetheless() -> None:
    with _running(r"import os; os.write(1, b'\xff\xfe' + 3 * 65536 * b'x' + b'\n')") as child:
        lines = _all_output(child)

    assert lines[0].startswith("\ufffd\ufffdx")
    assert sum(map(len, lines)) == 3 * 65536 + 2


def test_reports_are_read_apart_from_output() -> None:
    program = """
import os, sys
fd = int(sys.argv[4])
print("not a report", flush=True)
os.write(fd, b'{"kind":"ready","properties":{"port":1}}\\n{"kind":"failed","sente')
os.write(fd, b'nce":"no"}\\n{"kind":"rea')
"""
    with _running(program) as child:
        assert _all_reports(child) == [Ready({"port": 1}), Failed("no")]
        assert _all_output(child) == ["not a report"]


def test_a_report_may_be_long() -> None:
    program = """
import os, sys
os.write(int(sys.argv[4]), b'{"kind":"failed","sentence":"' + 300_000 * b"x" + b'"}\\n')
"""
    with _running(program) as child:
        assert _all_reports(child) == [Failed(300_000 * "x")]


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("", "ended with status 0"),
        ("raise SystemExit(7)", "ended with status 7"),
        ("import os; os.kill(os.getpid(), 9)", "was ended by SIGKILL"),
    ],
)
def test_how_it_ended_is_said_in_words(program: str, words: str) -> None:
    with _running(program) as child:
        assert child.is_running
        assert _ended(child) == words
        assert not child.is_running


def test_a_signal_to_what_has_ended_does_nothing() -> None:
    with _running("") as child:
        assert _is_readable(child.pidfd)
        child.signal(signal.SIGTERM)
        child.reap()
        child.signal(signal.SIGTERM)


def test_it_can_be_started_again_and_remembers_that_it_was_ready() -> None:
    with _running("") as child:
        child.note_ready({"port": 1})
        _ended(child)
        with _started(child):
            assert (child.state, child.was_ready) == (ChildState.STARTING, True)
            assert _ended(child) == "ended with status 0"


def test_a_signal_to_the_terminal_does_not_reach_it() -> None:
    with _running("import os; print(os.getsid(0) == os.getpid())") as child:
        assert _all_output(child) == ["True"]


def _cache_server(folder: Path) -> Child:
    unix = UnixAddress(str(folder / "c.sock"))
    return Child("cache", CachePart(name="cache", server=CacheServerConfig(memory_bytes=1 << 20, unix=unix)), folder)


def _wait_until_ready(child: Child) -> None:
    while not any(isinstance(report, Ready) for report in child.read_reports()[0]):
        assert _is_readable(child.report_fd)


def test_a_signal_finds_no_thread_of_a_part_that_would_die_of_it(tmp_path: Path) -> None:
    with _started(_cache_server(tmp_path)) as child:
        _wait_until_ready(child)
        threads = [path for path in Path(f"/proc/{child.pid}/task").iterdir() if path.name != str(child.pid)]
        masks = [int(re.search(r"SigBlk:\s*(\w+)", (path / "status").read_text())[1], 16) for path in threads]

        assert len(masks) >= 2
        assert all(mask >> (signal.SIGTERM - 1) & 1 for mask in masks)


def test_a_cache_server_that_ends_leaves_the_runtime_folder_to_its_supervisor(tmp_path: Path) -> None:
    """Also when nothing else is in it: what is started again needs it."""
    with _started(_cache_server(tmp_path)) as child:
        _wait_until_ready(child)
        assert os.listdir(tmp_path)
        child.signal(signal.SIGTERM)

        assert _ended(child) == "ended with status 0"

    assert os.listdir(tmp_path) == []
