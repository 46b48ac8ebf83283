"""A store's folder: its single owner, its share of the budget, and files that an older kvtier left in it."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
from pathlib import Path

from kvtier.errors import ConfigError
from kvtier.sizes import format_size
from kvtier.stores.files import Files, is_file_of
from kvtier.stores.payload_file import PAYLOADS_NAME
from kvtier.stores.record_file import RECORDS_NAME, SMALL_STEP_BYTES, read_version
from kvtier.stores.records import FORMAT_VERSION, HEADER_BYTES, UNIT_BYTES

logger = logging.getLogger(__name__)

_LOCK_NAME = "lock"
_OWN_NAMES = (PAYLOADS_NAME, RECORDS_NAME)
_MAP_SHARE = 256
_LEAST_MAPS_BYTES = 2 * UNIT_BYTES
"""Each of the two files may need a block for its map, once it lies in several pieces."""
MIN_FILE_BYTES = HEADER_BYTES + SMALL_STEP_BYTES + UNIT_BYTES + _LEAST_MAPS_BYTES


def holds_store(folder: Path) -> bool:
    """Whether a store has written into `folder`."""
    return (folder / RECORDS_NAME).is_file()


def take_folder(folder: Path) -> int:
    """Make the folder this process's own until the returned descriptor is closed. Raises `ConfigError`."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # its contents reveal prompts
        fd = os.open(folder / _LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"the KV cache folder {folder} cannot be used: {error.strerror}") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        raise ConfigError(f"the KV cache folder {folder} is in use by another process") from error
    return fd


def is_taken(folder: Path) -> bool:
    """Whether a process owns the folder. Nothing is created or changed."""
    return is_locked(folder / _LOCK_NAME)


def is_locked(path: Path) -> bool:
    """Whether a process holds the lock on this file. A file that is missing or unreadable is not locked."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def is_lock_of(fd: int, folder: Path) -> bool:
    """Whether the lock file that we hold is still the one in the folder, so that no other process can take it."""
    return is_file_of(fd, folder / _LOCK_NAME)


def room_in(folder: Path, file_space: int) -> int:
    """The budget without other users of room: other files in the folder, and the filesystem's map of a large file."""
    others = sum(_size_of(path) for path in folder.rglob("*") if path.name not in _OWN_NAMES or path.parent != folder)
    room = file_space - others
    if room < MIN_FILE_BYTES:
        raise ConfigError(
            f"other files in {folder} take {format_size(others)} of the {format_size(file_space)} allowed"
        )
    return (room - max(_LEAST_MAPS_BYTES, room // _MAP_SHARE)) // UNIT_BYTES * UNIT_BYTES


def space_of(folder: Path) -> int:
    """A budget that leaves a store at rest unchanged."""
    used = sum(_size_of(path) for path in folder.rglob("*"))
    return used + used // (_MAP_SHARE // 2) + MIN_FILE_BYTES


def set_aside_old(folder: Path, file_space: int, files: Files) -> None:
    """Move an older format out of the way, or remove it if it would leave no room. A newer one is refused."""
    for name in _OWN_NAMES:
        path = folder / name
        if path.exists() and not path.is_file():
            raise ConfigError(f"the KV cache folder {folder} cannot be used: {name} in it is not a file")
    version = read_version(folder / RECORDS_NAME, files)
    if version is None or version == FORMAT_VERSION:
        return
    if version > FORMAT_VERSION:
        raise ConfigError(
            f"{folder / RECORDS_NAME} has format version {version}, which this kvtier does not know; "
            "use a newer kvtier or another folder"
        )
    aside = folder / f"version-{version}"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    for name in _OWN_NAMES:
        if (folder / name).exists():
            os.replace(folder / name, aside / name)
    if sum(_size_of(path) for path in folder.rglob("*")) > file_space // 2:
        shutil.rmtree(aside)
        logger.warning("disk store %s: had format version %d, too large to keep; removed", folder, version)
    else:
        logger.warning("disk store %s: had format version %d; set aside in %s", folder, version, aside.name)


def _size_of(path: Path) -> int:
    try:
        status = path.stat()
    except FileNotFoundError:
        return 0
    return max(status.st_size, status.st_blocks * 512) if path.is_file() else 0
