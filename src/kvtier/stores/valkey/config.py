"""Where a cluster is, who speaks to it, and how long blocks live there. Checked once."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

from kvtier.blocks.namespace import Namespace
from kvtier.errors import ConfigError
from kvtier.stores.valkey.blocks import ClusterBlocks, OnLoss
from kvtier.stores.valkey.cluster import Cluster
from kvtier.stores.valkey.node import NodeAccess, NodeAddress, is_loopback

DEFAULT_TTL_S = 7 * 86400.0
DEFAULT_SEGMENT = 128
DEFAULT_TIMEOUT_S = 1.0
DEFAULT_BELOW_SERVER_TIMEOUT_S = 0.15
"""Shorter than the 0.25 s that an engine waits for its cache server: a cluster that hangs must not look like a
cache server that hangs."""
_MIN_TTL_S, _MAX_TTL_S = 60.0, 10 * 365 * 86400.0
_MAX_SEGMENT = 1 << 16
_MAX_SEEDS = 64
_MAX_TIMEOUT_S = 600.0


StoreOn: TypeAlias = Literal["commit", "reuse", "worth"]


class ClusterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`valkey` are some of its nodes, `tls://host:port` or `tcp://host:port`: the cluster names the others.

    With `compute_once`, hosts announce there what they are computing, and wait for what others are.
    """

    valkey: tuple[str, ...]
    user: str | None = None
    password: str | None = None
    ca_file: str | None = None
    ttl_s: float = DEFAULT_TTL_S
    segment: int = DEFAULT_SEGMENT
    timeout_s: float = DEFAULT_TIMEOUT_S
    plaintext: bool = False
    compute_once: bool = True

    def __post_init__(self) -> None:
        if not 1 <= len(self.valkey) <= _MAX_SEEDS:
            raise ConfigError(f"valkey must name from 1 to {_MAX_SEEDS} nodes of the cluster, such as tls://a:6379")
        if len({text.partition("://")[0] for text in self.valkey}) > 1:
            raise ConfigError("valkey must have nodes with TLS or nodes without, not both")
        for seed in self.seeds:
            if not self.is_tls and not self.plaintext and not is_loopback(seed.host):
                raise ConfigError(
                    f"{seed} is another host: write tls://{seed}, or plaintext: true if all may read and alter blocks"
                )
        if self.user is not None and self.password is None:
            raise ConfigError("user needs a password")
        if self.ca_file is not None and not self.is_tls:
            raise ConfigError("ca_file is about TLS: write tls:// before the nodes")
        if not _MIN_TTL_S <= self.ttl_s <= _MAX_TTL_S:
            raise ConfigError(f"ttl must be from {_MIN_TTL_S:g} s to ten years, not {self.ttl_s:g} s")
        if not 1 <= self.segment <= _MAX_SEGMENT:
            raise ConfigError(f"segment must be from 1 to {_MAX_SEGMENT} blocks, not {self.segment}")
        if not 0 < self.timeout_s <= _MAX_TIMEOUT_S:
            raise ConfigError(f"timeout_s must be more than 0 and at most {_MAX_TIMEOUT_S:g}, not {self.timeout_s:g}")

    @property
    def is_tls(self) -> bool:
        return self.valkey[0].startswith("tls://")

    @property
    def seeds(self) -> list[NodeAddress]:
        return [_parse_node(text) for text in self.valkey]

    def access(self) -> NodeAccess:
        """Raises `ConfigError` for a `ca_file` that cannot be read."""
        tls = None
        if self.is_tls:
            try:
                tls = ssl.create_default_context(cafile=self.ca_file)
            except (OSError, ssl.SSLError) as error:
                reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
                raise ConfigError(f"ca_file {Path(self.ca_file or '').name} cannot be used: {reason}") from error
        return NodeAccess(self.user, self.password, tls, self.plaintext)


class ClusterUse(msgspec.Struct, frozen=True, kw_only=True):
    """How a cache server uses its cluster, as its description shows it: everything but the password."""

    valkey: tuple[str, ...]
    user: str | None
    ca_file: str | None
    ttl_s: float
    segment: int
    timeout_s: float
    plaintext: bool
    compute_once: bool
    store_on: StoreOn
    write_bytes_per_s: int | None

    @classmethod
    def of(cls, config: ClusterConfig, store_on: StoreOn, write_bytes_per_s: int | None) -> ClusterUse:
        return cls(
            valkey=config.valkey,
            user=config.user,
            ca_file=config.ca_file,
            ttl_s=config.ttl_s,
            segment=config.segment,
            timeout_s=config.timeout_s,
            plaintext=config.plaintext,
            compute_once=config.compute_once,
            store_on=store_on,
            write_bytes_per_s=write_bytes_per_s,
        )

    def differences(self, other: ClusterUse) -> list[str]:
        """Each setting in which `other` differs, such as "segment 128 and not 64"."""
        mine, others = msgspec.structs.asdict(self), msgspec.structs.asdict(other)
        return [
            f"{name} {_shown(value)} and not {_shown(others[name])}"
            for name, value in mine.items()
            if value != others[name]
        ]


def open_cluster(config: ClusterConfig) -> Cluster:
    """It need not answer now. Raises `ConfigError` for a `ca_file` that cannot be read."""
    return Cluster(config.seeds, config.access())


def blocks_in(
    cluster: Cluster,
    config: ClusterConfig,
    namespace: Namespace,
    block_bytes: int,
    on_loss: OnLoss = lambda kind, count: None,
) -> ClusterBlocks:
    """The blocks of `namespace`."""
    return ClusterBlocks(
        cluster, namespace, block_bytes, ttl_s=config.ttl_s, segment_blocks=config.segment, on_loss=on_loss
    )


def _shown(value: object) -> str:
    return ",".join(value) if isinstance(value, tuple) else "none" if value is None else str(value)


def _parse_node(text: str) -> NodeAddress:
    scheme, _, rest = text.partition("://")
    host, colon, port = rest.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    is_port = port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) < 65536
    if scheme not in ("tls", "tcp") or not colon or not host or len(host) > 255 or not is_port:
        raise ConfigError(f"{text!r} is not a node: write tls://host:port, or tcp://host:port without TLS")
    return NodeAddress(host, int(port))
