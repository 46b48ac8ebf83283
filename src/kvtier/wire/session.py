"""The handshake and the order of messages, for both ends. Owns no socket.

    client: Hello(holder, nonce) ────────────────────────────────▶ server
    server: Challenge(nonce), when it wants a token ─────────────▶ client
    client: Proof(HMAC(token, "client" ‖ both nonces)) ──────────▶ server
    server: Welcome(HMAC(token, "server" ‖ both nonces), …) ─────▶ client
    then requests and replies, or a Failure and the end.

Each end proves that it knows the token without sending it, and a recorded handshake is useless later.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import secrets
from collections.abc import Sequence

import msgspec

from kvtier.errors import LocalProtocolError, RemoteProtocolError, TierRefused
from kvtier.wire.cipher import Seals, seals_of
from kvtier.wire.frames import HANDSHAKE_LIMITS, FrameLimits
from kvtier.wire.messages import (
    NONCE_BYTES,
    Challenge,
    Failure,
    Handshake,
    Hello,
    Message,
    Proof,
    Request,
    Welcome,
)

SERVER = "kvtier"
ENCRYPTED_SERVER = "kvtier, encrypted"
"""The name of a server that seals all frames after its welcome."""
PLACES = ", places"
"""The end of the name of a client that can report blocks' places in their prompts."""
RETENTION = ", retention"
"""Part of the name of a client that may ask for retention, and of a server that supports it, for such a client."""
DECLINES = ", declines"
"""Part of the name of a client whose blocks the server need not store: it may keep others that are worth more."""
_SEGMENTS = ", segments of "
"""Follows in the name of a server, for such a client, if it wants places."""
_MAX_SEGMENT_DIGITS = 5


class _Stage(enum.Enum):
    HELLO = enum.auto()
    PROOF = enum.auto()
    OPEN = enum.auto()
    REFUSED = enum.auto()


class ServerSession:
    """The server's side of one connection. `welcome` is sent to an accepted client.

    A client is accepted if it knows one of `tokens`, or if there are none. `token` is the one that it has proved to
    know. With `segment_blocks`, the server asks for blocks' places, from clients that can report them.
    """

    def __init__(
        self,
        welcome: Welcome,
        tokens: Sequence[bytes],
        limits: FrameLimits,
        secret: bytes | None = None,
        segment_blocks: int = 0,
    ) -> None:
        self._welcome = welcome
        self._segment_blocks = segment_blocks
        self._secret = secret
        self._tokens = tokens
        self.token: bytes | None = None
        self._session_limits = limits
        self._stage = _Stage.HELLO
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self.hello: Hello | None = None

    @property
    def is_open(self) -> bool:
        return self._stage is _Stage.OPEN

    @property
    def limits(self) -> FrameLimits:
        """What to accept next: little until the client is accepted."""
        return self._session_limits if self.is_open else HANDSHAKE_LIMITS

    @property
    def seals(self) -> Seals | None:
        """The seals of all frames after the welcome, if there is a secret for that."""
        if self._secret is None or self.hello is None:
            return None
        return seals_of(self._secret, self.hello.nonce, self._nonce).swapped()

    def shake(self, message: Message) -> Handshake:
        """The answer to a handshake message. The client is accepted once it is a `Welcome`.

        Raises `TierRefused` for a wrong token and `RemoteProtocolError` for a message out of order.
        """
        if self._stage is _Stage.HELLO and isinstance(message, Hello):
            self.hello = message
            named = self._welcome.server
            if RETENTION in message.client:
                named += RETENTION
            if self._segment_blocks and message.client.endswith(PLACES):
                named += f"{_SEGMENTS}{self._segment_blocks}"
            self._welcome = msgspec.structs.replace(self._welcome, server=named)
            if not self._tokens:
                self._stage = _Stage.OPEN
                return self._welcome
            self._stage = _Stage.PROOF
            return Challenge(self._nonce)
        if self._stage is _Stage.PROOF and isinstance(message, Proof):
            assert self.hello is not None
            for token in self._tokens:  # all of them, so that the time reveals nothing about which one matched
                if hmac.compare_digest(message.mac, _mac(token, b"client", self.hello.nonce, self._nonce)):
                    self.token = token
            if self.token is None:
                self._stage = _Stage.REFUSED
                raise TierRefused("the token is not the server's")
            self._stage = _Stage.OPEN
            mac = _mac(self.token, b"server", self.hello.nonce, self._nonce)
            return msgspec.structs.replace(self._welcome, mac=mac)
        raise RemoteProtocolError(f"{type(message).__name__} is out of order in a handshake")

    def request(self, message: Message) -> Request:
        """Check that `message` is a request in an open session."""
        if not self.is_open:
            raise LocalProtocolError("a request was passed on before the handshake ended")
        if not isinstance(message, Request):
            raise RemoteProtocolError(f"{type(message).__name__} is not a request")
        return message


class ClientSession:
    """The client's side of one connection."""

    def __init__(self, client: str, holder: bytes, token: bytes | None, secret: bytes | None = None) -> None:
        self._secret = secret
        self.hello = Hello(client, holder, secrets.token_bytes(NONCE_BYTES))
        self._token = token
        self._server_nonce: bytes | None = None
        self.welcome: Welcome | None = None

    @property
    def is_open(self) -> bool:
        return self.welcome is not None

    @property
    def seals(self) -> Seals | None:
        """Like the server's."""
        if self._secret is None or self._server_nonce is None:
            return None
        return seals_of(self._secret, self.hello.nonce, self._server_nonce)

    def shake(self, message: Message) -> Proof | None:
        """The answer to a handshake message, or None once the session is open.

        Raises `TierRefused` if the server wants a token that we lack, refuses ours, or does not know it itself.
        """
        if self.welcome is not None:
            raise LocalProtocolError("the handshake has ended")
        if isinstance(message, Failure):
            raise TierRefused(f"the cache server refused: {message.sentence}")
        if isinstance(message, Challenge) and self._server_nonce is None:
            if self._token is None:
                raise TierRefused("the cache server wants a token: pass token=...")
            self._server_nonce = message.nonce
            return Proof(_mac(self._token, b"client", self.hello.nonce, message.nonce))
        if isinstance(message, Welcome):
            self._check_server(message)
            self.welcome = message
            return None
        raise RemoteProtocolError(f"{type(message).__name__} is out of order in a handshake")

    def _check_server(self, welcome: Welcome) -> None:
        is_encrypted = welcome.server.partition(_SEGMENTS)[0].removesuffix(RETENTION) == ENCRYPTED_SERVER
        if is_encrypted != (self._secret is not None):
            raise TierRefused(
                "the cache server encrypts what it sends: pass its secret"
                if is_encrypted
                else "the cache server does not encrypt what it sends, and this client wants it to"
            )
        if self._secret is not None and self._server_nonce is None:
            raise TierRefused("the server asked for no token: without one there is nothing to make keys of")
        if self._token is None:
            return
        if self._server_nonce is None or not hmac.compare_digest(
            welcome.mac, _mac(self._token, b"server", self.hello.nonce, self._server_nonce)
        ):
            raise TierRefused("the server did not prove that it knows the token; it may not be ours")


def segment_blocks_of(welcome: Welcome) -> int:
    """How many blocks of a prompt the server keeps in one place; 0 if it does not report that."""
    digits = welcome.server.partition(_SEGMENTS)[2]
    return int(digits) if digits.isascii() and digits.isdigit() and len(digits) <= _MAX_SEGMENT_DIGITS else 0


def can_retain(welcome: Welcome) -> bool:
    """Whether the server supports `RetainRequest`."""
    return welcome.server.partition(_SEGMENTS)[0].endswith(RETENTION)


def _mac(token: bytes, role: bytes, client_nonce: bytes, server_nonce: bytes) -> bytes:
    return hmac.digest(token, role + client_nonce + server_nonce, hashlib.sha256)
