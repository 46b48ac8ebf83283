"""`kvtier serve`."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from kvtier.deploy.plan.deployment import load_plan
from kvtier.deploy.plan.parts import DeploymentPart
from kvtier.deploy.run.log import DeploymentLog
from kvtier.deploy.run.served_caches import make_runtime_folder, note_caches, remove_runtime_folder
from kvtier.deploy.run.summary import urls_of
from kvtier.deploy.run.supervisor import Supervisor
from kvtier.errors import ConfigError


@click.command("serve", short_help="Start everything that a deployment file describes.")
@click.argument("deployment", type=click.Path(path_type=Path, dir_okay=False))
def serve(deployment: Path) -> None:
    """Start everything that DEPLOYMENT, a YAML file, describes: cache servers, engines and HTTP servers.

    It stays in the foreground, with one log for all parts, and restarts parts that die. Ctrl-C stops everything in
    order, a second Ctrl-C at once; SIGHUP restarts the engines one by one.

        kvtier check deploy.yml     # reports problems; starts nothing

        kvtier serve deploy.yml
    """
    folder = make_runtime_folder()
    try:
        plan = load_plan(deployment, folder)
        parts: list[DeploymentPart] = [*plan.caches, *plan.engines, *plan.vllm_engines, plan.http]
        names = ["kvtier", *(part.name for part in parts)]
        supervisor = Supervisor(plan, DeploymentLog(sys.stderr, names), folder)
    except ConfigError as error:
        remove_runtime_folder(folder)
        raise click.ClickException(str(error)) from error
    caches = {cache.name: str(cache.server.unix) for cache in plan.caches}
    engines = [f"unix:{engine.socket}" for engine in plan.engines]
    url = urls_of(plan, supervisor.ports).get("openai", "")
    note_caches(folder, deployment.absolute(), caches, engines, url)
    sys.exit(supervisor.run())
