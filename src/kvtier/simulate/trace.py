"""Traces of requests: their arrival, their lengths and the blocks of their prompts. Hashes only, never text.

A trace is a file of JSON lines, plain or compressed with gzip, in the form of Mooncake's traces::

    {"timestamp": 2500, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1, 2]}

`timestamp` is in milliseconds, `hash_ids` are the prompt's blocks from its beginning, and equal numbers mean equal
prefixes. A line may name its `session` as well, by a number or a text; other fields are ignored. Lines are read one
at a time, so a trace may be larger than memory.
"""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from kvtier.errors import ConfigError
from kvtier.observe.printable import printable

BLOCK_TOKENS = 512
"""Tokens in a block of Mooncake's traces."""
MAX_BLOCKS = 1 << 20
MAX_TOKENS = 1 << 30
MAX_LINE_BYTES = 32 << 20
MAX_SESSION_CHARS = 256
_MAX_TIMESTAMP_MS = 1e15
_GZIP_MAGIC = b"\x1f\x8b"

_Tokens = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]
_Hash = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """One request: `hashes` are its prompt's blocks, from the first; `arrived_s` counts from the trace's own zero."""

    arrived_s: float
    input_length: int
    output_length: int
    hashes: tuple[int, ...]
    session: str | None = None


class _Line(msgspec.Struct, frozen=True):
    timestamp: Annotated[float, msgspec.Meta(ge=0, le=_MAX_TIMESTAMP_MS)]
    input_length: _Tokens
    hash_ids: Annotated[tuple[_Hash, ...], msgspec.Meta(max_length=MAX_BLOCKS)]
    output_length: _Tokens = 0
    session: int | Annotated[str, msgspec.Meta(max_length=MAX_SESSION_CHARS)] | None = None


def read_traces(path: Path | str) -> Iterator[TracedRequest]:
    """The requests of a trace, in the order of its lines. Empty lines are skipped.

    Raises `ConfigError` for a file that cannot be read, and for the first line that is not a request.
    """
    path = Path(path)
    try:
        with _opened(path) as file:
            for number, line in enumerate(_lines_of(path, file), 1):
                if line.strip():
                    yield _request_of(path, number, line)
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"the trace {path} cannot be read: {printable(str(error))}") from error


def by_arrival(requests: Iterable[TracedRequest]) -> list[TracedRequest]:
    """All requests in the order of arrival; requests of the same instant keep their order."""
    return sorted(requests, key=lambda request: request.arrived_s)


def _opened(path: Path) -> io.BufferedIOBase:
    file = path.open("rb")
    try:
        is_gzip = file.peek(len(_GZIP_MAGIC)).startswith(_GZIP_MAGIC)
    except BaseException:
        file.close()
        raise
    if not is_gzip:
        return file
    file.close()
    return gzip.open(path, "rb")


def _lines_of(path: Path, file: io.BufferedIOBase) -> Iterator[bytes]:
    number = 0
    while line := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(line) > MAX_LINE_BYTES:
            raise ConfigError(f"line {number} of the trace {path} is longer than {MAX_LINE_BYTES} bytes")
        yield line


def _request_of(path: Path, number: int, line: bytes) -> TracedRequest:
    try:
        found = _DECODER.decode(line)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise ConfigError(f"line {number} of the trace {path} is not a request: {printable(str(error))}") from error
    session = None if found.session is None else str(found.session)
    return TracedRequest(found.timestamp / 1000, found.input_length, found.output_length, found.hash_ids, session)


_DECODER = msgspec.json.Decoder(_Line)
