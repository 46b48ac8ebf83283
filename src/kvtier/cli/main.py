"""The `kvtier` command."""

from __future__ import annotations

import click

from kvtier.cli.cache import cache
from kvtier.cli.cache_server import cache_server


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="kvtier")
def main() -> None:
    """kvtier keeps the KV cache of every prompt prefix wherever there is room."""


main.add_command(cache_server)
main.add_command(cache)
