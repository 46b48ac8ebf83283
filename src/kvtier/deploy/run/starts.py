"""Which engines may start at the same time: what a start needs, and what the machine has room for.

An engine that measures the free memory of its GPU must be the only one that starts there: memory that others take
meanwhile would be missed, or counted twice. All others start side by side, as far as cores and host memory allow.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvtier.deploy.plan.parts import EnginePart, VllmPart
from kvtier.memory.machine_limits import available_memory_bytes, num_cores

_CPU = "cpu"
_DEFAULT_GPU = "cuda:0"
_GPU_DRIVERS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
"""One of these exists wherever torch can find a GPU."""

_DEFAULT_HOST_KV_BYTES = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class StartNeeds:
    """What an engine takes while it starts. `gpus` is empty on the CPU.

    `measures`: its KV is sized by the free memory of its GPU. `own_bytes` is host memory of its own. On their way to a
    GPU, the weights in `folder` pass through host memory, which engines of the same folder share.
    """

    gpus: frozenset[str] = frozenset()
    measures: bool = False
    own_bytes: int = 0
    folder: str = ""
    weights_bytes: int = 0


@dataclass(frozen=True, slots=True)
class FreeResources:
    """The machine's free resources, now."""

    num_cores: int
    available_bytes: int


def room_here() -> FreeResources:
    return FreeResources(num_cores(), available_memory_bytes())


def may_start(needs: StartNeeds, starting: Sequence[StartNeeds], room: FreeResources) -> bool:
    """Whether an engine may start beside those that are `starting`. A single one always may."""
    if not starting:
        return True
    if len(starting) >= room.num_cores:
        return False
    for other in starting:
        if needs.gpus & other.gpus and (needs.measures or other.measures):
            return False
    return _memory_bytes([*starting, needs]) <= room.available_bytes


def needs_of(part: EnginePart | VllmPart) -> StartNeeds:
    """Weights that are not in a folder of this machine yet count as zero."""
    if isinstance(part, VllmPart):
        gpus, stored_bytes = _gpus(part.device), _stored_bytes(part.model)
        if not gpus:
            return StartNeeds(own_bytes=stored_bytes)
        return StartNeeds(gpus=gpus, measures=True, folder=part.model, weights_bytes=stored_bytes)
    engine = part.engine
    gpus = _gpus(engine.device)
    stored_bytes = 0 if engine.load_format == "dummy" else _stored_bytes(engine.model)
    if gpus:
        return StartNeeds(
            gpus=gpus,
            measures=engine.kv_cache_space is None,
            own_bytes=engine.swap_space,
            folder=engine.model,
            weights_bytes=stored_bytes,
        )
    kv_bytes = _DEFAULT_HOST_KV_BYTES if engine.kv_cache_space is None else engine.kv_cache_space
    return StartNeeds(own_bytes=engine.swap_space + kv_bytes + stored_bytes)


def _memory_bytes(all_needs: Sequence[StartNeeds]) -> int:
    """Weights on their way to GPUs are page cache: those of one folder are there once."""
    passing = {needs.folder: needs.weights_bytes for needs in all_needs if needs.gpus}
    return sum(needs.own_bytes for needs in all_needs) + sum(passing.values())


def _gpus(device: str) -> frozenset[str]:
    if device == _CPU or (device == "auto" and not any(map(os.path.exists, _GPU_DRIVERS))):
        return frozenset()
    _, _, numbers = device.partition(":")
    return frozenset(f"cuda:{number}" for number in numbers.split(",")) if numbers else frozenset({_DEFAULT_GPU})


def _stored_bytes(model: str) -> int:
    folder = Path(model)
    total = 0
    if folder.is_absolute() and folder.is_dir():
        for path in folder.glob("*.safetensors"):
            with contextlib.suppress(OSError):
                total += path.stat().st_size
    return total
