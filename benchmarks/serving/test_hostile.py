"""The cost of one hostile client to a well-behaved one: its latencies alone, and beside each attack.

    python -m benchmarks.serving.test_hostile --quick

The deployment has a tiny model on the CPU. The well-behaved client asks for 4 tokens, for 4 tokens with a body of
40 kB, which is read in another process, and for `/health`, which the HTTP process answers by itself, in turn, one
request after the other. `http_peak_MiB` is that process's memory. The bars: an attack at most doubles the p99 of either
answer, and `/health` takes no more than 20 ms. Attacks that make the engine work have only the latter. The hostile
client has a low priority: only the server's work for it counts, since a real one runs on another machine.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.harness import Result, console, finish, make_parser, print_table
from benchmarks.serving.hostile_side import ATTACKS, ENGINE_WORK
from examples.use_remote_KV_cache.command import run_command
from examples.use_remote_KV_cache.deployment import Deployment
from kvtier.priority import step_back
from kvtier.testing.tiny_models import save_tiny_model

_HTTP_PART = b"kvtier.deploy.run.part\0http\0"
_TIMEOUT_S = 60.0
_RECOVERY_S = 60.0
_HEALTH_BAR = "<= 20"
_RATIO_BAR = "<= 2"
_BODY = json.dumps({"model": "model", "prompt": [1, 2, 3], "max_tokens": 4, "temperature": 0, "ignore_eos": True})
_LONG_BODY = _BODY + " " * 40_000


@dataclass
class _Latencies:
    seconds: list[float] = field(default_factory=list)
    long_s: list[float] = field(default_factory=list)
    health_s: list[float] = field(default_factory=list)
    num_failed: int = 0
    peak_bytes: int = 0

    def row(self, name: str) -> dict[str, object]:
        return {
            "beside": name,
            "requests": len(self.seconds) + len(self.long_s),
            "failed": self.num_failed,
            "p50_ms": round(1000 * share(self.seconds, 0.5), 1),
            "p99_ms": round(1000 * share(self.seconds, 0.99), 1),
            "long_p50_ms": round(1000 * share(self.long_s, 0.5), 1),
            "long_p99_ms": round(1000 * share(self.long_s, 0.99), 1),
            "health_p50_ms": round(1000 * share(self.health_s, 0.5), 2),
            "health_p99_ms": round(1000 * share(self.health_s, 0.99), 1),
            "http_peak_MiB": self.peak_bytes >> 20,
        }


def share(seconds: list[float], part: float) -> float:
    return sorted(seconds)[min(len(seconds) - 1, int(part * len(seconds)))]


def main() -> int:
    parser = make_parser(__doc__ or "")
    parser.add_argument("--attack", action="append", choices=tuple(ATTACKS), help="this one only; may be repeated")
    arguments = parser.parse_args()
    seconds = 6.0 if arguments.quick else 20.0
    with tempfile.TemporaryDirectory(prefix="kvtier-hostile-") as scratch:
        attacks = arguments.attack or list(ATTACKS)
        rows, figures = _measure(Path(scratch), attacks, seconds)
    print_table("one well-behaved client beside one hostile client", rows)
    return finish(Result("serving.test_hostile", {"seconds": seconds}, rows, figures), _bars(attacks), arguments.json)


def _bars(attacks: list[str]) -> dict[str, str]:
    bars: dict[str, str] = {}
    for name in attacks:
        if name not in ENGINE_WORK:
            bars |= {_figure("p99_ratio", name): _RATIO_BAR, _figure("long_p99_ratio", name): _RATIO_BAR}
        bars[_figure("health_p99_ms", name)] = _HEALTH_BAR
    return bars


def _figure(what: str, attack: str) -> str:
    return f"{what}_beside_{attack.replace(' ', '_')}"


def _measure(scratch: Path, attacks: list[str], seconds: float) -> tuple[list[dict[str, object]], dict[str, float]]:
    rows, figures = [], {}
    with _serving(scratch) as (openai, ollama):
        _ask(openai, 2.0)  # the first requests warm up
        alone = _ask(openai, seconds)
        rows.append(alone.row("none"))
        figures["p99_ms_alone"] = 1000 * share(alone.seconds, 0.99)
        for name in attacks:
            console.print(f"beside {name}")
            with _attacking(name, openai, ollama):
                time.sleep(1.0)
                beside = _ask(openai, seconds)
            rows.append(beside.row(name))
            figures[_figure("p99_ms", name)] = 1000 * share(beside.seconds, 0.99)
            figures[_figure("p99_ratio", name)] = share(beside.seconds, 0.99) / share(alone.seconds, 0.99)
            figures[_figure("long_p99_ratio", name)] = share(beside.long_s, 0.99) / share(alone.long_s, 0.99)
            figures[_figure("health_p99_ms", name)] = 1000 * share(beside.health_s, 0.99)
            _recover(openai)
    return rows, figures


@contextlib.contextmanager
def _serving(scratch: Path) -> Iterator[tuple[int, int]]:
    save_tiny_model(scratch / "tiny", "llama", max_position_embeddings=4096)
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]
        openai, ollama = (sock.getsockname()[1] for sock in socks)
    file = scratch / "deploy.yml"
    model = {"model": str(scratch / "tiny"), "name": "model", "kv_cache_space": "64MiB"}
    file.write_text(json.dumps({"models": [model], "http": {"openai": openai, "ollama": ollama}}))
    with (scratch / "log").open("w") as log, Deployment(file, url=f"http://127.0.0.1:{openai}", log=log):
        yield openai, ollama


@contextlib.contextmanager
def _attacking(name: str, openai: int, ollama: int) -> Iterator[None]:
    attacker = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.serving.hostile_side", name, str(openai), str(ollama)],
        start_new_session=True,
        preexec_fn=lambda: step_back(15),
    )
    try:
        yield
    finally:
        attacker.kill()
        attacker.wait()


def _ask(port: int, seconds: float) -> _Latencies:
    """Send requests one after the other for that long; failed ones count, too."""
    found = _Latencies()
    ends_at = time.perf_counter() + seconds
    pid = _http_pid()
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/clear_refs").write_text("5")  # its peak begins anew
    while time.perf_counter() < ends_at:
        for body, seconds_of in ((_BODY, found.seconds), (_LONG_BODY, found.long_s)):
            started_at = time.perf_counter()
            if not _is_answered(port, body=body):
                found.num_failed += 1
                time.sleep(0.01)
            seconds_of.append(time.perf_counter() - started_at)
        started_at = time.perf_counter()
        _is_answered(port, "/health")
        found.health_s.append(time.perf_counter() - started_at)
    found.peak_bytes = _peak_bytes(pid)
    return found


def _is_answered(port: int, path: str = "/v1/completions", body: str = _BODY) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT_S)
    try:
        if path == "/health":
            connection.request("GET", path)
        else:
            connection.request("POST", path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status == 200 and bool(response.read())
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _recover(port: int) -> None:
    """What an attack leaves behind is not the next one's."""
    deadline = time.monotonic() + _RECOVERY_S
    num_good = 0
    while num_good < 20 and time.monotonic() < deadline:
        num_good = num_good + 1 if _is_answered(port) else 0


def _http_pid() -> int:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if _HTTP_PART in (entry / "cmdline").read_bytes() and _is_ours(int(entry.name)):
                    return int(entry.name)
    return 0


def _is_ours(pid: int) -> bool:
    while pid > 1 and pid != os.getpid():
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return pid == os.getpid()


def _peak_bytes(pid: int) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) << 10
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
