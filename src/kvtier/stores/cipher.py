"""Blocks as ciphertext: AES-256-GCM under a key from a file. Data on disk can be neither read nor changed undetected.

Each process draws a salt and derives a key of its own from it and the key in the file; its blocks are numbered. Salt
and number form a block's nonce, so none is used twice, even after a crash, and even if a folder is copied back. They
are kept in the block's record with the tag: a payload takes no more room than in plaintext. The tag also covers
namespace, hash and size. Thread-safe; the work is done without the GIL.
"""

from __future__ import annotations

import hashlib
import hmac
import itertools
import mmap
import os
import struct
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvtier.errors import ConfigError
from kvtier.memory.aead import TAG_BYTES, Aead, InvalidTag, require_aead
from kvtier.stores.files import Files, NotAuthentic

SEAL_BYTES = 36
_SEAL = struct.Struct("<12sQ16s")
"""Salt, count, tag."""
_KEY_BYTES = 32
_PAGE_BYTES = 4096
_MAX_KEY_FILE_BYTES = 4096
_MAX_SALTS = 1024


class _Derived:
    """The keys derived from the key and a salt."""

    def __init__(self, key: bytes, salt: bytes) -> None:
        def derived(use: bytes) -> bytes:
            return hmac.digest(key, b"kvtier disk 1 " + use + salt, "sha256")

        self.aead = Aead(derived(b"payload"))
        self.mask_key = derived(b"checksum")


class BlockCipher:
    """Seals and opens blocks under one key."""

    def __init__(self, key: bytes) -> None:
        """Raises `ConfigError` without the library, or for a key of another length."""
        require_aead()
        if len(key) != _KEY_BYTES:
            raise ConfigError(f"an encryption key has {_KEY_BYTES} bytes, not {len(key)}")
        self._key = key
        self.key_check = hmac.digest(key, b"kvtier disk 1 key check", "sha256")
        """Equal for equal keys, and reveals nothing about the key."""
        self._salt = os.urandom(12)
        self._counts = itertools.count(1)  # `next` is atomic
        self._known: dict[bytes, _Derived] = {}
        self._staging: deque[mmap.mmap] = deque()

    @contextmanager
    def staged(self, slot_bytes: int) -> Iterator[memoryview]:
        """Aligned memory of a slot's size, with room for a tag behind it."""
        try:
            memory = self._staging.pop()  # the last used is in the processor's cache
        except IndexError:
            memory = mmap.mmap(-1, slot_bytes + _PAGE_BYTES)
        if len(memory) < slot_bytes + _PAGE_BYTES:
            memory = mmap.mmap(-1, slot_bytes + _PAGE_BYTES)
        with memoryview(memory) as whole, whole[: slot_bytes + _PAGE_BYTES] as staging:
            yield staging
        self._staging.append(memory)

    def seal(self, about: bytes, payload: memoryview, staging: memoryview, slot_bytes: int) -> bytes:
        """Write the ciphertext of `payload` to `staging`, zero-padded to a slot; returns the seal for its record."""
        nbytes = len(payload)
        salt, count = self._salt, next(self._counts)
        self._derived(salt).aead.encrypt_into(_nonce(count), payload, about, staging[: nbytes + TAG_BYTES])
        tag = bytes(staging[nbytes : nbytes + TAG_BYTES])
        staging[nbytes : slot_bytes + TAG_BYTES] = bytes(slot_bytes + TAG_BYTES - nbytes)
        return _SEAL.pack(salt, count, tag)

    def open(self, seal: bytes, about: bytes, staging: memoryview, into: memoryview) -> None:
        """The reverse. Raises `NotAuthentic`; `into` may then hold anything."""
        salt, count, tag = _SEAL.unpack(seal)
        nbytes = len(into)
        staging[nbytes : nbytes + TAG_BYTES] = tag
        try:
            self._derived(salt).aead.decrypt_into(_nonce(count), staging[: nbytes + TAG_BYTES], about, into)
        except InvalidTag as error:
            raise NotAuthentic("it was written with another key, or changed") from error

    def masked(self, checksum: int, seal: bytes) -> int:
        """The checksum of a plaintext as stored in a record, and back: it must not reveal which blocks are equal."""
        salt, count, _ = _SEAL.unpack(seal)
        mask = hashlib.blake2b(_nonce(count), digest_size=8, key=self._derived(salt).mask_key).digest()
        return checksum ^ int.from_bytes(mask, "little")

    def _derived(self, salt: bytes) -> _Derived:
        known = self._known.get(salt)
        if known is None:
            if len(self._known) >= _MAX_SALTS:
                self._known.clear()
            known = self._known[salt] = _Derived(self._key, salt)
        return known


class SealingFiles(Files):
    """The operating system's files, for a store whose blocks are sealed."""

    def __init__(self, cipher: BlockCipher) -> None:
        self.cipher = cipher


def sealing_files(key_file: Path | None) -> Files | None:
    """Files for a store under the key in a file; None without one. Raises `ConfigError`."""
    return None if key_file is None else SealingFiles(BlockCipher(read_key(key_file)))


def read_key(path: Path) -> bytes:
    """A key: 32 bytes, or 64 hexadecimal digits. Raises `ConfigError`."""
    try:
        with path.open("rb") as file:
            raw = file.read(_MAX_KEY_FILE_BYTES)
    except OSError as error:
        raise ConfigError(f"the encryption key in {path} cannot be read: {error.strerror}") from error
    if len(raw) == _KEY_BYTES:
        return raw
    try:
        key = bytes.fromhex(raw.decode("ascii").strip())
    except ValueError:
        key = b""
    if len(key) != _KEY_BYTES:
        raise ConfigError(
            f"{path} holds no encryption key: it has 32 bytes, or 64 hexadecimal digits, as of `openssl rand -hex 32`"
        )
    return key


def _nonce(count: int) -> bytes:
    return count.to_bytes(12, "little")
