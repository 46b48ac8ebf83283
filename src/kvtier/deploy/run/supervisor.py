"""Keeps a deployment running: starts its parts in order, restarts those that died, and stops everything cleanly.

One thread, one loop over descriptors: the parts' output, their reports, their ends, and signals. SIGINT and SIGTERM
stop it: the HTTP server drains first, then the engines store their blocks, then the cache servers write to disk. A
second signal cuts that short, a third kills. SIGHUP restarts the engines, one by one; but if it comes because the
terminal was closed, it stops everything.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from kvtier.deploy.plan.parts import DeploymentPlan, Listener
from kvtier.deploy.run.child import PART_COMMAND, Child, ChildState
from kvtier.deploy.run.log import DeploymentLog
from kvtier.deploy.run.reports import Failed, Progressed, Ready, Report
from kvtier.deploy.run.served_caches import remove_runtime_folder
from kvtier.deploy.run.starts import FreeResources, may_start, needs_of, room_here
from kvtier.deploy.run.summary import summary
from kvtier.errors import ConfigError
from kvtier.sizes import format_size

_SELF = "kvtier"
_BACKLOG = 1024
_ENGINES = ("engine", "vllm")
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class StopTimeouts:
    """How many seconds parts have to end before they are killed; `cut_short_s` applies once it was cut short."""

    engine_s: float = 60.0
    cache_s: float = 300.0
    cut_short_s: float = 10.0


_PATIENCE = StopTimeouts()


class Supervisor:
    """Call `run` once, in the main thread."""

    def __init__(
        self,
        plan: DeploymentPlan,
        log: DeploymentLog,
        runtime_folder: Path,
        *,
        patience: StopTimeouts = _PATIENCE,
        command: Sequence[str] = PART_COMMAND,
        room: Callable[[], FreeResources] = room_here,
    ) -> None:
        """Binds the listeners. Raises `ConfigError`, with nothing left behind, if an address is taken.

        `command` runs a part; `room` returns the machine's free resources for engines that start.
        """
        self._plan = plan
        self._patience = patience
        self._log = log
        self._runtime_folder = runtime_folder
        self._listeners = _bind_all(plan.http.listeners)
        self._caches = [Child("cache", part, runtime_folder, command=command) for part in plan.caches]
        self._room = room
        self._engines = [
            Child("engine", part, runtime_folder, needs=needs_of(part), command=command) for part in plan.engines
        ]
        self._engines += [
            Child("vllm", part, runtime_folder, needs=needs_of(part), command=command) for part in plan.vllm_engines
        ]
        fds = [sock.fileno() for sock in self._listeners]
        self._http = Child("http", plan.http, runtime_folder, listener_fds=fds, command=command)
        self._children = [*self._caches, *self._engines, self._http]
        self._selector = selectors.DefaultSelector()
        self._has_terminal = _is_terminal_there()
        self._started_at = time.monotonic()
        self._is_announced = False
        self._status = 0
        self._signals: deque[int] = deque()
        self._restarts: deque[Child] = deque()
        self._restarting: Child | None = None
        self._restart_deadline = 0.0
        self._num_stop_signals = 0
        self._phases: deque[tuple[list[Child], float]] = deque()
        self._stopping: list[Child] | None = None
        self._stop_deadline = 0.0

    @property
    def ports(self) -> list[int]:
        """The listeners' ports, in order."""
        return [sock.getsockname()[1] for sock in self._listeners]

    @property
    def is_stopping(self) -> bool:
        return self._stopping is not None

    def run(self) -> int:
        """Run until told to stop, or unable to start. Returns the exit status."""
        try:
            with self._signals_noted():
                while self._start_what_may() or not self._is_over():
                    for key, _ in self._selector.select(self._wait_s()):
                        if key.fd in self._selector.get_map():  # an earlier event in the list may have closed it
                            key.data()
                    self._heed_signals()
                    self._go_on_restarting()
                    self._go_on_stopping()
        finally:
            self._let_go()
        return self._status

    # --- starting ----------------------------------------------------------------------------------------------------

    def _start_what_may(self) -> bool:
        """Start whatever its order and its back-off allow. True if anything was started."""
        if self.is_stopping:
            return False
        now = time.monotonic()
        starting = [child.needs for child in self._engines if child.state is ChildState.STARTING]
        due = [
            child
            for child in self._children
            if child.state is ChildState.WAITING or (child.state is ChildState.DOWN and child.retry_at <= now)
        ]
        has_started = False
        for child in due:
            if child.kind != "cache" and not all(cache.was_ready for cache in self._caches):
                continue
            if child.kind in _ENGINES:
                if not may_start(child.needs, starting, self._room()):
                    continue
                starting.append(child.needs)
            self._start(child)
            has_started = True
        return has_started

    def _start(self, child: Child) -> None:
        child.start()
        self._log.line(child.name, f"starting, process {child.pid}")
        self._selector.register(child.pidfd, selectors.EVENT_READ, lambda: self._ended(child))
        self._selector.register(child.output_fd, selectors.EVENT_READ, lambda: self._read_output(child))
        self._selector.register(child.report_fd, selectors.EVENT_READ, lambda: self._read_reports(child))

    # --- hearing -----------------------------------------------------------------------------------------------------

    def _read_output(self, child: Child) -> None:
        if not child.read_output(lambda line: self._log.line(child.name, line)):
            self._forget(child.output_fd)

    def _read_reports(self, child: Child) -> None:
        reports, is_open = child.read_reports()
        for report in reports:
            self._take(child, report)
        if not is_open:
            self._forget(child.report_fd)

    def _take(self, child: Child, report: Report) -> None:
        if isinstance(report, Progressed):
            share = report.done / max(report.total, 1)
            text = f"{report.title}: {share:.0%} of {format_size(report.total)}"
            self._log.progress(child.name, text, is_last=report.done >= report.total)
        elif isinstance(report, Failed):
            child.failure = report.sentence
        else:
            self._ready(child, report)

    def _ready(self, child: Child, report: Ready) -> None:
        child.note_ready(report.properties)
        self._log.line(child.name, "ready")
        if self._restarting is child:
            self._restarting = None
            self._restart_next()
        if (
            not self._is_announced
            and not self.is_stopping
            and all(one.state is ChildState.READY for one in self._children)
        ):
            self._is_announced = True
            ports = self.ports
            seconds = time.monotonic() - self._started_at
            properties = {one.name: one.properties for one in self._children}
            self._log.plain(summary(self._plan, ports, properties, seconds))

    def _ended(self, child: Child) -> None:
        """A process has ended. Its last output is still in its pipes."""
        with contextlib.suppress(KeyError):
            while child.output_fd in self._selector.get_map() and self._has_bytes(child.output_fd):
                self._read_output(child)
            while child.report_fd in self._selector.get_map() and self._has_bytes(child.report_fd):
                self._read_reports(child)
        for fd in (child.pidfd, child.output_fd, child.report_fd):
            self._forget(fd)
        how = child.reap()
        if self.is_stopping:
            child.state = ChildState.STOPPED
            self._log.line(child.name, "stopped" if how == "ended with status 0" else how)
        elif child.state is ChildState.ENDING:
            child.state = ChildState.WAITING
        elif not child.was_ready:
            self._fail(child.failure or f"the process {how} before it was ready", child)
        else:
            self._plan_restart(child, child.failure or f"the process {how}")

    def _plan_restart(self, child: Child, why: str) -> None:
        now = time.monotonic()
        wait_s = child.backoff.note_failure(now - child.ready_at if child.state is ChildState.READY else 0.0)
        child.state = ChildState.DOWN
        child.retry_at = now + wait_s
        self._log.line(child.name, f"{why}; it is started again in {wait_s:g} s")

    def _fail(self, sentence: str, child: Child) -> None:
        child.state = ChildState.STOPPED
        self._log.line(child.name, f"cannot start: {sentence}")
        self._status = 1
        self._stop()

    # --- restarting engines -------------------------------------------------------------------------------------------

    def _restart_engines(self) -> None:
        self._restarts = deque(child for child in self._engines if child.state is ChildState.READY)
        self._log.line(_SELF, f"starting {len(self._restarts)} engines again, one by one")
        if self._restarting is None:
            self._restart_next()

    def _restart_next(self) -> None:
        while self._restarts:
            child = self._restarts.popleft()
            if child.state is ChildState.READY:
                self._restarting = child
                self._restart_deadline = time.monotonic() + self._patience.engine_s
                child.state = ChildState.ENDING
                child.signal(signal.SIGTERM)
                return

    def _go_on_restarting(self) -> None:
        child = self._restarting
        if child is not None and child.state is ChildState.ENDING and time.monotonic() > self._restart_deadline:
            child.signal(signal.SIGKILL)
            self._restart_deadline = time.monotonic() + self._patience.cut_short_s

    # --- stopping -----------------------------------------------------------------------------------------------------

    def _stop(self) -> None:
        """Begin to stop: first what clients see, last what keeps the blocks."""
        if self.is_stopping:
            return
        for sock in self._listeners:
            sock.close()
        for child in self._children:
            if not child.is_running:
                child.state = ChildState.STOPPED
        patience = self._patience
        drain_s = self._plan.http.api.drain_s + patience.cut_short_s
        self._phases = deque(
            [([self._http], drain_s), (self._engines, patience.engine_s), (self._caches, patience.cache_s)]
        )
        self._stopping = []
        self._go_on_stopping()

    def _go_on_stopping(self) -> None:
        if self._stopping is None:
            return
        if any(child.is_running for child in self._stopping):
            if time.monotonic() > self._stop_deadline:
                self._end_all(self._stopping, signal.SIGKILL)
                self._stop_deadline = time.monotonic() + self._patience.cut_short_s
            return
        while self._phases:
            self._stopping, limit_s = self._phases.popleft()
            if self._num_stop_signals > 1:
                limit_s = min(limit_s, self._patience.cut_short_s)
            self._stop_deadline = time.monotonic() + limit_s
            self._end_all(self._stopping, signal.SIGTERM)
            if any(child.is_running for child in self._stopping):
                return

    def _end_all(self, children: Iterable[Child], number: signal.Signals) -> None:
        for child in children:
            is_loading = child.kind in _ENGINES and child.state is ChildState.STARTING
            child.signal(signal.SIGKILL if is_loading else number)  # it reacts to nothing else, and has nothing to lose

    def _is_over(self) -> bool:
        return self.is_stopping and not self._phases and not any(child.is_running for child in self._children)

    def _let_go(self) -> None:
        """In any case, leave no process, descriptor or file behind."""
        for child in self._children:
            if child.is_running:
                child.signal(signal.SIGKILL)
                child.reap()
        self._selector.close()
        for sock in self._listeners:
            sock.close()
        for name in _leftovers(self._runtime_folder):
            with contextlib.suppress(OSError):
                name.unlink()
        remove_runtime_folder(self._runtime_folder)

    # --- signals and waiting ------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _signals_noted(self) -> Iterator[None]:
        receiver, sender = socket.socketpair()
        receiver.setblocking(False)
        sender.setblocking(False)
        is_nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        heeded = [number for number in _SIGNALS if number != signal.SIGHUP or not is_nohup]
        before = {number: signal.signal(number, self._note_signal) for number in heeded}
        wakeup_before = signal.set_wakeup_fd(sender.fileno())
        self._selector.register(receiver, selectors.EVENT_READ, lambda: _drain(receiver))
        try:
            yield
        finally:
            signal.set_wakeup_fd(wakeup_before)
            for number, handler in before.items():
                signal.signal(number, handler)
            receiver.close()
            sender.close()

    def _note_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)

    def _heed_signals(self) -> None:
        while self._signals:
            number = self._signals.popleft()
            if number == signal.SIGHUP and not (self._has_terminal and not _is_terminal_there()):
                if not self.is_stopping:
                    self._restart_engines()
                continue
            self._num_stop_signals += 1
            if self._num_stop_signals == 1:
                self._log.line(_SELF, "stopping: what is under way may end; once more cuts it short")
                self._stop()
            elif self._num_stop_signals == 2:
                self._log.line(_SELF, "cutting it short")
                self._end_all(self._children, signal.SIGTERM)
                self._stop_deadline = time.monotonic() + self._patience.cut_short_s
            else:
                self._end_all(self._children, signal.SIGKILL)

    def _wait_s(self) -> float | None:
        now = time.monotonic()
        times = [child.retry_at for child in self._children if child.state is ChildState.DOWN]
        if self._restarting is not None and self._restarting.state is ChildState.ENDING:
            times.append(self._restart_deadline)
        if self.is_stopping:
            times = [self._stop_deadline]
        return max(0.0, min(times) - now) + 0.01 if times else None

    def _forget(self, fd: int) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(fd)

    def _has_bytes(self, fd: int) -> bool:
        poll = selectors.PollSelector()
        poll.register(fd, selectors.EVENT_READ)
        with poll:
            return bool(poll.select(0))


def _is_terminal_there() -> bool:
    """Whether this process has a terminal that is not closed."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


def _bind_all(listeners: Iterable[Listener]) -> list[socket.socket]:
    bound: list[socket.socket] = []
    try:
        for one in listeners:
            bound.append(_bind(one))
    except ConfigError:
        for sock in bound:
            sock.close()
        raise
    return bound


def _bind(listener: Listener) -> socket.socket:
    """Bound here, before anything is loaded: a taken port is found at once, and a server's restart loses no client."""
    try:
        family = socket.getaddrinfo(listener.host, listener.port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((listener.host, listener.port), family=family, backlog=_BACKLOG)
    except OSError as error:
        reason = "the port is in use" if error.errno == errno.EADDRINUSE else error.strerror or str(error)
        raise ConfigError(
            f"cannot serve the {listener.api} API on {listener.host}:{listener.port}: {reason}"
        ) from error


def _leftovers(folder: Path) -> Iterator[Path]:
    """Sockets of parts that were killed."""
    for name in os.listdir(folder) if folder.is_dir() else ():
        if name.endswith((".sock", ".sock.lock")):
            yield folder / name


def _drain(receiver: socket.socket) -> None:
    with contextlib.suppress(BlockingIOError):
        while receiver.recv(4096):
            pass
