"""Encryption of a connection, for TCP without TLS: AES-256-GCM with keys of this connection alone.

Both ends have a secret, from a file. Each direction has a key, derived from the secret and both sides' nonces, and
numbers what it seals: nothing can be read, altered, left out, repeated or moved without the other end noticing. Only
the header of a frame is readable, and it is authenticated with the body.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Protocol

from kvtier.errors import ConfigError, RemoteProtocolError
from kvtier.memory.aead import Aead, InvalidTag, require_aead

PIECE_BYTES = 1 << 20
"""A payload is sealed in pieces of at most this size: each is opened as soon as it has arrived."""
MIN_SECRET_BYTES = 16


class Seal(Protocol):
    """One direction of a connection. Each call takes the next number."""

    def seal(self, data: memoryview | bytes, about: bytes) -> bytes: ...

    def open(self, data: bytearray, about: bytes, into: memoryview) -> None:
        """Decrypt to `into`, of the same length. Raises `RemoteProtocolError` if the other end has not sealed this."""


class AesSeal:
    """A seal with a key of 32 bytes that has no other use."""

    def __init__(self, key: bytes) -> None:
        self._cipher = Aead(key)
        self._number = 0

    def seal(self, data: memoryview | bytes, about: bytes) -> bytes:
        return self._cipher.encrypt(self._next(), data, about)

    def open(self, data: bytearray, about: bytes, into: memoryview) -> None:
        try:
            self._cipher.decrypt_into(self._next(), data, about, into)
        except InvalidTag as error:
            raise RemoteProtocolError("what came was not encrypted with the same secret, or was altered") from error

    def _next(self) -> bytes:
        self._number += 1
        return self._number.to_bytes(12, "big")


class Seals:
    """Both directions: `sent` is what this end sends, `received` what it gets."""

    def __init__(self, sent: Seal, received: Seal) -> None:
        self.sent = sent
        self.received = received

    def swapped(self) -> Seals:
        return Seals(self.received, self.sent)


def check_secret(secret: bytes) -> None:
    """Raises `ConfigError` if it cannot be used."""
    require_aead()
    if len(secret) < MIN_SECRET_BYTES:
        raise ConfigError(f"the secret for encryption is too short: use {MIN_SECRET_BYTES} characters or more")


def seals_of(secret: bytes, client_nonce: bytes, server_nonce: bytes) -> Seals:
    """The seals for a connection with these nonces, as seen by the client."""
    root = hmac.digest(client_nonce + server_nonce, secret, hashlib.sha256)  # as HKDF does
    of_client, of_server = (
        AesSeal(hmac.digest(root, b"kvtier frames of the " + end + b"\x01", hashlib.sha256))
        for end in (b"client", b"server")
    )
    return Seals(of_client, of_server)
