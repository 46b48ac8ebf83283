"""The options of a cache server for the Valkey cluster below it, and of commands that ask a cluster."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import msgspec

from kvtier.cli.size_parameter import SizeParameter
from kvtier.errors import ConfigError
from kvtier.stores.valkey.config import (
    DEFAULT_BELOW_SERVER_TIMEOUT_S,
    DEFAULT_SEGMENT,
    DEFAULT_TTL_S,
    ClusterConfig,
    StoreOn,
)

_FILE = click.Path(path_type=Path, exists=True, dir_okay=False)
_ASKED_TIMEOUT_S = 10.0
_SEGMENT = click.option(
    "--cluster-segment",
    type=int,
    default=DEFAULT_SEGMENT,
    show_default=True,
    help="Consecutive blocks of a prompt on one node. All hosts must use the same number.",
)
_ACCESS = (
    click.option("--cluster-plaintext", is_flag=True, help="Use no TLS with nodes on other hosts."),
    click.option("--cluster-ca-file", type=_FILE, default=None, help="CA of the nodes' certificates, for TLS."),
    click.option("--cluster-password-file", type=_FILE, default=None, help="File with the cluster user's password."),
    click.option("--cluster-user", default=None, help="The cluster's user for kvtier."),
)
_ASKED_OPTIONS = (
    _SEGMENT,
    *_ACCESS,
    click.option(
        "--cluster",
        "cluster_nodes",
        default=None,
        metavar="NODE,...",
        help="Ask a Valkey cluster and no server: some of its nodes, tls://host:port each.",
    ),
)
_OPTIONS = (
    click.option(
        "--cluster-write-rate",
        type=SizeParameter(),
        default=None,
        help="Limit on bytes written to the cluster per second, as in 200MiB.  [default: no limit]",
    ),
    click.option(
        "--cluster-store-on",
        type=click.Choice(["commit", "reuse", "worth"]),
        default="commit",
        show_default=True,
        help="When a block is written: at once, or when it is used again or about to leave the host: its disk (worth), "
        "or its memory without a disk (worth and reuse).",
    ),
    click.option(
        "--cluster-timeout",
        type=float,
        default=DEFAULT_BELOW_SERVER_TIMEOUT_S,
        show_default=True,
        help="Seconds that a match waits for the cluster; must be less than the clients' time-out.",
    ),
    _SEGMENT,
    click.option(
        "--cluster-ttl",
        type=float,
        default=DEFAULT_TTL_S,
        show_default=True,
        help="Seconds that a block stays in the cluster after its last use there.",
    ),
    click.option(
        "--cluster-compute-once/--no-cluster-compute-once",
        default=True,
        show_default=True,
        help="Announce in the cluster the blocks being computed: hosts that need the same wait for them.",
    ),
    *_ACCESS,
    click.option(
        "--cluster",
        "cluster_nodes",
        default=None,
        metavar="NODE,...",
        help="Share blocks with other hosts through a Valkey cluster: some of its nodes, tls://host:port each.",
    ),
)


@dataclass(frozen=True)
class AskedClusterOptions:
    """A cluster to be asked, if one was given."""

    cluster_nodes: str | None
    cluster_user: str | None
    cluster_password_file: Path | None
    cluster_ca_file: Path | None
    cluster_plaintext: bool
    cluster_segment: int

    def config(self) -> ClusterConfig | None:
        """Raises `ConfigError`."""
        config = self._reached()
        return None if config is None else msgspec.structs.replace(config, timeout_s=_ASKED_TIMEOUT_S)

    def _reached(self) -> ClusterConfig | None:
        if self.cluster_nodes is None:
            if self.cluster_user or self.cluster_password_file or self.cluster_ca_file or self.cluster_plaintext:
                raise ConfigError("which cluster? Give some of its nodes with --cluster")
            return None
        return ClusterConfig(
            valkey=tuple(node.strip() for node in self.cluster_nodes.split(",")),
            user=self.cluster_user,
            password=read_password(self.cluster_password_file),
            ca_file=None if self.cluster_ca_file is None else str(self.cluster_ca_file),
            segment=self.cluster_segment,
            plaintext=self.cluster_plaintext,
        )


@dataclass(frozen=True)
class ClusterOptions(AskedClusterOptions):
    """The cluster options of a server that were given."""

    cluster_compute_once: bool
    cluster_ttl: float
    cluster_timeout: float
    cluster_store_on: StoreOn
    cluster_write_rate: int | None

    def config(self) -> ClusterConfig | None:
        """Raises `ConfigError`."""
        config = self._reached()
        if config is None:
            return None
        return msgspec.structs.replace(
            config,
            ttl_s=self.cluster_ttl,
            timeout_s=self.cluster_timeout,
            compute_once=self.cluster_compute_once,
        )


def cluster_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """`--cluster` and its options; the command gets them as `cluster`."""
    return _collecting(command, ClusterOptions, _OPTIONS)


def asked_cluster_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """As `cluster_options`, for a command that asks a cluster: `cluster` is an `AskedClusterOptions`."""
    return _collecting(command, AskedClusterOptions, _ASKED_OPTIONS)


def _collecting(
    command: Callable[..., Any],
    kind: type[AskedClusterOptions],
    options: Sequence[Callable[[Callable[..., Any]], Callable[..., Any]]],
) -> Callable[..., Any]:
    @functools.wraps(command)
    def collected(**given: Any) -> Any:
        cluster = kind(**{name: given.pop(name) for name in kind.__dataclass_fields__})
        return command(cluster=cluster, **given)

    wrapped: Callable[..., Any] = collected
    for option in options:
        wrapped = option(wrapped)
    return wrapped


def read_password(path: Path | None) -> str | None:
    """Raises `ConfigError`."""
    if path is None:
        return None
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ConfigError(f"cannot read the password in {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"the password in {path} is not text in UTF-8") from error
