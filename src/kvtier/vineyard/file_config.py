"""How the file cache is set up: Vineyard's names and defaults."""

from __future__ import annotations

import enum
import os

import msgspec

from kvtier.errors import ConfigError
from kvtier.vineyard.whole_numbers import whole_number

_MAX_INT = 1 << 40
_MAX_FOLDER_DIGITS = 8
_MAX_IO_WORKERS = 256
_MAX_SECONDS = 10**10


class FilesystemType(enum.Enum):
    """Vineyard's term for where the files lie. All kinds are used in the same way here: by rename alone."""

    LOCAL = "local"


class FileCacheConfig(msgspec.Struct, frozen=True):
    """Chunks of `chunk_size` tokens as files under `root`, in folders of `split_number` hexadecimal digits.

    A chunk that this client wrote or found, and that no client of the folder has used for `ttl` seconds, is removed
    every `client_gc_interval` seconds; with `enable_global_gc`, so is every chunk unused for `global_ttl`, every
    `global_gc_interval`. With longer times, clients note a use at most every five seconds: times of ten seconds and
    more are accurate enough. `io_workers` is the number of reads or writes in flight.

    Files of other users are not hits, and a folder that others may write to is refused, unless `is_shared` declares
    that all users who can write there are trusted. Raises `ConfigError`, a `ValueError`, for a wrong type or size.
    """

    chunk_size: int = 16
    split_number: int = 2
    root: str = "/tmp/vineyard/llm_cache"
    filesystem_type: FilesystemType = FilesystemType.LOCAL
    client_gc_interval: float = 1800
    ttl: float = 1800
    enable_global_gc: bool = False
    global_gc_interval: float = 10800
    global_ttl: float = 10800
    io_workers: int = 8
    is_shared: bool = False

    def __post_init__(self) -> None:
        for name, limit in (
            ("chunk_size", _MAX_INT),
            ("split_number", _MAX_FOLDER_DIGITS),
            ("io_workers", _MAX_IO_WORKERS),
        ):
            msgspec.structs.force_setattr(self, name, whole_number(name, getattr(self, name), most=limit))
        if not isinstance(self.root, str) or not _is_path(self.root):
            raise ConfigError(f"root must be the path of a folder, not {self.root!r}")
        if not isinstance(self.filesystem_type, FilesystemType):
            raise ConfigError(f"filesystem_type must be a FilesystemType, not {self.filesystem_type!r}")
        for name in ("enable_global_gc", "is_shared"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be True or False, not {getattr(self, name)!r}")
        for name in ("client_gc_interval", "ttl", "global_gc_interval", "global_ttl"):
            _seconds(name, getattr(self, name))


def _is_path(text: str) -> bool:
    try:
        name = os.fsencode(text)
    except UnicodeEncodeError:
        return False
    return bool(name) and b"\0" not in name


def _seconds(name: str, value: object) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= _MAX_SECONDS:
        raise ConfigError(f"{name} must be a positive number of seconds, not {value!r}")
