"""`kvtier trace record` and `kvtier plan` on a running server, as a user starts them."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

import kvtier
from kvtier.blocks.layout import KvLayout
from kvtier.blocks.namespace import NamespaceFields
from kvtier.client.client import CacheClient
from kvtier.simulate.trace import read_traces
from kvtier.testing.servers import ServerProcess, cache_server
from tests.support.waiting import CALL_S, wait_until

LAYOUT = KvLayout(layers=2, kv_heads=2, head_dim=32, dtype="float32", block_tokens=4)
PROMPTS = [range(40), range(60), range(1000, 1040)]


def connect(server: ServerProcess) -> CacheClient:
    fields = NamespaceFields(layout=LAYOUT, weights="traced")
    return kvtier.connect(server.unix, layout=LAYOUT, namespace=fields, timeout_s=CALL_S)


def ask(client: CacheClient, tokens: range) -> None:
    hashes = client.hashes(tokens)
    with client.match(hashes):
        pass
    client.set(hashes, [bytes(LAYOUT.block_bytes) for _ in hashes])


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-P", "-m", "kvtier", *arguments]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_recording_ends_in_good_order_and_can_be_planned_from(tmp_path: Path, number: signal.Signals) -> None:
    path = tmp_path / "trace.jsonl.gz"
    with cache_server() as server, connect(server) as client:
        recording = subprocess.Popen(
            command("trace", "record", str(path), "--server", server.unix),
            **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True},
        )
        assert recording.stderr is not None
        assert recording.stderr.readline().startswith("recording what")
        for tokens in PROMPTS:
            ask(client, tokens)
        wait_until(lambda: client.miss_curve()["requests"] == len(PROMPTS))
        recording.send_signal(number)
        output, _ = recording.communicate(timeout=CALL_S)

        assert recording.returncode == 0
        assert output.startswith("3 requests in")
        requests = list(read_traces(path))
        assert [request.input_length for request in requests] == [40, 60, 40]
        assert requests[0].hashes == requests[1].hashes[:10]

        for given in ([str(path)], ["--server", server.unix]):
            planned = subprocess.run(
                command("plan", *given, "--model", "qwen2.5-7b"), capture_output=True, text=True, check=True
            )
            assert "h/day" in planned.stdout
