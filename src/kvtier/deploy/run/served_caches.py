"""The folder for the sockets of this user's deployments, and the cache servers and engines there.

A deployment lists them in a file in its runtime folder, so that other commands find them. Only folders of this user are
trusted.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from kvtier.errors import ConfigError
from kvtier.transport.address import UnixAddress, parse_address
from kvtier.transport.listening import is_own_folder

_PREFIX = "kvtier-"
NOTE_FILE = "caches.json"
_MAX_NOTE_BYTES = 1 << 20
_MAX_FOLDERS = 1000
_CONNECT_S = 2.0


class ServedCaches(msgspec.Struct, frozen=True, kw_only=True):
    """The cache servers of the deployment in `file`: addresses by name. `engines` are the addresses of its engines.

    `openai` is the URL of its OpenAI API.
    """

    file: str
    caches: dict[str, str]
    engines: tuple[str, ...] = ()
    openai: str = ""


class FoundCache(msgspec.Struct, frozen=True):
    """A cache server that answers, and whose it is, in words."""

    address: str
    whose: str


def make_runtime_folder() -> Path:
    """A folder for the sockets of one deployment's parts, for this user only. It is removed at the end."""
    parent = _runtime_parent()
    return Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))


def note_caches(
    folder: Path, file: Path, caches: Mapping[str, str], engines: Sequence[str] = (), openai: str = ""
) -> None:
    """For `find_caches` and others: the cache servers, by name, and engines of the deployment in `file`."""
    served = ServedCaches(file=str(file), caches=dict(caches), engines=tuple(engines), openai=openai)
    note = msgspec.json.encode(served)
    (folder / NOTE_FILE).write_bytes(note)


def remove_runtime_folder(folder: Path) -> None:
    """Remove it, if there is nothing but the note in it."""
    with contextlib.suppress(OSError):
        if os.listdir(folder) == [NOTE_FILE]:
            (folder / NOTE_FILE).unlink()
        folder.rmdir()


def find_caches() -> list[FoundCache]:
    """The cache servers of all deployments of this user whose sockets answer, each once, ordered by address."""
    found: dict[str, FoundCache] = {}
    for folder in _runtime_folders():
        note = _read_note(folder / NOTE_FILE)
        if note is None:
            continue
        for name, address in note.caches.items():
            if does_answer(address):
                found[address] = FoundCache(address, f"{name} of {note.file}")
    return sorted(found.values(), key=lambda one: one.address)


def find_engines() -> list[str]:
    """The addresses of the engines of all deployments of this user, each once; some may have ended."""
    notes = [_read_note(folder / NOTE_FILE) for folder in _runtime_folders()]
    return list(dict.fromkeys(address for note in notes if note is not None for address in note.engines))


def find_deployments() -> dict[str, str]:
    """The URLs of the OpenAI APIs of this user's deployments, by file, if one of their parts answers."""
    notes = [_read_note(folder / NOTE_FILE) for folder in _runtime_folders()]
    there = [note for note in notes if note is not None and note.openai]
    return {note.file: note.openai for note in there if any(map(does_answer, (*note.caches.values(), *note.engines)))}


def does_answer(address: str) -> bool:
    """Whether a process listens on this Unix socket."""
    try:
        parsed = parse_address(address)
        if not isinstance(parsed, UnixAddress):
            return False
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(_CONNECT_S)
            probe.connect(parsed.path)
    except (OSError, ConfigError):
        return False
    return True


def _runtime_parent() -> str | None:
    """None is the folder for temporary files."""
    parent = os.environ.get("XDG_RUNTIME_DIR")
    return parent if parent is not None and os.access(parent, os.W_OK | os.X_OK) else None


def _runtime_folders() -> Iterator[Path]:
    parents = dict.fromkeys(Path(parent) for parent in (_runtime_parent(), tempfile.gettempdir()) if parent)
    for parent in parents:
        with contextlib.suppress(OSError), os.scandir(parent) as entries:
            ours = (entry for entry in entries if entry.name.startswith(_PREFIX))
            for entry in itertools.islice(ours, _MAX_FOLDERS):
                if is_own_folder(Path(entry.path)):
                    yield Path(entry.path)


def _read_note(path: Path) -> ServedCaches | None:
    try:
        with path.open("rb") as file:
            return msgspec.json.decode(file.read(_MAX_NOTE_BYTES), type=ServedCaches)
    except (OSError, msgspec.MsgspecError):
        return None
