"""Every benchmark runs to its end with `--quick` on a machine without a GPU, as a user would start it.

How fast it is says nothing here: a missed bar is status 1, and fine, unless speed has nothing to do with it. One that
takes longer than five minutes is marked `soak`. All of them together take long: `make test-benchmarks` runs them, and
`make test-nightly`.
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_LIMIT_S = 1800

QUICK = (
    "clients.test_c_client",
    "cluster.test_two_hosts",
    "objects.test_segments",
    "eviction",
    "eviction.cost",
    "eviction.replayed",
    "eviction.served",
    "offloading_KV_cache.baseline.test_copies",
    "offloading_KV_cache.baseline.test_prefills",
    "offloading_KV_cache.baseline.test_swap",
    "offloading_KV_cache.profiler.swap_in",
    "offloading_KV_cache.profiler.swap_out",
    "offloading_KV_cache.test_long_prefill",
    "offloading_KV_cache.test_swap_in",
    "offloading_KV_cache.test_swap_out",
    "persistence_kv_cache.test_disk",
    "persistence_kv_cache.test_huge_pages",
    "planning.live_curve",
    "prefix_caching.baseline",
    "prefix_caching.test_long_prefill",
    "prefix_caching.test_quantized",
    "prefixes.test_pack",
    "prefixes.test_warm",
    "remote_kv_cache.baseline.test_memory_io",
    "remote_kv_cache.baseline.test_server",
    "remote_kv_cache.test_decode_beside_load",
    "remote_kv_cache.test_encrypted",
    "remote_kv_cache.test_hostile",
    "remote_kv_cache.test_load_or_compute",
    "remote_kv_cache.test_long_prefill",
    "remote_kv_cache.test_restart",
    "remote_kv_cache.test_transfer_in",
    "remote_kv_cache.test_transfer_out",
    "scale",
    "serving.test_hostile",
    "serving.test_http",
    "serving.test_page",
    "structured.compare_libraries",
    "structured.test_masks",
    "structured.test_json_schema",
    "use_remote_KV_cache.speed_test",
    "use_remote_KV_cache.stress_test",
    "vineyard.test_file_store",
    "vineyard.test_shared_folder",
    "vineyard.test_shared_memory",
    "vllm.pages",
)
_EXACT = {"planning.live_curve"}
"""Their bars do not depend on how fast the machine is: they are met, also here."""
_ZEROMQ = "remote_kv_cache.baseline.test_zmq_transfer"
_WITHOUT_PEER = "cluster.test_valkey"
_ELSEWHERE = {
    "remote_kv_cache.baseline.test_gpu_hit": "needs a GPU",
    "vllm.test_overhead": "needs vLLM's environment",
    "vllm.test_scheduler_side": "needs vLLM's environment",
    "vllm.test_ttft": "needs vLLM's environment",
}


def _run(module: str, target: Path, *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"benchmarks.{module}", "--quick", "--json", str(target), *more]
    return subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=_LIMIT_S, check=False)


def test_every_benchmark_with_a_quick_size_is_run_here() -> None:
    found = set()
    for path in (_ROOT / "benchmarks").rglob("*.py"):
        docstring = re.match(r'"""(.*?)"""', path.read_text(), re.DOTALL)
        if docstring is not None and "--quick" in docstring[1] and "python -m benchmarks." in docstring[1]:
            parts = path.relative_to(_ROOT / "benchmarks").with_suffix("").parts
            found.add(".".join(part for part in parts if part != "__main__"))

    assert found == {*QUICK, _ZEROMQ, _WITHOUT_PEER, *_ELSEWHERE}


@pytest.mark.benchmark
@pytest.mark.timeout(_LIMIT_S + 60)
@pytest.mark.parametrize("module", [*QUICK, _WITHOUT_PEER])
def test_a_quick_run_ends_with_a_result(module: str, tmp_path: Path) -> None:
    more = ("--alone",) if module == _WITHOUT_PEER else ()
    done = _run(module, tmp_path / "result.json", *more)

    assert done.returncode in ((0,) if module in _EXACT else (0, 1)), done.stderr[-4000:]
    assert "Traceback" not in done.stderr, done.stderr[-4000:]
    document = json.loads((tmp_path / "result.json").read_text())
    assert document["benchmark"].endswith(module.rpartition(".")[2])
    assert document["rows"]
    bars = document["settings"].get("bars", {})
    assert set(bars) <= set(document["figures"]), "a figure with a bar was not measured"


@pytest.mark.benchmark
@pytest.mark.timeout(_LIMIT_S + 60)
def test_zeromq_is_measured_or_one_sentence_says_how_to_get_it(tmp_path: Path) -> None:
    done = _run(_ZEROMQ, tmp_path / "result.json")

    assert "Traceback" not in done.stderr, done.stderr[-4000:]
    if importlib.util.find_spec("zmq") is None:
        assert done.returncode == 1
        assert "`make peers` installs it" in done.stderr
    else:
        assert done.returncode == 0
        assert json.loads((tmp_path / "result.json").read_text())["rows"]
