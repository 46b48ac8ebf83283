"""AES-256-GCM of the `cryptography` package, which is loaded only if something is encrypted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtier.errors import ConfigError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

TAG_BYTES = 16


class InvalidTag(Exception):
    """The data was changed, or was not encrypted with this key."""


class Aead:
    """One key of 32 bytes. A nonce must never be used twice. Raises `ConfigError` without the package."""

    def __init__(self, key: bytes) -> None:
        self._cipher = _aesgcm()(key)

    def encrypt(self, nonce: bytes, data: memoryview | bytes, about: bytes) -> bytes:
        return self._cipher.encrypt(nonce, data, about)

    def encrypt_into(self, nonce: bytes, data: memoryview, about: bytes, into: memoryview) -> None:
        """Encrypt `data` into `into`, which needs room for the tag behind the ciphertext."""
        self._cipher.encrypt_into(nonce, data, about, into)

    def decrypt_into(self, nonce: bytes, data: memoryview | bytearray, about: bytes, into: memoryview) -> None:
        """Decrypt `data` into `into`. Raises `InvalidTag` if the data or `about` was changed."""
        from cryptography import exceptions  # noqa: PLC0415

        try:
            self._cipher.decrypt_into(nonce, data, about, into)
        except exceptions.InvalidTag as error:
            raise InvalidTag from error


def require_aead() -> None:
    """Raises `ConfigError` if the package is missing, or too old."""
    _aesgcm()


def _aesgcm() -> type[AESGCM]:
    try:
        from cryptography.hazmat.primitives.ciphers import aead  # noqa: PLC0415  # 8 MB that few need
    except ImportError:
        pass
    else:
        if hasattr(aead.AESGCM, "decrypt_into"):
            return aead.AESGCM
    raise ConfigError("encryption needs cryptography 47 or newer: pip install 'kvtier[encryption]'")
