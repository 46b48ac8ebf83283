"""The cache server's settings. Checked wherever they come from."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from kvtier.blocks.layout import SLOT_ALIGN_BYTES
from kvtier.cacheserver.tenants import MIN_TOKEN_BYTES
from kvtier.errors import ConfigError
from kvtier.memory.machine import machine_memory_bytes
from kvtier.sizes import format_size
from kvtier.transport.address import TcpAddress, UnixAddress
from kvtier.wire.cipher import check_secret


class CacheServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`memory_bytes` is a hard bound on the arena. A server listens on a Unix socket, on TCP, or on both.

    `max_leased_bytes` (half of the memory unless given) is how much one client may hold at once; `lease_timeout_s`
    ends leases of TCP clients, who hold copies, and never those of local ones; `gone_grace_s` is how long the memory
    of a client that died is left alone, for copies still in flight. TCP clients know the `token`, and are the server's
    owner then, or are among the tenants of `tenants_file`, by a token or by a certificate that `tls_client_ca` signed.
    With `tcp_secret` all that goes over TCP is encrypted, for those without certificates.

    With `folder`, blocks are kept on disk too, at most `file_bytes` of everything in it. `stores_on` says when a block
    is written: when it is committed, or when it is first used again. Without `keeps_memory` memory is only a passage.
    With `key_file`, blocks on disk are sealed under the key in it (`stores/cipher`).
    With `needs_disk`, a folder that cannot be used is an error at start; without, the server starts in memory.
    """

    memory_bytes: int
    unix: UnixAddress | None = None
    tcp: TcpAddress | None = None
    token: bytes | None = None
    tcp_secret: bytes | None = None
    tenants_file: Path | None = None
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    tls_client_ca: Path | None = None
    metrics: TcpAddress | None = None
    max_connections: int = 256
    max_payload_bytes: int = 256 << 20
    max_leased_bytes: int | None = None
    max_pinned_share: float = 0.5
    lease_timeout_s: float = 60.0
    gone_grace_s: float = 0.5
    stall_timeout_s: float = 30.0
    flush_timeout_s: float = 300.0
    folder: Path | None = None
    file_bytes: int | None = None
    fsync: bool = False
    stores_on: Literal["commit", "reuse"] = "commit"
    keeps_memory: bool = True
    needs_disk: bool = True
    touches_memory: bool = False
    key_file: Path | None = None

    def __post_init__(self) -> None:
        if self.memory_bytes < SLOT_ALIGN_BYTES:
            raise ConfigError(f"memory must be at least 4KiB, not {format_size(self.memory_bytes)}")
        total_bytes = machine_memory_bytes()
        if self.memory_bytes > total_bytes:
            raise ConfigError(
                f"memory of {format_size(self.memory_bytes)} is more than the {format_size(total_bytes)} "
                "this machine or its control group has"
            )
        if self.unix is None and self.tcp is None:
            raise ConfigError("a cache server needs a Unix socket or a TCP address to listen on")
        if self.tcp is not None and not self.token and self.tenants_file is None:
            raise ConfigError("TCP needs a token, also on loopback: set one with --token-file, or give --tenants")
        if self.tenants_file is not None and self.tcp is None:
            raise ConfigError("tenants come over TCP: give a TCP address too")
        if self.tcp_secret is not None:
            if self.tcp is None or self.tls_certificate is not None:
                raise ConfigError("a secret for encryption is for TCP without TLS")
            check_secret(self.tcp_secret)
        if self.tls_client_ca is not None and self.tls_certificate is None:
            raise ConfigError("clients' certificates need TLS: give a certificate and a key too")
        if self.token is not None and len(self.token) < MIN_TOKEN_BYTES:
            raise ConfigError(f"the token is too short: use {MIN_TOKEN_BYTES} characters or more")
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ConfigError("TLS needs both a certificate and a key")
        if self.tls_certificate is not None and self.tcp is None:
            raise ConfigError("TLS is for TCP: give a TCP address too")
        if (self.folder is None) != (self.file_bytes is None):
            raise ConfigError("the disk needs both a folder (--folder) and a bound (--disk)")
        if self.folder is None and not self.keeps_memory:
            raise ConfigError("a server without memory needs a folder")
        if self.folder is None and (self.fsync or self.stores_on != "commit"):
            raise ConfigError("fsync and store-on are about the disk: give a folder (--folder) too")
        if self.folder is None and self.key_file is not None:
            raise ConfigError("an encryption key is for the disk: give a folder (--folder) too")
        if not self.keeps_memory and self.stores_on == "reuse":
            raise ConfigError("a server that keeps blocks on disk alone must store them when they are committed")
        if self.max_leased_bytes is not None and self.max_leased_bytes <= 0:
            raise ConfigError("max_leased_bytes must be positive")
        if not 0 <= self.max_pinned_share <= 1:
            raise ConfigError(f"max_pinned_share must be between 0 and 1, not {self.max_pinned_share}")
        for name in ("max_connections", "max_payload_bytes", "lease_timeout_s", "gone_grace_s", "stall_timeout_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be positive, not {getattr(self, name)}")

    @property
    def leased_bytes_per_client(self) -> int:
        return self.memory_bytes // 2 if self.max_leased_bytes is None else self.max_leased_bytes
