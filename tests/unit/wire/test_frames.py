"""Frames: any cut of the byte stream gives the same frames; what is wrong is refused before it is read."""

from __future__ import annotations

import struct
import tracemalloc
import weakref
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import RemoteProtocolError
from kvtier.wire.frames import (
    FIRST_BODY_BYTES,
    HANDSHAKE_LIMITS,
    HEADER_BYTES,
    MAGIC,
    MAX_BODY_BYTES,
    MAX_HASHES,
    VERSION,
    BufferList,
    Frame,
    FrameLimits,
    FrameReader,
    encode_frame,
)
from kvtier.wire.messages import MatchRequest, ReserveRequest, encode

LIMITS = FrameLimits(body_bytes=64, payload_bytes=256)


class Receiver:
    """A reader over plain bytes as messages, with its payloads scattered over views of `widths` bytes."""

    def __init__(self, limits: FrameLimits = LIMITS, widths: tuple[int, ...] = ()) -> None:
        self.reader: FrameReader[bytes] = FrameReader(bytes, self._place, limits)
        self.frames: list[Frame[bytes]] = []
        self.payloads: list[bytearray] = []
        self.placed: list[tuple[int, bytes, int]] = []
        self._widths = widths

    def feed(self, stream: bytes) -> None:
        """As `recvmsg_into` would: fill the wanted buffers in order, then report the count."""
        while stream:
            done = 0
            for view in self.reader.want():
                part = stream[done : done + len(view)]
                view[: len(part)] = part
                done += len(part)
            stream = stream[done:]
            frame = self.reader.advance(done)
            if frame is not None:
                self.frames.append(frame)

    def _place(self, request: int, message: bytes, payload_bytes: int) -> BufferList:
        self.placed.append((request, message, payload_bytes))
        self.payloads.append(bytearray(payload_bytes))
        left = memoryview(self.payloads[-1])
        views = []
        for width in self._widths:
            views.append(left[:width])
            left = left[width:]
        return [*views, left]


def header(
    *, magic: int = MAGIC, version: int = VERSION, zero: int = 0, request: int = 1, body: int = 1, payload: int = 0
) -> bytes:
    return struct.pack("<IHHIIQ", magic, version, zero, request, body, payload)


sent_frames = st.lists(
    st.tuples(st.integers(0, 2**32 - 1), st.binary(min_size=1, max_size=64), st.binary(max_size=256)), max_size=5
)


@given(sent_frames, st.data())
def test_any_cut_of_the_stream_gives_the_same_frames(sent: list[tuple[int, bytes, bytes]], data: st.DataObject) -> None:
    stream = b"".join(encode_frame(request, body, len(payload)) + payload for request, body, payload in sent)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=12)))
    receiver = Receiver(widths=tuple(data.draw(st.lists(st.integers(0, 90), max_size=4))))

    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        receiver.feed(stream[start:end])

    assert receiver.frames == [Frame(request, body, len(payload)) for request, body, payload in sent]
    assert receiver.payloads == [payload for _, _, payload in sent if payload]


def test_a_stream_of_single_bytes_gives_the_same_frames() -> None:
    receiver = Receiver(widths=(3, 0, 2))
    for byte in encode_frame(7, b"body", 9) + b"123456789" + encode_frame(8, b"next"):
        receiver.feed(bytes([byte]))

    assert receiver.frames == [Frame(7, b"body", 9), Frame(8, b"next", 0)]
    assert receiver.payloads == [b"123456789"]


def test_a_frame_has_the_bytes_it_is_documented_to_have() -> None:
    assert (
        encode_frame(0x01020304, b"ab", 5)
        == b"kvit" + bytes.fromhex("0300 0000 04030201 02000000 0500000000000000") + b"ab"
    )


def test_a_payload_is_scattered_over_the_views_in_order() -> None:
    receiver = Receiver()
    parts = [bytearray(2), bytearray(0), bytearray(3)]
    reader: FrameReader[bytes] = FrameReader(bytes, lambda *_: [memoryview(part) for part in parts], LIMITS)
    receiver.reader = reader

    receiver.feed(encode_frame(1, b"b", 5) + b"12345")

    assert parts == [b"12", b"", b"345"]


def test_a_place_is_asked_for_once_with_the_message_before_any_payload() -> None:
    receiver = Receiver()
    receiver.feed(encode_frame(3, b"body", 4))

    assert receiver.placed == [(3, b"body", 4)]
    assert receiver.frames == []
    receiver.feed(b"1234")
    assert receiver.placed == [(3, b"body", 4)]
    assert len(receiver.frames) == 1


def test_a_frame_without_payload_asks_for_no_place() -> None:
    receiver = Receiver()
    receiver.feed(encode_frame(3, b"body"))

    assert receiver.placed == []


@pytest.mark.parametrize("num_bytes", [1, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 2, HEADER_BYTES + 5])
def test_a_reader_knows_that_it_is_inside_a_frame(num_bytes: int) -> None:
    receiver = Receiver()
    receiver.feed((encode_frame(1, b"body", 3) + b"123")[:num_bytes])

    assert not receiver.reader.is_between_frames


@pytest.mark.parametrize(
    "stream", [b"", encode_frame(1, b"body"), encode_frame(1, b"b", 3) + b"123"], ids=["start", "body", "payload"]
)
def test_a_reader_knows_that_it_is_between_frames(stream: bytes) -> None:
    receiver = Receiver()
    receiver.feed(stream)

    assert receiver.reader.is_between_frames


@pytest.mark.parametrize(
    ("raw", "sentence"),
    [
        (header(magic=0x5054_5448), "bad magic"),
        (b"GET / HTTP/1.1\r\nHost: here\r\n\r\n"[:HEADER_BYTES], "bad magic"),
        (header(zero=1), "bad magic"),
        (header(version=1), "speaks version 1 of the protocol; this is version 3"),
        (header(version=0), "speaks version 0"),
        (header(body=0), "without a body"),
        (header(body=65), "over the limit"),
        (header(payload=257), "over the limit"),
        (header(body=2**32 - 1, payload=2**64 - 1), "over the limit"),
    ],
)
def test_a_wrong_header_is_refused_before_anything_more_is_read(raw: bytes, sentence: str) -> None:
    with pytest.raises(RemoteProtocolError, match=sentence):
        Receiver().feed(raw)


def test_a_frame_at_its_limits_is_taken() -> None:
    receiver = Receiver()
    receiver.feed(encode_frame(1, bytes(64), 256) + bytes(256))

    assert len(receiver.frames) == 1


def test_limits_may_grow_between_frames() -> None:
    receiver = Receiver(limits=HANDSHAKE_LIMITS)
    receiver.feed(encode_frame(1, b"hello"))
    receiver.reader.limits = LIMITS
    receiver.feed(encode_frame(2, b"b", 3) + b"123")

    assert [frame.request for frame in receiver.frames] == [1, 2]


def test_a_handshake_takes_no_payload() -> None:
    with pytest.raises(RemoteProtocolError, match="over the limit"):
        Receiver(limits=HANDSHAKE_LIMITS).feed(encode_frame(1, b"b", 1))


def test_the_most_hashes_a_message_may_hold_fit_into_a_body() -> None:
    hashes = bytes(32 * MAX_HASHES)
    assert len(encode(MatchRequest(2**63, hashes, 2**63, True))) <= MAX_BODY_BYTES
    assert len(encode(ReserveRequest(2**63, hashes, 2**63))) <= MAX_BODY_BYTES


# --- memory -----------------------------------------------------------------------------------------------------------

LARGE = FrameLimits(body_bytes=MAX_BODY_BYTES, payload_bytes=256)
LARGE_BYTES = 16 * FIRST_BODY_BYTES + 1


@pytest.fixture
def traced() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


class Text:
    """A message whose end shows."""

    def __init__(self, body: bytes | bytearray) -> None:
        self.body = bytes(body)


def test_a_large_body_is_whole_however_it_arrives() -> None:
    body = bytes(range(256)) * (LARGE_BYTES // 256) + b"x"
    stream = encode_frame(1, body, 3) + b"123" + encode_frame(2, b"next")
    for step in (len(stream), FIRST_BODY_BYTES, FIRST_BODY_BYTES + HEADER_BYTES, 99_991):
        receiver = Receiver(LARGE)
        for first in range(0, len(stream), step):
            receiver.feed(stream[first : first + step])
        assert receiver.frames == [Frame(1, body, 3), Frame(2, b"next", 0)]


def test_a_body_that_is_only_promised_takes_no_memory(traced: None) -> None:
    receiver = Receiver(LARGE)
    receiver.feed(header(body=MAX_BODY_BYTES))
    receiver.feed(bytes(1000))

    assert tracemalloc.get_traced_memory()[0] < 2 * FIRST_BODY_BYTES


def test_a_large_body_is_admitted_once_before_it_takes_memory() -> None:
    admitted: list[int] = []
    receiver = Receiver()
    receiver.reader = FrameReader(bytes, lambda *_: [], LARGE, admit=admitted.append)

    receiver.feed(header(body=LARGE_BYTES) + bytes(FIRST_BODY_BYTES - 1))
    assert admitted == []
    receiver.feed(bytes(1))
    assert admitted == [LARGE_BYTES]
    receiver.feed(bytes(LARGE_BYTES - FIRST_BODY_BYTES) + encode_frame(2, bytes(FIRST_BODY_BYTES)))
    assert admitted == [LARGE_BYTES]
    assert len(receiver.frames) == 2


def test_a_reader_that_was_dropped_holds_nothing(traced: None) -> None:
    receiver = Receiver(LARGE)
    receiver.feed(encode_frame(1, bytes(LARGE_BYTES))[:-1])
    receiver.reader.drop()

    assert tracemalloc.get_traced_memory()[0] < FIRST_BODY_BYTES


def test_a_reader_holds_nothing_of_a_frame_it_has_handed_over(traced: None) -> None:
    receiver = Receiver()
    reader: FrameReader[Text] = FrameReader(Text, lambda *_: [], LARGE)
    receiver.reader = reader  # type: ignore[assignment]
    receiver.feed(encode_frame(1, bytes(LARGE_BYTES)))
    message = weakref.ref(receiver.frames.pop().message)  # type: ignore[type-var]

    assert message() is None
    assert tracemalloc.get_traced_memory()[0] < FIRST_BODY_BYTES
