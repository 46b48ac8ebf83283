"""`kvtier cache-server`."""

from __future__ import annotations

import logging
import math
import os
import signal
import sys
from pathlib import Path
from typing import Any, Literal

import click

from kvtier.cacheserver.config import CacheServerConfig
from kvtier.cacheserver.server import CacheServer
from kvtier.errors import ConfigError
from kvtier.sizes import format_size, parse_size
from kvtier.transport.address import TcpAddress, UnixAddress, parse_address, parse_host_port
from kvtier.transport.listening import is_own_folder, make_private_folder

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_LONGEST_WAIT_S = 3600.0
_SWITCH_S = 0.0005
"""For which one connection's thread may keep the others waiting, while it works on a long request."""


class _Size(click.ParamType[int]):
    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return parse_size(value)
        except ConfigError as error:
            self.fail(str(error), param, ctx)


class _HostPort(click.ParamType[TcpAddress]):
    name = "host:port"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> TcpAddress:
        if isinstance(value, TcpAddress):
            return value
        try:
            return parse_host_port(value)
        except ConfigError as error:
            self.fail(str(error), param, ctx)


class _Seconds(click.ParamType[float]):
    name = "seconds"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            seconds = float(value)
        except ValueError:
            seconds = math.nan
        if not 0 < seconds < math.inf:
            self.fail(f"{value!r} is not a number of seconds above 0", param, ctx)
        return seconds


def default_socket() -> str:
    """Where the server listens, and clients look, when nobody says otherwise."""
    user = os.geteuid()
    if user == 0:
        return "/run/kvtier.sock"
    folder = os.environ.get("XDG_RUNTIME_DIR")
    if not folder or not is_own_folder(Path(folder)):  # one that came along from another user, as with sudo, is none
        folder = f"/tmp/kvtier-{user}"
    return f"{folder}/kvtier.sock"


@click.command("cache-server")
@click.option("--memory", type=_Size(), default="4GiB", show_default=True, help="Most memory for blocks, as in 20GiB.")
@click.option(
    "--socket",
    "socket_path",
    type=click.Path(dir_okay=False),
    default=None,
    help=f"Unix socket for processes on this host, open to this user only.  [default: {default_socket()}]",
)
@click.option(
    "--folder",
    type=click.Path(path_type=Path, file_okay=False),
    default=None,
    help="Keep blocks on disk too, in this folder, over restarts. Needs --disk.",
)
@click.option("--disk", type=_Size(), default=None, help="Most space for everything in --folder, as in 100GiB.")
@click.option("--disk-only", is_flag=True, help="Keep blocks on disk alone; --memory is then only what passes through.")
@click.option(
    "--store-on",
    type=click.Choice(["commit", "reuse"]),
    default="commit",
    show_default=True,
    help="When a block goes to disk: at once, or when it is first used again, which spares the SSD.",
)
@click.option("--fsync", is_flag=True, help="Let flush wait for the device, so that a power cut loses nothing either.")
@click.option(
    "--encryption-key-file",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    default=None,
    help="File with a key (32 bytes, or 64 hexadecimal digits): blocks on disk are encrypted.",
)
@click.option("--disk-optional", is_flag=True, help="Start in memory when the folder cannot be used, and try it again.")
@click.option(
    "--tcp", type=_HostPort(), default=None, help="Also listen on host:port. Needs --token-file or --tenants."
)
@click.option(
    "--token-file",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    default=None,
    help="File with the secret that TCP clients must know (8 characters or more).",
)
@click.option(
    "--tcp-secret-file",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    default=None,
    help="File with a secret (16 characters or more): TCP is encrypted with it, without TLS. Clients need it, too.",
)
@click.option(
    "--tenants",
    "tenants_file",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    default=None,
    help="File (TOML) with the tenants that TCP serves, and what each may have. Read again when it changes.",
)
@click.option("--tls-cert", type=click.Path(path_type=Path, dir_okay=False), help="Certificate (PEM): TCP speaks TLS.")
@click.option("--tls-key", type=click.Path(path_type=Path, dir_okay=False), help="Its private key (PEM).")
@click.option(
    "--tls-client-ca",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Who signs the certificates of tenants (PEM): such a one stands for a token.",
)
@click.option("--metrics", type=_HostPort(), default=None, help="Serve Prometheus metrics over HTTP on host:port.")
@click.option(
    "--max-leased",
    type=_Size(),
    default=None,
    help="Most memory one client may hold.  [default: half of --memory]",
)
@click.option("--max-frame", type=_Size(), default="256MiB", show_default=True, help="Largest payload of one frame.")
@click.option("--max-connections", type=click.IntRange(1), default=256, show_default=True)
@click.option(
    "--lease-timeout",
    type=click.FloatRange(0, min_open=True),
    default=60.0,
    show_default=True,
    help="Seconds after which a TCP client's lease ends. Leases of local clients never end by a clock.",
)
@click.option(
    "--touch-memory",
    is_flag=True,
    help="Make all of --memory resident in the background, so that first writes are as fast as later ones.",
)
@click.option(
    "--stop-when-unused",
    type=_Seconds(),
    default=None,
    help="Stop by itself, as on SIGTERM, when no client has been connected for so long, from the start on.",
)
@click.option("-v", "--verbose", is_flag=True, help="Say more.")
def cache_server(
    memory: int,
    socket_path: str | None,
    folder: Path | None,
    disk: int | None,
    disk_only: bool,
    store_on: Literal["commit", "reuse"],
    fsync: bool,
    encryption_key_file: Path | None,
    disk_optional: bool,
    tcp: TcpAddress | None,
    token_file: Path | None,
    tcp_secret_file: Path | None,
    tenants_file: Path | None,
    tls_cert: Path | None,
    tls_key: Path | None,
    tls_client_ca: Path | None,
    metrics: TcpAddress | None,
    max_leased: int | None,
    max_frame: int,
    max_connections: int,
    lease_timeout: float,
    touch_memory: bool,
    stop_when_unused: float | None,
    verbose: bool,
) -> None:
    """Keep KV blocks in memory that all processes on this host share, and on disk if you like.

    Start it once per host and leave it running:

        kvtier cache-server --memory 20GiB

    Processes of the same user then reach it with kvtier.connect("unix:PATH") and read and write blocks in its
    memory without a copy. Other hosts reach it over TCP when you ask for that:

        kvtier cache-server --memory 20GiB --tcp 0.0.0.0:7700 --token-file secret

    With a folder, blocks survive restarts and crashes, within a bound:

        kvtier cache-server --memory 20GiB --folder /var/cache/kvtier --disk 100GiB

    Ctrl-C or SIGTERM stops it: requests under way are answered and blocks are written to disk first. What is only in
    memory is gone then.
    """
    logging.basicConfig(
        level=logging.DEBUG if verbose else logging.INFO,
        format="%(asctime)s %(levelname)s %(message)s",
        stream=sys.stderr,
    )
    sys.setswitchinterval(_SWITCH_S)
    # Blocked before any thread starts, so that only sigwait below ever sees them.
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    path = socket_path or default_socket()
    try:
        if socket_path is None:
            _check_socket_folder(Path(path).parent)
        config = CacheServerConfig(
            memory_bytes=memory,
            unix=_unix_address(path),
            tcp=tcp,
            token=read_token(token_file),
            tcp_secret=read_token(tcp_secret_file),
            tenants_file=tenants_file,
            tls_certificate=tls_cert,
            tls_key=tls_key,
            tls_client_ca=tls_client_ca,
            metrics=metrics,
            max_connections=max_connections,
            max_payload_bytes=max_frame,
            max_leased_bytes=max_leased,
            lease_timeout_s=lease_timeout,
            touches_memory=touch_memory,
            folder=folder,
            file_bytes=disk,
            fsync=fsync,
            stores_on=store_on,
            keeps_memory=not disk_only,
            needs_disk=not disk_optional,
            key_file=encryption_key_file,
        )
        server = CacheServer(config)
    except ConfigError as error:
        raise click.ClickException(str(error)) from error
    click.echo(f"kvtier cache server: {format_size(memory)} of memory for blocks")
    if folder is not None and disk is not None:
        click.echo(f"  {format_size(disk)} of disk in {folder}")
    click.echo(f"  unix:{path}")
    if tcp is not None:
        click.echo(f"  tcp://{tcp.host}:{server.tcp_port}{' with TLS' if tls_cert else ''}")
    if metrics is not None:
        click.echo(f"  metrics: http://{metrics.host}:{server.metrics_port}/metrics")
    click.echo("ready; Ctrl-C stops it")
    sys.stdout.flush()
    _wait_for_the_end(server, stop_when_unused)
    click.echo("stopping")
    server.close()


def _wait_for_the_end(server: CacheServer, stop_when_unused_s: float | None) -> None:
    """Until a signal says so, or nobody has used the server for that long."""
    if stop_when_unused_s is None:
        signal.sigwait(_SIGNALS)
        return
    while (left_s := stop_when_unused_s - server.unused_s) > 0:
        if signal.sigtimedwait(_SIGNALS, min(left_s, _LONGEST_WAIT_S)) is not None:
            return
    click.echo(f"no client for {stop_when_unused_s:g} s")


def _check_socket_folder(folder: Path) -> None:
    """Of the default socket: nobody else may be able to put another socket in its place."""
    if folder == Path("/run"):
        return
    make_private_folder(folder)


def _unix_address(path: str) -> UnixAddress:
    address = parse_address(f"unix:{path}")
    assert isinstance(address, UnixAddress)
    return address


def read_token(path: Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        return path.read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"cannot read the token in {path}: {error.strerror}") from error
