"""A real Mooncake master and pool, where Mooncake is installed (`make test-mooncake`): the contract, and failures.

It listens on every interface without authentication, so its cases run in a network namespace with loopback alone.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CASES = "tests/support/mooncake_pool_cases.py"
_LIMIT_S = 500.0
_LOOPBACK_UP = """
import fcntl, os, socket, struct, sys
with socket.socket() as any_socket:
    fcntl.ioctl(any_socket, 0x8914, struct.pack("16sH14s", b"lo", 0x41, b""))  # SIOCSIFFLAGS: IFF_UP | IFF_RUNNING
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


def in_a_namespace(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["unshare", "--map-root-user", "--net", sys.executable, "-c", _LOOPBACK_UP, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=_LIMIT_S)


@pytest.mark.slow
def test_a_real_pool_keeps_the_contract_and_its_failures_are_misses() -> None:
    try:
        tried = in_a_namespace("-c", "import mooncake.store")
    except OSError as error:
        pytest.skip(f"there are no network namespaces here: {error.strerror}")
    if tried.returncode:
        pytest.skip(f"Mooncake cannot be used here: {(tried.stderr.strip().splitlines() or ['?'])[-1]}")

    run = in_a_namespace("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", CASES)

    assert run.returncode == os.EX_OK, run.stdout[-8000:] + run.stderr[-2000:]
    passed = re.search(r"(\d+) passed", run.stdout)
    assert passed is not None
    assert int(passed[1]) >= 20
