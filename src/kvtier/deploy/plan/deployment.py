"""From a deployment file to its plan: every part with all it needs to start. Starts, creates and changes nothing.

Key and token files are read here. Everything that cannot work is a `ConfigError` with file and line, as far as this can
be found without examining the machine, which `deploy/check` does.
"""

from __future__ import annotations

import itertools
from pathlib import Path

from kvtier.deploy.file.chat_form import is_chat_form, read_chat_form
from kvtier.deploy.file.native import Deployment, read_native
from kvtier.deploy.file.origin import Origin
from kvtier.deploy.file.yaml_file import Location, read_yaml
from kvtier.deploy.plan.caches import plan_caches
from kvtier.deploy.plan.engines import plan_engines
from kvtier.deploy.plan.http import HTTP_NAME, plan_http
from kvtier.deploy.plan.parts import DeploymentPlan, EnginePart, VllmPart
from kvtier.deploy.plan.runtime_names import RuntimeNames
from kvtier.transport.address import TcpAddress

_EVERYWHERE = ("0.0.0.0", "::")


def load_plan(path: Path, runtime_folder: Path) -> DeploymentPlan:
    """The plan of the file at `path`; sockets without a place of their own go to `runtime_folder`.

    Raises `ConfigError` with a sentence for each error, each with file and line.
    """
    deployment, origin = read_deployment(path)
    names = RuntimeNames(runtime_folder, taken=[HTTP_NAME])
    caches = plan_caches(deployment, origin, names)
    engines = plan_engines(deployment, origin, names, caches)
    http = plan_http(deployment, origin, engines, list(caches.values()))
    parts = [part for model in engines for part in model.parts]
    plan = DeploymentPlan(
        caches=tuple(caches.values()),
        engines=tuple(part for part in parts if isinstance(part, EnginePart)),
        vllm_engines=tuple(part for part in parts if isinstance(part, VllmPart)),
        http=http,
    )
    _check_ports(plan, origin)
    return plan


def read_deployment(path: Path) -> tuple[Deployment, Origin]:
    """The contents of the file, in either form, and where they are. Raises `ConfigError` as `load_plan` does."""
    file = read_yaml(path)
    return read_chat_form(file) if is_chat_form(file.value) else read_native(file)


def _check_ports(plan: DeploymentPlan, origin: Origin) -> None:
    ports: list[tuple[str, TcpAddress, Location]] = []
    for cache, place in zip(plan.caches, origin.caches, strict=True):
        for about, address in (("tcp", cache.server.tcp), ("metrics", cache.server.metrics)):
            if address is not None:
                ports.append((f"{about} of {cache.name}", address, origin.find(place, about) or place))
    for listener in plan.http.listeners:
        place = origin.find(origin.http, listener.api) or origin.http
        ports.append((f"the {listener.api} API", TcpAddress(listener.host, listener.port), place))
    for (first, one, _), (second, other, place) in itertools.combinations(ports, 2):
        is_same_host = one.host == other.host or one.host in _EVERYWHERE or other.host in _EVERYWHERE
        if one.port and one.port == other.port and is_same_host:
            raise origin.file.error(place, f"{first} and {second} both have port {one.port}")
