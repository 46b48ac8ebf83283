"""The one log of a deployment: where lines come from, and progress."""

from __future__ import annotations

import io
import re

from kvtier.deploy.run.log import DeploymentLog


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class _Gone(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError


class _Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def _without_colours(text: str) -> str:
    return re.sub(r"\x1b\[\d+m", "", text)


def test_lines_have_the_time_and_their_part_in_one_column() -> None:
    stream = io.StringIO()
    log = DeploymentLog(stream, ["kvtier", "a-long-name", "http"])
    log.line("http", "ready")
    log.line("a-long-name", "starting")

    assert re.fullmatch(
        r"\d\d:\d\d:\d\d http        \| ready\n\d\d:\d\d:\d\d a-long-name \| starting\n", stream.getvalue()
    )


def test_the_summary_stands_without_a_part() -> None:
    stream = io.StringIO()
    DeploymentLog(stream, []).plain("ready after 3 s")

    assert stream.getvalue() == "ready after 3 s\n"


def test_progress_in_a_file_is_a_line_every_two_seconds_and_the_last_one() -> None:
    stream, clock = io.StringIO(), _Clock()
    log = DeploymentLog(stream, ["engine", "other"], clock)
    for percent in range(0, 100, 10):
        log.progress("engine", f"{percent}%", is_last=False)
        clock.now += 0.5
    log.progress("other", "of another part", is_last=False)
    log.progress("engine", "100%", is_last=True)

    texts = [line.partition("| ")[2] for line in stream.getvalue().splitlines()]
    assert texts == ["0%", "40%", "80%", "of another part", "100%"]


def test_progress_on_a_terminal_is_overwritten_and_stays_when_it_is_the_last() -> None:
    stream = _Terminal()
    log = DeploymentLog(stream, ["engine"])
    log.progress("engine", "50%", is_last=False)
    log.progress("engine", "60%", is_last=False)
    log.progress("engine", "100%", is_last=True)
    log.line("engine", "ready")

    shown = re.sub(r"\d\d:\d\d:\d\d ", "", _without_colours(stream.getvalue()))
    assert shown == "engine | 50%\r\x1b[Kengine | 60%\r\x1b[Kengine | 100%\nengine | ready\n"


def test_a_line_on_a_terminal_takes_the_place_of_progress() -> None:
    stream = _Terminal()
    log = DeploymentLog(stream, ["engine", "http"])
    log.progress("engine", "50%", is_last=False)
    log.line("http", "ready")

    assert _without_colours(stream.getvalue()).split("\r\x1b[K")[1].endswith("http   | ready\n")


def test_parts_have_colours_on_a_terminal_alone() -> None:
    terminal, file = _Terminal(), io.StringIO()
    for stream in (terminal, file):
        DeploymentLog(stream, ["engine", "http"]).line("http", "ready")

    assert "\x1b[32m" in terminal.getvalue()
    assert "\x1b" not in file.getvalue()


def test_a_log_that_nobody_reads_stops_nobody() -> None:
    log = DeploymentLog(_Gone(), ["engine"])

    log.line("engine", "ready")
    log.plain("ready after 3 s")


def test_what_a_client_has_put_into_a_line_is_shown_and_not_obeyed() -> None:
    stream = io.StringIO()
    DeploymentLog(stream, ["http"]).line("http", "a\tb \x1b[33mwarning\x1b[0m \x1b]0;title\x07\u202e")

    assert stream.getvalue().endswith("| a\tb warning \\x1b]0;title\\x07\\u202e\n")
