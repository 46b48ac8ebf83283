"""Test programs of the C client as processes: lines to them, lines from them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

from kvtier.blocks.namespace import Namespace
from tests.support.actors import BLOCK_BYTES, LAYOUT, NAMESPACE
from tests.support.waiting import CALL_S, LIMIT_S


class CProgram:
    """A process that answers each line by one line. Looking for leaks at its end takes seconds: few tests do."""

    def __init__(self, *command: str | Path, finds_leaks: bool = False) -> None:
        self._process = subprocess.Popen(
            [str(part) for part in command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "ASAN_OPTIONS": f"detect_leaks={int(finds_leaks)}"},
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def say(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def hear(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the program ended with status {self._process.wait()} without a word"
        return line.rstrip("\n")

    def ask(self, line: str) -> str:
        self.say(line)
        return self.hear()

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def end(self) -> int:
        """Close its input and wait. Returns its status: a sanitizer's report makes it 1."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            return self._process.wait(LIMIT_S)
        finally:
            if self._process.poll() is None:
                self.kill()
            self._process.stdout.close()


@contextlib.contextmanager
def c_program(*command: str | Path, finds_leaks: bool = False) -> Iterator[CProgram]:
    """A program that must end well unless it was killed."""
    program = CProgram(*command, finds_leaks=finds_leaks)
    try:
        yield program
    except BaseException:
        program.kill()
        program.end()
        raise
    status = program.end()
    assert status in (0, -signal.SIGKILL), f"the program ended with status {status}"


@contextlib.contextmanager
def c_actor(
    programs: Path,
    address: str,
    token: str | None = None,
    *,
    namespace: Namespace = NAMESPACE,
    answer: str = "done",
    finds_leaks: bool = False,
) -> Iterator[CProgram]:
    """A C client of `tests.support.actors.LAYOUT`, whose first line has been heard."""
    arguments = [address, namespace.hex(), str(BLOCK_BYTES), str(LAYOUT.block_tokens), str(CALL_S)]
    command = [programs / "actor", *arguments, *([] if token is None else [token])]
    with c_program(*command, finds_leaks=finds_leaks) as program:
        heard = program.hear()
        assert heard.startswith(answer), heard
        yield program
