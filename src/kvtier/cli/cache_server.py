"""`kvtier cache-server`."""

from __future__ import annotations

import logging
import math
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from kvtier.blocks.eviction import Eviction
from kvtier.blocks.retention import MAX_TTL_S
from kvtier.cacheserver.config import DEFAULT_MAX_RETENTION_S, CacheServerConfig
from kvtier.cacheserver.server import CacheServer
from kvtier.cacheserver.tenants import DEFAULT_RETAINED_SHARE
from kvtier.cli.cluster_options import ClusterOptions, cluster_options
from kvtier.cli.size_parameter import SizeParameter
from kvtier.errors import ConfigError
from kvtier.observe.recent_warnings import RecentWarnings
from kvtier.sizes import format_size
from kvtier.transport.address import TcpAddress, UnixAddress, parse_address, parse_host_port
from kvtier.transport.listening import is_own_folder, make_private_folder

if TYPE_CHECKING:
    from kvtier.api.page.standalone import PageServer

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_LONGEST_WAIT_S = 3600.0
_SWITCH_S = 0.0005
"""How long one connection's thread may keep the others waiting while it works on a long request."""


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
    """The server's default socket, where clients look, too."""
    user = os.geteuid()
    if user == 0:
        return "/run/kvtier.sock"
    folder = os.environ.get("XDG_RUNTIME_DIR")
    if not folder or not is_own_folder(Path(folder)):  # a folder of another user, as with sudo, does not count
        folder = f"/tmp/kvtier-{user}"
    return f"{folder}/kvtier.sock"


@click.command("cache-server", short_help="Run a cache server for all processes of this host.")
@click.option(
    "--memory", type=SizeParameter(), default="4GiB", show_default=True, help="Most memory for blocks, as in 20GiB."
)
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
    help="Also keep blocks on disk, in this folder, across restarts. Needs --disk.",
)
@click.option("--disk", type=SizeParameter(), default=None, help="Most space for everything in --folder, as in 100GiB.")
@click.option("--disk-only", is_flag=True, help="Keep blocks on disk only; --memory is then a buffer.")
@click.option(
    "--store-on",
    type=click.Choice(["commit", "reuse"]),
    default="commit",
    show_default=True,
    help="When a block is written to disk: at once, or when it is first used again, which spares the SSD.",
)
@click.option(
    "--disk-writes",
    type=SizeParameter(),
    default=None,
    help="Most bytes written to disk in a day: what is used again goes first.  [default: no limit]",
)
@click.option("--fsync", is_flag=True, help="Make flush wait for the device, so that a power cut loses nothing either.")
@click.option(
    "--encryption-key-file",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    default=None,
    help="File with a key (32 bytes, or 64 hexadecimal digits): blocks on disk are encrypted.",
)
@click.option("--disk-optional", is_flag=True, help="If the folder cannot be used, start in memory and keep trying.")
@click.option(
    "--eviction",
    type=click.Choice(["adaptive", "lru"]),
    default="adaptive",
    show_default=True,
    help="Which blocks are evicted: the least recently used, or those least likely to be asked for soon.",
)
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
    help="File (TOML) with the tenants of the TCP port and their shares. Reloaded when it changes.",
)
@click.option("--tls-cert", type=click.Path(path_type=Path, dir_okay=False), help="Certificate (PEM): TCP speaks TLS.")
@click.option("--tls-key", type=click.Path(path_type=Path, dir_okay=False), help="Its private key (PEM).")
@click.option(
    "--tls-client-ca",
    type=click.Path(path_type=Path, dir_okay=False),
    help="CA (PEM) that signs the certificates of tenants, which replace tokens.",
)
@click.option("--metrics", type=_HostPort(), default=None, help="Serve Prometheus metrics over HTTP on host:port.")
@click.option(
    "--page",
    type=_HostPort(),
    default=None,
    help="Show a page about the server on host:port. With --token-file it asks for the token, which other hosts need; "
    "they get it over HTTPS where there is --tls-cert.",
)
@click.option(
    "--max-leased",
    type=SizeParameter(),
    default=None,
    help="Most memory one client may hold.  [default: half of --memory]",
)
@click.option(
    "--retained-share",
    type=click.FloatRange(0, 1),
    default=DEFAULT_RETAINED_SHARE,
    show_default=True,
    help="The part of memory and disk that clients may have retained.",
)
@click.option(
    "--max-retention",
    type=click.FloatRange(0, MAX_TTL_S, min_open=True),
    default=DEFAULT_MAX_RETENTION_S,
    show_default=True,
    help="The longest time, in seconds, for which a prefix is retained.",
)
@click.option(
    "--max-frame", type=SizeParameter(), default="256MiB", show_default=True, help="Largest payload of one frame."
)
@click.option("--max-connections", type=click.IntRange(1), default=256, show_default=True)
@click.option(
    "--lease-timeout",
    type=click.FloatRange(0, min_open=True),
    default=60.0,
    show_default=True,
    help="Seconds after which a TCP client's lease ends. Leases of local clients do not time out.",
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
    help="Stop, as on SIGTERM, after this many seconds without a connected client, counted from the start.",
)
@cluster_options
@click.option("-v", "--verbose", is_flag=True, help="Log more.")
def cache_server(
    cluster: ClusterOptions,
    memory: int,
    socket_path: str | None,
    folder: Path | None,
    disk: int | None,
    disk_only: bool,
    store_on: Literal["commit", "reuse"],
    disk_writes: int | None,
    fsync: bool,
    encryption_key_file: Path | None,
    disk_optional: bool,
    eviction: Eviction,
    tcp: TcpAddress | None,
    token_file: Path | None,
    tcp_secret_file: Path | None,
    tenants_file: Path | None,
    tls_cert: Path | None,
    tls_key: Path | None,
    tls_client_ca: Path | None,
    metrics: TcpAddress | None,
    page: TcpAddress | None,
    max_leased: int | None,
    retained_share: float,
    max_retention: float,
    max_frame: int,
    max_connections: int,
    lease_timeout: float,
    touch_memory: bool,
    stop_when_unused: float | None,
    verbose: bool,
) -> None:
    """Keep KV blocks in memory that all processes on this host share, and optionally on disk.

    Start it once per host and leave it running:

        kvtier cache-server --memory 20GiB

    Processes of the same user then reach it with kvtier.connect("unix:PATH") and read and write blocks in its
    memory without a copy. Other hosts can reach it over TCP:

        kvtier cache-server --memory 20GiB --tcp 0.0.0.0:7700 --token-file secret

    With a folder, blocks survive restarts and crashes, within a size limit:

        kvtier cache-server --memory 20GiB --folder /var/cache/kvtier --disk 100GiB

    With a Valkey cluster, the servers of several hosts share their blocks:

        kvtier cache-server --memory 20GiB --cluster tls://10.0.0.1:6379,tls://10.0.0.2:6379

    Ctrl-C or SIGTERM stops it: it first answers running requests and writes blocks to disk. Blocks that are only in
    memory are lost.
    """
    logging.basicConfig(
        level=logging.DEBUG if verbose else logging.INFO,
        format="%(asctime)s %(levelname)s %(message)s",
        stream=sys.stderr,
    )
    warnings = RecentWarnings()
    logging.getLogger().addHandler(warnings)
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
            max_retained_share=retained_share,
            max_retention_s=max_retention,
            lease_timeout_s=lease_timeout,
            touches_memory=touch_memory,
            folder=folder,
            file_bytes=disk,
            fsync=fsync,
            stores_on=store_on,
            disk_writes_per_day=disk_writes,
            keeps_memory=not disk_only,
            needs_disk=not disk_optional,
            key_file=encryption_key_file,
            cluster=cluster.config(),
            shares_on=cluster.cluster_store_on,
            eviction=eviction,
            share_bytes_per_s=cluster.cluster_write_rate,
        )
        server = CacheServer(config, warnings=warnings)
        page_server = _show_page(server, page, f"unix:{path}", config)
    except ConfigError as error:
        raise click.ClickException(str(error)) from error
    _tell_ready(config, path, server, page_server)
    _wait_for_the_end(server, stop_when_unused)
    click.echo("stopping")
    if page_server is not None:
        page_server.close()
    server.close()


def _show_page(
    server: CacheServer, address: TcpAddress | None, shown: str, config: CacheServerConfig
) -> PageServer | None:
    """Raises `ConfigError` if it cannot be shown; the server is then closed."""
    if address is None:
        return None
    try:
        from kvtier.api.page.standalone import PageServer  # noqa: PLC0415 - only the page needs the HTTP libraries

        if config.tcp_secret is not None and address.host not in ("127.0.0.1", "localhost", "::1"):
            raise ConfigError(f"a page on {address.host} needs --tls-cert: --tcp-secret-file does not encrypt pages")
        pair = (config.tls_certificate, config.tls_key)
        certificate = None if pair[0] is None or pair[1] is None else (pair[0], pair[1])
        return PageServer(address, server, shown, config.token, certificate)
    except ImportError as error:
        server.close()
        raise ConfigError("a page needs pip install 'kvtier[server]'") from error
    except ConfigError:
        server.close()
        raise


def _tell_ready(config: CacheServerConfig, path: str, server: CacheServer, page_server: PageServer | None) -> None:
    """Print what the server has, and where it can be reached."""
    click.echo(f"kvtier cache server: {format_size(config.memory_bytes)} of memory for blocks")
    if config.file_bytes is not None:
        click.echo(f"  {format_size(config.file_bytes)} of disk in {config.folder}")
    if config.cluster is not None:
        click.echo(f"  cluster {config.cluster.valkey[0]}")
    click.echo(f"  unix:{path}")
    if config.tcp is not None:
        click.echo(f"  tcp://{config.tcp.host}:{server.tcp_port}{' with TLS' if config.tls_certificate else ''}")
    if config.metrics is not None:
        click.echo(f"  metrics: http://{config.metrics.host}:{server.metrics_port}/metrics")
    if page_server is not None:
        click.echo(f"  page: {page_server.url}")
    click.echo("ready; Ctrl-C stops it")
    sys.stdout.flush()


def _wait_for_the_end(server: CacheServer, stop_when_unused_s: float | None) -> None:
    """Run until a signal comes, or the server was unused for this long."""
    if stop_when_unused_s is None:
        signal.sigwait(_SIGNALS)
        return
    while (left_s := stop_when_unused_s - server.unused_s) > 0:
        if signal.sigtimedwait(_SIGNALS, min(left_s, _LONGEST_WAIT_S)) is not None:
            return
    click.echo(f"no client for {stop_when_unused_s:g} s")


def _check_socket_folder(folder: Path) -> None:
    """The folder of the default socket: no other user may be able to replace the socket."""
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
