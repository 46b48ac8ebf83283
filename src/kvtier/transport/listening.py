"""Listening sockets, and the peer's process behind a Unix connection."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
import struct
from pathlib import Path

from kvtier.errors import ConfigError, TierRefused
from kvtier.transport.address import TcpAddress, UnixAddress

_SO_PEERPIDFD = 77
_UCRED = struct.Struct("3i")
_BACKLOG = 256
LOCK_END = ".lock"
"""Suffix of the lock file's name, after that of the socket."""


class UnixListener:
    """A Unix socket that only its owner can connect to, guarded by a lock file beside it.

    The lock distinguishes a living server from the socket file of a killed one, which is replaced.
    """

    def __init__(self, address: UnixAddress) -> None:
        self.path = address.path
        self._lock_fd = self._lock()
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            if os.path.exists(self.path) and not _is_socket(self.path):
                raise ConfigError(f"{self.path} exists and is not a socket: remove it, or choose another path")
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path)
            os.fchmod(self.sock.fileno(), 0o600)  # before bind, so that the file is never open to others
            self.sock.bind(self.path)
            self.sock.listen(_BACKLOG)
        except OSError as error:
            self._give_up()
            raise ConfigError(f"cannot listen on unix:{self.path}: {error.strerror or error}") from error
        except ConfigError:
            self._give_up()
            raise

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self.path)
        self._give_up()

    def _give_up(self) -> None:
        self.sock.close()
        with contextlib.suppress(OSError):
            os.unlink(self.path + LOCK_END)
        os.close(self._lock_fd)

    def _lock(self) -> int:
        path = self.path + LOCK_END
        while True:
            try:
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            except OSError as error:
                raise ConfigError(f"cannot listen on unix:{self.path}: {error.strerror}") from error
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(fd).st_ino == os.stat(path).st_ino:
                    return fd
            except BlockingIOError as error:
                os.close(fd)
                raise ConfigError(f"unix:{self.path} is in use by another cache server") from error
            except FileNotFoundError:
                pass  # the last owner removed it between our open and our lock
            os.close(fd)


def listen_tcp(address: TcpAddress) -> socket.socket:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        return socket.create_server((address.host, address.port), family=family, backlog=_BACKLOG)
    except OSError as error:
        reason = "it is in use" if error.errno == errno.EADDRINUSE else error.strerror or str(error)
        raise ConfigError(f"cannot listen on {address}: {reason}") from error


def peer_user(sock: socket.socket) -> int:
    """The user id of the process at the other end of a connected Unix socket."""
    _, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return int(uid)


def is_own_folder(folder: Path) -> bool:
    """Whether the folder belongs to this user and is writable."""
    try:
        is_own = folder.is_absolute() and folder.stat().st_uid == os.geteuid()
        return is_own and os.access(folder, os.W_OK | os.X_OK)
    except OSError:
        return False


def make_private_folder(folder: Path) -> None:
    """Make a folder that only this user can open, if it does not exist.

    Raises `ConfigError` if it belongs to another user, or is open to others.
    """
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise ConfigError(f"cannot create {folder} for a cache server's socket: {error.strerror}") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise ConfigError(f"{folder} is not a folder that only this user can open: remove it, or set XDG_RUNTIME_DIR")


def peer_process(sock: socket.socket) -> tuple[int, int]:
    """The process id and a pidfd of the process that connected a Unix socket.

    Raises `TierRefused` if it cannot be watched, as across process namespaces on old kernels.
    """
    pid, _, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    try:
        pidfd = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
        os.set_inheritable(pidfd, False)
        return pid, pidfd
    except OSError:
        pass  # before Linux 6.5
    try:
        return pid, os.pidfd_open(pid)
    except (OSError, OverflowError) as error:
        raise TierRefused(
            f"this server cannot watch process {pid}, so it cannot share memory with it: connect over TCP instead"
        ) from error


def _is_socket(path: str) -> bool:
    return os.stat(path).st_mode & 0o170000 == 0o140000
