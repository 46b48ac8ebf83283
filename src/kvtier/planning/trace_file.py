"""Writing a trace: JSON lines in the form that `kvtier.simulate.trace` reads, within a bound, compressed by name."""

from __future__ import annotations

import contextlib
import gzip
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import msgspec

from kvtier.errors import ConfigError
from kvtier.observe.printable import printable
from kvtier.simulate.trace import TracedRequest

_encoder = msgspec.json.Encoder()


class _Sink(Protocol):
    def write(self, data: bytes, /) -> int: ...


class TraceFile:
    """Writes requests to `sink` as lines, at most `max_bytes` of them before compression."""

    def __init__(self, sink: _Sink, max_bytes: int) -> None:
        self._sink = sink
        self._bytes_left = max_bytes
        self.num_requests = 0
        self.is_full = False

    def add(self, request: TracedRequest) -> bool:
        """Write a request. False if the file has no room for it; then it takes no more requests."""
        line = _line_of(request)
        if self.is_full or len(line) > self._bytes_left:
            self.is_full = True
            return False
        self._sink.write(line)
        self._bytes_left -= len(line)
        self.num_requests += 1
        return True


@contextlib.contextmanager
def new_trace(path: Path, max_bytes: int) -> Iterator[TraceFile]:
    """A new file, private to this user, compressed if its name ends in `.gz`. Never overwrites an existing file.

    However the block ends, the file has all added requests in whole lines. Raises `ConfigError` if it cannot be made.
    """
    try:
        file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb")
    except FileExistsError as error:
        raise ConfigError(f"{path} already exists: choose another file, or remove it first") from error
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(file)
            sink: _Sink = file
            if path.suffix == ".gz":
                sink = stack.enter_context(gzip.GzipFile(fileobj=file, mode="wb", mtime=0))
            yield TraceFile(sink, max_bytes)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {printable(error.strerror or str(error))}") from error


def _line_of(request: TracedRequest) -> bytes:
    fields: dict[str, object] = {
        "timestamp": round(request.arrived_s * 1000),
        "input_length": request.input_length,
        "output_length": request.output_length,
        "hash_ids": request.hashes,
    }
    if request.session is not None:
        fields["session"] = request.session
    return _encoder.encode(fields) + b"\n"
