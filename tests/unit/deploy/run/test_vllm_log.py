"""What is said of a vLLM that has ended: the cause that its log has, however much was written after it."""

from __future__ import annotations

import io
import threading

import pytest

from kvtier.deploy.run.vllm_log import VllmLog

_TRACEBACK = [f'(APIServer pid=7)   File "entry_{number}.py", line {number}, in run' for number in range(100)]
_READY = "ready"
_MINUTES_LATER = "minutes later"


class Written(io.BytesIO):
    """What vLLM writes, and what happens meanwhile: it becomes ready, or time passes."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__()
        self.now = 1000.0
        self.log: VllmLog | None = None
        self.may_begin = threading.Event()
        self._lines = lines

    def readline(self, size: int | None = -1, /) -> bytes:
        self.may_begin.wait()
        assert self.log is not None
        while self._lines:
            line = self._lines.pop(0)
            if line == _READY:
                self.log.note_ready()
            elif line == _MINUTES_LATER:
                self.now += 300.0
            else:
                return f"{line}\n".encode()
        return b""


def words_after(*lines: str) -> str:
    written = Written(list(lines))
    written.log = log = VllmLog(written, lambda: written.now)
    written.may_begin.set()
    log.close()
    return log.last_words()


def test_the_cause_is_said_that_stands_before_the_tracebacks_of_other_processes() -> None:
    cause = "(EngineCore pid=8) ERROR 11-19 12:00:00 [core.py:1477] ValueError: the KV does not fit"

    words = words_after(cause, *_TRACEBACK, "RuntimeError: Engine core initialization failed. See root cause above.")

    assert words == (
        "; its log says: ValueError: the KV does not fit / "
        "RuntimeError: Engine core initialization failed. See root cause above."
    )


def test_an_error_that_is_said_again_and_again_is_one_and_hides_no_other() -> None:
    assert words_after("ValueError: first", *["RuntimeError: then"] * 500) == (
        "; its log says: ValueError: first / RuntimeError: then"
    )


def test_a_value_that_a_setting_must_not_have_is_said_and_not_only_counted() -> None:
    words = words_after(
        *_TRACEBACK,
        "(APIServer pid=7) pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig",
        "(APIServer pid=7)   Value error, max_model_len (2048) is greater than 1024 [type=value_error]",
        "(APIServer pid=7)     For further information visit https://errors.pydantic.dev/2.14/v/value_error",
    )

    assert words == "; its log says: Value error, max_model_len (2048) is greater than 1024 [type=value_error]"


def test_a_warning_about_errors_that_may_come_is_none() -> None:
    warning = "(APIServer pid=7) WARNING 11-19 13:02:00 [system_utils.py:255] This can cause `OSError: [Errno 24]`"

    assert words_after(warning, "ValueError: the cause") == "; its log says: ValueError: the cause"


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([], ""),
        (["", "one", "two", "three", "four", ""], "; its log says: two / three / four"),
        (["api_server.py: error: unrecognized arguments: --x"], "; its log says: error: unrecognized arguments: --x"),
    ],
)
def test_few_lines_are_said_as_they_are(lines: list[str], words: str) -> None:
    assert words_after(*lines) == words


def test_an_error_long_before_the_end_is_not_why_a_running_one_ended() -> None:
    assert words_after("ValueError: old", _READY, _MINUTES_LATER, "ValueError: new").endswith(" says: ValueError: new")
    assert words_after("ValueError: old", _MINUTES_LATER, "RuntimeError: new").count("Error: ") == 2


def test_what_is_remembered_is_bounded() -> None:
    words = words_after(*[f"ValueError: {number} {'x' * 10_000}" for number in range(1000)])

    assert len(words) < 4000
    assert "ValueError: 936 x" in words
