"""The cache server's settings. Checked wherever they come from."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from kvtier.blocks.eviction import Eviction
from kvtier.blocks.layout import SLOT_ALIGN_BYTES
from kvtier.blocks.retention import check_ttl
from kvtier.cacheserver.tenants import DEFAULT_RETAINED_SHARE, MIN_TOKEN_BYTES
from kvtier.errors import ConfigError
from kvtier.memory.machine import machine_memory_bytes
from kvtier.sizes import format_size
from kvtier.stores.valkey.config import ClusterConfig
from kvtier.transport.address import TcpAddress, UnixAddress
from kvtier.wire.cipher import check_secret

DEFAULT_MAX_RETENTION_S = 24 * 3600.0
_MIN_DISK_WRITES_PER_DAY = 1 << 20
_MAX_DISK_WRITES_PER_DAY = 1 << 60
DEFAULT_CLUSTER_TIMEOUT_S = 0.15
"""An engine waits 0.25 s for its cache server's answer: a cluster that hangs must not look as if that did."""


class CacheServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`memory_bytes` is a hard bound on the arena. A server listens on a Unix socket, on TCP, or on both.

    `max_leased_bytes` (half of the memory unless given) is how much one client may hold at once; `lease_timeout_s`
    ends leases of TCP clients, who hold copies, and never those of local ones; `gone_grace_s` is how long the memory
    of a client that died is left alone, for copies still in flight. TCP clients know the `token`, and are the server's
    owner then, or are among the tenants of `tenants_file`, by a token or by a certificate that `tls_client_ca` signed.
    With `tcp_secret` all that goes over TCP is encrypted, for those without certificates.

    With `folder`, blocks are kept on disk too, at most `file_bytes` of everything in it. `stores_on` says when a block
    is written: when it is committed, or when it is first used again. `disk_writes_per_day` bounds the bytes that are
    written in a day (`disk_admission`). Without `keeps_memory` memory is only a passage.
    With `cluster`, what neither has is looked for there, and hosts share it (`cluster_below`). `shares_on` says when a
    block is written there, at most `share_bytes_per_s` of them.
    Clients may have `max_retained_share` of what is theirs retained, in memory and on disk, for `max_retention_s`.
    `eviction` says how blocks leave memory and disk (`blocks/adaptive_policy`).
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
    max_retained_share: float = DEFAULT_RETAINED_SHARE
    max_retention_s: float = DEFAULT_MAX_RETENTION_S
    lease_timeout_s: float = 60.0
    gone_grace_s: float = 0.5
    stall_timeout_s: float = 30.0
    flush_timeout_s: float = 300.0
    folder: Path | None = None
    file_bytes: int | None = None
    fsync: bool = False
    stores_on: Literal["commit", "reuse"] = "commit"
    disk_writes_per_day: int | None = None
    keeps_memory: bool = True
    needs_disk: bool = True
    touches_memory: bool = False
    key_file: Path | None = None
    cluster: ClusterConfig | None = None
    shares_on: Literal["commit", "reuse", "worth"] = "commit"
    eviction: Eviction = "adaptive"
    share_bytes_per_s: int | None = None

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
        if self.disk_writes_per_day is not None:
            self._check_disk_writes(self.disk_writes_per_day)
        if self.folder is None and self.key_file is not None:
            raise ConfigError("an encryption key is for the disk: give a folder (--folder) too")
        if self.cluster is None and (self.shares_on != "commit" or self.share_bytes_per_s is not None):
            raise ConfigError("when and how fast blocks are shared is about a cluster: give one (--cluster) too")
        if self.share_bytes_per_s is not None and self.share_bytes_per_s <= 0:
            raise ConfigError("at least a byte a second must go to the cluster: --cluster-write-rate")
        if not self.keeps_memory and self.stores_on == "reuse":
            raise ConfigError("a server that keeps blocks on disk alone must store them when they are committed")
        if self.eviction not in ("adaptive", "lru"):
            raise ConfigError(f"eviction must be adaptive or lru, not {self.eviction!r}")
        if self.max_leased_bytes is not None and self.max_leased_bytes <= 0:
            raise ConfigError("max_leased_bytes must be positive")
        if not 0 <= self.max_pinned_share <= 1:
            raise ConfigError(f"max_pinned_share must be between 0 and 1, not {self.max_pinned_share}")
        if not 0 <= self.max_retained_share <= 1:
            raise ConfigError(f"retained_share must be between 0 and 1, not {self.max_retained_share}")
        check_ttl("max_retention_s", self.max_retention_s)
        for name in ("max_connections", "max_payload_bytes", "lease_timeout_s", "gone_grace_s", "stall_timeout_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be positive, not {getattr(self, name)}")

    def _check_disk_writes(self, num_bytes: int) -> None:
        if self.folder is None:
            raise ConfigError("a budget of disk writes is about the disk: give a folder (--folder) too")
        if not self.keeps_memory:
            raise ConfigError("a server that keeps blocks on disk alone must write all of them: --disk-writes")
        if not _MIN_DISK_WRITES_PER_DAY <= num_bytes <= _MAX_DISK_WRITES_PER_DAY:
            raise ConfigError(f"disk writes must be 1MiB to 1EiB a day, not {format_size(num_bytes)}")

    @property
    def leased_bytes_per_client(self) -> int:
        return self.memory_bytes // 2 if self.max_leased_bytes is None else self.max_leased_bytes
