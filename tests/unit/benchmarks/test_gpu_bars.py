"""What a benchmark must reach on a GPU: which bars apply, and that a missed one is seen."""

from __future__ import annotations

import argparse
import json

import pytest

from benchmarks.harness import Result
from benchmarks.offloading_KV_cache import test_long_prefill as offloading_long_prefill
from benchmarks.offloading_KV_cache import test_swap_in as swap_in
from benchmarks.prefix_caching import baseline
from benchmarks.prefix_caching.engine_stand import SCHEDULES, EngineStand, PromptMaker
from benchmarks.prefix_caching.options import conclude
from benchmarks.store_cost import Size, figure_name
from benchmarks.tier_stand import DEVICE_ON

TINY = ("--quick", "--device", "cpu", "--prompts", "2", "--input-tokens", "72", "--always-load")


@pytest.mark.parametrize(("value", "status"), [(2.0, 0), (1.0, 1), (None, 1)])
def test_a_bar_that_is_missed_or_not_measured_ends_a_benchmark_with_1(value, status, tmp_path, capsys):
    target = tmp_path / "result.json"
    result = Result("a benchmark", {})

    def act():
        if value is not None:
            result.figures["speed"] = value

    assert conclude(result, argparse.Namespace(json=str(target)), {"speed": ">= 1.5"}, act) == status

    assert json.loads(target.read_text())["settings"]["bars"] == {"speed": ">= 1.5"}
    assert ("NO" in capsys.readouterr().err) == bool(status)


def test_what_was_measured_before_a_failure_is_written(tmp_path):
    result = Result("a benchmark", {})

    def act():
        result.figures["speed"] = 3.0
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        conclude(result, argparse.Namespace(json=str(tmp_path / "result.json")), {}, act)

    assert json.loads((tmp_path / "result.json").read_text())["figures"] == {"speed": 3.0}


@pytest.mark.slow
def test_the_bars_of_host_hits_are_those_of_what_is_measured(monkeypatch, tmp_path):
    monkeypatch.setattr(offloading_long_prefill, "is_h200", lambda device: True)
    target = tmp_path / "result.json"

    status = offloading_long_prefill.main([*TINY, "--outputs", "2", "--ttft-tokens", "0", "--json", str(target)])

    assert status == 1  # a CPU's figures have other names
    document = json.loads(target.read_text())
    assert document["settings"]["bars"] == {"host_hit_n2": ">= 78"}
    assert {"vLLM 0.24"} <= {key for row in document["rows"] for key in row}


@pytest.mark.slow
def test_swap_in_says_at_which_hit_rate_host_memory_falls_behind(monkeypatch, tmp_path):
    monkeypatch.setattr(swap_in, "CLOSE", 1e9)
    target = tmp_path / "result.json"
    ways = ("--ways", swap_in.DEVICE_HIT, swap_in.HOST_OFF)

    swap_in.main([*TINY, *ways, "--repeats", "1", "--hit-rates", "50", "80", "--json", str(target)])

    figures = json.loads(target.read_text())["figures"]
    assert figures["parts_at"] == 50
    assert "host_over_none_50" not in figures


@pytest.mark.parametrize(
    ("parts", "rates", "expected"),
    [
        (["sweep"], (0, 100), {"sweep_0", "sweep_100"}),
        (["pairs"], (0,), {"async2_over_sync_min", *baseline.BARS["pairs"]}),
        (["table"], (0,), set()),
    ],
)
def test_the_bars_of_the_baseline_are_those_of_its_parts(parts, rates, expected, monkeypatch):
    monkeypatch.setattr(baseline, "is_h200", lambda device: True)
    arguments = argparse.Namespace(parts=parts, device="cuda", model_shape=baseline.VLLM_SHAPE)
    size = baseline.Size(1, 1, 1, 1, rates, rates, 16, 1, 16, None)

    assert set(baseline._bars(arguments, size)) == expected


def test_the_sweep_stands_beside_vllm_and_names_its_settings(capsys):
    with EngineStand("small", "cpu", max_model_len=256, max_num_requests=4, kv_cache_space=8 << 20) as stand:
        size = baseline.Size(3, 1, 1, 1, (50,), (50,), 64, 4, 8192, None)
        result = Result("a sweep", {})

        baseline.measure_sweep(stand, PromptMaker(stand.vocab_size), size, result, with_vllm=True)

    assert result.rows[0]["vLLM 0.24"] == baseline.VLLM_QPS[50]
    assert result.figures["sweep_50"] > 0
    assert "4 requests at a time" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("batched_tokens", "prompts", "input_tokens"), [(1024, 4, 8192), (128, 2, 8192), (64, 1, 8192), (32, 1, 4096)]
)
def test_runs_with_small_steps_have_fewer_prompts_and_then_shorter_ones(batched_tokens, prompts, input_tokens):
    size = Size(4, 8192, 5, 1, (1024,), (DEVICE_ON,), SCHEDULES, most_steps=128)

    cell = size.of(batched_tokens)

    assert (cell.prompts, cell.input_tokens) == (prompts, input_tokens)
    assert cell.prompts * cell.input_tokens <= 128 * batched_tokens


def test_a_gpus_store_cost_has_a_name_of_its_own():
    names = [figure_name("swap_out_qps", argparse.Namespace(device=device)) for device in ("cpu", "cuda")]

    assert names == ["swap_out_qps_min", "swap_out_qps_gpu_min"]
