"""The options of a cache server for the Valkey cluster below it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import click

from kvtier.cacheserver.config import DEFAULT_CLUSTER_TIMEOUT_S
from kvtier.cli.size_parameter import SizeParameter
from kvtier.errors import ConfigError
from kvtier.stores.valkey.config import DEFAULT_SEGMENT, DEFAULT_TTL_S, ClusterConfig

_FILE = click.Path(path_type=Path, exists=True, dir_okay=False)
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
        default=DEFAULT_CLUSTER_TIMEOUT_S,
        show_default=True,
        help="Seconds that a match waits for the cluster; must be less than the clients' time-out.",
    ),
    click.option(
        "--cluster-segment",
        type=int,
        default=DEFAULT_SEGMENT,
        show_default=True,
        help="Consecutive blocks of a prompt on one node. All hosts must use the same number.",
    ),
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
    click.option("--cluster-plaintext", is_flag=True, help="Use no TLS with nodes on other hosts."),
    click.option("--cluster-ca-file", type=_FILE, default=None, help="CA of the nodes' certificates, for TLS."),
    click.option("--cluster-password-file", type=_FILE, default=None, help="File with the cluster user's password."),
    click.option("--cluster-user", default=None, help="The cluster's user for kvtier."),
    click.option(
        "--cluster",
        "cluster_nodes",
        default=None,
        metavar="NODE,...",
        help="Share blocks with other hosts through a Valkey cluster: some of its nodes, tls://host:port each.",
    ),
)


@dataclass(frozen=True)
class ClusterOptions:
    """The cluster options that were given."""

    cluster_nodes: str | None
    cluster_user: str | None
    cluster_password_file: Path | None
    cluster_ca_file: Path | None
    cluster_plaintext: bool
    cluster_compute_once: bool
    cluster_ttl: float
    cluster_segment: int
    cluster_timeout: float
    cluster_store_on: Literal["commit", "reuse", "worth"]
    cluster_write_rate: int | None

    def config(self) -> ClusterConfig | None:
        """Raises `ConfigError`."""
        if self.cluster_nodes is None:
            if self.cluster_user or self.cluster_password_file or self.cluster_ca_file or self.cluster_plaintext:
                raise ConfigError("which cluster? Give some of its nodes with --cluster")
            return None
        return ClusterConfig(
            valkey=tuple(node.strip() for node in self.cluster_nodes.split(",")),
            user=self.cluster_user,
            password=read_password(self.cluster_password_file),
            ca_file=None if self.cluster_ca_file is None else str(self.cluster_ca_file),
            ttl_s=self.cluster_ttl,
            segment=self.cluster_segment,
            timeout_s=self.cluster_timeout,
            plaintext=self.cluster_plaintext,
            compute_once=self.cluster_compute_once,
        )


def cluster_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """`--cluster` and its options; the command gets them as `cluster`."""

    @functools.wraps(command)
    def collected(**given: Any) -> Any:
        cluster = ClusterOptions(**{name: given.pop(name) for name in ClusterOptions.__dataclass_fields__})
        return command(cluster=cluster, **given)

    for option in _OPTIONS:
        collected = option(collected)
    return collected


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
