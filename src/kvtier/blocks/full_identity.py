"""The identity of a model's weights from all of their bytes, computed once and kept until a file changes.

The sampled identity (`weights`) takes milliseconds, but can miss a change that leaves every sample alone. This one
reads all bytes, at the speed of the disk. The digests of a file are kept in a record beside the weights, or in this
user's cache folder if that place is not writable, and are valid while the file's size, time and inode are the same. As
with the sampled identity, it does not matter how tensors are spread over files. Callable from any thread.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

from kvtier.blocks.weights import MALFORMED, read_safetensors_header, tensor_range, weights_identity_of_folder
from kvtier.errors import ConfigError
from kvtier.observe.printable import printable

IdentityKind: TypeAlias = Literal["sampled", "full"]
Progress: TypeAlias = Callable[[str, int], AbstractContextManager[Callable[[int], object]]]
"""Makes a context from a title and a number of bytes; it yields a function to report bytes that are done."""

_RECORD_NAME = ".kvtier-identity.json"
_PREFIX = "full-1:"
_PIECE_BYTES = 8 << 20
_NUM_THREADS = min(8, os.cpu_count() or 1)
_MAX_RECORD_BYTES = 64 << 20


class _File(msgspec.Struct, frozen=True):
    """The digests of a weight file's `tensors`, by name, and the file's state when they were computed."""

    size: int
    mtime_ns: int
    inode: int
    tensors: dict[str, str]


class _Record(msgspec.Struct, frozen=True):
    version: Literal[1]
    files: dict[str, _File]


def identity_of_folder(folder: Path, kind: IdentityKind, progress: Progress | None = None) -> str:
    """The identity of the `*.safetensors` files in `folder`. Raises `ConfigError` like `weights_identity_of_folder`."""
    if kind == "sampled":
        return weights_identity_of_folder(folder)
    return full_identity_of_folder(folder, progress)


def full_identity_of_folder(folder: Path, progress: Progress | None = None) -> str:
    """The full identity, which never equals a sampled one. Concurrent processes of a user read the weights once."""
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise ConfigError(f"no *.safetensors files in {folder}")
    places = _places(folder)
    with _alone(places):
        known = _kept(places, paths)
        left = [path for path in paths if path.name not in known]
        if left:
            known |= _read_all(folder, left, progress or _silent)
            _keep(places, known)
    digest = hashlib.sha256()
    tensors = {name: one for path in paths for name, one in known[path.name].tensors.items()}
    for name in sorted(tensors):
        digest.update(bytes.fromhex(tensors[name]))
    return _PREFIX + digest.hexdigest()


# --- reading -------------------------------------------------------------------------------------------------------


def _read_all(folder: Path, paths: list[Path], progress: Progress) -> dict[str, _File]:
    found: dict[str, _File] = {}
    total = sum(path.stat().st_size for path in paths)
    with progress(f"Hashing {folder.name}", total) as advance, ThreadPoolExecutor(_NUM_THREADS) as threads:
        for path in paths:
            try:
                before = path.stat()
                with path.open("rb") as file:
                    entries, first_byte = read_safetensors_header(file)
                heads = {
                    name: (json.dumps([name, entry["dtype"], entry["shape"]]), tensor_range(entry))
                    for name, entry in entries.items()
                }
                work = {
                    threads.submit(_digest, path, head, first_byte + start, end - start): (name, end - start)
                    for name, (head, (start, end)) in heads.items()
                }
                tensors = {}
                for done in as_completed(work):
                    name, nbytes = work[done]
                    tensors[name] = done.result()
                    advance(nbytes)
            except (OSError, *MALFORMED) as error:
                raise ConfigError(f"{path} cannot be read as safetensors: {printable(str(error))}") from error
            found[path.name] = _File(before.st_size, before.st_mtime_ns, before.st_ino, tensors)
    return found


def _digest(path: Path, head: str, offset: int, nbytes: int) -> str:
    """The digest of a tensor's name, dtype and shape, and of all its bytes."""
    digest = hashlib.sha256(hashlib.sha256(head.encode()).digest())
    piece = memoryview(bytearray(min(nbytes, _PIECE_BYTES)))
    with path.open("rb", buffering=0) as file:
        file.seek(offset)
        while nbytes:
            length = file.readinto(piece[: min(nbytes, len(piece))])
            if not length:
                raise ValueError("the file ends inside a tensor")
            digest.update(piece[:length])
            nbytes -= length
    return digest.hexdigest()


@contextlib.contextmanager
def _silent(title: str, nbytes: int) -> Iterator[Callable[[int], object]]:
    yield lambda done: None


# --- keeping -------------------------------------------------------------------------------------------------------


def _places(folder: Path) -> list[Path]:
    """The places for a record: beside the weights, or else in this user's cache."""
    name = hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:32]
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return [folder / _RECORD_NAME, Path(cache) / "kvtier" / "identity" / f"{name}.json"]


def _kept(places: list[Path], paths: list[Path]) -> dict[str, _File]:
    """The recorded digests of those files that have not changed since."""
    kept: dict[str, _File] = {}
    for place in places:
        record = _read(place)
        for path in paths:
            known = None if record is None else record.files.get(path.name)
            status = path.stat()
            is_same = known is not None and (known.size, known.mtime_ns, known.inode) == (
                status.st_size,
                status.st_mtime_ns,
                status.st_ino,
            )
            if known is not None and is_same:
                kept.setdefault(path.name, known)
    return kept


def _read(place: Path) -> _Record | None:
    """The record, if this user, root or the folder's owner wrote it and no other user can write to it; else None."""
    try:
        fd = os.open(place, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            status = os.fstat(fd)
            trusted = (os.geteuid(), 0, place.parent.stat().st_uid)
            if not stat.S_ISREG(status.st_mode) or status.st_uid not in trusted or status.st_mode & 0o022:
                return None
            with open(fd, "rb", closefd=False) as file:
                return msgspec.json.decode(file.read(_MAX_RECORD_BYTES), type=_Record)
        finally:
            os.close(fd)
    except (OSError, msgspec.DecodeError, UnicodeError, RecursionError):
        return None


def _keep(places: list[Path], known: dict[str, _File]) -> None:
    """Write the record to the first writable place; without one, the next start reads all weights again."""
    raw = msgspec.json.encode(_Record(1, known))
    for place in places:
        temporary = place.with_name(f"{place.name}.{secrets.token_hex(4)}")
        try:
            place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            with open(fd, "wb") as file:
                os.fchmod(fd, 0o644)
                file.write(raw)
            os.replace(temporary, place)
            return
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()


@contextlib.contextmanager
def _alone(places: list[Path]) -> Iterator[None]:
    """Let other processes of this user wait for the record being made here; if locking fails, none of them waits."""
    fd = -1
    with contextlib.suppress(OSError):
        lock = places[-1].with_suffix(".lock")
        lock.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX)
    try:
        yield
    finally:
        if fd >= 0:
            os.close(fd)
