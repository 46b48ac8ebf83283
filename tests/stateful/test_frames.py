"""The wire against any peer: random messages, random cuts, random damage. Nothing but a protocol error comes of it."""

from __future__ import annotations

from itertools import pairwise

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.errors import RemoteProtocolError, TierRefused
from kvtier.wire import messages as wire
from kvtier.wire.frames import HANDSHAKE_LIMITS, BufferList, Frame, FrameLimits, FrameReader, encode_frame
from kvtier.wire.session import ClientSession, ServerSession
from tests.support.examples import examples

LIMITS = FrameLimits(body_bytes=4096, payload_bytes=1024)
HASH = bytes(range(32))
NONCE = bytes(16)
WELCOME = wire.Welcome("server", NONCE, b"", 0, 1024, True)
MESSAGES: list[wire.Message] = [
    wire.Hello("client", NONCE, NONCE),
    wire.Challenge(NONCE),
    wire.Proof(bytes(32)),
    WELCOME,
    wire.Open(HASH, "name", 4096, 16, ""),
    wire.MatchRequest(1, HASH * 3, 7, True),
    wire.ReserveRequest(1, HASH * 3, 8),
    wire.GetRequest(1, HASH, 4),
    wire.PinRequest(1, HASH, True),
    wire.Fill(8, 0, 2),
    wire.Commit(8, 0, 2),
    wire.Ping(),
    wire.Matched(wire.pack_numbers([0, 4096]), "miss", 1, 2),
    wire.Reserved(wire.pack_numbers([1]), wire.pack_numbers([4096]), 1, 2, 3, "why"),
    wire.Blocks(0, 2, True, bytes(16)),
    wire.Document("{}"),
    wire.Failure("refused", "no"),
]

sent_frames = st.lists(
    st.tuples(st.integers(0, 2**32 - 1), st.sampled_from(MESSAGES), st.binary(max_size=300)), min_size=1, max_size=5
)
plain_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=9)
    | st.binary(max_size=40),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
bodies = st.binary(max_size=80) | st.builds(
    lambda tag, fields: msgspec.msgpack.encode([tag, *fields]),
    st.integers(0, 50),
    st.lists(plain_values, max_size=7),
)


class Damage:
    """A way to change a stream."""

    flips = st.tuples(st.just("flip"), st.integers(0, 4000), st.integers(1, 255))
    cuts = st.tuples(st.just("cut"), st.integers(0, 4000), st.integers(1, 40))
    insertions = st.tuples(st.just("insert"), st.integers(0, 4000), st.binary(min_size=1, max_size=40))
    any = st.lists(flips | cuts | insertions, min_size=1, max_size=6)

    @staticmethod
    def done_to(stream: bytes, damages: list[tuple[str, int, int | bytes]]) -> bytes:
        raw = bytearray(stream)
        for kind, position, what in damages:
            place = position % (len(raw) + 1)
            if isinstance(what, bytes):
                raw[place:place] = what
            elif kind == "cut":
                del raw[place : place + what]
            elif place < len(raw):
                raw[place] ^= what
        return bytes(raw)


class Peer:
    """One end of a connection: a reader over the messages of the protocol."""

    def __init__(self, limits: FrameLimits = LIMITS) -> None:
        self.reader: FrameReader[wire.Message] = FrameReader(wire.decode, self._place, limits)
        self.payloads: list[bytearray] = []

    def receive(self, stream: bytes) -> list[Frame[wire.Message]]:
        frames = []
        while stream:
            done = 0
            for view in self.reader.want():
                part = stream[done : done + len(view)]
                view[: len(part)] = part
                done += len(part)
            assert done, "the reader wants nothing and gives nothing"
            stream = stream[done:]
            frame = self.reader.advance(done)
            if frame is not None:
                frames.append(frame)
        return frames

    def _place(self, request: int, message: wire.Message, payload_bytes: int) -> BufferList:
        assert payload_bytes <= LIMITS.payload_bytes
        self.payloads.append(bytearray(payload_bytes))
        return [memoryview(self.payloads[-1])]


def stream_of(sent: list[tuple[int, wire.Message, bytes]]) -> bytes:
    return b"".join(encode_frame(request, wire.encode(message), len(data)) + data for request, message, data in sent)


def parts_of(stream: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(cut % (len(stream) + 1) for cut in cuts), len(stream)]
    return [stream[start:end] for start, end in pairwise(edges)]


cut_places = st.lists(st.integers(0, 4000), max_size=10)


@given(sent_frames, cut_places)
@settings(deadline=None)
def test_any_cut_of_the_stream_gives_the_same_messages(
    sent: list[tuple[int, wire.Message, bytes]], cuts: list[int]
) -> None:
    peer = Peer()

    received = [frame for part in parts_of(stream_of(sent), cuts) for frame in peer.receive(part)]

    assert received == [Frame(request, message, len(data)) for request, message, data in sent]
    assert peer.payloads == [data for _, _, data in sent if data]


@given(sent_frames, Damage.any, cut_places)
@settings(max_examples=examples(250), deadline=None)
def test_a_damaged_stream_is_read_or_refused_whatever_its_cuts(
    sent: list[tuple[int, wire.Message, bytes]], damages: list[tuple[str, int, int | bytes]], cuts: list[int]
) -> None:
    stream = Damage.done_to(stream_of(sent), damages)

    def outcome(parts: list[bytes]) -> tuple[list[Frame[wire.Message]], str]:
        peer = Peer()
        frames: list[Frame[wire.Message]] = []
        try:
            for part in parts:
                frames += peer.receive(part)
        except RemoteProtocolError as error:
            return [], str(error)
        return frames, ""

    assert outcome(parts_of(stream, cuts)) == outcome(parts_of(stream, list(range(len(stream)))))


@given(bodies)
@settings(max_examples=examples(300), deadline=None)
def test_any_body_is_a_message_or_a_protocol_error(body: bytes) -> None:
    try:
        message = wire.decode(body)
    except RemoteProtocolError:
        return
    assert wire.decode(wire.encode(message)) == message


@given(st.lists(st.sampled_from(MESSAGES), max_size=6), st.sampled_from([None, b"a long token"]))
@settings(max_examples=examples(200), deadline=None)
def test_any_order_of_messages_opens_a_session_only_as_it_should(
    messages: list[wire.Message], token: bytes | None
) -> None:
    server, client = ServerSession(WELCOME, [token] if token else [], LIMITS), ClientSession("client", NONCE, token)
    for message in messages:
        for session in (server, client):
            if session.is_open:
                continue
            try:
                session.shake(message)
            except (RemoteProtocolError, TierRefused):
                pass

    assert server.is_open == (token is None and any(isinstance(message, wire.Hello) for message in messages))
    assert client.is_open == (token is None and WELCOME in messages)
    assert (server.limits == HANDSHAKE_LIMITS) == (not server.is_open)
