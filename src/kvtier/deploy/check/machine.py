"""This machine's resources for a deployment: memory, disk, GPUs, ports. Read-only."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from kvtier.memory.machine_limits import machine_memory_bytes

_EXTRAS = {"engine": ("torch", "safetensors", "transformers"), "server": ("starlette", "uvicorn")}
"""What a deployment needs besides the core, and modules by which to recognise it."""


@dataclass(frozen=True, slots=True)
class Gpu:
    name: str
    total_bytes: int
    has_fp8: bool


@dataclass(frozen=True, slots=True)
class Filesystem:
    """The filesystem of an existing or future path. `device` identifies it."""

    device: int
    free_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """`missing_extras` are parts of kvtier that are not installed; `port_problem` returns "" for a free port.

    `hub_problem` returns "" for a model (and its revision) that the hub has.
    """

    memory_bytes: int
    gpus: tuple[Gpu, ...] = ()
    missing_extras: tuple[str, ...] = ()
    filesystem_of: Callable[[Path], Filesystem]
    port_problem: Callable[[str, int], str]
    hub_problem: Callable[[str, str | None], str]


def this_machine() -> Machine:
    """Imports torch, if installed, to find the GPUs."""
    missing = tuple(extra for extra, modules in _EXTRAS.items() if not all(find_spec(module) for module in modules))
    return Machine(
        memory_bytes=machine_memory_bytes(),
        gpus=() if "engine" in missing else _gpus(),
        missing_extras=missing,
        filesystem_of=_filesystem_of,
        port_problem=_port_problem,
        hub_problem=_hub_problem,
    )


def existing_part(path: Path) -> Path:
    """The path itself, or the nearest of its parents that exists."""
    while not os.path.lexists(path) and path != path.parent:
        path = path.parent
    return path


def _gpus() -> tuple[Gpu, ...]:
    import torch  # noqa: PLC0415  # takes seconds, and only this needs it

    found = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    return tuple(Gpu(one.name, one.total_memory, (one.major, one.minor) >= (8, 9)) for one in found)


def _filesystem_of(path: Path) -> Filesystem:
    there = existing_part(path)
    space = os.statvfs(there)
    return Filesystem(os.stat(there).st_dev, space.f_bavail * space.f_frsize)


def _hub_problem(model: str, revision: str | None) -> str:
    try:
        from kvtier.models.hub import hub_problem  # noqa: PLC0415  # of the extra `engine`
    except ImportError:
        return ""
    return hub_problem(model, revision=revision)


def _port_problem(host: str, port: int) -> str:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        return f"the host {host} is not known: {error.strerror}"
    try:
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return f"port {port} of {host} is in use"
        return f"port {port} of {host} cannot be used: {error.strerror}"
    return ""
