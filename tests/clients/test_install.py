"""The C library as another program finds it: installed, with pkg-config."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from kvtier.testing.servers import cache_server
from tests.clients.conftest import SOURCE
from tests.support.waiting import LIMIT_S


def _run(*command: str | Path, **settings: str) -> str:
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, timeout=LIMIT_S, env={**os.environ, **settings}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.skipif(shutil.which("pkg-config") is None, reason="there is no pkg-config on this machine")
def test_the_example_is_built_by_pkg_config_and_runs(programs: Path, tmp_path: Path) -> None:
    _run("make", "-s", "-C", SOURCE, "install", f"PREFIX={tmp_path}")
    flags = _run("pkg-config", "--cflags", "--libs", "kvtier", PKG_CONFIG_PATH=f"{tmp_path}/lib/pkgconfig").split()
    _run("cc", SOURCE / "examples" / "prefix.c", *flags, "-o", tmp_path / "prefix")
    header = tmp_path / "header.cc"
    header.write_text('#include "kvtier/vineyard.hpp"\nint main() { return vineyard::Status().ok() ? 0 : 1; }\n')
    _run("c++", "-std=c++17", header, *flags, "-pthread", "-o", tmp_path / "header")

    with cache_server() as server:
        for stored in (6, 0):
            answer = _run(tmp_path / "prefix", server.unix, LD_LIBRARY_PATH=f"{tmp_path}/lib")
            assert answer.splitlines() == [f"stored {stored} blocks", *(f"block {i} begins with {i}" for i in range(6))]
    _run(tmp_path / "header", LD_LIBRARY_PATH=f"{tmp_path}/lib")


def test_the_library_shows_its_own_functions_only(programs: Path) -> None:
    """And depends on libc alone."""
    names = _run("nm", "-D", "--defined-only", programs / "libkvtier.so")
    assert {line.split()[-1] for line in names.splitlines()} == _declared()
    needed = [line for line in _run("readelf", "-d", programs / "libkvtier.so").splitlines() if "NEEDED" in line]
    assert all("libc.so" in line or "ld-linux" in line for line in needed), needed


def _declared() -> set[str]:
    """The functions of the header."""
    text = (SOURCE / "include" / "kvtier.h").read_text()
    words = text.replace("(", " ( ").replace("*", " ").split()
    return {word for word, after in itertools.pairwise(words) if after == "(" and word.startswith("kvt_")}
