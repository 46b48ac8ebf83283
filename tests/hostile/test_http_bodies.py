"""Bodies of every wrong kind, for both APIs, against a real deployment: others are answered, and nothing is kept."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.deployments import DeploymentProcess
from tests.support.http_bodies import BodyMaker
from tests.support.serving import MODEL, QUESTIONS, ask, save_model
from tests.support.waiting import LIMIT_S

_TEXT = """\
models:
  - model: tiny
    kv_cache_space: 32MiB
    max_model_len: 1024
    default_options: {max_tokens: 4}
"""
_BATCH = 50
_FEW, _MANY = 2, 20
"""Batches, of each API in turn: a few seconds, and about a minute."""

_SOAK_BODIES, _SOAK_S = 1_000_000, 3600.0
_ALLOWED = {200, 400, 404, 408, 413, 415, 503}
"""503 has a `Retry-After`; 500 would be a mistake of ours."""

_MAX_GROWTH_BYTES = 96 << 20


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeploymentProcess]:
    folder = tmp_path_factory.mktemp("hostile")
    save_model(folder / "tiny")
    with DeploymentProcess(folder, _TEXT, http={"max_body": "1MiB"}) as running:
        yield running


class _Fuzzer:
    """Sends batches of bodies; after each, a well-behaved request must get the answer it got before."""

    def __init__(self, deployment: DeploymentProcess, seed: int) -> None:
        self.statuses: Counter[int] = Counter()
        self._deployment = deployment
        self._maker = BodyMaker(seed, MODEL)
        self._pids = {name: part.pid for name, part in deployment.parts().items()}
        self._right = ask(deployment, QUESTIONS[0]).text
        limits = httpx.Limits(max_keepalive_connections=4)
        self._clients = {
            "openai": httpx.Client(base_url=deployment.openai_url, limits=limits, timeout=LIMIT_S, trust_env=False),
            "ollama": httpx.Client(base_url=deployment.ollama_url, limits=limits, timeout=LIMIT_S, trust_env=False),
        }

    def close(self) -> None:
        for client in self._clients.values():
            client.close()

    def batch(self, api: str) -> None:
        make = self._maker.openai if api == "openai" else self._maker.ollama
        for _ in range(_BATCH):
            path, body = make()
            answer = self._clients[api].post(path, content=body)
            self.statuses[answer.status_code] += 1
            assert answer.status_code in _ALLOWED, (path, body[:2000], answer.status_code, answer.text[:500])
            assert answer.status_code == 200 or len(answer.content) < 2000, (path, body[:2000], answer.text[:3000])
            assert answer.status_code != 503 or answer.headers["retry-after"]
        assert ask(self._deployment, QUESTIONS[0]).text == self._right
        found = {name: part.pid for name, part in self._deployment.parts().items()}
        assert found == self._pids, "a part has died"

    def memory_bytes(self) -> dict[str, int]:
        return {name: _resident_bytes(pid) for name, pid in self._pids.items()}


def _resident_bytes(pid: int) -> int:
    for line in Path("/proc", str(pid), "status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) << 10
    raise AssertionError(f"process {pid} has no memory")


def _fuzz(deployment: DeploymentProcess, seed: int, num_batches: int, seconds: float) -> None:
    fuzzer = _Fuzzer(deployment, seed)
    ends_at = time.monotonic() + seconds
    try:
        for api in ("openai", "ollama"):
            fuzzer.batch(api)
        before = fuzzer.memory_bytes()
        for _ in range(num_batches):
            for api in ("openai", "ollama"):
                fuzzer.batch(api)
            if time.monotonic() > ends_at:
                break
        grown = {name: after - before[name] for name, after in fuzzer.memory_bytes().items()}
    finally:
        fuzzer.close()
    assert max(grown.values()) < _MAX_GROWTH_BYTES, grown
    assert fuzzer.statuses[200], "no body was right"
    assert fuzzer.statuses[400], "no body was wrong"


@pytest.mark.scaled
def test_whatever_a_body_holds_the_server_goes_on(
    deployment: DeploymentProcess, request: pytest.FixtureRequest
) -> None:
    is_short = request.config.getoption("cases") == "sample"
    _fuzz(deployment, 1 if is_short else 2, _FEW if is_short else _MANY, LIMIT_S)


@pytest.mark.soak
@pytest.mark.timeout(2 * _SOAK_S)
def test_a_million_bodies_or_an_hour_of_them(deployment: DeploymentProcess) -> None:
    _fuzz(deployment, int(time.time()), _SOAK_BODIES // (2 * _BATCH), _SOAK_S)
