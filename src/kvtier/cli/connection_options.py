"""The options that say how to reach a running cache server."""

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

_FILE = click.Path(path_type=Path, exists=True, dir_okay=False)
_OPTIONS = (
    click.option("--key-file", type=_FILE, help="Its private key."),
    click.option("--cert-file", type=_FILE, help="Certificate, for a TCP server that knows you by that."),
    click.option("--ca-file", type=_FILE, help="Who signed, for TLS."),
    click.option("--secret-file", type=_FILE, help="Secret, for a TCP server that encrypts without TLS."),
    click.option("--token-file", type=_FILE, help="Token, for a TCP server."),
    click.option("--server", default=None, help=f"A running server.  [default: unix:{default_socket()}]"),
)


@dataclass(frozen=True)
class Reach:
    """How a server is reached. `server` is its address, if that was given."""

    server: str | None
    token_file: Path | None
    secret_file: Path | None
    ca_file: Path | None
    cert_file: Path | None
    key_file: Path | None

    @property
    def address(self) -> str:
        return self.server or f"unix:{default_socket()}"

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
    """`--server` and what opens it; the command gets them as `reach`."""

    @functools.wraps(command)
    def collected(**given: Any) -> Any:
        reach = Reach(**{name: given.pop(name) for name in Reach.__dataclass_fields__})
        return command(reach=reach, **given)

    for option in _OPTIONS:
        collected = option(collected)
    return collected
