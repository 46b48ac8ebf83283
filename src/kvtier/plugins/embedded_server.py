"""A cache server that nobody has to run: started by the first process that wants it, shared, gone with the last.

The server is a `kvtier cache-server` of its own session and no child of ours, so it outlives whoever started it; it
ends by itself when no client has been connected for some seconds. Any process of the same user that asks for the same
one gets it.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import msgspec

from kvtier.blocks.layout import SLOT_ALIGN_BYTES
from kvtier.client.server_connection import ServerConnection
from kvtier.errors import ConfigError, KvtierError, TierRefused, TierTimeout, TierUnavailable
from kvtier.plugins.runtime_folder import remove_dead, server_folder, try_lock
from kvtier.sizes import format_size
from kvtier.stores.folder import take_folder
from kvtier.transport.address import UnixAddress
from kvtier.transport.listening import peer_process
from kvtier.wire import messages as wire

logger = logging.getLogger(__name__)

_UNUSED_S = 10.0
_START_S = 90.0  # more than a server that is just ending may take to write to its disk
_LEFT = "stopping"
"""Last words of a server that waited for a client and left: this process was too late, and starts it again."""
_TRY_S = 2.0
_LEAVING_S = 1.0
_POLL_S = 0.02
_LOOK_S = 0.2
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0
_STEADY_S = 60.0
_MAX_LOG_BYTES = 1 << 20

# Runs alone and at once: no child of ours may be left, for engines end all of their children when they end.
_DETACH = """
import os, sys
try:
    os.sched_setaffinity(0, map(int, sys.argv[1].split(",")))
except OSError:
    pass
if os.fork() == 0:
    os.execv(sys.argv[2], sys.argv[2:])
"""

_servers: weakref.WeakSet[EmbeddedServer] = weakref.WeakSet()


def _forget_parent() -> None:
    for server in list(_servers):
        server.forget_parent()


os.register_at_fork(after_in_child=_forget_parent)


class _Settings(msgspec.Struct, frozen=True):
    """Of what a server says about itself."""

    memory_bytes: int
    file_space_bytes: int | None

    def __str__(self) -> str:
        disk = "no disk" if self.file_space_bytes is None else f"disk {format_size(self.file_space_bytes)}"
        return f"memory {format_size(self.memory_bytes)} and {disk}"


class _Use(msgspec.Struct):
    """Of what a server counts."""

    connections: int


class EmbeddedServer:
    """The cache server with these budgets. `ensure` makes sure that it runs, from then on until `close`.

    With a `folder` it is the one server of that folder, whatever `name` says. Without one, nothing outlives it, and
    processes share it if they give the same `name` and `memory`. Thread-safe.
    """

    def __init__(
        self,
        memory: int,
        folder: Path | None = None,
        disk: int | None = None,
        *,
        name: str = "shared",
        unused_s: float = _UNUSED_S,
        start_timeout_s: float = _START_S,
    ) -> None:
        """`memory` and `disk` are bytes. The server ends `unused_s` after its last client has gone."""
        if (folder is None) != (disk is None):
            raise ConfigError("a disk needs both a folder and a bound: give `folder` and `disk`")
        self._memory = memory
        self._folder = None if folder is None else folder.expanduser().resolve()
        self._disk = disk
        self._settings = _Settings(memory // SLOT_ALIGN_BYTES * SLOT_ALIGN_BYTES, disk)
        self._unused_s = unused_s
        self._start_timeout_s = start_timeout_s
        identity = ["memory", name, str(memory)] if self._folder is None else ["folder", str(self._folder)]
        self._place = server_folder(hashlib.sha256("\0".join(identity).encode()).hexdigest())
        self._address = UnixAddress(str(self._place.socket))
        self._log_start = 0
        self._reset()
        _servers.add(self)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._connection: ServerConnection | None = None
        self._thread: threading.Thread | None = None
        self._is_closing = threading.Event()
        self._lock_fds: set[int] = set()

    @property
    def address(self) -> str:
        return str(self._address)

    @property
    def log(self) -> Path:
        """What the server says."""
        return self._place.log

    def ensure(self) -> None:
        """The server runs when this returns. It is held, and started again should it die, until `close`.

        Raises `ConfigError` with one sentence when that cannot be, after a bounded time.
        """
        with self._lock:
            if self._thread is not None:
                return
            self._is_closing.clear()
            self._connection = self._reach()
            self._thread = threading.Thread(target=self._watch, name="kvtier-embedded-server", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Let go of the server. Safe to call twice, and without `ensure`."""
        self._is_closing.set()  # an `ensure` under way gives up
        with self._lock:
            self._is_closing.set()
            if self._thread is not None:
                self._thread.join()
                self._thread = None
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    def forget_parent(self) -> None:
        """In a forked child: the connection and the locks are the parent's, which alone may hold anything with them."""
        if self._connection is not None:
            self._connection.close()
        for fd in self._lock_fds:
            os.close(fd)
        self._reset()

    # --- keeping it alive ------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """The thread: start the server again when it has died, at once at first, more patiently if it keeps dying."""
        reached_at = time.monotonic()
        pause_s = 0.0
        while not self._is_closing.wait(_LOOK_S):
            if self._connection is not None:
                if not self._connection.has_ended():
                    continue
                logger.warning("the embedded cache server has ended, it is started again address=%s", self.address)
                self._connection.close()
                self._connection = None
                if time.monotonic() - reached_at > _STEADY_S:
                    pause_s = 0.0
            if self._is_closing.wait(pause_s):
                return
            pause_s = min(_LONGEST_PAUSE_S, max(_FIRST_PAUSE_S, 2 * pause_s))
            try:
                self._connection = self._reach()
                reached_at = time.monotonic()
            except KvtierError as error:
                if not self._is_closing.is_set():
                    logger.warning("no embedded cache server, it is tried again in %.1f s: %s", pause_s, error)
            except Exception:
                logger.exception("no embedded cache server, by a bug of ours; it is tried again in %.1f s", pause_s)

    # --- finding or starting it --------------------------------------------------------------------------------------

    def _reach(self) -> ServerConnection:
        """A connection to the server, which is started if need be. Raises `ConfigError`."""
        try:
            return self._find_or_start()
        except OSError as error:
            raise ConfigError(f"cannot use {self._place.path} for a cache server: {error.strerror or error}") from error

    def _find_or_start(self) -> ServerConnection:
        started_at = time.monotonic()
        deadline = started_at + self._start_timeout_s
        has_started = False
        with self._start_lock(deadline):
            while True:
                connection = self._connect(deadline, is_patient=time.monotonic() < started_at + _LEAVING_S)
                if connection is not None:
                    remove_dead(self._place.path.parent)
                    return connection
                life_fd = try_lock(self._place.life_lock)
                if life_fd is not None:  # no server starts, runs or ends here
                    with self._holding(life_fd):
                        if has_started and self._last_words() != _LEFT:
                            raise ConfigError(f"the embedded cache server did not start: {self._last_words()}")
                        self._start(life_fd)
                        has_started = True
                self._pause(deadline)

    @contextlib.contextmanager
    def _start_lock(self, deadline: float) -> Iterator[None]:
        """One process at a time looks for the server and starts it."""
        while True:
            self._place.make()
            with contextlib.suppress(FileNotFoundError):  # the folder was removed as that of a dead server
                fd = try_lock(self._place.start_lock)
                if fd is not None:
                    break
            self._pause(deadline)
        with self._holding(fd):
            yield

    @contextlib.contextmanager
    def _holding(self, lock_fd: int) -> Iterator[None]:
        self._lock_fds.add(lock_fd)
        try:
            yield
        finally:
            self._lock_fds.discard(lock_fd)
            os.close(lock_fd)

    def _pause(self, deadline: float) -> None:
        if self._is_closing.wait(_POLL_S):
            raise ConfigError("closed while the embedded cache server was starting")
        if time.monotonic() > deadline:
            raise ConfigError(
                f"no embedded cache server answered on {self.address} within {self._start_timeout_s:g} s: "
                f"see {self._place.log}"
            )

    def _connect(self, deadline: float, is_patient: bool) -> ServerConnection | None:
        """None while no server answers, or while one with other settings, which nobody uses, is ending.

        With `is_patient`, also while somebody uses it: who has just gone may still be counted.
        """
        deadline = min(deadline, time.monotonic() + _TRY_S)
        with contextlib.ExitStack() as stack:
            try:
                holder = secrets.token_bytes(wire.HOLDER_BYTES)
                connection = ServerConnection(self._address, holder, deadline)
                stack.callback(connection.close)
                os.close(connection.take_arena_fd())
                text = connection.call(wire.InfoRequest(), wire.Document, deadline).text
                found = msgspec.json.decode(text, type=_Settings)
                text = connection.call(wire.StatsRequest(), wire.Document, deadline).text
                is_used = msgspec.json.decode(text, type=_Use).connections > 1
            except (TierUnavailable, TierTimeout):
                return None
            except (KvtierError, msgspec.MsgspecError) as error:
                raise ConfigError(f"the embedded cache server on {self.address} cannot be used: {error}") from error
            if found == self._settings:
                stack.pop_all()
                return connection
        if not is_used:
            self._end_other()
        elif not is_patient:
            raise ConfigError(
                f"the embedded cache server of {self._folder} is in use with {found}: "
                "give the same, or another folder, or end the engines that use it"
            )
        return None

    def _end_other(self) -> None:
        """End the server that waits here for a next client, with settings that nobody wants any more."""
        with contextlib.suppress(OSError, TierRefused), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.connect(self._address.path)
            _, pidfd = peer_process(sock)
            try:
                signal.pidfd_send_signal(pidfd, signal.SIGTERM)
            finally:
                os.close(pidfd)

    def _start(self, life_fd: int) -> None:
        """Start it, without waiting until it answers."""
        self._check_folder()
        command = [sys.executable, "-P", "-m", "kvtier", "cache-server"]  # -P: no module of the working folder is run
        command += ["--memory", str(self._memory), "--socket", self._address.path]
        command += ["--stop-when-unused", str(self._unused_s)]
        if self._folder is not None:
            command += ["--folder", str(self._folder), "--disk", str(self._disk)]
        try:
            with open(self._place.log, "ab") as log:
                if log.tell() > _MAX_LOG_BYTES:
                    log.truncate(0)
                self._log_start = log.seek(0, os.SEEK_END)
                subprocess.run(
                    [sys.executable, "-P", "-S", "-c", _DETACH, ",".join(map(str, _processors())), *command],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd=self._place.path,
                    env=_environment(),
                    pass_fds=[life_fd],
                    start_new_session=True,
                    check=False,
                )
        except OSError as error:
            raise ConfigError(f"cannot start a cache server: {error.strerror or error}") from error

    def _check_folder(self) -> None:
        """Raises `ConfigError` when the folder cannot be used, as when another kind of server has it."""
        if self._folder is None:
            return
        try:
            os.close(take_folder(self._folder))
        except ConfigError as error:
            if not isinstance(error.__cause__, BlockingIOError):
                raise
            raise ConfigError(
                f"{self._folder} belongs to a cache server that was started otherwise: "
                "give its address as `server`, or another folder"
            ) from error

    def _last_words(self) -> str:
        with contextlib.suppress(OSError):
            lines = self._place.log.read_bytes()[self._log_start :].decode(errors="replace").split("\n")
            for line in reversed(lines):
                if line.strip():
                    return line.strip().removeprefix("Error: ")
        return "it ended without a word"


def _processors() -> list[int]:
    """Where any thread of this process may run: an engine may have bound the one that asks to a single processor."""
    allowed: set[int] = set()
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):
            allowed |= os.sched_getaffinity(int(thread))
    return sorted(allowed)


def _environment() -> dict[str, str]:
    """Ours, with paths that hold in another folder too."""
    environment = dict(os.environ)
    if paths := environment.get("PYTHONPATH"):
        environment["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, paths.split(os.pathsep)))
    return environment
