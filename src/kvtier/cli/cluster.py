"""`kvtier cluster`: make a cluster of new Valkey servers, where `valkey-cli` is not at hand."""

from __future__ import annotations

from pathlib import Path

import click

from kvtier.errors import ConfigError, KvtierError
from kvtier.stores.valkey.config import ClusterConfig
from kvtier.stores.valkey.creation import create_cluster

_FILE = click.Path(path_type=Path, exists=True, dir_okay=False)


@click.group("cluster")
def cluster() -> None:
    """Set up a Valkey cluster that engines of several hosts share."""


@cluster.command("create")
@click.argument("nodes", nargs=-1, required=True, metavar="NODE...")
@click.option("--user", default=None, help="Who may use CLUSTER and CONFIG GET on the nodes.")
@click.option("--password-file", type=_FILE, default=None, help="File with that user's password.")
@click.option("--ca-file", type=_FILE, default=None, help="Who signed the nodes' certificates, for TLS.")
@click.option("--plaintext", is_flag=True, help="Speak to nodes on other hosts without TLS.")
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
    """Join new servers, tls://host:port or tcp://host:port, to a cluster in which each has its share of the slots.

        kvtier cluster create tls://10.0.0.1:6379 tls://10.0.0.2:6379 tls://10.0.0.3:6379

    Nothing is changed if one of them does not answer, or is in a cluster already.
    """
    try:
        config = ClusterConfig(
            valkey=nodes,
            user=user,
            password=_read_password(password_file),
            ca_file=None if ca_file is None else str(ca_file),
            plaintext=plaintext,
        )
        create_cluster(config.seeds, config.access(), timeout)
    except KvtierError as error:
        raise click.ClickException(str(error)) from error
    click.echo(f"a cluster of {len(nodes)} nodes, all slots served")


def _read_password(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ConfigError(f"cannot read the password in {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"the password in {path} is no text in UTF-8") from error
