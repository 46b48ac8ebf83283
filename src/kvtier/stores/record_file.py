"""`records.kvtier`: a header and a flat array of records, one for each block. Owns the file, not the meaning.

Separate from the payloads' file, so that a buffered write of a record never waits for direct writes of payloads. It
grows in steps and only ever shrinks on opening. A write that has returned is complete for any reader after the end of
this process. The owner makes sure that no two threads write one record at a time.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from kvtier.stores.files import Files, is_file_of
from kvtier.stores.records import (
    DAMAGED,
    FORMAT_VERSION,
    FREE_RECORD,
    HEADER_BYTES,
    RECORD_BYTES,
    BlockRecord,
    DamagedRecord,
    Header,
    decode_header,
    decode_records,
    encode_block,
    encode_header,
)

RECORDS_NAME = "records.kvtier"
SMALL_STEP_BYTES = 64 << 10
_LARGE_STEP_BYTES = 1 << 20
_LARGE_STORE_BYTES = 4 << 30
_PIECE_RECORDS = 1 << 14  # read at a time


def step_bytes_of(file_space: int) -> int:
    """The step by which the records of a store of this size grow."""
    return _LARGE_STEP_BYTES if file_space >= _LARGE_STORE_BYTES else SMALL_STEP_BYTES


class RecordFile:
    """Records by number, from 0."""

    def __init__(self, path: Path, files: Files) -> None:
        self._files = files
        self._path = path
        self._fd = files.open(path, os.O_RDWR | os.O_CREAT)
        self.nbytes = files.size(self._fd)
        self.num_missing = 0
        self.has_header = False
        self.key_check = b""
        """As in the header, and in the next header that is written."""

    @property
    def num_records(self) -> int:
        return max(0, self.nbytes - HEADER_BYTES) // RECORD_BYTES

    def read(self) -> tuple[dict[int, BlockRecord], list[int]]:
        """The records by number, and the numbers of damaged ones. Logs what is missing from the file."""
        header = self._read_header()
        self.has_header = header is not None
        if header is not None:
            self.num_missing = max(0, header.num_records - self.num_records)
            self.key_check = header.key_check
        found: dict[int, BlockRecord] = {}
        damaged: list[int] = []
        raw = bytearray(min(self.num_records, _PIECE_RECORDS) * RECORD_BYTES)
        end = 0
        while True:
            # Holes are skipped, so that a file that was made huge opens as fast as any other.
            data = self._files.next_data(self._fd, HEADER_BYTES + end * RECORD_BYTES)
            first = (data - HEADER_BYTES) // RECORD_BYTES
            if first >= self.num_records:
                break
            end = first + _PIECE_RECORDS
            length = self._files.read_into(self._fd, [memoryview(raw)], HEADER_BYTES + first * RECORD_BYTES)
            piece = memoryview(raw)[: length // RECORD_BYTES * RECORD_BYTES]
            for number, record in enumerate(decode_records(piece, first), first):
                if record is DAMAGED:
                    damaged.append(number)
                elif record is not None:
                    assert not isinstance(record, DamagedRecord)
                    found[number] = record
        return found, damaged

    def repair(self) -> None:
        """Make header and size correct, whatever they were."""
        self.cut(HEADER_BYTES + self.num_records * RECORD_BYTES)
        self._write_header(self.num_records)
        self.nbytes = max(self.nbytes, HEADER_BYTES)

    def write(self, records: Iterable[tuple[int, BlockRecord]]) -> None:
        """Write records, adjacent ones in one call. If it fails, some of them may be written."""
        self._write_raw(sorted((number, encode_block(record, number)) for number, record in records))

    def wipe(self, numbers: Iterable[int]) -> None:
        self._write_raw([(number, FREE_RECORD) for number in sorted(numbers)])

    def grow(self, nbytes: int) -> range:
        """Add empty records; returns their numbers. Raises `OSError` if there is no room; nothing is added then."""
        self._files.allocate(self._fd, self.nbytes, nbytes)
        first = self.num_records
        last = first + nbytes // RECORD_BYTES
        self._write_header(last)
        self.nbytes += nbytes
        return range(first, last)

    def cut(self, nbytes: int) -> None:
        """Make the file no larger than this."""
        if self.nbytes > nbytes:
            self.nbytes = nbytes
            self._write_header(self.num_records)
            self._files.truncate(self._fd, nbytes)

    def cut_free(self, first_free: int, num_records: int) -> None:
        """Remove free records from `first_free` on, beyond `num_records` in total."""
        self.cut(HEADER_BYTES + max(first_free, num_records) * RECORD_BYTES)

    def is_in_place(self) -> bool:
        """Whether the open file is still the one in the folder."""
        return is_file_of(self._fd, self._path)

    def sync(self) -> None:
        self._files.sync(self._fd)

    def close(self) -> None:
        self._files.close(self._fd)

    def _read_header(self) -> Header | None:
        raw = bytearray(HEADER_BYTES)
        length = self._files.read_into(self._fd, [memoryview(raw)], 0)
        return decode_header(bytes(raw[:length]))

    def _write_header(self, num_records: int) -> None:
        self._files.write(self._fd, [encode_header(Header(FORMAT_VERSION, num_records, self.key_check))], 0)

    def _write_raw(self, records: Sequence[tuple[int, bytes]]) -> None:
        first = 0
        for end in range(1, len(records) + 1):
            if end == len(records) or records[end][0] != records[end - 1][0] + 1:
                run = b"".join(raw for _, raw in records[first:end])
                self._files.write(self._fd, [run], HEADER_BYTES + records[first][0] * RECORD_BYTES)
                first = end


def read_version(path: Path, files: Files) -> int | None:
    """The format version of a record file; None if there is none or its header is damaged."""
    if not path.exists():
        return None
    fd = files.open(path, os.O_RDONLY)
    try:
        raw = bytearray(HEADER_BYTES)
        length = files.read_into(fd, [memoryview(raw)], 0)
        header = decode_header(bytes(raw[:length]))
        return None if header is None else header.version
    finally:
        files.close(fd)
