"""The `kvtier` command."""

from __future__ import annotations

import importlib

import click

_COMMANDS = {
    "cache": "kvtier.cli.cache:cache",
    "cache-server": "kvtier.cli.cache_server:cache_server",
    "canary": "kvtier.cli.canary:canary_command",
    "check": "kvtier.cli.check:check_command",
    "cluster": "kvtier.cli.cluster:cluster",
    "explain": "kvtier.cli.explain:explain_command",
    "pack": "kvtier.cli.pack:pack",
    "plan": "kvtier.cli.plan:plan_command",
    "prefix": "kvtier.cli.prefix:prefix",
    "serve": "kvtier.cli.serve:serve",
    "trace": "kvtier.cli.trace:trace",
    "warm": "kvtier.cli.warm:warm",
}


class _Commands(click.Group):
    """Loads a command when it is called: a cache server starts without the others' dependencies."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, _, name = _COMMANDS[cmd_name].partition(":")
        command: click.Command = getattr(importlib.import_module(module), name)
        return command


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="kvtier")
def main() -> None:
    """kvtier keeps the KV cache of every prompt prefix wherever there is room."""
