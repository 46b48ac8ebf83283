"""`kvtier canary`: the results of engines that computed cached blocks again, and resuming loads."""

from __future__ import annotations

import click

from kvtier.cli.engine_socket import engine_socket
from kvtier.deploy.run.served_caches import find_engines
from kvtier.engine.process.asking import ask_metrics
from kvtier.engine.process.messages import Metrics
from kvtier.errors import KvtierError
from kvtier.observe.metrics import ENGINE_CANARY_CHECKS
from kvtier.observe.printable import printable

_TIMEOUT_S = 10.0
_LONGEST = 2000


@click.command("canary", short_help="Show what engines found when they checked cached blocks.")
@click.option(
    "--engine", default=None, help="An engine's socket, unix:PATH; by default all of this user's deployments."
)
@click.option("--resume", is_flag=True, help="Load from the cache again if the canary has stopped that.")
def canary_command(engine: str | None, resume: bool) -> None:
    """Show what engines found when they computed cached blocks again, and whether they load from the cache.

    The exit status is 1 if one of them does not.
    """
    addresses = [engine] if engine is not None else find_engines()
    if not addresses:
        raise click.ClickException("no deployment of this user has an engine: give --engine unix:PATH")
    is_off = False
    for address in addresses:
        try:
            found = ask_metrics(engine_socket(address), _TIMEOUT_S, resumes_loading=resume)
        except KvtierError as error:
            if engine is not None:
                raise click.ClickException(printable(str(error), _LONGEST)) from error
            continue  # its deployment has ended, or is starting
        is_off |= bool(found.loading_off)
        click.echo(f"{printable(address)}: {printable(_sentence(found), _LONGEST)}")
    if is_off:
        raise click.exceptions.Exit(1)


def _sentence(found: Metrics) -> str:
    counts = {
        sample.labels["result"]: int(sample.value)
        for family in found.families
        if family.name == ENGINE_CANARY_CHECKS
        for sample in family.samples
    }
    checks = ", ".join(f"{count} {result}" for result, count in sorted(counts.items())) or "none"
    state = f"loading is off: {found.loading_off}" if found.loading_off else "loading is on"
    return f"{state}; checks: {checks}"
