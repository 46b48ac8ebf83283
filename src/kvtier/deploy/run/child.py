"""One process of a deployment, as seen by its supervisor: start it, read from it, signal it. No thread of its own.

The supervisor's loop calls everything. It waits on `fds`: the process's own (readable when it has ended), its output
and its reports.
"""

from __future__ import annotations

import contextlib
import enum
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from kvtier.deploy.plan.parts import DeploymentPart, encode_part
from kvtier.deploy.run.backoff import Backoff
from kvtier.deploy.run.process_group import end_group
from kvtier.deploy.run.reports import Report, decode_report
from kvtier.deploy.run.starts import StartNeeds

PART_COMMAND = (sys.executable, "-P", "-m", "kvtier.deploy.run.part")  # -P: no module of the working folder is run

_READ_BYTES = 1 << 16
_MAX_LINE_BYTES = 1 << 16


_NOTHING = StartNeeds()


class ChildState(enum.Enum):
    """ENDING: told to end, to be restarted then. DOWN: not running, to be restarted at `retry_at`."""

    WAITING = "waiting"
    STARTING = "starting"
    READY = "ready"
    ENDING = "ending"
    DOWN = "down"
    STOPPED = "stopped"


class Child:
    """`kind` is "cache", "engine", "vllm" or "http"; `listener_fds` are inherited."""

    def __init__(
        self,
        kind: str,
        part: DeploymentPart,
        runtime_folder: Path,
        *,
        needs: StartNeeds = _NOTHING,
        listener_fds: Sequence[int] = (),
        command: Sequence[str] = PART_COMMAND,
    ) -> None:
        """`needs` is what an engine takes while it starts."""
        self.kind = kind
        self.part = part
        self.name = part.name
        self.needs = needs
        self.state = ChildState.WAITING
        self.properties: dict[str, object] = {}
        self.was_ready = False
        self.ready_at = 0.0
        self.backoff = Backoff()
        self.retry_at = 0.0
        self.failure = ""
        self.pidfd = -1
        self.output_fd = -1
        self.report_fd = -1
        self._listener_fds = list(listener_fds)
        self._command = [*command, kind, part.name, str(runtime_folder)]
        self._process: subprocess.Popen[bytes] | None = None
        self._output = _Lines()
        self._reports = _Lines()

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    @property
    def is_running(self) -> bool:
        return self._process is not None

    def start(self) -> None:
        """In a new session: the terminal's Ctrl-C reaches only the supervisor, which knows the order."""
        report_read, report_write = os.pipe()
        output_read, output_write = os.pipe()
        try:
            self._process = subprocess.Popen(
                [*self._command, str(report_write), *map(str, self._listener_fds)],
                stdin=subprocess.PIPE,
                stdout=output_write,
                stderr=output_write,
                pass_fds=[report_write, *self._listener_fds],
                start_new_session=True,
            )
        finally:
            os.close(report_write)
            os.close(output_write)
        self.output_fd, self.report_fd = output_read, report_read
        os.set_blocking(output_read, False)
        os.set_blocking(report_read, False)
        self.pidfd = os.pidfd_open(self._process.pid)
        self.state = ChildState.STARTING
        self.failure = ""
        self._output, self._reports = _Lines(), _Lines()
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended already: this is noticed elsewhere
            self._process.stdin.write(encode_part(self.part) + b"\n")
            self._process.stdin.flush()

    def read_output(self, show: Callable[[str], None]) -> bool:
        """Show complete lines, and at the end the incomplete one. False at the end."""
        lines, is_open = self._output.read(self.output_fd)
        if not is_open or len(self._output.rest) > _MAX_LINE_BYTES:
            lines.append(self._output.take_rest())
        for line in lines:
            if line.strip():
                show(line.decode(errors="replace"))
        return is_open

    def read_reports(self) -> tuple[list[Report], bool]:
        """Complete reports, and whether more may come. A report cut off by a kill is ignored."""
        lines, is_open = self._reports.read(self.report_fd)
        return [decode_report(line) for line in lines], is_open

    def signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, number)

    def reap(self) -> str:
        """The process has ended: release everything held for it. Returns how it ended, in words.

        Processes that it has started in its group end with it.
        """
        process = self._process
        assert process is not None
        end_group(process.pid)  # before it is waited for: until then, its number cannot be reused
        status = process.wait()
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
        for fd in (self.pidfd, self.output_fd, self.report_fd):
            os.close(fd)
        self.pidfd = self.output_fd = self.report_fd = -1
        self._process = None
        if status < 0:
            return f"was ended by {signal.Signals(-status).name}"
        return f"ended with status {status}"

    def note_ready(self, properties: dict[str, object]) -> None:
        self.state = ChildState.READY
        self.properties = properties
        self.was_ready = True
        self.ready_at = time.monotonic()


class _Lines:
    """Whole lines of a non-blocking pipe. `rest` is the beginning of the next one."""

    def __init__(self) -> None:
        self.rest = b""

    def read(self, fd: int) -> tuple[list[bytes], bool]:
        """The complete lines, and whether more may come."""
        try:
            data = os.read(fd, _READ_BYTES)
        except BlockingIOError:
            return [], True
        # A progress bar returns to the line's start again and again: each of its states is a line here.
        *lines, self.rest = (self.rest + data).replace(b"\r", b"\n").split(b"\n")
        return lines, bool(data)

    def take_rest(self) -> bytes:
        rest, self.rest = self.rest, b""
        return rest
