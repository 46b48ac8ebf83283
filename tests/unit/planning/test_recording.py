from __future__ import annotations

import threading
from pathlib import Path

import pytest

from kvtier.cacheserver.prompt_log import PromptLog
from kvtier.errors import ConfigError, TierUnavailable
from kvtier.planning.recording import Recorder
from kvtier.planning.trace_file import new_trace
from kvtier.simulate.trace import TracedRequest, read_traces
from tests.support.prompt_traffic import hashed

SPACE, OTHER = bytes(32), bytes([7] * 32)
PLENTY = 1 << 20


class Server:
    """From `begin` on, it is asked for one more prompt each time that somebody has fetched."""

    def __init__(self, *prompts: tuple[bytes, tuple[int, ...]]) -> None:
        self.log = PromptLog()
        self._prompts = list(prompts)
        self._has_begun = False

    def begin(self) -> None:
        """Is asked for the first of its prompts."""
        self._has_begun = True
        self._ask()

    def asked_prompts(self, first: int) -> dict[str, object]:
        page = self.log.read(first)
        if self._has_begun:
            self._ask()
        return page

    def _ask(self) -> None:
        if self._prompts:
            namespace, prompt = self._prompts.pop(0)
            self.log.note(namespace, 16, hashed(prompt))


def recorded(
    server: Server, path: Path, namespace: str = "", max_bytes: int = PLENTY
) -> tuple[Recorder, list[TracedRequest]]:
    stop = threading.Event()
    stop.set()
    with new_trace(path, max_bytes) as trace:
        recorder = Recorder(server, namespace)
        server.begin()
        recorder.run(trace, stop, lambda _: None)
    return recorder, list(read_traces(path))


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_prompts_are_written_with_equal_numbers_for_equal_blocks(tmp_path: Path, name: str) -> None:
    server = Server((SPACE, (1, 2)), (SPACE, (1, 2, 3)), (SPACE, (9,)))

    _, requests = recorded(server, tmp_path / name)

    assert [request.input_length for request in requests] == [32, 48, 16]
    assert requests[0].hashes == requests[1].hashes[:2]
    assert len({*requests[1].hashes, *requests[2].hashes}) == 4
    assert requests[0].arrived_s == 0


def test_what_was_asked_for_before_is_not_recorded(tmp_path: Path) -> None:
    server = Server((SPACE, (1,)))
    server.log.read(1)
    server.log.note(SPACE, 16, hashed((5, 6)))

    recorder, requests = recorded(server, tmp_path / "trace")

    assert [len(request.hashes) for request in requests] == [1]
    assert recorder.recorded.num_lost == 0


def test_numbers_of_two_recordings_have_nothing_in_common(tmp_path: Path) -> None:
    _, first = recorded(Server((SPACE, (1, 2))), tmp_path / "first")
    _, second = recorded(Server((SPACE, (1, 2))), tmp_path / "second")

    assert not {*first[0].hashes} & {*second[0].hashes}


def test_one_namespace_is_recorded_and_the_others_are_counted(tmp_path: Path) -> None:
    server = Server((SPACE, (1,)), (OTHER, (2,)), (OTHER, (3,)))

    recorder, requests = recorded(server, tmp_path / "trace", namespace="0707")

    assert len(requests) == 2
    assert recorder.recorded.others == {SPACE.hex(): 1}


def test_a_full_file_has_whole_lines_only(tmp_path: Path) -> None:
    server = Server(*[(SPACE, tuple(range(number, number + 20))) for number in range(8)])

    _, requests = recorded(server, tmp_path / "trace", max_bytes=1500)

    assert 1 <= len(requests) < 8
    assert (tmp_path / "trace").stat().st_size <= 1500
    assert (tmp_path / "trace").stat().st_mode & 0o077 == 0


def test_a_file_that_exists_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text("mine")

    with pytest.raises(ConfigError, match="exists"), new_trace(path, PLENTY):
        pass
    assert path.read_text() == "mine"


@pytest.mark.parametrize(
    "page", [{}, {"first": -1, "prompts": []}, {"first": 1, "prompts": [[1.0, "00", 16, "no base64!"]]}]
)
def test_a_server_that_answers_something_else_is_refused(tmp_path: Path, page: dict[str, object]) -> None:
    class Strange:
        def asked_prompts(self, first: int) -> dict[str, object]:
            return {**page}

    stop = threading.Event()
    stop.set()
    with new_trace(tmp_path / "trace", PLENTY) as trace, pytest.raises(TierUnavailable, match="not understood"):
        Recorder(Strange()).run(trace, stop, lambda _: None)
