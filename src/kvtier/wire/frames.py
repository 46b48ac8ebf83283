"""Frames: how a byte stream is cut into messages and block payloads. Owns no socket and no payload memory.

    magic u32 | version u16 | zero u16 | request u32 | body bytes u32 | payload bytes u64 | body | payload

The body is one msgpack message; the payload is raw block bytes, so that a sender gathers it from an arena and a
receiver scatters it into one with no copy in between. All numbers are little-endian.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvtier.errors import RemoteProtocolError
from kvtier.memory.aead import TAG_BYTES
from kvtier.sizes import format_size
from kvtier.wire.cipher import PIECE_BYTES, Seal

MAGIC = 0x7469_766B  # "kvit" in the stream
VERSION = 3
_HEADER = struct.Struct("<IHHIIQ")
HEADER_BYTES = _HEADER.size

BufferList = list[memoryview]
_Message = TypeVar("_Message")


@dataclass(frozen=True, slots=True)
class FrameLimits:
    """The largest body and payload that a receiver accepts."""

    body_bytes: int
    payload_bytes: int


HANDSHAKE_LIMITS = FrameLimits(body_bytes=4096, payload_bytes=0)
MAX_BODY_BYTES = 16 << 20
MAX_HASHES = MAX_BODY_BYTES // 32 - 32
"""Limit on the hashes in one message: a prompt of eight million tokens."""
FIRST_BODY_BYTES = 256 << 10
"""Memory for the first part of a body; more follows once this much has arrived."""


@dataclass(frozen=True, slots=True)
class Frame(Generic[_Message]):
    request: int
    message: _Message
    payload_bytes: int


def encode_frame(request: int, body: bytes, payload_bytes: int = 0) -> bytes:
    """Header and body; the caller sends `payload_bytes` of payload right after."""
    return _HEADER.pack(MAGIC, VERSION, 0, request, len(body), payload_bytes) + body


def sealed_frame(seal: Seal, request: int, body: bytes, payload: Sequence[memoryview]) -> BufferList:
    """A frame for an encrypted connection: sizes in the header are those of the plaintext."""
    header = _HEADER.pack(MAGIC, VERSION, 0, request, len(body), sum(map(len, payload)))
    pieces = [memoryview(header), memoryview(seal.seal(body, header))]
    for view in payload:
        for first in range(0, len(view), PIECE_BYTES):
            pieces.append(memoryview(seal.seal(view[first : first + PIECE_BYTES], header)))
    return pieces


class FrameReader(Generic[_Message]):
    """Turns a byte stream into frames.

    Fill the buffers of `want()` in order (``recvmsg_into`` does so without a copy), report the count to `advance()`,
    and get the frame back once all of it has arrived. `place` is called once per payload, with the decoded message, and
    returns where its bytes go: views that together hold exactly the payload. `taste` is called with each piece of it as
    it arrives, in order, and with whether it ends a view: a checksum over it finds the bytes in the CPU's cache.
    `admit` is called with the size of a body of more than `FIRST_BODY_BYTES` before memory for the rest is taken. After
    any error, the stream is unusable.
    """

    def __init__(
        self,
        decode: Callable[[bytes | bytearray], _Message],
        place: Callable[[int, _Message, int], BufferList],
        limits: FrameLimits,
        taste: Callable[[memoryview, bool], None] = lambda piece, is_end: None,
        admit: Callable[[int], None] = lambda nbytes: None,
    ) -> None:
        self.limits = limits
        self._decode = decode
        self._place = place
        self._taste = taste
        self._admit = admit
        self._raw_header = bytearray(HEADER_BYTES)
        self._raw_body = self._piece = bytearray()
        self._frame: Frame[_Message] | None = None
        self._places: list[tuple[memoryview, bool]] = []
        self.seal: Seal | None = None
        """The seal of frames that arrive from now on."""
        self._start()

    def want(self) -> BufferList:
        return self._left

    @property
    def is_between_frames(self) -> bool:
        """No byte of the next frame has arrived yet."""
        return self._stage == self._end_of_header and len(self._left[0]) == HEADER_BYTES

    def drop(self) -> None:
        """Release all memory: the body's, and the views of a payload in progress. The reader is then finished."""
        self._left.clear()
        self._places.clear()
        self._raw_body = self._piece = bytearray()
        self._frame = None

    def advance(self, nbytes: int) -> Frame[_Message] | None:
        left = self._left
        is_payload = self._stage == self._end_of_payload and self.seal is None
        done = 0
        while done < len(left) and nbytes >= len(left[done]):
            if is_payload:
                self._taste(left[done], True)
            nbytes -= len(left[done])
            done += 1
        if done:
            del left[:done]
        if left:
            if nbytes:
                if is_payload:
                    self._taste(left[0][:nbytes], False)
                left[0] = left[0][nbytes:]
            return None
        return self._stage()

    def _start(self) -> None:
        self._stage: Callable[[], Frame[_Message] | None] = self._end_of_header
        self._left: BufferList = [memoryview(self._raw_header)]

    def _end_of_header(self) -> None:
        magic, version, zero, request, body_bytes, payload_bytes = _HEADER.unpack(self._raw_header)
        if magic != MAGIC or zero != 0:
            raise RemoteProtocolError("the peer does not speak kvtier's protocol (bad magic)")
        if version != VERSION:
            raise RemoteProtocolError(f"the peer speaks version {version} of the protocol; this is version {VERSION}")
        limits = self.limits
        if body_bytes > limits.body_bytes or payload_bytes > limits.payload_bytes:
            raise RemoteProtocolError(
                f"a frame of {format_size(body_bytes)} body and {format_size(payload_bytes)} payload is over the limit "
                f"of {format_size(limits.body_bytes)} and {format_size(limits.payload_bytes)}"
            )
        if body_bytes == 0:
            raise RemoteProtocolError("a frame without a body")
        self._request = request
        self._payload_bytes = payload_bytes
        self._body_bytes = body_bytes if self.seal is None else body_bytes + TAG_BYTES
        self._raw_body = bytearray(min(self._body_bytes, FIRST_BODY_BYTES))
        self._stage = self._end_of_body
        self._left = [memoryview(self._raw_body)]

    def _grow_body(self) -> None:
        """Allow twice as much as has arrived: promising a large body is not enough to take memory for it."""
        done = len(self._raw_body)
        if done == FIRST_BODY_BYTES:
            self._admit(self._body_bytes)
        grown = bytearray(min(2 * done, self._body_bytes))
        grown[:done] = self._raw_body
        self._raw_body = grown
        self._left = [memoryview(grown)[done:]]

    def _end_of_body(self) -> Frame[_Message] | None:
        if len(self._raw_body) < self._body_bytes:
            self._grow_body()
            return None
        body = self._raw_body
        if self.seal is not None:
            body = bytearray(len(body) - TAG_BYTES)
            self.seal.open(self._raw_body, bytes(self._raw_header), memoryview(body))
        message = self._decode(body)
        self._raw_body = bytearray()
        self._frame = Frame(self._request, message, self._payload_bytes)
        if not self._payload_bytes:
            return self._end_of_payload()
        views = [view for view in self._place(self._request, message, self._payload_bytes) if len(view)]
        assert sum(map(len, views)) == self._payload_bytes, "place() must hold exactly the payload"
        self._stage = self._end_of_payload
        self._left = views
        if self.seal is not None:
            self._begin_sealed(views)
        return None

    def _begin_sealed(self, views: BufferList) -> None:
        """Receive a payload piece by piece, and open each into its place."""
        self._places = [
            (view[first : first + PIECE_BYTES], first + PIECE_BYTES >= len(view))
            for view in reversed(views)
            for first in reversed(range(0, len(view), PIECE_BYTES))
        ]
        self._next_piece()
        self._stage = self._end_of_piece

    def _next_piece(self) -> None:
        self._piece = bytearray(len(self._places[-1][0]) + TAG_BYTES)
        self._left = [memoryview(self._piece)]

    def _end_of_piece(self) -> Frame[_Message] | None:
        assert self.seal is not None
        place, is_end = self._places.pop()
        self.seal.open(self._piece, bytes(self._raw_header), place)
        self._taste(place, is_end)
        if self._places:
            self._next_piece()
            return None
        return self._end_of_payload()

    def _end_of_payload(self) -> Frame[_Message]:
        frame, self._frame = self._frame, None  # an idle connection keeps nothing of its last request
        self._piece = bytearray()
        assert frame is not None
        self._start()
        return frame
