from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvtier.errors import ConfigError, TierUnavailable
from kvtier.planning.live import plan_live, read_curve
from kvtier.planning.page import page_of
from kvtier.planning.plan import Plan, plan_trace, sizes_for
from kvtier.planning.terminal import bar, lines_of
from kvtier.simulate.costs import Costs
from kvtier.simulate.shapes import GPUS, SHAPE_NAMES, shape_of
from kvtier.simulate.tiers import TieredReplay, TierSettings, replay_tiers
from kvtier.simulate.trace import TracedRequest
from tests.support.prompt_traffic import lru_hit_share, sessions

COSTS = Costs(shape_of("qwen2.5-7b"), GPUS["h200"], 5e9)
PROMPTS = sessions(12, 12, seed=3)
REQUESTS = [TracedRequest(10.0 * number, 512 * len(prompt), 9, prompt) for number, prompt in enumerate(PROMPTS)]
BLOCK_BYTES = 512 * COSTS.shape.kv_bytes


def planned(**given: Any) -> Plan:
    return plan_trace(REQUESTS, COSTS, name="made-up", **given)


def half(requests: Sequence[TracedRequest], settings: TierSettings, costs: Costs, block_tokens: int) -> TieredReplay:
    return TieredReplay(200, 60, 40, 8.0, 0, 0, 0, [1.0] * 9 + [2.0])


def curve(**given: object) -> dict[str, object]:
    return {
        **{
            "policy": "lru",
            "runs": "adaptive",
            "memory_bytes": 1 << 30,
            "file_bytes": None,
            "requests": 1000,
            "asked_tokens": 4_000_000,
        },
        **{"asked_bytes": 4_000_000 * COSTS.shape.kv_bytes, "seconds": 3600.0, "sampled_share": 0.5},
        "points": [[1 << 28, 0.1], [1 << 30, 0.3], [1 << 34, 0.7]],
        **given,
    }


# --- shapes ---------------------------------------------------------------------------------------------------------


def test_the_shape_of_qwen_has_56_kibibytes_a_token() -> None:
    shape = shape_of("Qwen2.5-7B")

    assert shape.kv_bytes == 56 << 10
    assert shape.parameters == pytest.approx(6.53e9, rel=0.01)  # without the embedding
    assert shape_of("qwen2.5-7b", "fp8").kv_bytes == 28 << 10


def test_later_tokens_cost_more() -> None:
    shape = shape_of("llama-3.1-8b")

    assert shape.prefill_flops(100_000, 101_000) > 2 * shape.prefill_flops(0, 1000)
    assert shape.prefill_flops(0, 500) + shape.prefill_flops(500, 1000) == pytest.approx(shape.prefill_flops(0, 1000))


def test_a_config_of_a_checkpoint_is_a_shape(tmp_path: Path) -> None:
    config = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64}
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 100, "intermediate_size": 128}))

    assert shape_of(str(tmp_path)).kv_bytes == shape_of(str(tmp_path / "config.json")).kv_bytes == 2 * 2 * 2 * 16 * 2


@pytest.mark.parametrize("text", ["{}", "[", '{"num_hidden_layers": -1}', '{"num_hidden_layers": 1e30}', "[" * 90_000])
def test_a_config_that_is_none_is_refused_in_a_sentence(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)

    with pytest.raises(ConfigError, match="does not describe a decoder"):
        shape_of(str(tmp_path))


def test_an_unknown_shape_is_told_which_are_known() -> None:
    with pytest.raises(ConfigError, match=SHAPE_NAMES[0]):
        shape_of("gpt-17")
    with pytest.raises(ConfigError, match="KV dtype"):
        shape_of("qwen2.5-7b", "int3")


# --- a trace --------------------------------------------------------------------------------------------------------


def test_hits_are_those_of_exact_lru() -> None:
    for point in planned().by_memory:
        expected = lru_hit_share(PROMPTS, point.memory_bytes // BLOCK_BYTES)
        assert point.lru.hit_share == pytest.approx(expected)


def test_more_memory_saves_more_and_answers_sooner() -> None:
    points = planned().by_memory

    for smaller, larger in itertools.pairwise(points):
        assert larger.lru.hit_share >= smaller.lru.hit_share
        assert larger.lru.saved_gpu_s >= smaller.lru.saved_gpu_s
        assert larger.lru.mean_ttft_s <= smaller.lru.mean_ttft_s


def test_a_disk_hits_what_memory_of_its_size_would_and_later() -> None:
    plan = planned(memory_bytes=8 * BLOCK_BYTES)
    in_memory = {point.memory_bytes: point for point in plan.by_memory}

    assert plan.by_disk
    for point in plan.by_disk:
        assert point.memory_bytes == 8 * BLOCK_BYTES
        assert point.lru.hit_share == pytest.approx(in_memory[point.disk_bytes].lru.hit_share)
        assert point.lru.mean_ttft_s >= in_memory[point.disk_bytes].lru.mean_ttft_s


def test_a_disk_that_is_slower_than_computing_is_not_read() -> None:
    costs = dataclasses.replace(COSTS, disk_bytes_per_s=1e6)
    plan = plan_trace(REQUESTS, costs, name="slow", memory_bytes=8 * BLOCK_BYTES)
    now = next(point for point in plan.by_memory if point.memory_bytes == 8 * BLOCK_BYTES)

    assert plan.by_disk[-1].lru.hit_share == now.lru.hit_share
    assert plan.advice[1].startswith("disk: more than")


def test_advice_names_room_points_and_hours() -> None:
    advice = planned(memory_bytes=64 * BLOCK_BYTES).advice[0]

    assert advice.startswith("+")
    assert "of memory: +" in advice
    assert "H200 hours a day" in advice
    assert "on top of 1.75GiB of memory" in advice


def test_where_all_fits_no_more_is_advised() -> None:
    assert planned(memory_bytes=1 << 50).advice == ["memory: more than 1024TiB of memory gains less than a point"]


def test_a_measured_speed_takes_the_place_of_the_model() -> None:
    plan = plan_trace(REQUESTS[:1], Costs(COSTS.shape, COSTS.gpu, 5e9, 512.0), name="one")

    assert plan.by_memory[0].lru.mean_ttft_s == pytest.approx(len(PROMPTS[0]))


def test_the_plan_says_how_the_servers_policy_differs() -> None:
    assert "not simulated" in planned().notes[-1]

    plan = planned(simulate=half)

    assert {point.effect.hit_share for point in plan.by_memory + plan.by_disk} == {0.5}
    assert "simulated on the same trace" in plan.notes[-1]


def test_ours_is_simulated_with_its_disk_and_advice_goes_by_it() -> None:
    plan = planned(memory_bytes=200 * BLOCK_BYTES, simulate=replay_tiers)
    point = plan.by_disk[-1]
    simulated = replay_tiers(REQUESTS, TierSettings(200, point.disk_bytes // BLOCK_BYTES), COSTS)

    assert point.adaptive is not None
    assert point.adaptive.hit_share == simulated.hit_rate
    assert point.adaptive.late_ttft_s == simulated.ttft_s(0.9)
    assert point.effect is point.adaptive


def test_a_deployment_with_lru_gets_advice_for_lru_beside_what_the_other_policy_would_do() -> None:
    plan = planned(simulate=half, eviction="lru")

    assert plan.advice == planned().advice != planned(simulate=half).advice
    assert {point.adaptive.hit_share for point in plan.by_memory if point.adaptive is not None} == {0.5}
    assert "the advice is for LRU; the adaptive policy was simulated on the same trace" in plan.notes[-1]


def test_a_trace_without_blocks_is_refused() -> None:
    with pytest.raises(ConfigError, match="nothing to plan"):
        plan_trace([TracedRequest(0, 10, 1, ())], COSTS, name="empty")
    with pytest.raises(ConfigError, match="nothing to plan"):
        plan_trace([], COSTS, name="empty")


def test_where_nothing_is_asked_for_again_no_cache_is_advised() -> None:
    plan = plan_trace(REQUESTS[:1], COSTS, name="one")

    assert plan.advice == ["memory: a cache of any size gains less than a point, since almost no prompt is repeated"]
    assert plan.by_disk == []


def test_a_short_trace_is_called_short() -> None:
    hurried = [dataclasses.replace(request, arrived_s=0.0) for request in REQUESTS]

    assert "covers only 1 seconds" in plan_trace(hurried, COSTS, name="hurried").notes[-1]
    assert "covers only" not in planned().notes[-1]


def test_requests_without_blocks_or_tokens_are_computed() -> None:
    requests = [*REQUESTS, TracedRequest(5.0, 0, 3, ()), TracedRequest(6.0, 700, 3, ()), TracedRequest(7.0, 0, 0, (1,))]

    assert plan_trace(requests, COSTS, name="mixed").by_memory[-1].lru.hit_share > 0


def test_sizes_are_doublings_and_what_there_is() -> None:
    sizes = sizes_for(1000, 300)

    assert sizes[-1] == 1024
    assert 300 in sizes


# --- a server's curve -----------------------------------------------------------------------------------------------


def test_a_live_curve_becomes_a_plan() -> None:
    plan = plan_live(read_curve(curve()), COSTS, name="unix:x")
    now = next(point for point in plan.by_memory if point.memory_bytes == 1 << 30)

    assert now.lru.hit_share == pytest.approx(0.3)
    assert plan.by_memory[-1].lru.hit_share == pytest.approx(0.7)
    assert any("shows LRU" in note for note in plan.notes)
    assert "+40 points" in plan.advice[0] or "of memory: +" in plan.advice[0]


def test_a_live_plan_says_what_the_server_runs() -> None:
    adaptive, lru = (plan_live(read_curve(curve(runs=runs)), COSTS, name="x").notes for runs in ("adaptive", "lru"))

    assert any("runs the adaptive policy" in note for note in adaptive)
    assert any("evicts with LRU" in note for note in lru)


def test_a_live_plan_computes_what_a_disk_is_too_slow_for() -> None:
    slow = dataclasses.replace(COSTS, disk_bytes_per_s=1e6)
    plans = [plan_live(read_curve(curve(file_bytes=1 << 34)), costs, name="x") for costs in (COSTS, slow)]

    assert [plan.by_disk[-1].lru.hit_share for plan in plans] == pytest.approx([0.7, 0.3])
    assert plans[1].by_disk[-1].lru.mean_ttft_s < 1.0


def test_a_live_plan_reads_a_disk_no_faster_than_memory() -> None:
    fast, faster = (dataclasses.replace(COSTS, disk_bytes_per_s=speed) for speed in (COSTS.gpu.host_bytes_per_s, 1e15))
    known = read_curve(curve(file_bytes=1 << 34))

    assert plan_live(known, faster, name="x").by_disk == plan_live(known, fast, name="x").by_disk


def test_a_live_plan_warns_of_few_requests_and_of_another_model() -> None:
    notes = plan_live(read_curve(curve(requests=5, asked_bytes=4_000_000)), COSTS, name="x").notes

    assert any("few" in note for note in notes)
    assert any("check --model" in note for note in notes)


@pytest.mark.parametrize(
    "wrong", [{"points": [[1, 2.0]]}, {"memory_bytes": 0}, {"seconds": -1.0}, {"points": "none"}, {"policy": 5}]
)
def test_a_curve_that_is_none_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(TierUnavailable, match="not understood"):
        read_curve(curve(**wrong))


def test_a_server_without_traffic_says_so() -> None:
    with pytest.raises(ConfigError, match="after some traffic"):
        read_curve(curve(points=[], asked_tokens=0))


# --- drawings -------------------------------------------------------------------------------------------------------


def test_a_bar_is_as_long_as_its_share() -> None:
    assert bar(0.5, 8) == "████    "
    assert bar(2.0, 3) == "███"
    assert bar(-1.0, 3) == "   "


def test_the_table_has_a_line_for_each_size() -> None:
    plan = planned(simulate=half)
    text = "\n".join(lines_of(plan))

    assert text.count("█") > 0
    assert text.count("50.0%") >= len(plan.by_memory)
    assert all(sentence in text for sentence in (*plan.advice, *plan.notes))


def test_the_page_stands_alone_and_shows_names_as_text() -> None:
    plan = plan_trace(REQUESTS, COSTS, name="<script>alert(1)</script>", simulate=half)
    page = page_of(plan)

    assert "<script" not in page
    assert page.count("<svg") == 6
    assert not [word for word in ("http:", "https:", "src=", "url(", "@import") if word in page]
    assert "hits (adaptive)" in page
    assert "TTFT p90 (LRU)" in page
