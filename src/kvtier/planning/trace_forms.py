"""Reads published traces in several forms.

- Mooncake's form, and ours, which adds a `session`: `kvtier.simulate.trace`. Some tools write `session_id`.
- Qwen-Bailian's form: seconds, blocks of 16 tokens, and `parent_chat_id`, which leads to a session's first turn.
"""

from __future__ import annotations

import gzip
import hashlib
import itertools
import zlib
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Annotated, TypeVar, cast

import msgspec

from kvtier.errors import ConfigError
from kvtier.observe.printable import printable
from kvtier.simulate.trace import BLOCK_TOKENS, MAX_BLOCKS, MAX_LINE_BYTES, MAX_SESSION_CHARS, MAX_TOKENS, TracedRequest

FORMS = ("mooncake", "bailian")
BAILIAN_BLOCK_TOKENS = 16
_MAX_CHATS = 1 << 20
"""Most chats to remember the sessions of; the oldest are forgotten."""
_MAX_TIMESTAMP = 1e15
_GZIP_MAGIC = b"\x1f\x8b"
_HASH_BITS = (1 << 63) - 1

_Tokens = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]
_Timestamp = Annotated[float, msgspec.Meta(ge=0, le=_MAX_TIMESTAMP)]
_Hashes = Annotated[tuple[Annotated[int, msgspec.Meta(ge=0)], ...], msgspec.Meta(max_length=MAX_BLOCKS)]
_Name = int | Annotated[str, msgspec.Meta(max_length=MAX_SESSION_CHARS)]


_Line = TypeVar("_Line")


class _Mooncake(msgspec.Struct, frozen=True):
    timestamp: _Timestamp
    input_length: _Tokens
    hash_ids: _Hashes
    output_length: _Tokens = 0
    session: _Name | None = None
    session_id: _Name | None = None


class _Bailian(msgspec.Struct, frozen=True):
    timestamp: _Timestamp
    input_length: _Tokens
    hash_ids: _Hashes
    chat_id: _Name
    output_length: _Tokens = 0
    parent_chat_id: _Name = -1


class _Sessions:
    """Finds the first chat of a session by any of its chats."""

    def __init__(self) -> None:
        self._roots: OrderedDict[str, str] = OrderedDict()

    def root_of(self, chat: str, parent: str) -> str:
        root = self._roots.get(parent, chat if parent == "-1" else parent)
        self._roots[chat] = root
        if len(self._roots) > _MAX_CHATS:
            self._roots.popitem(last=False)
        return root


def form_of(path: Path) -> str:
    """The one of `FORMS` that the first line of a trace has. Raises `ConfigError` for a file without one."""
    _, line = next(_lines_of(path), (0, b""))
    if not line:
        raise ConfigError(f"the trace {path} is empty")
    try:
        fields = msgspec.json.decode(line, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise ConfigError(f"the trace {path} is not a file of JSON lines: {printable(str(error))}") from error
    if "hash_ids" not in fields:
        raise ConfigError(f"the trace {path} has no hash_ids: without blocks its prefixes are unknown")
    return "bailian" if "chat_id" in fields else "mooncake"


def read_form(path: Path, form: str) -> Iterator[TracedRequest]:
    """The requests of a trace of this form, line by line.

    Raises `ConfigError` for a file that cannot be read, and for the first line that is not a request.
    """
    return _read_bailian(path) if form == "bailian" else _read_mooncake(path)


def block_tokens_of(form: str) -> int:
    return BAILIAN_BLOCK_TOKENS if form == "bailian" else BLOCK_TOKENS


def coarsened(request: TracedRequest, factor: int) -> TracedRequest:
    """The same request with blocks `factor` times as large; a remainder at the end is one smaller block.

    A block's number is a digest of all blocks up to its end, so equal numbers still mean equal prefixes.
    """
    if factor == 1:
        return request
    hashes = []
    digest = hashlib.blake2b(digest_size=8)
    for first in range(0, len(request.hashes), factor):
        part = request.hashes[first : first + factor]
        digest.update(b"".join(number.to_bytes(8, "little") for number in part))
        hashes.append(int.from_bytes(digest.digest(), "little") & _HASH_BITS)
    return TracedRequest(request.arrived_s, request.input_length, request.output_length, tuple(hashes), request.session)


def _read_mooncake(path: Path) -> Iterator[TracedRequest]:
    decoder = msgspec.json.Decoder(_Mooncake)
    for number, line in _lines_of(path):
        found = _decoded(decoder, path, number, line)
        session = found.session_id if found.session is None else found.session
        yield _request(found, found.timestamp / 1000, None if session is None else str(session))


def _read_bailian(path: Path) -> Iterator[TracedRequest]:
    decoder = msgspec.json.Decoder(_Bailian)
    sessions = _Sessions()
    for number, line in _lines_of(path):
        found = _decoded(decoder, path, number, line)
        yield _request(found, found.timestamp, sessions.root_of(str(found.chat_id), str(found.parent_chat_id)))


def _decoded(decoder: msgspec.json.Decoder[_Line], path: Path, number: int, line: bytes) -> _Line:
    try:
        return decoder.decode(line)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise ConfigError(f"line {number} of the trace {path} is not a request: {printable(str(error))}") from error


def _request(found: _Mooncake | _Bailian, arrived_s: float, session: str | None) -> TracedRequest:
    hashes = tuple(number & _HASH_BITS for number in found.hash_ids)
    return TracedRequest(arrived_s, found.input_length, found.output_length, hashes, session)


def _lines_of(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines that are not empty, with their numbers."""
    try:
        with path.open("rb") as raw:
            file = cast("IO[bytes]", gzip.GzipFile(fileobj=raw)) if _is_gzip(raw) else raw
            for number in itertools.count(1):
                line = file.readline(MAX_LINE_BYTES + 1)
                if not line:
                    return
                if len(line) > MAX_LINE_BYTES:
                    raise ConfigError(f"line {number} of the trace {path} is longer than {MAX_LINE_BYTES} bytes")
                if line.strip():
                    yield number, line
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"the trace {path} cannot be read: {printable(str(error))}") from error


def _is_gzip(file: IO[bytes]) -> bool:
    begin = file.read(len(_GZIP_MAGIC))
    file.seek(0)
    return begin == _GZIP_MAGIC
