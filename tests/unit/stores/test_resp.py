"""RESP3 from any pieces: what is sent is read, payloads land where they belong, and nonsense ends the stream."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import RemoteProtocolError
from kvtier.stores.valkey.resp import Reply, ReplyError, ReplyReader, command, command_around


class Pieces:
    """Hands out `data` in pieces of the given sizes, then whole."""

    def __init__(self, data: bytes, sizes: list[int]) -> None:
        self._data = data
        self._sizes = list(sizes)

    def receive(self, buffers: list[memoryview]) -> int:
        if not self._data:
            raise EOFError
        room = sum(map(len, buffers))
        count = min(len(self._data), room, self._sizes.pop(0) if self._sizes else room)
        left = self._data[:count]
        self._data = self._data[count:]
        for buffer in buffers:
            part = left[: len(buffer)]
            buffer[: len(part)] = part
            left = left[len(part) :]
        return count


def encoded(reply: Reply) -> bytes:
    if reply is None:
        return b"_\r\n"
    if isinstance(reply, int):
        return b":%d\r\n" % reply
    if isinstance(reply, bytes):
        return b"$%d\r\n%b\r\n" % (len(reply), reply)
    if isinstance(reply, ReplyError):
        return b"-%b\r\n" % reply.sentence.encode()
    return b"*%d\r\n%b" % (len(reply), b"".join(map(encoded, reply)))


SIMPLE = st.one_of(
    st.none(), st.integers(-(2**63), 2**63 - 1), st.binary(max_size=300), st.just(ReplyError("OOM", "OOM no room"))
)
REPLIES = st.recursive(SIMPLE, lambda inner: st.lists(inner, max_size=5), max_leaves=20)
SIZES = st.lists(st.integers(1, 40), max_size=60)


@given(st.lists(REPLIES, min_size=1, max_size=8), SIZES)
def test_what_is_sent_is_read_whatever_pieces_it_comes_in(replies: list[Reply], sizes: list[int]) -> None:
    reader = ReplyReader(Pieces(b"".join(map(encoded, replies)), sizes).receive)

    assert [reader.read() for _ in replies] == replies
    assert not reader.has_more


@given(st.lists(st.binary(min_size=1, max_size=50_000), min_size=1, max_size=6), SIZES, st.integers(0, 40))
def test_payloads_land_in_their_views(payloads: list[bytes], sizes: list[int], num_behind: int) -> None:
    reader = ReplyReader(Pieces(b"".join(encoded(payload) for payload in payloads), sizes).receive)

    for payload in payloads:
        split = max(0, len(payload) - num_behind)
        front, behind = bytearray(split), bytearray(len(payload) - split)
        assert reader.read((memoryview(front), memoryview(behind))) == len(payload)
        assert bytes(front + behind) == payload


@given(st.binary(max_size=5000), SIZES)
def test_a_payload_of_another_size_is_skipped(payload: bytes, sizes: list[int]) -> None:
    room = bytearray(b"\xa5" * (len(payload) + 1))
    reader = ReplyReader(Pieces(encoded(payload) + encoded(7), sizes).receive)

    assert reader.read((memoryview(room),)) == len(payload)
    assert set(room) == {0xA5}
    assert reader.read() == 7


@given(st.binary(max_size=5000), st.integers(0, 5000), SIZES)
def test_a_text_that_is_too_long_is_skipped(text: bytes, longest: int, sizes: list[int]) -> None:
    reader = ReplyReader(Pieces(encoded(text) + encoded(7), sizes).receive)

    assert reader.read(longest=longest) == (text if len(text) <= longest else len(text))
    assert reader.read() == 7


def test_what_a_server_pushes_is_passed_over() -> None:
    reader = ReplyReader(Pieces(b">2\r\n$10\r\ninvalidate\r\n*1\r\n+key\r\n:3\r\n", []).receive)

    assert reader.read() == 3


@pytest.mark.parametrize(
    ("data", "reply"),
    [
        (b"+OK\r\n", b"OK"),
        (b"$-1\r\n", None),
        (b"*-1\r\n", None),
        (b"#t\r\n", b"t"),
        (b",1.5\r\n", b"1.5"),
        (b"%1\r\n+a\r\n:1\r\n", [b"a", 1]),
        (b"~1\r\n:1\r\n", [1]),
        (b"!7\r\nOOM bad\r\n", ReplyError("OOM", "OOM bad")),
        (b"=7\r\ntxt:abc\r\n", b"txt:abc"),
        (b"(123\r\n", 123),
    ],
)
def test_each_kind_of_reply_is_read(data: bytes, reply: Reply) -> None:
    assert ReplyReader(Pieces(data, []).receive).read() == reply


@pytest.mark.parametrize(
    "data",
    [
        b"?3\r\n",
        b"\r\n",
        b":abc\r\n",
        b":\r\n",
        b":" + b"9" * 30 + b"\r\n",
        b"$5\r\nabcdeXY",
        b"$99999999999\r\n",
        b"$-2\r\n",
        b"*99999999\r\n",
        b"*-2\r\n",
        b"+" + b"a" * 20_000,
        b"*1\r\n" * 20 + b":1\r\n",
    ],
)
def test_nonsense_ends_the_stream(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        ReplyReader(Pieces(data, []).receive).read()


@given(st.binary(max_size=200), SIZES)
def test_any_bytes_are_a_reply_or_an_error_of_ours(data: bytes, sizes: list[int]) -> None:
    reader = ReplyReader(Pieces(data, sizes).receive)
    is_over = False
    while not is_over:
        try:
            reader.read()
        except (EOFError, RemoteProtocolError):
            is_over = True


def test_a_command_is_a_list_of_words() -> None:
    assert command(b"GET", b"key") == b"*2\r\n$3\r\nGET\r\n$3\r\nkey\r\n"
    before, after = command_around((b"SET", b"k"), 5, (b"PX", b"10"))
    assert before + b"hello" + after == command(b"SET", b"k", b"hello", b"PX", b"10")
