"""`kvtier serve`."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from pathlib import Path

import click

from kvtier.deploy.plan.deployment import load_plan
from kvtier.deploy.plan.parts import DeploymentPart
from kvtier.deploy.run.log import DeploymentLog
from kvtier.deploy.run.supervisor import Supervisor
from kvtier.errors import ConfigError


@click.command("serve")
@click.argument("deployment", type=click.Path(path_type=Path, dir_okay=False))
def serve(deployment: Path) -> None:
    """Start everything that DEPLOYMENT, a YAML file, describes: cache servers, engines and HTTP servers.

    It stays in the foreground with one log of all parts. What dies is started again. Ctrl-C stops everything in good
    order, a second one at once; SIGHUP starts the engines again, one by one.

        kvtier check deploy.yml     # what is wrong with it, what it would use

        kvtier serve deploy.yml
    """
    folder = _runtime_folder()
    try:
        plan = load_plan(deployment, folder)
        parts: list[DeploymentPart] = [*plan.caches, *plan.engines, *plan.vllm_engines, plan.http]
        names = ["kvtier", *(part.name for part in parts)]
        supervisor = Supervisor(plan, DeploymentLog(sys.stderr, names), folder)
    except ConfigError as error:
        with contextlib.suppress(OSError):
            folder.rmdir()
        raise click.ClickException(str(error)) from error
    sys.exit(supervisor.run())


def _runtime_folder() -> Path:
    """For the parts' sockets: of this user alone, gone at the end."""
    parent = os.environ.get("XDG_RUNTIME_DIR")
    if parent is not None and not os.access(parent, os.W_OK | os.X_OK):
        parent = None
    return Path(tempfile.mkdtemp(prefix="kvtier-", dir=parent))
