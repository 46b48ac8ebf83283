"""`kvtier cluster`: make a cluster of new Valkey servers, if `valkey-cli` is not available."""

from __future__ import annotations

from pathlib import Path

import click

from kvtier.cli.cluster_options import read_password
from kvtier.errors import KvtierError
from kvtier.stores.valkey.config import ClusterConfig
from kvtier.stores.valkey.creation import create_cluster

_FILE = click.Path(path_type=Path, exists=True, dir_okay=False)


@click.group("cluster")
def cluster() -> None:
    """Set up a Valkey cluster that engines of several hosts share."""


@cluster.command("create", short_help="Join new servers to a cluster.")
@click.argument("nodes", nargs=-1, required=True, metavar="NODE...")
@click.option("--user", default=None, help="A user that may run CLUSTER and CONFIG GET on the nodes.")
@click.option("--password-file", type=_FILE, default=None, help="File with that user's password.")
@click.option("--ca-file", type=_FILE, default=None, help="CA of the nodes' certificates, for TLS.")
@click.option("--plaintext", is_flag=True, help="Use no TLS with nodes on other hosts.")
@click.option(
    "--timeout", default=60.0, show_default=True, type=click.FloatRange(1, 3600), help="Seconds for them to join."
)
def create_command(
    nodes: tuple[str, ...],
    user: str | None,
    password_file: Path | None,
    ca_file: Path | None,
    plaintext: bool,
    timeout: float,
) -> None:
    """Join new servers, tls://host:port or tcp://host:port, into a cluster and divide the slots among them.

        kvtier cluster create tls://10.0.0.1:6379 tls://10.0.0.2:6379 tls://10.0.0.3:6379

    Nothing is changed if one of them does not answer, or already belongs to a cluster.
    """
    try:
        config = ClusterConfig(
            valkey=nodes,
            user=user,
            password=read_password(password_file),
            ca_file=None if ca_file is None else str(ca_file),
            plaintext=plaintext,
        )
        create_cluster(config.seeds, config.access(), timeout)
    except KvtierError as error:
        raise click.ClickException(str(error)) from error
    click.echo(f"a cluster of {len(nodes)} nodes, all slots served")
