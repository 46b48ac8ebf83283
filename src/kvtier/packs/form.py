"""The file format of a pack, which is written and read from front to back. No cache, no sockets.

    magic ‖ version ‖ length of the header ‖ header (JSON) ‖ hashes ‖ text ‖ seal
    section: "sect" ‖ count ‖ first ‖ checksums ‖ blocks ‖ seal         repeated for all blocks
    end:     "end!" ‖ 0 ‖ number of blocks ‖ seal                       and nothing behind it

Numbers are little-endian. A block's checksum is the same as in every tier: XXH3 over namespace, hash and bytes. A seal
is SHA-256 over the previous seal and the bytes since then, except blocks, which have checksums; so parts of one pack do
not fit another. In a signed pack, seals are HMAC-SHA-256 under the key, and cover blocks, too: no change made without
the key goes undetected. Every part is checked before it is used.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from kvtier.blocks.hashing import HASH_BYTES, BlockHash, split_hashes
from kvtier.blocks.namespace import Namespace
from kvtier.errors import ConfigError
from kvtier.memory.checksum import checksum_of
from kvtier.observe.printable import printable

VERSION = 1
MAX_BLOCKS = 1 << 20
MAX_BLOCK_BYTES = 1 << 30
MAX_TEXT_BYTES = 128 << 20
MAX_NAME_CHARACTERS = 256
SECTION_BYTES = 32 << 20
_MAX_SECTION_BYTES = 256 << 20
_MAX_HEADER_BYTES = 1 << 20
_MAX_KEY_BYTES = 4096
_MIN_KEY_BYTES = 16
_MAGIC = b"\x93kvpack\n"
_HEAD = struct.Struct("<8sII")
_PART = struct.Struct("<4sIQ")
_SECTION, _END = b"sect", b"end!"
_SEAL_BYTES = 32
_FIRST_SEAL = b"kvtier pack 1"
_DIGEST = re.compile(r"[0-9a-f]{64}")


class ByteReader(Protocol):
    """A file, or a pipe, that is read from front to back."""

    def readinto(self, buffer: memoryview, /) -> int | None: ...


class ByteWriter(Protocol):
    def write(self, data: bytes | memoryview, /) -> int: ...


class PackHeader(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A pack's description of itself. `fields` are the fields of its namespace, if known.

    `root` is the root of the chain of hashes: the namespace or, with an API key's salt, a digest of both. `tokens`
    counts the tokens of the prefix, including those after the last full block.
    """

    name: str
    model: str
    namespace: str
    root: str
    fields: dict[str, object] | None = None
    block_bytes: int
    block_tokens: int
    num_blocks: int
    section_blocks: int
    tokens: int
    text_bytes: int = 0
    is_signed: bool = False

    def __post_init__(self) -> None:
        if len(self.name) > MAX_NAME_CHARACTERS or len(self.model) > MAX_NAME_CHARACTERS:
            raise ValueError("a name is too long")
        if not _DIGEST.fullmatch(self.namespace) or not _DIGEST.fullmatch(self.root):
            raise ValueError("namespace and root have 32 bytes in hex")
        if not 0 < self.num_blocks <= MAX_BLOCKS or not 0 < self.block_tokens <= 1 << 20:
            raise ValueError("the number of blocks, or of their tokens, is out of range")
        if not 0 < self.block_bytes <= MAX_BLOCK_BYTES or not 0 <= self.text_bytes <= MAX_TEXT_BYTES:
            raise ValueError("the size of a block, or of the text, is out of range")
        most = max(1, _MAX_SECTION_BYTES // self.block_bytes)
        full_tokens = self.num_blocks * self.block_tokens
        if not 0 < self.section_blocks <= most or not full_tokens <= self.tokens < full_tokens + self.block_tokens:
            raise ValueError("the size of a section, or the number of tokens, is out of range")

    @property
    def namespace_bytes(self) -> Namespace:
        return Namespace(bytes.fromhex(self.namespace))


class Section:
    """Consecutive blocks from block `first` on; `data` is valid until the next section."""

    def __init__(self, first: int, count: int, data: memoryview, block_bytes: int) -> None:
        self.first = first
        self.count = count
        self.data = data
        self._block_bytes = block_bytes

    def blocks(self) -> list[memoryview]:
        size = self._block_bytes
        return [self.data[number * size : (number + 1) * size] for number in range(self.count)]


def section_blocks_of(block_bytes: int) -> int:
    return max(1, SECTION_BYTES // block_bytes)


def read_sign_key(path: Path | None) -> bytes | None:
    """Raises `ConfigError` for a file that cannot be read, or whose key is too short or too long."""
    if path is None:
        return None
    try:
        with path.open("rb") as file:
            key = file.read(_MAX_KEY_BYTES + 1).strip()
    except OSError as error:
        raise ConfigError(f"the key in {path} cannot be read: {error.strerror}") from error
    if not _MIN_KEY_BYTES <= len(key) <= _MAX_KEY_BYTES:
        raise ConfigError(f"{path} must hold a key of {_MIN_KEY_BYTES} to {_MAX_KEY_BYTES} bytes, not {len(key)}")
    return key


class _Seals:
    """The chain of seals: each covers the one before it."""

    def __init__(self, key: bytes | None) -> None:
        self._key = key
        self._last = _FIRST_SEAL
        self._digest = self._new()

    def _new(self) -> hmac.HMAC | hashlib._Hash:
        if self._key is None:
            return hashlib.sha256(self._last)
        return hmac.new(self._key, self._last, "sha256")

    def add(self, data: bytes | memoryview) -> None:
        self._digest.update(data)

    def next(self) -> bytes:
        self._last = self._digest.digest()
        self._digest = self._new()
        return self._last


class PackWriter:
    """Writes one pack: sections in order, then `finish`."""

    def __init__(
        self,
        file: ByteWriter,
        header: PackHeader,
        hashes: Sequence[BlockHash],
        text: bytes = b"",
        key: bytes | None = None,
    ) -> None:
        assert len(hashes) == header.num_blocks
        assert len(text) == header.text_bytes
        assert header.is_signed == (key is not None)
        self._file = file
        self._header = header
        self._hashes = hashes
        self._is_signed = key is not None
        self._seals = _Seals(key)
        self._num_written = 0
        encoded = msgspec.json.encode(header)
        if len(encoded) > _MAX_HEADER_BYTES:
            raise ConfigError("the fields of the namespace are too long for a pack")
        self._put(_HEAD.pack(_MAGIC, VERSION, len(encoded)) + encoded + b"".join(hashes) + text)
        self._write(self._seals.next())

    def write(self, data: memoryview) -> None:
        """Write the next section; `data` has its blocks back to back."""
        first, block_bytes = self._num_written, self._header.block_bytes
        count = len(data) // block_bytes
        assert len(data) == count * block_bytes
        checksums = checksums_of(self._header, self._hashes[first : first + count], data)
        self._put(_PART.pack(_SECTION, count, first) + checksums)
        if self._is_signed:
            self._seals.add(data)
        self._write(data)
        self._write(self._seals.next())
        self._num_written += count

    def finish(self) -> None:
        assert self._num_written == self._header.num_blocks
        self._put(_PART.pack(_END, 0, self._num_written))
        self._write(self._seals.next())

    def _put(self, data: bytes) -> None:
        self._seals.add(data)
        self._write(data)

    def _write(self, data: bytes | memoryview) -> None:
        left = memoryview(data)
        while left:
            left = left[self._file.write(left) :]


class PackReader:
    """Reads one pack, and returns only checked data. A damaged pack is refused with one sentence."""

    def __init__(self, file: ByteReader, name: str, key: bytes | None = None) -> None:
        """Read up to the blocks. `name` is for error messages. With a key, only a pack signed with it is accepted.

        Raises `ConfigError`, here and later.
        """
        self._file = file
        self._name = printable(name)
        self._has_key = key is not None
        self._seals = _Seals(key)
        self.header = self._read_header()
        joined = self._take(self.header.num_blocks * HASH_BYTES)
        self.hashes = split_hashes(joined)
        self.text = self._take(self.header.text_bytes)
        self._check_seal("its header")

    def sections(self, buffers: Sequence[bytearray] = ()) -> Iterator[Section]:
        """All blocks in order, each section verified. Reads sections into `buffers` in turn, or into a new buffer."""
        header = self.header
        size = min(header.section_blocks, header.num_blocks) * header.block_bytes
        views = [memoryview(one) for one in buffers] or [memoryview(bytearray(size))]
        first = number = 0
        while first < header.num_blocks:
            count = min(header.section_blocks, header.num_blocks - first)
            self._check_part(_SECTION, count, first)
            checksums = self._take(8 * count)
            data = views[number % len(views)][: count * header.block_bytes]
            self._fill(data)
            if header.is_signed and self._has_key:
                self._seals.add(data)
            self._check_seal(f"its blocks from {first} on")
            if checksums_of(header, self.hashes[first : first + count], data) != checksums:
                raise self._refused(f"is damaged: the checksums of blocks from {first} on do not match")
            yield Section(first, count, data, header.block_bytes)
            first += count
            number += 1
        self._check_part(_END, 0, header.num_blocks)
        self._check_seal("its end")
        rest = memoryview(bytearray(1))
        if self._file.readinto(rest):
            raise self._refused("is damaged: there are bytes behind its end")

    def _read_header(self) -> PackHeader:
        magic, version, length = _HEAD.unpack(self._take(_HEAD.size, "is not a pack: it is too short"))
        if magic != _MAGIC:
            raise self._refused("is not a pack")
        if version != VERSION:
            raise self._refused(f"is a pack of version {version}, but this kvtier reads version {VERSION}")
        if not 0 < length <= _MAX_HEADER_BYTES:
            raise self._refused("is damaged: its header has an impossible length")
        encoded = self._take(length)
        try:
            header = msgspec.json.decode(encoded, type=PackHeader)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise self._refused(f"is damaged: {printable(str(error))}") from error
        if header.is_signed and not self._has_key:
            raise self._refused("is signed: give the key that it was signed with")
        if self._has_key and not header.is_signed:
            raise self._refused("is not signed, but a key was given")
        return header

    def _check_part(self, kind: bytes, count: int, first: int) -> None:
        if _PART.unpack(self._take(_PART.size)) != (kind, count, first):
            raise self._refused(f"is damaged behind block {first}")

    def _check_seal(self, what: str) -> None:
        expected = self._seals.next()
        found = bytearray(_SEAL_BYTES)
        self._fill(memoryview(found))
        if not hmac.compare_digest(expected, bytes(found)):
            cause = "or another key has signed it" if self._has_key else "or was changed"
            raise self._refused(f"is damaged: {what} cannot be trusted, {cause}")

    def _take(self, count: int, sentence: str = "") -> bytes:
        taken = memoryview(bytearray(count))
        self._fill(taken, sentence)
        self._seals.add(taken)
        return bytes(taken)

    def _fill(self, into: memoryview, sentence: str = "") -> None:
        left = into
        while left:
            try:
                num_read = self._file.readinto(left)
            except OSError as error:
                raise self._refused(f"cannot be read: {error.strerror}") from error
            if not num_read:
                raise self._refused(sentence or "is cut off")
            left = left[num_read:]

    def _refused(self, sentence: str) -> ConfigError:
        return ConfigError(f"{self._name} {sentence}")


def checksums_of(header: PackHeader, hashes: Sequence[BlockHash], data: memoryview) -> bytes:
    """One u64 for each block."""
    namespace, size = header.namespace_bytes, header.block_bytes
    sums = [
        checksum_of(namespace, block_hash, data[number * size : (number + 1) * size])
        for number, block_hash in enumerate(hashes)
    ]
    return struct.pack(f"<{len(sums)}Q", *sums)
