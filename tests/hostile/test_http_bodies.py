"""Bodies of every wrong kind, for both APIs, against a real deployment: others are answered, and nothing is kept."""

from __future__ import annotations

import contextlib
import json
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from kvtier.sizes import parse_size
from tests.support.deployments import DeploymentProcess
from tests.support.http_bodies import BodyMaker
from tests.support.serving import MODEL, QUESTIONS, body_of, save_model
from tests.support.waiting import LIMIT_S

_TEXT = """\
models:
  - model: tiny
    kv_cache_space: 32MiB
    max_model_len: 1024
    default_options: {max_tokens: 4}
"""
_MAX_BODY = "1MiB"
_BATCH = 50
_FEW, _MANY = 4, 240
"""Batches, of each API in turn: a few seconds, and half a minute."""

_SOAK_SHARES = 5
_SOAK_BODIES = 200_000
"""In each share: a million in all."""

_SOAK_S = 3600.0
_THREADS = 12
_ANSWER_TOKENS = 4
_ALLOWED = {200, 400, 404, 408, 413, 415, 429, 503}
"""429 and 503 have a `Retry-After`; 500 would be a mistake of ours."""

_MAX_GROWTH_BYTES = 96 << 20


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeploymentProcess]:
    folder = tmp_path_factory.mktemp("hostile")
    save_model(folder / "tiny")
    with DeploymentProcess(folder, _TEXT, http={"max_body": _MAX_BODY}) as running:
        yield running


class _Fuzzer:
    """Sends batches of bodies, several at a time; after each, a well-behaved request must get the answer of before."""

    def __init__(self, deployment: DeploymentProcess, seed: int) -> None:
        self.statuses: Counter[int] = Counter()
        self._lock = threading.Lock()
        self._deployment = deployment
        self._seed = seed
        self._pids = {name: part.pid for name, part in deployment.parts().items()}
        self._right = self._ask()

    def batches(self, numbers: range) -> None:
        with ThreadPoolExecutor(_THREADS) as threads:
            for _ in threads.map(self._batch, numbers):
                pass

    def _batch(self, number: int) -> None:
        api = "openai" if number % 2 else "ollama"
        maker = BodyMaker(self._seed + number, MODEL)
        make = maker.openai if api == "openai" else maker.ollama
        url = self._deployment.openai_url if api == "openai" else self._deployment.ollama_url
        statuses: Counter[int] = Counter()
        with contextlib.closing(HTTPConnection(urlsplit(url).netloc, timeout=LIMIT_S)) as connection:
            for _ in range(_BATCH):
                path, body = make()
                try:
                    with contextlib.suppress(ConnectionError):  # refused before all of it was sent
                        connection.request("POST", path, body)
                    answer = connection.getresponse()
                    said = answer.read()
                except ConnectionError:  # what was still on its way has swept the answer away
                    assert len(body) > parse_size(_MAX_BODY), (path, body[:2000])
                    connection.close()
                    statuses[413] += 1
                    continue
                statuses[answer.status] += 1
                assert answer.status in _ALLOWED, (path, body[:2000], answer.status, said[:500])
                assert answer.status == 200 or len(said) < 2000, (path, body[:2000], said[:3000])
                assert answer.status not in (429, 503) or answer.headers["retry-after"]
        with self._lock:
            self.statuses += statuses
        assert self._ask() == self._right
        found = {name: part.pid for name, part in self._deployment.parts().items()}
        assert found == self._pids, "a part has died"

    def _ask(self) -> str:
        address = urlsplit(self._deployment.openai_url).netloc
        with contextlib.closing(HTTPConnection(address, timeout=LIMIT_S)) as connection:
            connection.request("POST", "/v1/completions", json.dumps(body_of(QUESTIONS[0], _ANSWER_TOKENS)))
            return str(json.loads(connection.getresponse().read())["choices"][0]["text"])

    def memory_bytes(self) -> dict[str, int]:
        return {name: _resident_bytes(pid) for name, pid in self._pids.items()}


def _resident_bytes(pid: int) -> int:
    for line in Path("/proc", str(pid), "status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) << 10
    raise AssertionError(f"process {pid} has no memory")


def _fuzz(deployment: DeploymentProcess, seed: int, num_batches: int) -> None:
    fuzzer = _Fuzzer(deployment, seed)
    fuzzer.batches(range(2))
    before = fuzzer.memory_bytes()
    fuzzer.batches(range(2, num_batches))
    grown = {name: after - before[name] for name, after in fuzzer.memory_bytes().items()}
    assert max(grown.values()) < _MAX_GROWTH_BYTES, grown
    assert fuzzer.statuses[200], "no body was right"
    assert fuzzer.statuses[400], "no body was wrong"


@pytest.mark.scaled
def test_whatever_a_body_holds_the_server_goes_on(
    deployment: DeploymentProcess, request: pytest.FixtureRequest
) -> None:
    is_short = request.config.getoption("cases") == "sample"
    _fuzz(deployment, 1 if is_short else 10_000, _FEW if is_short else _MANY)


@pytest.mark.soak
@pytest.mark.timeout(_SOAK_S)
@pytest.mark.parametrize("share", range(_SOAK_SHARES))
def test_a_million_bodies(deployment: DeploymentProcess, share: int) -> None:
    _fuzz(deployment, (1 + share) * 1_000_000, _SOAK_BODIES // _BATCH)
