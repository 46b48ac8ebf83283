"""The C client, built by the system's compiler, and what drives its test programs."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "clients" / "c"
_COMPILERS = (os.environ.get("CC", "cc"), os.environ.get("CXX", "c++"), "make")


def _missing() -> str:
    return next((name for name in _COMPILERS if shutil.which(name) is None), "")


@pytest.fixture(scope="session")
def programs() -> Path:
    """The folder of the programs."""
    return _built("all")


@pytest.fixture(scope="session")
def sanitized_programs() -> Path:
    """Like `programs`, with address and undefined-behaviour sanitizers: a report ends a program with status 1."""
    return _built("sanitized") / "sanitized"


@pytest.fixture(scope="session")
def plain_programs() -> Path:
    """Like processors without hand-written code."""
    return _built("plain") / "plain"


def _built(target: str) -> Path:
    if _missing():
        pytest.skip(f"the C client is not built or tested: there is no {_missing()} on this machine")
    build = SOURCE / "build"
    build.mkdir(exist_ok=True)
    with open(build / ".lock", "w") as lock:  # several workers of pytest build at once
        fcntl.flock(lock, fcntl.LOCK_EX)
        _run(["make", "-s", "-C", str(SOURCE), "-j2", target])
    return build


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
