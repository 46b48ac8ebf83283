"""A cache server started by its first client and stopped after its last.

The server is a `kvtier cache-server` in a session of its own, not a child process, so it outlives the process that
started it. It stops after some seconds without a client. Processes of one user that ask for the same server share it.
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
from dataclasses import dataclass
from pathlib import Path

import msgspec

from kvtier.blocks.layout import SLOT_ALIGN_BYTES
from kvtier.client.server_connection import ServerConnection
from kvtier.errors import ConfigError, KvtierError, TierRefused, TierTimeout, TierUnavailable
from kvtier.plugins.runtime_folder import remove_dead, server_folder, try_lock
from kvtier.sizes import format_size
from kvtier.stores.folder import take_folder
from kvtier.stores.valkey.config import ClusterUse
from kvtier.transport.address import UnixAddress
from kvtier.transport.listening import peer_process
from kvtier.wire import messages as wire

logger = logging.getLogger(__name__)

_UNUSED_S = 10.0
_START_S = 90.0  # longer than a stopping server may need to write to its disk
_LEFT = "stopping"
"""Last log line of a server that stopped for lack of clients: this process was too late, and starts it again."""
_TRY_S = 2.0
_LEAVING_S = 1.0
_POLL_S = 0.02
_LOOK_S = 0.2
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0
_STEADY_S = 60.0
_MAX_LOG_BYTES = 1 << 20

# Runs by itself and exits at once: engines end all of their children, so the server must not be one.
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


@dataclass(frozen=True, slots=True)
class EmbeddedCluster:
    """A Valkey cluster below the server: the command's `options` that name it, and what they mean."""

    options: tuple[str, ...]
    use: ClusterUse


class _Settings(msgspec.Struct, frozen=True):
    """The part of a server's description that is compared."""

    memory_bytes: int
    file_space_bytes: int | None
    cluster_use: ClusterUse | None = None

    def beside(self, wanted: _Settings) -> str:
        """What they are, and how the cluster is used in another way than `wanted`."""
        disk = "no disk" if self.file_space_bytes is None else f"disk {format_size(self.file_space_bytes)}"
        text = f"memory {format_size(self.memory_bytes)} and {disk}"
        if self.cluster_use is None:
            return text if wanted.cluster_use is None else f"{text}, without a cluster"
        text += f", above the cluster {self.cluster_use.valkey[0]}"
        if wanted.cluster_use is None or not (differences := self.cluster_use.differences(wanted.cluster_use)):
            return text
        return f"{text} with {', '.join(differences)}"


class _Use(msgspec.Struct):
    """The part of a server's statistics that is read."""

    connections: int


class EmbeddedServer:
    """The cache server with these budgets, kept running from `ensure` to `close`.

    With a `folder` it is the only server of that folder, whatever the `name`. Without one, its blocks are lost when it
    stops, and processes share it if they give the same `name`, `memory` and `cluster`. Thread-safe.
    """

    def __init__(
        self,
        memory: int,
        folder: Path | None = None,
        disk: int | None = None,
        *,
        cluster: EmbeddedCluster | None = None,
        page: str | None = None,
        name: str = "shared",
        unused_s: float = _UNUSED_S,
        start_timeout_s: float = _START_S,
    ) -> None:
        """`memory` and `disk` are bytes. The server stops `unused_s` after its last client has disconnected.

        It shows a page on `page` (`host:port`) if this process starts it; a running server is left unchanged.
        """
        if (folder is None) != (disk is None):
            raise ConfigError("a disk needs both a folder and a bound: give `folder` and `disk`")
        self._memory = memory
        self._folder = None if folder is None else folder.expanduser().resolve()
        self._disk = disk
        self._cluster = cluster
        self._page = page
        use = None if cluster is None else cluster.use
        self._settings = _Settings(memory // SLOT_ALIGN_BYTES * SLOT_ALIGN_BYTES, disk, use)
        self._unused_s = unused_s
        self._start_timeout_s = start_timeout_s
        identity = ["memory", name, str(memory)] if self._folder is None else ["folder", str(self._folder)]
        identity += ["cluster", *cluster.options] if cluster is not None and self._folder is None else []
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
        """The server's log file."""
        return self._place.log

    def ensure(self) -> None:
        """Return when the server runs. It stays in use until `close`, and is restarted if it dies.

        Raises `ConfigError` with one sentence, after a bounded time, if it cannot run.
        """
        with self._lock:
            if self._thread is not None:
                return
            self._is_closing.clear()
            self._connection = self._reach()
            self._thread = threading.Thread(target=self._watch, name="kvtier-embedded-server", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Disconnect from the server. Safe to call twice, and without `ensure`."""
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
        """In a forked child: give up the parent's connection and locks."""
        if self._connection is not None:
            self._connection.close()
        for fd in self._lock_fds:
            os.close(fd)
        self._reset()

    # --- keeping it alive ------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """The thread: restart a server that has died, at once at first, with growing pauses if it keeps dying."""
        reached_at = time.monotonic()
        pause_s = 0.0
        while not self._is_closing.wait(_LOOK_S):
            if self._connection is not None:
                if not self._connection.has_ended():
                    continue
                logger.warning("the embedded cache server has stopped; restarting it address=%s", self.address)
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
                    logger.warning("no embedded cache server; trying again in %.1f s: %s", pause_s, error)
            except Exception:
                logger.exception("no embedded cache server, because of a bug; trying again in %.1f s", pause_s)

    # --- finding or starting it --------------------------------------------------------------------------------------

    def _reach(self) -> ServerConnection:
        """Connect to the server, starting it if necessary. Raises `ConfigError`."""
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
        """Lets one process at a time look for the server and start it."""
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
        """None while no server answers, or while an unused one with other settings is stopping.

        With `is_patient`, also while that one is in use: a client that has just left may still be counted.
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
                f"the embedded cache server of {self._folder} is in use with {found.beside(self._settings)}: "
                "give the same settings or another folder, or stop the engines that use it"
            )
        return None

    def _end_other(self) -> None:
        """Stop an idle server whose settings are no longer wanted."""
        with contextlib.suppress(OSError, TierRefused), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.connect(self._address.path)
            _, pidfd = peer_process(sock)
            try:
                signal.pidfd_send_signal(pidfd, signal.SIGTERM)
            finally:
                os.close(pidfd)

    def _start(self, life_fd: int) -> None:
        """Start the server without waiting for it to answer."""
        self._check_folder()
        command = [
            sys.executable,
            "-P",
            "-m",
            "kvtier",
            "cache-server",
        ]  # -P: nothing is imported from the working folder
        command += ["--memory", str(self._memory), "--socket", self._address.path]
        command += ["--stop-when-unused", str(self._unused_s)]
        if self._folder is not None:
            command += ["--folder", str(self._folder), "--disk", str(self._disk)]
        if self._cluster is not None:
            command += self._cluster.options
        if self._page is not None:
            command += ["--page", self._page]
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
        """Raises `ConfigError` if the folder cannot be used, for example because another kind of server owns it."""
        if self._folder is None:
            return
        try:
            os.close(take_folder(self._folder))
        except ConfigError as error:
            if not isinstance(error.__cause__, BlockingIOError):
                raise
            raise ConfigError(
                f"{self._folder} belongs to a cache server that was not started on demand: "
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
    """The processors of all threads of this process: an engine may have bound the calling thread to a single one."""
    allowed: set[int] = set()
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):
            allowed |= os.sched_getaffinity(int(thread))
    return sorted(allowed)


def _environment() -> dict[str, str]:
    """This process's environment, with absolute paths in PYTHONPATH."""
    environment = dict(os.environ)
    if paths := environment.get("PYTHONPATH"):
        environment["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, paths.split(os.pathsep)))
    return environment
