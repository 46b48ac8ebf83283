"""AES-256-GCM of the `cryptography` package, which those who encrypt nothing can do without."""

from __future__ import annotations

from kvtier.errors import ConfigError

try:
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    _IS_THERE = hasattr(AESGCM, "decrypt_into")
except ImportError:  # without the extra `encryption`
    _IS_THERE = False

__all__ = ["AESGCM", "TAG_BYTES", "InvalidTag", "require_aead"]

TAG_BYTES = 16


def require_aead() -> None:
    """Raises `ConfigError` where the package is missing, or too old."""
    if not _IS_THERE:
        raise ConfigError("encryption needs cryptography 47 or newer: pip install 'kvtier[encryption]'")
