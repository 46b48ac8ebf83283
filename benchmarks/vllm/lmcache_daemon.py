"""LMCache's daemon as a peer, if it is installed in vLLM's environment."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.vllm.stand import PAGE_TOKENS

_PATIENCE_S = 90.0


def why_no_lmcache() -> str | None:
    return None if importlib.util.find_spec("lmcache") else "lmcache is not installed in this environment"


@contextlib.contextmanager
def lmcache_daemon(folder: Path, memory_bytes: int) -> Iterator[dict[str, Any]]:
    """A daemon with chunks as long as vLLM's pages. Yields its engines' `kv_transfer_config`; logs to `folder`."""
    port, http_port, metrics_port = _free_port(), _free_port(), _free_port()
    command = [
        *(sys.executable, "-m", "lmcache.cli.main", "server"),
        *("--port", str(port), "--http-port", str(http_port), "--prometheus-port", str(metrics_port)),
        *("--chunk-size", str(PAGE_TOKENS), "--l1-size-gb", str(memory_bytes >> 30), "--eviction-policy", "LRU"),
        *("--supported-transfer-mode", "auto"),
    ]
    os.environ |= {"LMCACHE_LOG_LEVEL": "ERROR", "LMCACHE_DISABLE_BANNER": "1", "LMCACHE_TRACK_USAGE": "false"}
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            _wait_for(process, port, folder / "log")
            yield {
                "kv_connector": "LMCacheMPConnector",
                "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {"lmcache.mp.host": "tcp://localhost", "lmcache.mp.port": port},
            }
        finally:
            process.terminate()
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_for(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.2)
    raise RuntimeError(f"LMCache's daemon does not listen: {log.read_text()[-2000:]}")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])
