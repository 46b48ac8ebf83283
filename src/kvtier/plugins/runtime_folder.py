"""Folders of embedded servers, one each, inside a folder that only this user can access.

Locks are the kernel's (flock): they are released when their process ends, however it ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from kvtier.errors import ConfigError
from kvtier.transport.listening import is_own_folder, make_private_folder

_KEY_CHARACTERS = 16
_SOCKET_NAME = "kvtier.sock"
_MAX_SOCKET_BYTES = 107


class ServerFolder:
    """The files of one server.

    A process holds `start_lock` while it looks for the server and starts it if necessary. A server holds `life_lock`
    from before its first instruction until its process has ended.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.socket = path / _SOCKET_NAME
        self.log = path / "log"
        self.start_lock = path / "start"
        self.life_lock = path / "life"

    def make(self) -> None:
        """Create the folder. Raises `ConfigError` if that fails, or if other users can access it."""
        for folder in (self.path.parent, self.path):
            make_private_folder(folder)

    def remove_if_dead(self) -> None:
        """Remove the folder, unless its server is running or about to be started."""
        with contextlib.ExitStack() as stack:
            for lock in (self.start_lock, self.life_lock):
                fd = try_lock(lock)
                if fd is None:
                    return
                stack.callback(os.close, fd)
            shutil.rmtree(self.path, ignore_errors=True)


def server_folder(key: str) -> ServerFolder:
    """The folder of the server `key`, the same for all processes of a user. Raises `ConfigError` if there is none."""
    for root in _roots():
        folder = ServerFolder(root / key[:_KEY_CHARACTERS])
        if len(os.fsencode(folder.socket)) <= _MAX_SOCKET_BYTES:
            return folder
    raise ConfigError("no folder with a short enough path for a socket: set XDG_RUNTIME_DIR")


def remove_dead(root: Path) -> None:
    """Remove the folders of servers in `root` that have stopped and are not being started again."""
    with contextlib.suppress(OSError):
        for path in root.iterdir():
            if len(path.name) == _KEY_CHARACTERS and (path / "start").exists():
                with contextlib.suppress(OSError):
                    ServerFolder(path).remove_if_dead()


def try_lock(path: Path) -> int | None:
    """A descriptor that holds the lock on the file, created if missing; None while another process holds it."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(fd).st_ino == os.stat(path).st_ino:
            return fd
    except (BlockingIOError, FileNotFoundError):  # another process holds it, or has just removed it
        pass
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    return None


def _roots() -> Iterator[Path]:
    """Candidates, best first. An XDG_RUNTIME_DIR of another user (kept by sudo, for example) is skipped."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and is_own_folder(Path(runtime)):
        yield Path(runtime) / "kvtier"
    for temporary in (tempfile.gettempdir(), "/tmp"):
        yield Path(temporary) / f"kvtier-{os.geteuid()}"
