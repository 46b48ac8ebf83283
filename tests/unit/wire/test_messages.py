"""The messages: what is sent is what is read, and nothing else is read."""

from __future__ import annotations

from typing import get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.blocks.match_end import MatchEnd
from kvtier.blocks.retention import MAX_TTL_S
from kvtier.errors import RemoteProtocolError
from kvtier.wire import messages as wire

numbers = st.integers(0, 2**62)
positive = st.integers(1, 2**62)
texts = st.text(max_size=20)
hashes = st.integers(0, 3).map(lambda count: bytes(range(32)) * count)
runs = st.lists(numbers, max_size=3).map(wire.pack_numbers)

STRATEGIES: dict[type, st.SearchStrategy[wire.Message]] = {
    wire.Hello: st.builds(wire.Hello, texts, st.binary(min_size=16, max_size=16), st.binary(min_size=16, max_size=16)),
    wire.Challenge: st.builds(wire.Challenge, st.binary(min_size=16, max_size=16)),
    wire.Proof: st.builds(wire.Proof, st.binary(max_size=40)),
    wire.Welcome: st.builds(
        wire.Welcome, texts, st.binary(max_size=20), st.binary(max_size=40), numbers, positive, st.booleans()
    ),
    wire.Open: st.builds(
        wire.Open, st.binary(min_size=32, max_size=32), texts, st.integers(1, 1 << 40), st.integers(1, 64), texts
    ),
    wire.MatchRequest: st.builds(wire.MatchRequest, numbers, hashes, numbers, st.booleans()),
    wire.ReserveRequest: st.builds(wire.ReserveRequest, numbers, hashes, numbers),
    wire.GetRequest: st.builds(wire.GetRequest, numbers, hashes, st.integers(1, 100)),
    wire.ContainsRequest: st.builds(wire.ContainsRequest, numbers, hashes),
    wire.PinRequest: st.builds(wire.PinRequest, numbers, hashes, st.booleans()),
    wire.DropRequest: st.builds(wire.DropRequest, numbers, hashes),
    wire.Release: st.builds(wire.Release, numbers),
    wire.Fill: st.builds(wire.Fill, numbers, numbers, st.integers(1, 100)),
    wire.Await: st.builds(wire.Await, numbers, numbers),
    wire.ListRequest: st.builds(wire.ListRequest, numbers, st.integers(0, 2**48 - 1)),
    wire.VerifyRequest: st.builds(wire.VerifyRequest, numbers, hashes),
    wire.SuspectRequest: st.builds(wire.SuspectRequest, numbers, hashes),
    wire.PlaceRequest: st.builds(
        wire.PlaceRequest,
        numbers,
        st.binary(min_size=32, max_size=32),
        st.binary(min_size=32, max_size=32),
        st.integers(0, wire.MAX_POSITION),
    ),
    wire.RetainRequest: st.builds(
        wire.RetainRequest,
        numbers,
        hashes,
        st.integers(0, MAX_TTL_S),
        st.integers(1, 100),
        st.text(max_size=20),
        st.integers(0, 1 << 40),
    ),
    wire.Retained: st.builds(wire.Retained, numbers, st.integers(0, MAX_TTL_S), texts),
    wire.PresenceRequest: st.builds(wire.PresenceRequest, st.binary(min_size=32, max_size=32), hashes),
    wire.NoteRequest: st.builds(wire.NoteRequest, st.text(min_size=1, max_size=20), texts),
    wire.NotedRequest: st.builds(wire.NotedRequest, st.text(min_size=1, max_size=20)),
    wire.Listed: st.integers(0, 3).map(lambda count: wire.Listed(bytes(32 * count), bytes(count), count)),
    wire.SharedMatch: st.integers(0, 9).map(lambda count: wire.SharedMatch(bytes(16), "miss", 1, 9, count)),
    wire.Commit: st.builds(wire.Commit, numbers, numbers, numbers),
    wire.Close: st.builds(wire.Close, numbers),
    wire.Flush: st.builds(wire.Flush),
    wire.InfoRequest: st.builds(wire.InfoRequest),
    wire.SpacesRequest: st.builds(wire.SpacesRequest, st.integers(0, (1 << 48) - 1)),
    wire.StatsRequest: st.builds(wire.StatsRequest),
    wire.MissCurveRequest: st.builds(wire.MissCurveRequest, st.integers(0, (1 << 48) - 1)),
    wire.Ping: st.builds(wire.Ping),
    wire.Bye: st.builds(wire.Bye),
    wire.Opened: st.builds(wire.Opened, numbers),
    wire.Matched: st.builds(wire.Matched, runs, st.sampled_from([*wire.ENDING_WORDS.values()]), st.just(0), numbers),
    wire.Reserved: runs.flatmap(
        lambda run: st.builds(wire.Reserved, st.just(run), st.just(run), numbers, numbers, numbers, texts)
    ),
    wire.Blocks: st.integers(0, 4).flatmap(
        lambda count: st.builds(wire.Blocks, numbers, st.just(count), st.booleans(), st.just(bytes(8 * count)))
    ),
    wire.Contained: st.builds(wire.Contained, st.binary(max_size=10)),
    wire.Counted: st.builds(wire.Counted, numbers),
    wire.Done: st.builds(wire.Done),
    wire.Document: st.builds(wire.Document, texts),
    wire.Failure: st.builds(wire.Failure, st.sampled_from(wire.FAILURE_KINDS), texts),
}

any_message = st.one_of(*STRATEGIES.values())

HASH = bytes(range(32))
PLAIN = wire.MatchRequest(5, HASH * 2, 9, False)


def raw(*items: object) -> bytes:
    return msgspec.msgpack.encode(list(items))


def test_every_message_is_covered_here() -> None:
    assert set(STRATEGIES) == set(get_args(wire.Message))


@pytest.mark.parametrize("kind", STRATEGIES, ids=lambda kind: kind.__name__)
def test_a_message_that_was_sent_is_the_message_that_is_read(kind: type) -> None:
    @given(STRATEGIES[kind])
    def law(message: wire.Message) -> None:
        assert wire.decode(wire.encode(message)) == message
        assert type(wire.decode(bytearray(wire.encode(message)))) is kind

    law()


@given(any_message, st.data())
def test_a_message_cut_short_is_refused(message: wire.Message, data: st.DataObject) -> None:
    body = wire.encode(message)
    cut = data.draw(st.integers(0, len(body) - 1))

    with pytest.raises(RemoteProtocolError):
        wire.decode(body[:cut])


@given(any_message, st.binary(min_size=1, max_size=8))
def test_a_message_with_more_behind_it_is_refused(message: wire.Message, more: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        wire.decode(wire.encode(message) + more)


@given(any_message)
def test_a_message_with_a_field_too_many_is_refused(message: wire.Message) -> None:
    items = msgspec.msgpack.decode(wire.encode(message))

    with pytest.raises(RemoteProtocolError):
        wire.decode(raw(*items, 0))


@given(any_message.filter(lambda message: bool(message.__struct_fields__)))
def test_a_message_with_a_field_too_few_is_refused(message: wire.Message) -> None:
    items = msgspec.msgpack.decode(wire.encode(message))

    with pytest.raises(RemoteProtocolError):
        wire.decode(raw(*items[:-1]))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        raw(),
        raw(99),
        raw("Hello"),
        raw(1),
        raw(46, 1),
        raw(24.0),
        msgspec.msgpack.encode({"type": 24}),
        msgspec.msgpack.encode(24),
        msgspec.msgpack.encode(None),
        raw(17, "7"),
        raw(17, 7.5),
        raw(17, None),
        raw(15, 1, HASH, 1),
        raw(14, 1, "no bytes"),
        raw(47, b"no text"),
        b"\x92\x2f\xa2\xff\xfe",
        b"\x91" * 100_000,
    ],
    ids=lambda body: body[:12].hex() + f" {len(body)}",
)
def test_what_is_no_message_is_refused(body: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="cannot be read"):
        wire.decode(body)


@pytest.mark.parametrize(
    "body",
    [
        raw(1, "client", bytes(15), bytes(16)),
        raw(1, "client", bytes(16), bytes(17)),
        raw(2, bytes(15)),
        raw(10, bytes(31), "name", 4096, 16, ""),
        raw(10, HASH, "name", 0, 16, ""),
        raw(10, HASH, "name", -1, 16, ""),
        raw(10, HASH, "name", (1 << 40) + 1, 16, ""),
        raw(10, HASH, "name", 4096, 0, ""),
        raw(10, HASH, "n" * 257, 4096, 16, ""),
        raw(10, HASH, "name", 4096, 16, "f" * ((64 << 10) + 1)),
        raw(29, bytes(31), b""),
        raw(29, HASH, bytes(31)),
        raw(30, "", "text"),
        raw(30, "r" * 257, "text"),
        raw(30, "id", "t" * ((64 << 10) + 1)),
        raw(31, ""),
        raw(31, "r" * 257),
        raw(11, 1, bytes(31), 1),
        raw(12, 1, bytes(33), 1),
        raw(13, 1, bytes(33), 1),
        raw(13, 1, HASH, 0),
        raw(14, 1, bytes(1)),
        raw(15, 1, bytes(1), True),
        raw(16, 1, bytes(1)),
        raw(18, 1, -1, 1),
        raw(18, 1, 0, 0),
        raw(19, 1, 0, -1),
        raw(41, bytes(7), "all"),
        raw(41, bytes(8), "whatever"),
        raw(42, bytes(8), bytes(16), 0, 0, 0, ""),
        raw(42, bytes(7), bytes(7), 0, 0, 0, ""),
        raw(43, -1, 1, True),
        raw(43, 0, -1, True),
    ],
    ids=lambda body: f"tag {body[1]} {body[2:].hex()[-12:]} {len(body)}",
)
def test_a_field_out_of_its_bounds_is_refused(body: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="cannot be read"):
        wire.decode(body)


@pytest.mark.parametrize(
    "body",
    [
        raw(4, "server", b"", b"", -1, 1, False),
        raw(4, "server", b"", b"", 1, -1, False),
        raw(45, -1),
        raw(42, b"", b"", 0, 0, -1, ""),
    ],
    ids=["arena", "payload", "count", "refused"],
)
def test_less_than_nothing_is_refused(body: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        wire.decode(body)


@pytest.mark.parametrize(
    ("word", "end"),
    [
        ("all", MatchEnd.ALL),
        ("miss", MatchEnd.NEVER_STORED),
        ("evicted", MatchEnd.EVICTED),
        ("pending", MatchEnd.PENDING),
        ("limit", MatchEnd.LIMIT),
        ("down", MatchEnd.TIER_DOWN),
    ],
)
def test_the_words_for_the_end_of_a_match_are_what_they_always_were(word: str, end: MatchEnd) -> None:
    assert wire.ENDING_WORDS[end] == word
    assert wire.Matched(b"", word, 0, 0).match_end is end


def test_a_match_that_ends_with_an_unknown_word_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="an unknown ending"):
        wire.decode(raw(41, b"", "gone", 0, 0))


@pytest.mark.parametrize(
    ("flags", "end"),
    [
        (0, MatchEnd.NEVER_STORED),
        (wire.LISTED_EVICTED, MatchEnd.EVICTED),
        (wire.LISTED_EVICTED | wire.LISTED_DOWN, MatchEnd.TIER_DOWN),
        (wire.LISTED_EVICTED | wire.LISTED_DOWN | wire.LISTED_PENDING, MatchEnd.PENDING),
    ],
)
def test_the_flags_of_a_missing_block_say_why_it_is_missing(flags: int, end: MatchEnd) -> None:
    assert wire.match_end_of(flags) is end


def test_a_message_is_an_array_with_its_tag_first() -> None:
    assert msgspec.msgpack.decode(wire.encode(PLAIN)) == [11, 5, HASH * 2, 9, False]


def test_tags_are_what_they_always_were() -> None:
    tags = {kind.__name__: kind.__struct_config__.tag for kind in get_args(wire.Message)}  # type: ignore[attr-defined]

    assert tags == {
        **{"Hello": 1, "Challenge": 2, "Proof": 3, "Welcome": 4},
        **{"Open": 10, "MatchRequest": 11, "ReserveRequest": 12, "GetRequest": 13, "ContainsRequest": 14},
        **{"PinRequest": 15, "DropRequest": 16, "Release": 17, "Fill": 18, "Commit": 19, "Close": 20},
        **{
            "Flush": 21,
            "InfoRequest": 22,
            "SpacesRequest": 32,
            "SuspectRequest": 33,
            "PlaceRequest": 34,
            "MissCurveRequest": 37,
            "StatsRequest": 23,
            "Ping": 24,
            "Bye": 25,
        },
        **{"Await": 26, "ListRequest": 27, "VerifyRequest": 28, "Listed": 49, "SharedMatch": 50},
        **{"RetainRequest": 35, "Retained": 51},
        **{"PresenceRequest": 29, "NoteRequest": 30, "NotedRequest": 31},
        **{"Opened": 40, "Matched": 41, "Reserved": 42, "Blocks": 43, "Contained": 44, "Counted": 45},
        **{"Done": 46, "Document": 47, "Failure": 48},
    }


@given(st.lists(st.integers(0, 2**64 - 1)))
def test_packed_numbers_unpack_into_themselves(numbers: list[int]) -> None:
    packed = wire.pack_numbers(numbers)

    assert packed == b"".join(number.to_bytes(8, "little") for number in numbers)
    assert wire.unpack_numbers(packed) == numbers
