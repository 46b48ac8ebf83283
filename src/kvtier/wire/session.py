"""The handshake and the order of messages, for both ends. Owns no socket.

    client: Hello(holder, nonce) ────────────────────────────────▶ server
    server: Challenge(nonce), when it wants a token ─────────────▶ client
    client: Proof(HMAC(token, "client" ‖ both nonces)) ──────────▶ server
    server: Welcome(HMAC(token, "server" ‖ both nonces), …) ─────▶ client
    then requests and replies, or a Failure and the end.

Each end proves that it knows the token without sending it, and a recorded handshake is of no use later.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import secrets
from collections.abc import Sequence

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
"""What a server calls itself when all frames after its welcome are sealed."""


class _Stage(enum.Enum):
    HELLO = enum.auto()
    PROOF = enum.auto()
    OPEN = enum.auto()
    REFUSED = enum.auto()


class ServerSession:
    """The server's side of one connection. `welcome` is sent to a client that may come in.

    That is one that knows one of `tokens`, or anyone if there are none. `token` is the one it has proved to know.
    """

    def __init__(
        self, welcome: Welcome, tokens: Sequence[bytes], limits: FrameLimits, secret: bytes | None = None
    ) -> None:
        self._welcome = welcome
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
        """What to accept next: little until the client is in."""
        return self._session_limits if self.is_open else HANDSHAKE_LIMITS

    @property
    def seals(self) -> Seals | None:
        """What all frames after the welcome are sealed with, if there is a secret for that."""
        if self._secret is None or self.hello is None:
            return None
        return seals_of(self._secret, self.hello.nonce, self._nonce).swapped()

    def shake(self, message: Message) -> Handshake:
        """The answer to a handshake message. The client is in once it is a `Welcome`.

        Raises `TierRefused` for a wrong token and `RemoteProtocolError` for a message out of order.
        """
        if self._stage is _Stage.HELLO and isinstance(message, Hello):
            self.hello = message
            if not self._tokens:
                self._stage = _Stage.OPEN
                return self._welcome
            self._stage = _Stage.PROOF
            return Challenge(self._nonce)
        if self._stage is _Stage.PROOF and isinstance(message, Proof):
            assert self.hello is not None
            for token in self._tokens:  # all of them: how long that takes says nothing of which it is
                if hmac.compare_digest(message.mac, _mac(token, b"client", self.hello.nonce, self._nonce)):
                    self.token = token
            if self.token is None:
                self._stage = _Stage.REFUSED
                raise TierRefused("the token is not the server's")
            self._stage = _Stage.OPEN
            welcome = self._welcome
            mac = _mac(self.token, b"server", self.hello.nonce, self._nonce)
            return Welcome(
                welcome.server,
                welcome.server_id,
                mac,
                welcome.arena_bytes,
                welcome.max_payload_bytes,
                welcome.has_disk,
            )
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
        """As the server's."""
        if self._secret is None or self._server_nonce is None:
            return None
        return seals_of(self._secret, self.hello.nonce, self._server_nonce)

    def shake(self, message: Message) -> Proof | None:
        """The answer to a handshake message, or None when the session is open.

        Raises `TierRefused` when the server wants a token we lack, refuses ours, or does not know it itself.
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
        is_encrypted = welcome.server == ENCRYPTED_SERVER
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


def _mac(token: bytes, role: bytes, client_nonce: bytes, server_nonce: bytes) -> bytes:
    return hmac.digest(token, role + client_nonce + server_nonce, hashlib.sha256)
