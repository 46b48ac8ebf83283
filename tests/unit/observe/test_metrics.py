"""Counters and levels, by name."""

from __future__ import annotations

from prometheus_client import generate_latest

from kvtier.observe.metrics import EngineCounts, EngineMetrics, ServerMetrics, TierMetrics


def test_two_processes_worth_of_metrics_do_not_collide() -> None:
    one, other = TierMetrics(), TierMetrics()
    one.hit_blocks.labels(tier="host").inc(3)

    assert (one.value(one.hit_blocks), other.value(other.hit_blocks)) == (3, 0)


def test_a_counters_value_is_summed_over_what_the_labels_leave_open() -> None:
    metrics = TierMetrics()
    metrics.failures.labels(tier="a", kind="timeout").inc()
    metrics.failures.labels(tier="a", kind="io").inc(2)
    metrics.failures.labels(tier="b", kind="io").inc(4)

    assert metrics.value(metrics.failures) == 7
    assert metrics.value(metrics.failures, tier="a") == 3
    assert metrics.value(metrics.failures, tier="a", kind="io") == 2


def test_levels_are_read_when_they_are_scraped() -> None:
    levels = {"used_bytes": 1.0, "evicted_blocks": 2.0}
    metrics = ServerMetrics(lambda: levels)
    levels["used_bytes"] = 5.0

    lines = generate_latest(metrics.registry).decode().splitlines()

    assert "kvtier_server_used_bytes 5.0" in lines
    assert "kvtier_server_evicted_blocks_total 2.0" in lines


def test_an_engines_counts_are_read_when_they_are_scraped() -> None:
    counts = EngineCounts(num_blocks=8)
    metrics = EngineMetrics(counts)
    counts.note_end("stop", 10, {"device": 4, "host": 2})
    counts.note_end("stop", 5, {"device": 1})
    counts.output_tokens += 7
    counts.running_requests = 2

    lines = generate_latest(metrics.registry).decode().splitlines()

    assert 'kvtier_engine_finished_requests_total{reason="stop"} 2.0' in lines
    assert "kvtier_engine_prompt_tokens_total 15.0" in lines
    assert 'kvtier_engine_cached_tokens_total{tier="device"} 5.0' in lines
    assert 'kvtier_engine_cached_tokens_total{tier="host"} 2.0' in lines
    assert "kvtier_engine_output_tokens_total 7.0" in lines
    assert "kvtier_engine_running_requests 2.0" in lines
    assert "kvtier_engine_blocks 8.0" in lines
