"""What a part tells its supervisor, through a real pipe."""

from __future__ import annotations

import os
from collections.abc import Iterator

import msgspec
import pytest

from kvtier.deploy.run.reports import Failed, Progressed, Ready, Report, Reporter, decode_report


class _Pipe:
    def __init__(self) -> None:
        self.read_fd, self.write_fd = os.pipe()
        os.set_blocking(self.read_fd, False)

    def reports(self) -> list[Report]:
        """What came since the last time."""
        try:
            data = os.read(self.read_fd, 1 << 16)
        except BlockingIOError:
            return []
        return [decode_report(line) for line in data.splitlines()]


@pytest.fixture
def pipe() -> Iterator[_Pipe]:
    pipe = _Pipe()
    yield pipe
    os.close(pipe.read_fd)
    os.close(pipe.write_fd)


@pytest.mark.parametrize(
    "report",
    [
        Progressed("Loading a model", 5, 10),
        Ready({"num_blocks": 12, "device": "cpu", "port": None}),
        Failed("line one\nline two, with ümläuts"),
    ],
)
def test_a_report_is_one_line_and_comes_as_it_was_told(pipe: _Pipe, report: Report) -> None:
    Reporter(pipe.write_fd).tell(report)

    assert pipe.reports() == [report]


def test_progress_is_told_twice_a_second_at_most_and_at_its_end(pipe: _Pipe) -> None:
    with Reporter(pipe.write_fd).progress("Loading", 1000) as advance:
        for _ in range(1000):
            advance(1)

    told = pipe.reports()
    assert told[0] == Progressed("Loading", 1, 1000)
    assert told[-1] == Progressed("Loading", 1000, 1000)
    assert len(told) < 10


def test_a_supervisor_that_is_gone_is_no_error() -> None:
    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    try:
        Reporter(write_fd).tell(Failed("nobody hears this"))
    finally:
        os.close(write_fd)


def test_what_is_no_report_is_an_error() -> None:
    with pytest.raises(msgspec.ValidationError):
        decode_report(b'{"kind":"unheard-of"}')
