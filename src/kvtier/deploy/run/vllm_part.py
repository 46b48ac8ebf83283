"""The process beside an engine of vLLM: starts vLLM, passes its log on, reports when it is ready, and ends all of it.

vLLM has several processes, all in this one's group: however this process ends, none of them is left. If it is killed,
the supervisor ends them.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvtier import __version__
from kvtier.deploy.plan.parts import VllmPart
from kvtier.deploy.run import vllm_start
from kvtier.deploy.run.process_group import end_group
from kvtier.deploy.run.reports import Ready, Reporter
from kvtier.deploy.run.signals import is_signalled
from kvtier.deploy.run.vllm_log import VllmLog
from kvtier.errors import ConfigError, EngineStopped

logger = logging.getLogger(__name__)

_START = str(Path(vllm_start.__file__).absolute())
_PROBE_S = 120.0
_ASK_S = 5.0
_DRAIN_S = 30.0
_END_S = 20.0
_MAX_REPLY_BYTES = 1 << 20
_CONNECTED = "03"
_KEY_VARIABLE = "VLLM_API_KEY"
"""With it, vLLM refuses what the HTTP server passes on: that has no key for vLLM."""

_OF_HTTP_SERVER = 1
"""Connections that the HTTP server holds open without a request, to notice when an engine ends."""


def run_vllm(part: VllmPart, reporter: Reporter, signals: Sequence[signal.Signals]) -> None:
    """Run until a signal of `signals`, which must be blocked. Raises `ConfigError` or `EngineStopped` if it fails."""
    environment = {**os.environ, "PYTHONSAFEPATH": "1", **visible_gpus(part.device, os.environ)}
    if environment.get(_KEY_VARIABLE):
        raise ConfigError(f"{_KEY_VARIABLE} is set in the environment: unset it, http.api_keys says who may ask")
    version = _look(part, environment)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(part.socket)  # of one that was killed: vLLM would not start over it
    process = subprocess.Popen(
        [part.python, _START, "run", *part.arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
    )
    assert process.stdout is not None
    log = VllmLog(process.stdout)
    try:
        _serve(part, process, log, reporter, signals, version)
    finally:
        if os.getpgrp() == os.getpid():
            end_group(os.getpid(), but=os.getpid())
        process.kill()
        process.wait()
        log.close()


def visible_gpus(device: str, environment: Mapping[str, str]) -> dict[str, str]:
    """GPU variables for vLLM's environment. Numbers count the GPUs that this process sees."""
    if device == "cpu":
        return {"CUDA_VISIBLE_DEVICES": ""}
    _, _, numbers = device.partition(":")
    if not numbers:
        return {}
    seen = [one.strip() for one in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if one.strip()]
    wanted = [int(number) for number in numbers.split(",")]
    if seen and max(wanted) >= len(seen):
        raise ConfigError(f"there is no device {device}: CUDA_VISIBLE_DEVICES has {len(seen)}")
    return {"CUDA_VISIBLE_DEVICES": ",".join(seen[number] if seen else str(number) for number in wanted)}


def _look(part: VllmPart, environment: Mapping[str, str]) -> str:
    """The version of vLLM. Raises `ConfigError` with what is missing from its Python."""
    python = part.python
    try:
        done = subprocess.run(
            [python, _START, "look"], stdin=subprocess.DEVNULL, capture_output=True, env=environment, timeout=_PROBE_S
        )
        found = json.loads(done.stdout)
    except OSError as error:
        raise ConfigError(f"vllm_python {python} cannot be run: {error.strerror}") from error
    except (ValueError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"vllm_python {python} is not a working Python") from error
    if not isinstance(found, dict):
        raise ConfigError(f"vllm_python {python} is not a working Python")
    version = str(found["vllm"])
    if not version:
        raise ConfigError(f"vLLM is not installed in {python}: install it there, or say which Python with vllm_python")
    if not part.cache_server:
        return version
    if not found["kvtier"]:
        raise ConfigError(f"kvtier is not installed in {python}, where vLLM needs it for the cache: pip install kvtier")
    if found["fit"] == "OLDER":
        raise ConfigError(
            f"vLLM {version} in {python} is too old for kvtier's connector: update it, or set cache: false"
        )
    if found["kvtier"] != __version__:
        logger.warning("kvtier is %s in %s and %s here: install the same", found["kvtier"], python, __version__)
    return version


def _serve(
    part: VllmPart,
    process: subprocess.Popen[bytes],
    log: VllmLog,
    reporter: Reporter,
    signals: Sequence[signal.Signals],
    version: str,
) -> None:
    is_ready = False
    while not is_signalled(signals):
        if process.poll() is not None:
            when = "" if is_ready else " before it was ready"
            raise EngineStopped(f"vLLM {_how(process.returncode)}{when}{log.last_words()}")
        if not is_ready and _get(part.socket, "/health") is not None:
            is_ready = True
            log.note_ready()
            reporter.tell(Ready({"vllm": version, **_properties(part.socket)}))
    logger.info("stopping")
    _drain(part.socket, process, signals)
    process.terminate()
    deadline = time.monotonic() + _END_S
    while process.poll() is None and time.monotonic() < deadline and not is_signalled(signals):
        pass


def _drain(path: str, process: subprocess.Popen[bytes], signals: Sequence[signal.Signals]) -> None:
    """No new requests reach it; running ones may end. Another signal cuts this short."""
    with contextlib.suppress(OSError):
        os.unlink(path)
    deadline = time.monotonic() + _DRAIN_S
    while _num_connections(path) > _OF_HTTP_SERVER and process.poll() is None and time.monotonic() < deadline:
        if is_signalled(signals):
            return


def _num_connections(path: str) -> int:
    """The accepted, open connections of a Unix socket."""
    with open("/proc/net/unix", encoding="utf-8", errors="replace") as table:
        rows = (line.split() for line in table)
        return sum(len(row) > 7 and row[7] == path and row[5] == _CONNECTED for row in rows)


def _properties(path: str) -> dict[str, object]:
    with contextlib.suppress(ValueError, LookupError, TypeError):
        return {"max_model_len": int(json.loads(_get(path, "/v1/models") or b"")["data"][0]["max_model_len"])}
    return {}


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=_ASK_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def _get(path: str, page: str) -> bytes | None:
    """vLLM's answer; None if there is none, or its status is not 200."""
    with contextlib.closing(_UnixConnection(path)) as connection:
        try:
            connection.request("GET", page)
            response = connection.getresponse()
            body = response.read(_MAX_REPLY_BYTES)
        except (OSError, http.client.HTTPException):
            return None
        return body if response.status == 200 else None


def _how(status: int) -> str:
    return f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
