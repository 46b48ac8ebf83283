"""Stores named prefixes across restarts: a folder with one small file of records, and a content file for each prefix.

Every file is written under another name and then renamed, so a process that dies at any moment leaves the book as it
was before or after a change. With a key, all files are encrypted, as blocks on disk are. May be called from any thread:
`get`, `note_hits` and iteration only use memory, all other methods wait for files.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import secrets
import threading
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

import msgspec

from kvtier.api.prefixes.record import PrefixContent, PrefixRecord
from kvtier.errors import ConfigError
from kvtier.memory.aead import TAG_BYTES, Aead, InvalidTag
from kvtier.observe.log_limit import LogLimit
from kvtier.stores.cipher import read_key

logger = logging.getLogger(__name__)

MAX_PREFIXES = 1024
MAX_ALL_BYTES = 1 << 30
"""Limit for the content files of all prefixes together."""
_NAMES_FILE = "names.json"
_ASIDE = "names.damaged-"
"""How the name of a records file that could not be read begins. While there is one, no content file is removed."""
_MAX_NAMES_BYTES = 4 << 20
_MAX_CONTENT_BYTES = 128 << 20
_MAX_CACHED = 8
_NONCE_BYTES = 12


class _Names(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    prefixes: list[PrefixRecord]


_VERSION = 1


class PrefixBook:
    """Records by name. Without a folder they are kept in memory until the process ends."""

    max_all_bytes = MAX_ALL_BYTES

    def __init__(self, folder: Path | None = None, key_file: Path | None = None) -> None:
        """Raises `ConfigError` for a folder or a key that cannot be used. A damaged file is set aside."""
        self._folder = folder
        self._seal = _Seal(None if key_file is None else read_key(key_file))
        self._records: dict[str, PrefixRecord] = {}
        self.num_changes = 0
        """Since this book was opened."""
        self._contents: OrderedDict[str, PrefixContent] = OrderedDict()
        self._warnings = LogLimit(logger)
        self._memory = threading.Lock()
        """Protects the records and the contents; never held while a file is read or written."""
        self._files = threading.Lock()
        """Held for a whole change, so changes are made one at a time. Taken before `_memory`."""
        if folder is None:
            return
        try:
            for each in (folder.parent, folder):  # the files contain prompts
                each.mkdir(mode=0o700, parents=True, exist_ok=True)
            names = self._read_names(folder)
            if names is not None:
                self._records = {record.name: record for record in names}
                self._remove_strays(folder)
        except OSError as error:
            raise ConfigError(f"the folder for prefixes {folder} cannot be used: {error.strerror}") from error

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[PrefixRecord]:
        """The records in the order of their names."""
        with self._memory:
            records = list(self._records.values())
        return iter(sorted(records, key=lambda record: record.name))

    def get(self, name: str) -> PrefixRecord | None:
        with self._memory:
            return self._records.get(name)

    def content(self, record: PrefixRecord) -> PrefixContent | None:
        """The content of a prefix; None if its file is missing or damaged."""
        with self._memory:
            found = self._contents.get(record.file)
            if found is not None:
                self._contents.move_to_end(record.file)
        if found is None and self._folder is not None:
            found = self._read_content(self._folder / f"{record.file}.prefix", record)
            if found is not None and self._is_known(record):
                self._keep(record.file, found)
        return found

    def check_room(self, name: str) -> None:
        """Raises `ConfigError` if there is no room for one more name."""
        with self._memory:
            is_full = name not in self._records and len(self._records) >= MAX_PREFIXES
        if is_full:
            raise ConfigError(f"there are {MAX_PREFIXES} named prefixes already: drop one first")

    def add(self, record: PrefixRecord, content: PrefixContent) -> PrefixRecord:
        """Store a prefix, replacing any of the same name. Raises `ConfigError` if the disk or the book is full.

        One without text keeps the text of the same prefix before. Returns the record as it is stored.
        """
        with self._files:
            self.check_room(record.name)
            before = self.get(record.name)
            if before is not None and not record.has_text:
                record, content = self._with_text(record, content, before)
            encoded = msgspec.msgpack.encode(content)
            if len(encoded) > _MAX_CONTENT_BYTES or self._stored_bytes() + len(encoded) > self.max_all_bytes:
                raise ConfigError("the texts of all named prefixes together are too large: drop one first")
            if self._folder is None:
                with self._memory:
                    self._contents[record.file] = content
            else:
                self._write(f"{record.file}.prefix", self._seal.close(encoded, record.file))
            try:
                self._change(record, gone=None)
            except ConfigError:
                self._forget(record)
                raise
            if before is not None and before.file != record.file:
                self._forget(before)
            return record

    def _with_text(
        self, record: PrefixRecord, content: PrefixContent, before: PrefixRecord
    ) -> tuple[PrefixRecord, PrefixContent]:
        is_same = (before.model, before.key, before.root) == (record.model, record.key, record.root)
        had = self.content(before) if is_same else None
        if had is None or had.text is None or had.joined_hashes != content.joined_hashes:
            return record, content
        return msgspec.structs.replace(record, has_text=True), msgspec.structs.replace(content, text=had.text)

    def change(self, record: PrefixRecord, **changes: object) -> PrefixRecord:
        """Change fields of a prefix's record. Raises `ConfigError` if the prefix is gone or cannot be written."""
        with self._files:
            changed = msgspec.structs.replace(self.current(record), **changes)
            self._change(changed, gone=None)
            return changed

    def note_hits(self, record: PrefixRecord, count: int, at: float) -> None:
        """Count requests that began with the prefix, the last one at `at`, in memory until the next change or `save`.

        Does nothing if the prefix is gone.
        """
        with self._memory:
            now = self._records.get(record.name)
            if now is not None and now.file == record.file:
                last = max(at, now.last_used or at)
                self._records[record.name] = msgspec.structs.replace(now, hits=now.hits + count, last_used=last)

    def rename(self, record: PrefixRecord, to: str) -> PrefixRecord:
        """Raises `ConfigError` if the new name is taken, or if the prefix is gone."""
        with self._files:
            now = self.current(record)
            if to == now.name:
                return now
            if self.get(to) is not None:
                raise ConfigError(f"a prefix {to} already exists")
            renamed = msgspec.structs.replace(now, name=to)
            self._change(renamed, gone=now.name)
            return renamed

    def remove(self, record: PrefixRecord) -> None:
        """Remove this very prefix, even if it was renamed. Raises `ConfigError` if it is already gone."""
        with self._files:
            now = self.current(record)
            try:
                self._change(None, gone=now.name)
            except ConfigError:  # on a full disk, its content makes room for the names
                self._forget(now)
                self._change(None, gone=now.name)
            self._forget(now)

    def save(self) -> None:
        """Write the records. Raises `ConfigError` if that fails."""
        with self._files:
            self._change(None, gone=None)

    def current(self, record: PrefixRecord) -> PrefixRecord:
        """The current record, found by its file: another prefix may have the name by now.

        Raises `ConfigError` if the prefix is gone.
        """
        with self._memory:
            found = next((one for one in self._records.values() if one.file == record.file), None)
        if found is None:
            raise ConfigError(f"the prefix {record.name} has been dropped")
        return found

    # --- files -------------------------------------------------------------------------------------------------------

    def _change(self, record: PrefixRecord | None, *, gone: str | None) -> None:
        """Change the file, then memory, where hits may have been noted in between. The caller holds `_files`."""
        if self._folder is not None:
            with self._memory:
                names = _Names(_VERSION, list(self._changed(record, gone).values()))
            self._write(_NAMES_FILE, self._seal.close(msgspec.json.encode(names), _NAMES_FILE))
        with self._memory:
            self._records = self._changed(record, gone)
            self.num_changes += 1

    def _changed(self, record: PrefixRecord | None, gone: str | None) -> dict[str, PrefixRecord]:
        kept = {name: one for name, one in self._records.items() if name != gone}
        return kept if record is None else {**kept, record.name: record}

    def _forget(self, record: PrefixRecord) -> None:
        with self._memory:
            self._contents.pop(record.file, None)
        if self._folder is not None:
            with contextlib.suppress(OSError):
                (self._folder / f"{record.file}.prefix").unlink()

    def _is_known(self, record: PrefixRecord) -> bool:
        with self._memory:
            return any(one.file == record.file for one in self._records.values())

    def _keep(self, file: str, content: PrefixContent) -> None:
        with self._memory:
            self._contents[file] = content
            if len(self._contents) > _MAX_CACHED:
                self._contents.popitem(last=False)

    def _stored_bytes(self) -> int:
        if self._folder is not None:
            return sum(path.stat().st_size for path in self._folder.glob("*.prefix"))
        with self._memory:
            texts = [content.text for content in self._contents.values()]
        return sum(text.num_characters for text in texts if text is not None)

    def _write(self, name: str, data: bytes) -> None:
        """Write a file completely or not at all, even if the process or the machine dies."""
        assert self._folder is not None
        beside = self._folder / f"{name}.new"
        try:
            fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            with open(fd, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, self._folder / name)
        except OSError as error:
            with contextlib.suppress(OSError):
                beside.unlink()
            raise ConfigError(f"the prefixes in {self._folder} cannot be written: {error.strerror}") from error

    def _read_names(self, folder: Path) -> list[PrefixRecord] | None:
        """The records; None if unknown. An unreadable file is set aside, and used again once it can be read."""
        path = folder / _NAMES_FILE
        try:
            return self._names_in(path).prefixes
        except FileNotFoundError:
            pass
        except _Unreadable as error:
            aside = folder / f"{_ASIDE}{secrets.token_hex(4)}"
            os.replace(path, aside)
            logger.warning(
                "the names of prefixes cannot be read and are set aside as %s; until it is removed, all texts stay: %s",
                aside.name,
                str(error),
            )
        for aside in sorted(folder.glob(f"{_ASIDE}*"), key=lambda one: one.stat().st_mtime, reverse=True):
            with contextlib.suppress(_Unreadable):
                names = self._names_in(aside)
                os.replace(aside, path)
                logger.warning("the names of prefixes set aside as %s can be read again", aside.name)
                return names.prefixes
        return None

    def _names_in(self, path: Path) -> _Names:
        with path.open("rb") as file:
            data = file.read(_MAX_NAMES_BYTES + 1)
        try:
            names = msgspec.json.decode(self._seal.open(data, _NAMES_FILE), type=_Names)
        except (msgspec.MsgspecError, ValueError, RecursionError, InvalidTag) as error:
            raise _Unreadable(str(error) or "the file is damaged, or was encrypted with another key") from error
        if names.version != _VERSION or len(names.prefixes) > MAX_PREFIXES or len(data) > _MAX_NAMES_BYTES:
            raise _Unreadable("the file has another version, or is too large")
        return names

    def _read_content(self, path: Path, record: PrefixRecord) -> PrefixContent | None:
        try:
            with path.open("rb") as file:
                data = file.read(_MAX_CONTENT_BYTES)
            return msgspec.msgpack.decode(self._seal.open(data, record.file), type=PrefixContent)
        except (OSError, msgspec.MsgspecError, ValueError, RecursionError, InvalidTag) as error:
            if self._is_known(record):  # else it was dropped meanwhile
                reason = str(error) or "the file is damaged, or was encrypted with another key"
                self._warnings.warning(
                    record.file, "the text of the prefix %s in %s cannot be read: %s", record.name, path.name, reason
                )
            return None

    def _remove_strays(self, folder: Path) -> None:
        """Remove content files without a record, left by a process that died, unless records were set aside."""
        known = {f"{record.file}.prefix" for record in self._records.values()}
        has_others = any(folder.glob(f"{_ASIDE}*"))
        for path in folder.iterdir():
            is_stray = path.suffix == ".prefix" and path.name not in known and not has_others
            if path.name.endswith(".new") or is_stray:
                with contextlib.suppress(OSError):
                    path.unlink()


class _Unreadable(Exception):
    """A records file that is damaged, or was written with another key."""


class _Seal:
    """Encrypts files if there is a key. A file's name (`about`) is authenticated, so files cannot be swapped."""

    def __init__(self, key: bytes | None) -> None:
        self._aead = None if key is None else Aead(hmac.digest(key, b"kvtier prefixes 1", "sha256"))

    def close(self, data: bytes, about: str) -> bytes:
        if self._aead is None:
            return data
        nonce = secrets.token_bytes(_NONCE_BYTES)
        return nonce + self._aead.encrypt(nonce, data, about.encode())

    def open(self, data: bytes, about: str) -> bytes:
        """Raises `InvalidTag`."""
        if self._aead is None:
            return data
        if len(data) < _NONCE_BYTES + TAG_BYTES:
            raise InvalidTag
        opened = bytearray(len(data) - _NONCE_BYTES - TAG_BYTES)
        nonce, sealed = data[:_NONCE_BYTES], data[_NONCE_BYTES:]
        self._aead.decrypt_into(nonce, bytearray(sealed), about.encode(), memoryview(opened))
        return bytes(opened)


def new_file() -> str:
    """A name for the content file of a new prefix."""
    return secrets.token_hex(16)
