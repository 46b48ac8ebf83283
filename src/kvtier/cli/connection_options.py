"""The options for reaching a running cache server."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from kvtier.blocks.layout import KvLayout
from kvtier.blocks.namespace import Namespace
from kvtier.cli.cache_server import default_socket, read_token
from kvtier.client.client import CacheClient
from kvtier.client.connecting import connect
from kvtier.deploy.run.served_caches import FoundCache, does_answer, find_caches
from kvtier.errors import ConfigError
from kvtier.observe.printable import printable

_FILE = click.Path(path_type=Path, exists=True, dir_okay=False)
_OPTIONS = (
    click.option("--key-file", type=_FILE, help="Its private key."),
    click.option("--cert-file", type=_FILE, help="Client certificate, for a TCP server that requires one."),
    click.option("--ca-file", type=_FILE, help="CA of the server's certificate, for TLS."),
    click.option("--secret-file", type=_FILE, help="Secret, for a TCP server that encrypts without TLS."),
    click.option("--token-file", type=_FILE, help="Token, for a TCP server."),
    click.option(
        "--server",
        default=None,
        help=f"A running server.  [default: the one at unix:{default_socket()}, or that of kvtier serve]",
    ),
)


@dataclass(frozen=True)
class ConnectionOptions:
    """How to reach a server. `server` is its address, if it was given."""

    server: str | None
    token_file: Path | None
    secret_file: Path | None
    ca_file: Path | None
    cert_file: Path | None
    key_file: Path | None

    @functools.cached_property
    def address(self) -> str:
        """The given address, or that of this user's only running server, alone or in a deployment.

        Raises `ConfigError` with all addresses if there are several.
        """
        if self.server:
            return self.server
        usual = f"unix:{default_socket()}"
        found = [FoundCache(usual, "kvtier cache-server")] if does_answer(usual) else []
        found += [one for one in find_caches() if one.address != usual]
        if len(found) > 1:
            listed = " or ".join(f"{one.address} ({printable(one.whose)})" for one in found)
            raise ConfigError(f"{len(found)} cache servers are running here: say which with --server, {listed}")
        return found[0].address if found else usual

    def connect(
        self, timeout_s: float, layout: KvLayout | None = None, namespace: Namespace | None = None, name: str = ""
    ) -> CacheClient:
        return connect(
            self.address,
            layout=layout,
            namespace=namespace,
            name=name,
            token=read_token(self.token_file),
            secret=read_token(self.secret_file),
            ca_file=self.ca_file,
            certificate=self.cert_file,
            key=self.key_file,
            timeout_s=timeout_s,
        )


def connection_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """`--server` and its credentials; the command gets them as `reach`."""

    @functools.wraps(command)
    def collected(**given: Any) -> Any:
        reach = ConnectionOptions(**{name: given.pop(name) for name in ConnectionOptions.__dataclass_fields__})
        return command(reach=reach, **given)

    for option in _OPTIONS:
        collected = option(collected)
    return collected
