"""The `kvtier` command."""

from __future__ import annotations

import click

from kvtier.cli.cache import cache
from kvtier.cli.cache_server import cache_server
from kvtier.cli.check import check_command
from kvtier.cli.explain import explain_command
from kvtier.cli.serve import serve


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="kvtier")
def main() -> None:
    """kvtier keeps the KV cache of every prompt prefix wherever there is room."""


main.add_command(cache_server)
main.add_command(cache)
main.add_command(explain_command)
main.add_command(check_command)
main.add_command(serve)
