"""The handshake, for both ends, without a socket."""

from __future__ import annotations

import pytest

from kvtier.errors import LocalProtocolError, RemoteProtocolError, TierRefused
from kvtier.wire.frames import HANDSHAKE_LIMITS, FrameLimits
from kvtier.wire.messages import Challenge, Done, Failure, Hello, Message, Ping, Proof, Welcome
from kvtier.wire.session import PLACES, RETENTION, ClientSession, ServerSession, can_retain, segment_blocks_of

LIMITS = FrameLimits(body_bytes=1 << 20, payload_bytes=1 << 20)
WELCOME = Welcome("server", b"id", b"", 1 << 30, 1 << 20, False)
TOKEN = b"correct horse"


def server(token: bytes | None = None) -> ServerSession:
    return ServerSession(WELCOME, [] if token is None else [b"another", token], LIMITS)


def client(token: bytes | None = None) -> ClientSession:
    return ClientSession("client", bytes(16), token)


def challenged(here: ClientSession, there: ServerSession) -> Proof:
    """The client's proof after the first half of a handshake with a token."""
    proof = here.shake(there.shake(here.hello))
    assert proof is not None
    return proof


def test_without_a_token_the_first_answer_lets_the_client_in() -> None:
    here, there = client(), server()

    assert here.shake(there.shake(here.hello)) is None

    assert here.is_open
    assert there.is_open
    assert here.welcome == WELCOME
    assert there.hello == here.hello


def test_with_a_token_both_ends_prove_it_and_are_in() -> None:
    here, there = client(TOKEN), server(TOKEN)
    proof = challenged(here, there)
    assert not here.is_open
    assert not there.is_open

    assert here.shake(there.shake(proof)) is None

    assert here.is_open
    assert there.is_open
    assert here.welcome is not None
    assert (here.welcome.server, here.welcome.arena_bytes) == (WELCOME.server, WELCOME.arena_bytes)


@pytest.mark.parametrize("name", ["kvtier", "kvtier, encrypted"])
def test_only_a_client_that_knows_of_places_hears_how_large_a_segment_is(name: str) -> None:
    secret = b"sixteen bytes of secret" if "encrypted" in name else None
    welcome = Welcome(name, b"id", b"", 0, 1 << 20, False)
    for called, segment_blocks, expected in (("old", 128, 0), (f"new{PLACES}", 0, 0), (f"new{PLACES}", 128, 128)):
        here = ClientSession(called, bytes(16), TOKEN, secret)
        there = ServerSession(welcome, [TOKEN], LIMITS, secret, segment_blocks)
        assert here.shake(there.shake(challenged(here, there))) is None
        assert here.welcome is not None
        assert segment_blocks_of(here.welcome) == expected
        assert (here.welcome.server == name) == (expected == 0)


@pytest.mark.parametrize("name", ["kvtier", "kvtier, encrypted"])
@pytest.mark.parametrize("segment_blocks", [0, 128])
def test_only_a_client_that_asks_for_retention_hears_that_it_is_granted(name: str, segment_blocks: int) -> None:
    secret = b"sixteen bytes of secret" if "encrypted" in name else None
    welcome = Welcome(name, b"id", b"", 0, 1 << 20, False)
    for called, is_told in ((f"old{PLACES}", False), (f"new{RETENTION}", True), (f"new{RETENTION}{PLACES}", True)):
        here = ClientSession(called, bytes(16), TOKEN, secret)
        there = ServerSession(welcome, [TOKEN], LIMITS, secret, segment_blocks)
        assert here.shake(there.shake(challenged(here, there))) is None
        assert here.welcome is not None
        assert can_retain(here.welcome) == is_told
        assert segment_blocks_of(here.welcome) == (segment_blocks if called.endswith(PLACES) else 0)


@pytest.mark.parametrize("said", ["", "x", "-1", "1e3", "123456", "\u0661", " 4"])
def test_a_segment_that_is_no_small_number_is_none(said: str) -> None:
    assert segment_blocks_of(Welcome(f"kvtier, segments of {said}", b"", b"", 0, 1, False)) == 0


def test_the_token_itself_is_never_sent() -> None:
    here, there = client(TOKEN), server(TOKEN)
    challenge = there.shake(here.hello)
    proof = here.shake(challenge)
    assert proof is not None

    assert not [
        message for message in (here.hello, challenge, proof, there.shake(proof)) if TOKEN in repr(message).encode()
    ]


def test_a_wrong_token_is_refused_and_the_client_stays_out() -> None:
    here, there = client(b"wrong token"), server(TOKEN)
    proof = challenged(here, there)

    with pytest.raises(TierRefused, match="the token is not the server's"):
        there.shake(proof)

    assert not there.is_open


def test_a_client_without_a_token_is_told_that_it_needs_one() -> None:
    here, there = client(), server(TOKEN)

    with pytest.raises(TierRefused, match="wants a token"):
        here.shake(there.shake(here.hello))


def test_a_server_that_asks_for_no_token_is_not_trusted_by_a_client_that_has_one() -> None:
    here, there = client(TOKEN), server()

    with pytest.raises(TierRefused, match="did not prove"):
        here.shake(there.shake(here.hello))

    assert not here.is_open


@pytest.mark.parametrize("mac", [b"", bytes(32)])
def test_a_server_that_does_not_know_the_token_is_found_out(mac: bytes) -> None:
    here = client(TOKEN)
    here.shake(Challenge(bytes(16)))

    with pytest.raises(TierRefused, match="did not prove"):
        here.shake(Welcome("impostor", b"", mac, 0, 1, False))

    assert not here.is_open


def test_a_server_cannot_send_the_clients_own_proof_back() -> None:
    here = client(TOKEN)
    proof = here.shake(Challenge(bytes(16)))
    assert proof is not None

    with pytest.raises(TierRefused, match="did not prove"):
        here.shake(Welcome("mirror", b"", proof.mac, 0, 1, False))


def test_a_recorded_proof_opens_no_other_session() -> None:
    here = client(TOKEN)
    recorded = challenged(here, server(TOKEN))
    later = server(TOKEN)
    later.shake(here.hello)

    with pytest.raises(TierRefused):
        later.shake(recorded)


def test_a_recorded_welcome_convinces_no_other_client() -> None:
    here, there = client(TOKEN), server(TOKEN)
    recorded = there.shake(challenged(here, there))
    later = client(TOKEN)
    later.shake(Challenge(bytes(16)))

    with pytest.raises(TierRefused, match="did not prove"):
        later.shake(recorded)


def test_nonces_are_never_the_same() -> None:
    challenges = {repr(server(TOKEN).shake(client().hello)) for _ in range(20)}
    hellos = {client().hello.nonce for _ in range(20)}

    assert len(challenges) == len(hellos) == 20


@pytest.mark.parametrize("message", [Proof(bytes(32)), Ping(), Challenge(bytes(16)), WELCOME, Done()], ids=repr)
def test_a_server_takes_nothing_before_hello(message: Message) -> None:
    with pytest.raises(RemoteProtocolError, match="out of order"):
        server(TOKEN).shake(message)


@pytest.mark.parametrize("message", [Hello("again", bytes(16), bytes(16)), Ping()], ids=repr)
def test_a_server_takes_nothing_but_a_proof_after_its_challenge(message: Message) -> None:
    there = server(TOKEN)
    there.shake(client().hello)

    with pytest.raises(RemoteProtocolError, match="out of order"):
        there.shake(message)

    assert not there.is_open


def test_a_server_takes_no_second_handshake() -> None:
    there = server()
    there.shake(client().hello)

    with pytest.raises(RemoteProtocolError, match="out of order"):
        there.shake(client().hello)


def test_a_client_takes_no_second_challenge() -> None:
    here = client(TOKEN)
    here.shake(Challenge(bytes(16)))

    with pytest.raises(RemoteProtocolError, match="out of order"):
        here.shake(Challenge(bytes(16)))


@pytest.mark.parametrize("message", [Done(), Proof(b""), Ping()], ids=repr)
def test_a_client_takes_nothing_else_in_a_handshake(message: Message) -> None:
    with pytest.raises(RemoteProtocolError, match="out of order"):
        client().shake(message)


def test_a_client_does_not_shake_hands_twice() -> None:
    here = client()
    here.shake(WELCOME)

    with pytest.raises(LocalProtocolError):
        here.shake(WELCOME)


def test_a_servers_refusal_is_told_in_its_own_words() -> None:
    with pytest.raises(TierRefused, match="too many connections"):
        client().shake(Failure("refused", "too many connections"))


def test_little_is_accepted_until_the_client_is_in() -> None:
    here, there = client(TOKEN), server(TOKEN)
    limits = [there.limits]
    proof = challenged(here, there)
    limits.append(there.limits)
    there.shake(proof)
    limits.append(there.limits)

    assert limits == [HANDSHAKE_LIMITS, HANDSHAKE_LIMITS, LIMITS]


def test_every_handshake_message_fits_into_a_handshakes_frame() -> None:
    assert HANDSHAKE_LIMITS.body_bytes >= 1024
    assert HANDSHAKE_LIMITS.payload_bytes == 0


def test_a_request_passes_in_an_open_session_only() -> None:
    there = server()
    with pytest.raises(LocalProtocolError):
        there.request(Ping())
    there.shake(client().hello)

    assert there.request(Ping()) == Ping()


@pytest.mark.parametrize("message", [Done(), WELCOME, Challenge(bytes(16))], ids=repr)
def test_what_is_no_request_is_the_clients_fault(message: Message) -> None:
    there = server()
    there.shake(client().hello)

    with pytest.raises(RemoteProtocolError, match="is not a request"):
        there.request(message)
