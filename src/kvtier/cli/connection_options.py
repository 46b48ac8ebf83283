"""The options that say how to reach a running cache server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import click

from kvtier.cli.cache_server import default_socket

_Command = TypeVar("_Command", bound=Callable[..., object])


def connection_options(command: _Command) -> _Command:
    """`--server`, `--token-file` and `--ca-file`."""
    for option in (
        click.option(
            "--ca-file", type=click.Path(path_type=Path, exists=True, dir_okay=False), help="Who signed, for TLS."
        ),
        click.option(
            "--token-file",
            type=click.Path(path_type=Path, exists=True, dir_okay=False),
            help="Token, for a TCP server.",
        ),
        click.option("--server", default=None, help=f"A running server.  [default: unix:{default_socket()}]"),
    ):
        command = option(command)
    return command
