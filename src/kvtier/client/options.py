"""Settings for talking to a cache server."""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass
from pathlib import Path

from kvtier.errors import ConfigError
from kvtier.wire.cipher import check_secret

DEFAULT_TRANSFER_CONNECTIONS = min(4, max(2, (os.cpu_count() or 1) // 4))


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientOptions:
    """Settings for talking to a cache server.

    `timeout_s` limits every call; a transfer gets a second more per 64 MB. `transfer_connections` share one large
    transfer over TCP: by default one for every four cores, from two to four. `ca_file` turns TLS on and is the
    authority that signed the server's certificate; without TLS, `secret` encrypts, if the server has the same.
    `certificate` and `key` are this client's own, if the server identifies it by them. Without `takes_declines`, the
    server stores all blocks that it has room for; with it, it may keep others that are likelier to be asked for.
    """

    token: bytes | None = None
    secret: bytes | None = None
    ca_file: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    timeout_s: float = 1.0
    max_connections: int = 8
    transfer_connections: int = DEFAULT_TRANSFER_CONNECTIONS
    takes_declines: bool = False

    def __post_init__(self) -> None:
        if self.timeout_s <= 0:
            raise ConfigError(f"timeout_s must be positive, not {self.timeout_s}")
        if self.secret is not None:
            if self.ca_file is not None:
                raise ConfigError("a secret for encryption is for TCP without TLS: give one or the other")
            check_secret(self.secret)
        if (self.certificate is None) != (self.key is None):
            raise ConfigError("a client's certificate needs its key, and the key its certificate")
        if self.certificate is not None and self.ca_file is None:
            raise ConfigError("a client's certificate needs TLS: give ca_file too")
        if self.max_connections <= 0 or not 0 < self.transfer_connections <= self.max_connections:
            raise ConfigError("max_connections must be positive and not less than transfer_connections")

    def tls(self) -> ssl.SSLContext | None:
        if self.ca_file is None:
            return None
        try:
            context = ssl.create_default_context(cafile=str(self.ca_file))
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"cannot use the certificates in {self.ca_file}: {error}") from error
        if self.certificate is not None:
            try:
                context.load_cert_chain(self.certificate, self.key)
            except (OSError, ssl.SSLError) as error:
                raise ConfigError(f"cannot use the certificate {self.certificate}: {error}") from error
        return context
