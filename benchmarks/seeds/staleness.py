"""Finds results that are older than the code they measure, by comparing a result's commit with changes of the modules.

It needs the repository's git history. An old result is not wrong: the change may not affect what is measured. Only
measuring again shows that.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.seeds.registry import ROOT

_CORE = ("blocks", "memory", "kernels")
_SERVER = ("blocks", "memory", "wire", "transport", "client", "cacheserver")
_ENGINE = (*_CORE, "models", "engine/device", "engine/schedule", "engine/engine.py")
_TIERS = (*_ENGINE, "tiers", "transfer")

MEASURED: Mapping[str, tuple[str, ...]] = {
    "remote_kv_cache.baseline.test_memory_io": ("memory/copying.py", "transfer/copiers"),
    "remote_kv_cache.baseline.test_zmq_transfer": (),
    "remote_kv_cache.baseline.test_server": _SERVER,
    "remote_kv_cache.baseline.test_gpu_hit": _SERVER,
    "offloading_KV_cache.baseline": ("memory", "transfer/copiers"),
    "offloading_KV_cache": _TIERS,
    "remote_kv_cache": (*_TIERS, *_SERVER),
    "persistence_kv_cache": (*_SERVER, "stores"),
    "prefix_caching": _ENGINE,
    "serving": (*_ENGINE, "engine", "api"),
    "use_remote_KV_cache": (*_TIERS, *_SERVER, "stores", "engine", "api", "deploy"),
    "vineyard.test_file_store": ("vineyard/file_cache.py", "vineyard/chunk_files.py", "vineyard/chunk_transfers.py"),
    "vineyard.test_shared_folder": ("vineyard/file_cache.py", "vineyard/chunk_files.py", "vineyard/chunk_room.py"),
    "vineyard": ("vineyard/shared_cache.py", *_SERVER),
    "vllm": ("plugins", "transfer", "tiers"),
    "peers": (),
    "quantized_products": ("kernels",),
}
"""Modules below src/kvtier, by the beginning of a benchmark's name; the longest match counts."""


@dataclass(frozen=True)
class Age:
    """The age of a result, from git. `changes` are later commits that changed the code it measures; None if unknown."""

    file: Path
    commit: str
    at: str
    changes: int | None

    @property
    def sentence(self) -> str:
        if self.changes is None:
            return "of a commit that is not known here"
        if not self.changes:
            return "as new as what it measures"
        return f"older: {self.changes} change{'s' if self.changes > 1 else ''} since of what it measures"


def measured_by(benchmark: str) -> tuple[str, ...]:
    """The paths, from the repository's root, that a benchmark's figures depend on; its own file is one of them."""
    fitting = [name for name in MEASURED if benchmark == name or benchmark.startswith(f"{name}.")]
    own = tuple(f"src/kvtier/{path}" for path in MEASURED[max(fitting, key=len)]) if fitting else ("src/kvtier",)
    return (*own, f"benchmarks/{benchmark.replace('.', '/')}.py")


def age_of(file: Path, root: Path = ROOT) -> Age:
    """Raises `OSError` or `ValueError` if the file is not a result."""
    document: Mapping[str, Any] = json.loads(file.read_text())
    commit, at = str(document.get("commit", "unknown")), str(document.get("at", ""))
    known = commit.removesuffix("-dirty")
    paths = measured_by(str(document.get("benchmark", "")))
    return Age(file, commit, at, _changes_since(known, paths, root))


def ages(folder: Path, root: Path = ROOT) -> Iterator[Age]:
    """The ages of all results in a folder and the folders below it."""
    for file in sorted(folder.rglob("*.json")):
        yield age_of(file, root)


def _changes_since(commit: str, paths: Sequence[str], root: Path) -> int | None:
    try:
        done = subprocess.run(
            ["git", "rev-list", "--count", f"{commit}..HEAD", "--", *paths],
            capture_output=True,
            text=True,
            check=True,
            cwd=root,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return int(done.stdout)
