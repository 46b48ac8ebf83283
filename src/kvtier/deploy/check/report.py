"""Whether a plan would start on this machine, and what it would use. Starts, creates and changes nothing."""

from __future__ import annotations

import os
import ssl
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import msgspec

from kvtier.blocks.layout import slot_bytes_of
from kvtier.deploy.check.cluster import notes_on_cluster
from kvtier.deploy.check.machine import Gpu, Machine, existing_part
from kvtier.deploy.check.model_needs import ModelNeeds, read_model_needs
from kvtier.deploy.check.mooncake import notes_on_mooncake
from kvtier.deploy.check.objects import notes_on_objects
from kvtier.deploy.plan.parts import CachePart, DeploymentPlan, EnginePart, Listener, VllmPart
from kvtier.engine.config import EngineConfig
from kvtier.errors import ConfigError
from kvtier.sizes import format_size
from kvtier.stores.folder import is_locked, is_taken
from kvtier.transport.listening import LOCK_END

_DEFAULT_HOST_KV_BYTES = 1 << 30
"""An engine's default memory for KV on the CPU."""


class CacheUse(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    memory_bytes: int
    disk_bytes: int = 0
    disk_free_bytes: int | None = None
    folder: str
    socket: str
    tcp: str
    metrics: str


class EngineUse(msgspec.Struct, frozen=True, kw_only=True):
    """`architecture` is empty, and values that depend on it are None, while the model is not on this machine."""

    name: str
    served_as: str
    model: str
    device: str
    share: float
    architecture: str = ""
    weights_bytes: int | None = None
    kv_token_bytes: int | None = None
    kv_cache_bytes: int | None = None
    swap_bytes: int = 0
    pool_bytes: int = 0
    """Memory lent to a Mooncake pool, and buffers to and from it."""
    cache_server: str = ""


class CheckReport(msgspec.Struct, frozen=True, kw_only=True):
    """`host_bytes` is all memory of this machine that the parts take, `disk_bytes` all that they may write.

    `problems` keep the deployment from starting, `notes` do not.
    """

    caches: tuple[CacheUse, ...]
    engines: tuple[EngineUse, ...]
    listeners: tuple[Listener, ...]
    scheme: str
    """The listeners' scheme: "http", or "https" with a certificate."""
    host_bytes: int
    machine_bytes: int
    disk_bytes: int
    problems: tuple[str, ...]
    notes: tuple[str, ...]


def check_plan(plan: DeploymentPlan, machine: Machine, runtime_folder: Path) -> CheckReport:
    """Does not check sockets in `runtime_folder`, which is created when the deployment starts."""
    problems: list[str] = []
    notes: list[str] = []
    for extra in machine.missing_extras:
        if extra == "engine" and not plan.engines:
            continue  # vLLM brings its own
        problems.append(f"a part of kvtier is not installed: pip install 'kvtier[{extra}]'")
    engines = []
    models = _Models(machine)
    for part in plan.engines:
        needs = models.needs(part, problems, notes)
        engines.append(_engine_use(part, needs, machine))
        if needs is not None:
            problems += _problems_of_blocks(part, needs)
            problems += _problems_of_length(part, needs)
    engines += [_vllm_use(part) for part in plan.vllm_engines]
    for vllm_part in plan.vllm_engines:
        problems += _problems_of_vllm(vllm_part, machine)
    caches = [_cache_use(part, machine) for part in plan.caches]
    host_bytes = sum(use.memory_bytes for use in caches) + sum(_host_bytes(engine) for engine in engines)
    if host_bytes > machine.memory_bytes:
        problems.append(
            f"all parts together take {format_size(host_bytes)} of memory, "
            f"but this machine or its control group has {format_size(machine.memory_bytes)}"
        )
    if "engine" not in machine.missing_extras:
        problems += _problems_of_devices(engines[: len(plan.engines)], plan, machine)
    problems += _problems_of_disks(plan, machine)
    for cache in plan.caches:
        notes += _notes_on_tiers(cache)
        (problems if cache.server.needs_disk else notes).extend(_problems_of_folder(cache))
        problems += _problems_of_socket(cache, runtime_folder)
        problems += _problems_of_neighbours(cache, plan)
        problems += _problems_of_tls(cache.name, cache.server.tls_certificate, cache.server.tls_key)
    problems += _problems_of_tls(plan.http.name, plan.http.api.tls_certificate, plan.http.api.tls_key)
    problems += _problems_of_ports(plan, machine)
    return CheckReport(
        caches=tuple(caches),
        engines=tuple(engines),
        listeners=plan.http.listeners,
        scheme="http" if plan.http.api.tls_certificate is None else "https",
        host_bytes=host_bytes,
        machine_bytes=machine.memory_bytes,
        disk_bytes=sum(use.disk_bytes for use in caches),
        problems=tuple(dict.fromkeys(problems)),
        notes=tuple(dict.fromkeys(notes)),
    )


def _notes_on_tiers(cache: CachePart) -> list[str]:
    notes: list[str] = []
    if cache.mooncake is not None:
        notes += notes_on_mooncake(cache.mooncake)
    for cluster in filter(None, (cache.cluster, cache.server.cluster)):
        notes += notes_on_cluster(cluster)
    if cache.objects is not None:
        notes += notes_on_objects(cache.objects)
    return notes


class _Models:
    """The needs of each model, which is examined once, however many engines run it."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._known: list[tuple[EngineConfig, ModelNeeds | None]] = []

    def needs(self, part: EnginePart, problems: list[str], notes: list[str]) -> ModelNeeds | None:
        engine = msgspec.structs.replace(part.engine, device="auto")
        for known, needs in self._known:
            if known == engine:
                return needs
        found = self._look(part, problems, notes)
        self._known.append((engine, found))
        return found

    def _look(self, part: EnginePart, problems: list[str], notes: list[str]) -> ModelNeeds | None:
        engine = part.engine
        try:
            needs = read_model_needs(engine)
        except ConfigError as error:
            problems.append(str(error))
            return None
        if needs is None:
            problem = self._machine.hub_problem(engine.model, engine.revision)
            if problem:
                problems.append(problem)
            else:
                notes.append(f"{engine.model} is not on this machine: it will be downloaded")
        elif needs.note:
            notes.append(f"{part.served_as}: {needs.note}")
        return needs


def _engine_use(part: EnginePart, needs: ModelNeeds | None, machine: Machine) -> EngineUse:
    engine = part.engine
    device = _device_of(engine, machine)
    return EngineUse(
        name=part.name,
        served_as=part.served_as,
        model=engine.model,
        device=device,
        share=engine.gpu_memory_utilization,
        architecture=needs.architecture if needs else "",
        weights_bytes=needs.weights_bytes if needs else None,
        kv_token_bytes=needs.kv_token_bytes if needs else None,
        kv_cache_bytes=engine.kv_cache_space or (_DEFAULT_HOST_KV_BYTES if device == "cpu" else None),
        swap_bytes=engine.swap_space,
        pool_bytes=engine.mooncake.memory + engine.mooncake.buffer if engine.mooncake is not None else 0,
        cache_server=engine.cache_server,
    )


def _vllm_use(part: VllmPart) -> EngineUse:
    """The resources that vLLM takes are unknown before it starts."""
    return EngineUse(
        name=part.name,
        served_as=part.served_as,
        model=part.model,
        device=part.device,
        share=0.0,
        architecture="vLLM",
        cache_server=part.cache_server,
    )


def _problems_of_vllm(part: VllmPart, machine: Machine) -> Iterator[str]:
    if not os.access(part.python, os.X_OK):
        yield f"{part.name}: the Python {part.python} of vLLM cannot be run"
    numbers = [int(number) for number in part.device.partition(":")[2].split(",") if number]
    if numbers and "engine" not in machine.missing_extras and max(numbers) >= len(machine.gpus):
        yield f"{part.name}: there is no device {part.device}: torch finds {len(machine.gpus)} GPUs"


def _cache_use(part: CachePart, machine: Machine) -> CacheUse:
    server = part.server
    return CacheUse(
        name=part.name,
        memory_bytes=server.memory_bytes,
        disk_bytes=server.file_bytes or 0,
        disk_free_bytes=None if server.folder is None else machine.filesystem_of(server.folder).free_bytes,
        folder=str(server.folder or ""),
        socket=server.unix.path if server.unix else "",
        tcp=str(server.tcp or "").removeprefix("tcp://"),
        metrics=str(server.metrics or "").removeprefix("tcp://"),
    )


def _device_of(engine: EngineConfig, machine: Machine) -> str:
    if engine.device == "auto":
        return "cuda:0" if machine.gpus else "cpu"
    return "cuda:0" if engine.device == "cuda" else engine.device


def _host_bytes(engine: EngineUse) -> int:
    on_host = (engine.weights_bytes or 0) + (engine.kv_cache_bytes or 0) if engine.device == "cpu" else 0
    return engine.swap_bytes + engine.pool_bytes + on_host


def _problems_of_blocks(part: EnginePart, needs: ModelNeeds) -> Iterator[str]:
    engine = part.engine
    block_bytes = needs.kv_token_bytes * engine.block_size
    if 0 < engine.swap_space < slot_bytes_of(block_bytes):
        yield f"{part.name}: swap_space {format_size(engine.swap_space)} holds no block of {format_size(block_bytes)}"
    if engine.kv_cache_space is not None and engine.kv_cache_space < 2 * block_bytes:
        yield (
            f"{part.name}: kv_cache_space {format_size(engine.kv_cache_space)} holds fewer than two blocks "
            f"of {format_size(block_bytes)}"
        )


def _problems_of_length(part: EnginePart, needs: ModelNeeds) -> Iterator[str]:
    wanted = part.engine.max_model_len
    if wanted is not None and wanted > needs.max_positions:
        yield f"{part.name}: max_model_len {wanted} is more than the {needs.max_positions} that the model can do"


def _problems_of_devices(engines: list[EngineUse], plan: DeploymentPlan, machine: Machine) -> Iterator[str]:
    by_device: defaultdict[str, list[EngineUse]] = defaultdict(list)
    for engine, part in zip(engines, plan.engines, strict=True):
        if engine.device == "cpu":
            continue
        number = int(engine.device.removeprefix("cuda:"))
        if number >= len(machine.gpus):
            yield f"{engine.name}: there is no device {engine.device}: torch finds {len(machine.gpus)} GPUs"
            continue
        by_device[engine.device].append(engine)
        yield from _problems_of_gpu(engine, part.engine, machine.gpus[number])
    for device, users in by_device.items():
        share = sum(engine.share for engine in users)
        if len(users) > 1 and share > 1 + 1e-9:
            names = ", ".join(engine.name for engine in users)
            yield f"{names} take {share:g} of {device} together: lower gpu_memory_utilization to {1 / len(users):.2f}"


def _problems_of_gpu(engine: EngineUse, config: EngineConfig, gpu: Gpu) -> Iterator[str]:
    if config.quantization == "fp8" and not gpu.has_fp8:
        yield f"{engine.name}: quantization fp8 needs a GPU of compute capability 8.9 or more, not {gpu.name}"
    room_bytes = int(gpu.total_bytes * engine.share)
    if engine.weights_bytes is not None and engine.weights_bytes > room_bytes:
        yield (
            f"{engine.name}: weights of {format_size(engine.weights_bytes)} do not fit into "
            f"{engine.share:g} of {engine.device}, which is {format_size(room_bytes)}"
        )


def _problems_of_disks(plan: DeploymentPlan, machine: Machine) -> Iterator[str]:
    wanted: defaultdict[int, int] = defaultdict(int)
    free: dict[int, int] = {}
    folders: defaultdict[int, list[str]] = defaultdict(list)
    for part in plan.caches:
        folder, file_bytes = part.server.folder, part.server.file_bytes
        if folder is None or file_bytes is None:
            continue
        filesystem = machine.filesystem_of(folder)
        wanted[filesystem.device] += max(0, file_bytes - _used_bytes(folder))
        free[filesystem.device] = filesystem.free_bytes
        folders[filesystem.device].append(str(folder))
    for device, more_bytes in wanted.items():
        if more_bytes > free[device]:
            yield (
                f"{', '.join(folders[device])} may grow by {format_size(more_bytes)}, "
                f"but there is {format_size(free[device])} of free disk"
            )


def _used_bytes(folder: Path) -> int:
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(place, name)).st_blocks * 512
            except OSError:
                continue
    return total


def _problems_of_folder(part: CachePart) -> Iterator[str]:
    folder = part.server.folder
    if folder is None:
        return
    there = existing_part(folder)
    if not there.is_dir():
        yield f"the folder {folder} of {part.name} cannot be used: {there} is not a folder"
    elif not os.access(there, os.W_OK | os.X_OK):
        yield f"the folder {folder} of {part.name} cannot be written"
    elif is_taken(folder):
        yield f"the folder {folder} of {part.name} is in use by another process"


def _problems_of_socket(part: CachePart, runtime_folder: Path) -> Iterator[str]:
    socket = Path(part.server.unix.path) if part.server.unix else None
    if socket is not None and socket.parent != runtime_folder:
        if not socket.parent.is_dir():
            yield f"the folder of the socket {socket} of {part.name} does not exist"
        elif not os.access(socket.parent, os.W_OK | os.X_OK):
            yield f"the socket {socket} of {part.name} cannot be made: its folder cannot be written"
        elif socket.exists() and not socket.is_socket():
            yield f"the socket {socket} of {part.name} cannot be made: a file of that name exists"
        elif is_locked(Path(f"{socket}{LOCK_END}")):
            yield f"the socket {socket} of {part.name} is in use by another cache server"


def _problems_of_neighbours(part: CachePart, plan: DeploymentPlan) -> Iterator[str]:
    folder = part.server.folder
    models = [*(one.engine.model for one in plan.engines), *(one.model for one in plan.vllm_engines)]
    for model in dict.fromkeys(models):
        if folder is not None and Path(model).is_dir() and folder.resolve().is_relative_to(Path(model).resolve()):
            yield f"the folder {folder} of {part.name} is in that of the model {model}: give it one of its own"


def _problems_of_tls(name: str, certificate: Path | None, key: Path | None) -> Iterator[str]:
    if certificate is None or key is None:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")
    except ssl.SSLError as error:
        is_other_key = error.reason == "KEY_VALUES_MISMATCH"
        reason = "the key is another one's" if is_other_key else "both must be PEM, the key without a password"
        yield f"tls_cert {certificate} and tls_key {key} of {name} cannot be used: {reason}"
    except OSError as error:
        yield f"tls_cert {certificate} and tls_key {key} of {name} cannot be read: {error.strerror}"


def _problems_of_ports(plan: DeploymentPlan, machine: Machine) -> Iterator[str]:
    addresses = [(listener.host, listener.port) for listener in plan.http.listeners]
    for part in plan.caches:
        addresses += [(one.host, one.port) for one in (part.server.tcp, part.server.metrics) if one is not None]
    for host, port in addresses:
        if problem := machine.port_problem(host, port):
            yield problem
