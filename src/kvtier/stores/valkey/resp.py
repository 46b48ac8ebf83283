"""RESP3, the protocol of Valkey and Redis, without a socket: commands as bytes, replies from what arrives.

A payload is received where it belongs: only what shares a read with its ends is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias, Union

from kvtier.errors import RemoteProtocolError

_BUFFER_BYTES = 16 << 10
_MAX_LINE_BYTES = 8 << 10
_MAX_TEXT_BYTES = 16 << 20
_MAX_SKIPPED_BYTES = 1 << 30
_MAX_ITEMS = 1 << 20
_MAX_DEPTH = 8
_SCRATCH_BYTES = 1 << 20

_INTEGERS = b":("
_LINES = b"+,#"
_BULKS = b"$=!"
_LISTS = b"*~>%"


@dataclass(frozen=True, slots=True)
class ReplyError:
    """A command was refused. `code` is the first word: MOVED, OOM, NOPERM."""

    code: str
    sentence: str


Reply: TypeAlias = Union[int, bytes, ReplyError, list["Reply"], None]  # noqa: UP007


def command(*words: bytes) -> bytes:
    """A whole command."""
    parts = [b"*%d\r\n" % len(words)]
    parts += [b"$%d\r\n%b\r\n" % (len(word), word) for word in words]
    return b"".join(parts)


def command_around(words: Sequence[bytes], payload_bytes: int, after: Sequence[bytes]) -> tuple[bytes, bytes]:
    """The bytes before and after a word of `payload_bytes` in the middle of a command."""
    before = [b"*%d\r\n" % (len(words) + 1 + len(after))]
    before += [b"$%d\r\n%b\r\n" % (len(word), word) for word in words]
    before.append(b"$%d\r\n" % payload_bytes)
    behind = [b"\r\n"]
    behind += [b"$%d\r\n%b\r\n" % (len(word), word) for word in after]
    return b"".join(before), b"".join(behind)


class ReplyReader:
    """Reads replies in order. `receive` fills buffers in their order and returns how many bytes came, at least one.

    Whatever does not follow the protocol, or its bounds, raises `RemoteProtocolError`: the stream is lost then.
    """

    def __init__(self, receive: Callable[[list[memoryview]], int]) -> None:
        self._receive = receive
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._first = 0
        self._end = 0

    @property
    def has_more(self) -> bool:
        """Bytes have arrived that no reply was read from."""
        return self._first < self._end

    def read(self, into: Sequence[memoryview] | None = None, *, longest: int | None = None) -> Reply:
        """The next reply. A bulk goes `into` the views, if it fills them, and counts as its size.

        One of another size is skipped, and counts as its size, too; so is one of more than `longest` bytes without
        views. Whatever the server pushes is skipped.
        """
        while True:
            kind, rest = self._line()
            if kind != ord(">"):
                return self._value(kind, rest, into, 0, longest)
            self._items(rest, 0, 1)

    def _value(
        self, kind: int, rest: bytes, into: Sequence[memoryview] | None, depth: int, longest: int | None = None
    ) -> Reply:
        if kind in _INTEGERS:
            return _number(rest)
        if kind == ord("_"):
            return None
        if kind in _LINES:
            return rest
        if kind == ord("-"):
            return _error(rest)
        if kind in _BULKS:
            size = _number(rest)
            if size == -1:  # as RESP2 says that there is nothing
                return None
            if kind == ord("!"):
                return _error(self._text(size))
            if into is None and (longest is None or size <= longest):
                return self._text(size)
            return self._place(size, into or ())
        if kind in _LISTS:
            return self._items(rest, depth, 2 if kind == ord("%") else 1)
        raise RemoteProtocolError(f"a reply begins with the byte {kind}")

    def _items(self, rest: bytes, depth: int, per_item: int) -> Reply:
        count = _number(rest)
        if count == -1:
            return None
        if not 0 <= count * per_item <= _MAX_ITEMS or depth == _MAX_DEPTH:
            raise RemoteProtocolError("a reply has too many parts")
        return [self._value(*self._line(), None, depth + 1) for _ in range(count * per_item)]

    def _line(self) -> tuple[int, bytes]:
        """Its first byte and the rest."""
        num_searched = 0
        while True:
            found = bytes(self._buffer[self._first + num_searched : self._end]).find(b"\r\n")
            if found >= 0:
                break
            num_searched = max(0, self._end - self._first - 1)
            if num_searched > _MAX_LINE_BYTES:
                raise RemoteProtocolError("a line of a reply is too long")
            self._fill()
        end = self._first + num_searched + found
        line = bytes(self._buffer[self._first : end])
        self._first = end + 2
        if not line:
            raise RemoteProtocolError("an empty line in place of a reply")
        return line[0], line[1:]

    def _fill(self) -> None:
        """Receive more behind what is there."""
        if self._end == len(self._buffer):
            kept = bytes(self._buffer[self._first : self._end])
            self._buffer[: len(kept)] = kept
            self._first, self._end = 0, len(kept)
        self._end += self._receive([self._buffer[self._end :]])

    def _text(self, size: int) -> bytes:
        if not 0 <= size <= _MAX_TEXT_BYTES:
            raise RemoteProtocolError(f"a reply of {size} bytes")
        text = bytearray(min(size, _SCRATCH_BYTES))
        done = 0
        while done < size:  # memory for what has arrived, not for what was promised
            if done == len(text):
                text += bytes(min(done, size - done))
            with memoryview(text) as whole:
                self._fill_views([whole[done:]])
            done = len(text)
        self._end_of_bulk()
        return bytes(text)

    def _place(self, size: int, into: Sequence[memoryview]) -> int:
        if size == sum(map(len, into)):
            self._fill_views(into)
        else:
            if not 0 <= size <= _MAX_SKIPPED_BYTES:
                raise RemoteProtocolError(f"a reply of {size} bytes")
            scratch = memoryview(bytearray(min(size, _SCRATCH_BYTES)))
            left = size
            while left:
                part = scratch[: min(left, len(scratch))]
                self._fill_views([part])
                left -= len(part)
        self._end_of_bulk()
        return size

    def _fill_views(self, views: Sequence[memoryview]) -> None:
        left = [view for view in views if len(view)]
        while left and self.has_more:
            count = min(len(left[0]), self._end - self._first)
            left[0][:count] = self._buffer[self._first : self._first + count]
            self._first += count
            left[0] = left[0][count:]
            if not len(left[0]):
                left.pop(0)
        if not left:
            return
        self._first = self._end = 0
        while left:
            count = self._receive([*left, self._buffer])
            while left and count >= len(left[0]):
                count -= len(left.pop(0))
            if left:
                left[0] = left[0][count:]
            else:
                self._end = count

    def _end_of_bulk(self) -> None:
        while self._end - self._first < 2:
            self._fill()
        if bytes(self._buffer[self._first : self._first + 2]) != b"\r\n":
            raise RemoteProtocolError("a reply does not end where it said")
        self._first += 2


def _number(text: bytes) -> int:
    digits = text[1:] if text[:1] in (b"-", b"+") else text
    if not digits.isdigit() or len(digits) > 20:
        raise RemoteProtocolError("a reply has no number where there must be one")
    return int(text)


def _error(text: bytes) -> ReplyError:
    sentence = text.decode(errors="replace")
    return ReplyError(sentence.partition(" ")[0], sentence)
