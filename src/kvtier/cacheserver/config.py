"""The cache server's settings, checked on construction, wherever the values come from."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from kvtier.blocks.eviction import Eviction
from kvtier.blocks.layout import SLOT_ALIGN_BYTES
from kvtier.blocks.retention import check_ttl
from kvtier.cacheserver.tenants import DEFAULT_RETAINED_SHARE, MIN_TOKEN_BYTES
from kvtier.errors import ConfigError
from kvtier.memory.machine_limits import machine_memory_bytes
from kvtier.sizes import format_size
from kvtier.stores.valkey.config import ClusterConfig, StoreOn
from kvtier.transport.address import TcpAddress, UnixAddress
from kvtier.wire.cipher import check_secret

DEFAULT_MAX_RETENTION_S = 24 * 3600.0
_MIN_DISK_WRITES_PER_DAY = 1 << 20
_MAX_DISK_WRITES_PER_DAY = 1 << 60


class CacheServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`memory_bytes` is a hard bound on the arena. A server listens on a Unix socket, on TCP, or on both.

    `max_leased_bytes` (by default half of the memory) bounds what one client holds at once. `lease_timeout_s` ends the
    leases of idle TCP clients, which hold copies, but never those of local clients. `gone_grace_s` is how long the
    memory of a dead client is left alone, for copies still in flight. A TCP client that knows the `token` acts as the
    server's owner; the others are tenants from `tenants_file`, identified by a token or by a certificate signed by
    `tls_client_ca`. `tcp_secret` encrypts all TCP traffic in place of TLS, so no certificates are needed.

    With `folder`, blocks are kept on disk too; everything in the folder takes at most `file_bytes`. `stores_on` says
    when a block is written to disk: at its commit, or at its first reuse. `disk_writes_per_day` bounds the bytes
    written in a day (`disk_admission`). Without `keeps_memory`, memory is only a buffer before the disk.
    With `cluster`, blocks in neither place are looked up in a cluster that hosts share (`cluster_below`). `shares_on`
    says when a block is written there, and `share_bytes_per_s` how fast at most.
    Clients may retain up to `max_retained_share` of their memory and disk, for at most `max_retention_s`.
    `eviction` names the policy that evicts blocks from memory and disk (`blocks/adaptive_policy`).
    With `key_file`, blocks on disk are encrypted with the key in that file (`stores/cipher`).
    With `needs_disk`, an unusable folder is an error at start; otherwise the server starts with memory only.
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
    shares_on: StoreOn = "commit"
    eviction: Eviction = "adaptive"
    share_bytes_per_s: int | None = None

    def __post_init__(self) -> None:
        self._check_memory()
        self._check_listening()
        self._check_disk()
        self._check_cluster()
        self._check_limits()

    def _check_memory(self) -> None:
        if self.memory_bytes < SLOT_ALIGN_BYTES:
            raise ConfigError(f"memory must be at least 4KiB, not {format_size(self.memory_bytes)}")
        total_bytes = machine_memory_bytes()
        if self.memory_bytes > total_bytes:
            raise ConfigError(
                f"memory of {format_size(self.memory_bytes)} is more than the {format_size(total_bytes)} "
                "this machine or its control group has"
            )

    def _check_listening(self) -> None:
        if self.unix is None and self.tcp is None:
            raise ConfigError("a cache server needs a Unix socket or a TCP address to listen on")
        if self.tcp is not None and not self.token and self.tenants_file is None:
            raise ConfigError("TCP needs a token, even on loopback: set one with --token-file, or give --tenants")
        if self.tenants_file is not None and self.tcp is None:
            raise ConfigError("tenants connect over TCP: give a TCP address too")
        if self.tcp_secret is not None:
            if self.tcp is None or self.tls_certificate is not None:
                raise ConfigError("an encryption secret is for TCP without TLS: give a TCP address, no certificate")
            check_secret(self.tcp_secret)
        if self.tls_client_ca is not None and self.tls_certificate is None:
            raise ConfigError("client certificates need TLS: give the server a certificate and a key too")
        if self.token is not None and len(self.token) < MIN_TOKEN_BYTES:
            raise ConfigError(f"the token is too short: use {MIN_TOKEN_BYTES} characters or more")
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ConfigError("TLS needs both a certificate and a key")
        if self.tls_certificate is not None and self.tcp is None:
            raise ConfigError("TLS is for TCP: give a TCP address too")

    def _check_disk(self) -> None:
        if (self.folder is None) != (self.file_bytes is None):
            raise ConfigError("the disk needs both a folder (--folder) and a size (--disk)")
        if self.folder is None and not self.keeps_memory:
            raise ConfigError("a server that keeps no blocks in memory needs a folder (--folder)")
        if self.folder is None and (self.fsync or self.stores_on != "commit"):
            raise ConfigError("fsync and store-on apply to the disk: give a folder (--folder) too")
        if self.disk_writes_per_day is not None:
            self._check_disk_writes(self.disk_writes_per_day)
        if self.folder is None and self.key_file is not None:
            raise ConfigError("an encryption key is for the disk: give a folder (--folder) too")
        if not self.keeps_memory and self.stores_on == "reuse":
            raise ConfigError("a server that keeps blocks only on disk must store them when they are committed")

    def _check_cluster(self) -> None:
        if self.cluster is None and (self.shares_on != "commit" or self.share_bytes_per_s is not None):
            raise ConfigError("share-on and the write rate apply to a cluster: give one (--cluster) too")
        if self.share_bytes_per_s is not None and self.share_bytes_per_s <= 0:
            raise ConfigError("the cluster's write rate (--cluster-write-rate) must be positive")

    def _check_limits(self) -> None:
        if self.eviction not in ("adaptive", "lru"):
            raise ConfigError(f"eviction must be adaptive or lru, not {self.eviction!r}")
        if self.max_leased_bytes is not None and self.max_leased_bytes <= 0:
            raise ConfigError("max_leased_bytes must be positive")
        for name, share in (("max_pinned_share", self.max_pinned_share), ("retained_share", self.max_retained_share)):
            if not 0 <= share <= 1:
                raise ConfigError(f"{name} must be between 0 and 1, not {share}")
        check_ttl("max_retention_s", self.max_retention_s)
        for name in ("max_connections", "max_payload_bytes", "lease_timeout_s", "gone_grace_s", "stall_timeout_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be positive, not {getattr(self, name)}")

    def _check_disk_writes(self, num_bytes: int) -> None:
        if self.folder is None:
            raise ConfigError("a budget of disk writes applies to the disk: give a folder (--folder) too")
        if not self.keeps_memory:
            raise ConfigError("a server that keeps blocks only on disk must write all of them: leave out --disk-writes")
        if not _MIN_DISK_WRITES_PER_DAY <= num_bytes <= _MAX_DISK_WRITES_PER_DAY:
            raise ConfigError(f"disk writes must be 1MiB to 1EiB a day, not {format_size(num_bytes)}")

    @property
    def leased_bytes_per_client(self) -> int:
        return self.memory_bytes // 2 if self.max_leased_bytes is None else self.max_leased_bytes
