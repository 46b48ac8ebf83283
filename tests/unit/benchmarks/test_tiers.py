"""The benchmarks of tiers below the device, in a size that takes seconds: checks pass, figures are there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.harness import Result
from benchmarks.offloading_KV_cache import test_long_prefill as offloading_long_prefill
from benchmarks.offloading_KV_cache import test_swap_in as swap_in
from benchmarks.offloading_KV_cache import test_swap_out as swap_out
from benchmarks.offloading_KV_cache.baseline import test_copies as copies
from benchmarks.offloading_KV_cache.baseline import test_prefills as prefills
from benchmarks.offloading_KV_cache.profiler import swap_in as swap_in_profile
from benchmarks.offloading_KV_cache.profiler import swap_out as swap_out_profile
from benchmarks.offloading_KV_cache.profiler.tracing import report
from benchmarks.prefix_caching import test_quantized as quantized
from benchmarks.prefix_caching.engine_stand import EngineStand, PromptMaker, Round, Variant
from benchmarks.remote_kv_cache import test_decode_beside_load as decode_beside_load
from benchmarks.remote_kv_cache import test_long_prefill as remote_long_prefill
from benchmarks.remote_kv_cache import test_restart as restart
from benchmarks.remote_kv_cache import test_transfer_in as transfer_in
from benchmarks.remote_kv_cache import test_transfer_out as transfer_out
from benchmarks.tier_stand import BELOW, DEVICE_OFF, DEVICE_ON, drop_below, expect_hits, expect_tokens, full_share

TINY = ("--quick", "--device", "cpu", "--prompts", "2", "--input-tokens", "72")
STORE = (*TINY, "--pairs", "1", "--turns", "1", "--batched-tokens", "64")
LONG = (*TINY, "--outputs", "2", "--always-load")
HOST = (*LONG, "--ttft-tokens", "100")
ONCE = (*TINY, "--repeats", "1")
BESIDE = (*ONCE, "--long-tokens", "200", "--window", "24")
HITS = (*TINY, "--output-tokens", "2", "--hit-rates", "0", "50", "--repeats", "1", "--always-load")

MAINS = {
    "copies": (copies.main, (*ONCE, "--blocks", "8", "--passes", "1"), "copy_out_loaded_gbs"),
    "swap_out": (swap_out.main, STORE, "swap_out_qps_min"),
    "swap_in": (swap_in.main, HITS, "host_over_device_50"),
    "offloading_long_prefill": (offloading_long_prefill.main, HOST, "host_ttft_cold_over_hit"),
    "prefills": (prefills.main, (*TINY, "--model-shape", "small", "--repeats", "1"), "prefill_over_copy_small"),
    "quantized": (quantized.main, (*ONCE, "--output-tokens", "3"), "gptq_decode_x"),
    "restart": (restart.main, (*ONCE, "--always-load", "--parts", "server", "disk"), "disk_of_raw"),
    "decode_beside_load": (decode_beside_load.main, BESIDE, "decode_p99_growth"),
    "transfer_out": (transfer_out.main, STORE, "transfer_out_qps_min"),
    "transfer_out_tcp": (transfer_out.main, (*STORE, "--tcp"), "transfer_out_tcp_qps_min"),
    "transfer_in": (transfer_in.main, HITS, "transfer_in_second_over_first"),
    "remote_long_prefill": (remote_long_prefill.main, LONG, "server_hit_over_cold_off_n2"),
}


@pytest.mark.sampled(every=20)
@pytest.mark.parametrize("name", MAINS)
def test_a_tiny_run_passes_its_checks_and_writes_its_figure(name, tmp_path):
    main, arguments, figure = MAINS[name]

    main([*arguments, "--json", str(tmp_path / "result.json")])

    document = json.loads((tmp_path / "result.json").read_text())
    assert document["figures"][figure] > 0
    assert document["rows"]
    assert document["settings"]["quick"]


@pytest.mark.slow
def test_tcp_after_a_restart_stands_beside_a_bare_socket(tmp_path):
    """In a process of its own: the socket's other end is one that multiprocessing watches from a third."""
    target = tmp_path / "result.json"
    command = [sys.executable, "-m", "benchmarks.remote_kv_cache.test_restart", *ONCE, "--parts", "tcp"]

    done = subprocess.run(
        [*command, "--json", str(target)], cwd=Path(__file__).parents[3], capture_output=True, text=True, timeout=300
    )

    assert done.returncode == 0, done.stderr
    document = json.loads(target.read_text())
    assert document["figures"]["tcp_of_raw_socket"] > 0
    assert [row["what"] for row in document["rows"]][1:] == ["raw socket, 1 connections", "raw socket, 4 connections"]


@pytest.mark.slow
@pytest.mark.parametrize(("main", "name"), [(swap_out_profile.main, "store"), (swap_in_profile.main, "load")])
def test_a_profile_leaves_a_trace_with_the_copies_and_the_engines_steps(main, name, tmp_path):
    target = tmp_path / "trace.json"

    main([*TINY, "--trace", str(target), "--json", str(tmp_path / "result.json")])

    names = {event["name"] for event in json.loads(target.read_text())["traceEvents"]}
    assert "kvtier step" in names
    assert any(one.startswith(f"kvtier {name}: 4 blocks, kvtier-") for one in names)
    assert 0 <= json.loads((tmp_path / "result.json").read_text())["figures"]["beside_compute"] <= 1


def test_a_stand_loads_only_what_its_tiers_have_and_only_with_them():
    settings = {"max_model_len": 256, "kv_cache_space": 8 << 20, "swap_space": 8 << 20, "always_load": True}
    with EngineStand("small", "cpu", **settings) as stand:
        prompts = PromptMaker(stand.vocab_size).make(2, 40)
        rounds = []
        for variant in (Variant(DEVICE_ON), Variant(DEVICE_OFF), Variant(DEVICE_OFF, has_tiers=False)):
            stand.use(variant)
            rounds.append(stand.run(prompts, 2))
        drop_below(stand)
        stand.use(Variant(DEVICE_OFF))
        rounds.append(stand.run(prompts, 2))

    computed, loaded, without, dropped = rounds
    expect_hits(loaded, BELOW, full_share(40), "stored")
    for other in (computed, without, dropped):
        expect_hits(other, (), 0.0, "not stored")
        expect_tokens(loaded, other, "cpu", "stored")


@pytest.mark.parametrize(
    ("shares", "tiers", "share"),
    [({"device": 0.9}, BELOW, 0.9), ({"host": 0.5}, BELOW, 0.9), ({"host": 0.5}, (), 0.0), ({}, ("device",), 0.9)],
)
def test_hits_from_elsewhere_too_few_and_unexpected_ones_are_failures(shares, tiers, share):
    with pytest.raises(RuntimeError, match="expected"):
        expect_hits(Round(1.0, 1.0, 1.0, 1, shares, []), tiers, share, "a run")


@pytest.mark.parametrize(("length", "shared", "share"), [(40, None, 32 / 40), (32, None, 31 / 32), (100, 50, 48 / 100)])
def test_a_prompts_last_token_is_never_cached(length, shared, share):
    assert full_share(length, shared) == share


def test_a_report_says_how_much_of_the_copies_ran_beside_compute(tmp_path):
    def event(name, start, duration, tid, cat=""):
        return {"name": name, "ts": start, "dur": duration, "tid": tid, "cat": cat}

    events = [
        event("kvtier step", 0, 100, 1),
        event("aten::mm", 10, 80, 1, "cpu_op"),
        event("kvtier step", 200, 100, 1),
        event("kvtier store: 2 blocks, kvtier-store", 90, 20, 2),
        event("kvtier store: 2 blocks, kvtier-store", 210, 20, 2),
    ]
    result = Result("a profile", {})

    report(events, "store", 1024, "cpu", tmp_path / "trace.json", result)

    assert result.figures["beside_compute"] == 0.25

    with pytest.raises(RuntimeError, match="0 copies"):
        report(events, "load", 1024, "cpu", tmp_path / "trace.json", result)
