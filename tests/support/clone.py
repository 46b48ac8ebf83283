"""A folder that looks like a clone after `make install`, and shell commands that run in it as documents have them."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support.document_code import ROOT
from tests.support.valkey import free_port
from tests.support.waiting import LIMIT_S

_END = "status=$?; kill $(jobs -p) 2>/dev/null || true; wait || true; exit $status"


def lay_out(folder: Path) -> None:
    """Sources, examples and programs, as in a clone after `make install`."""
    for name in ("examples", "benchmarks", "src"):
        (folder / name).symlink_to(ROOT / name)
    programs = folder / ".venv/bin"
    programs.mkdir(parents=True)
    for name, arguments in (("python", ""), ("kvtier", "-m kvtier")):
        program = programs / name
        program.write_text(f'#!/bin/sh\nexec {sys.executable} {arguments} "$@"\n')
        program.chmod(0o755)


def run_commands(commands: str, folder: Path) -> str:
    """Run `commands` in one bash, with free ports for 8080 and 11434, and return their output.

    The commands may end `kvtier serve` themselves. No process of theirs survives the call. Raises `AssertionError` with
    output and log (`serve.log`) if one fails.
    """
    openai, ollama = free_port(), free_port()
    here = commands.replace("8080", str(openai)).replace("11434", str(ollama))
    here = here.replace("examples.ask ", f"examples.ask --url http://127.0.0.1:{openai} ")
    with tempfile.TemporaryDirectory(prefix="kv-") as runtime:  # short: a socket's path has at most 107 bytes
        process = subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", f"trap '{_END}' EXIT\n{here}"],
            cwd=folder,
            env={
                **os.environ,
                "PATH": f"{folder / '.venv/bin'}:{os.environ['PATH']}",
                "PYTHONPATH": "src",
                "XDG_RUNTIME_DIR": runtime,
                "TMPDIR": runtime,
                "OMP_NUM_THREADS": "1",
                "no_proxy": "*",
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            said, _ = process.communicate(timeout=5 * LIMIT_S)
        finally:
            process.kill()
            process.wait()
        log = folder / "serve.log"
        assert process.returncode == 0, f"{said}\n{log.read_text() if log.exists() else ''}"
    return said
