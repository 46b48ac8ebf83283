"""The simulation of many hosts over a cluster, against what can be worked out by hand."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from benchmarks.scale import __main__ as program
from benchmarks.scale import costs, scenarios
from benchmarks.scale.costs import LAYOUT, Costs, bytes_of
from benchmarks.scale.fleet import Fleet, FleetConfig, Sharing
from benchmarks.scale.links import Clock, Link
from benchmarks.scale.placement import (
    make_prompt,
    random_hashes,
    shard_of,
    slots_of,
    usable_share,
    usable_share_expected,
)
from benchmarks.scale.workload import SYSTEM_PROMPTS, Router, Workload, drive
from kvtier.stores.valkey import cluster as valkey_cluster
from kvtier.stores.valkey import window as valkey_window
from kvtier.stores.valkey.slots import NUM_SLOTS

COSTS = Costs()
TINY = scenarios.Size((2, 4), 4, 3.0, 1, 6, 1, 1e10)


# --- links ---------------------------------------------------------------------------------------------------------


def test_flows_of_one_size_share_a_link_and_end_together() -> None:
    clock = Clock()
    link = Link(clock, rate=100.0, flow_rate=100.0)
    ends: list[float] = []

    for _ in range(5):
        link.start(40.0, lambda: ends.append(clock.now))
    clock.run()

    assert ends == pytest.approx([2.0] * 5)


def test_a_flow_is_never_faster_than_its_host() -> None:
    clock = Clock()
    link = Link(clock, rate=100.0, flow_rate=10.0)
    ends: list[float] = []

    link.start(40.0, lambda: ends.append(clock.now))
    clock.run()

    assert ends == pytest.approx([4.0])


def test_a_flow_that_comes_later_takes_half_from_then_on() -> None:
    clock = Clock()
    link = Link(clock, rate=10.0, flow_rate=10.0)
    ends: dict[str, float] = {}

    link.start(100.0, lambda: ends.setdefault("first", clock.now))
    clock.at(5.0, lambda: link.start(100.0, lambda: ends.setdefault("second", clock.now)) and None)
    clock.run()

    assert ends == {"first": pytest.approx(15.0), "second": pytest.approx(20.0)}


def test_a_cancelled_flow_has_what_came_and_leaves_the_rest_to_others() -> None:
    clock = Clock()
    link = Link(clock, rate=10.0, flow_rate=10.0)
    ends: list[float] = []
    came: list[float] = []

    flow = link.start(100.0, lambda: ends.append(-1.0))
    link.start(100.0, lambda: ends.append(clock.now))
    clock.at(4.0, lambda: came.append(link.cancel(flow)))
    clock.run()

    assert came == pytest.approx([20.0])
    assert ends == pytest.approx([12.0])


def test_no_link_delivers_more_than_it_can_and_every_byte_arrives_once() -> None:
    dice = random.Random(1)
    clock = Clock()
    link = Link(clock, rate=50.0, flow_rate=20.0)
    arrived: list[float] = []
    sizes = [dice.uniform(1, 200) for _ in range(300)]
    for nbytes in sizes:
        at = dice.uniform(0, 300)
        clock.at(at, lambda nbytes=nbytes: link.start(nbytes, lambda: arrived.append(nbytes)) and None)  # type: ignore[misc]
    for second in range(0, 600, 7):
        clock.run(second)
        assert link.delivered_bytes <= 50.0 * second + 1e-6
    clock.run()

    assert sorted(arrived) == sorted(sizes)
    assert link.delivered_bytes == pytest.approx(sum(sizes))
    assert link.delivered_bytes <= 50.0 * link.busy_s * (1 + 1e-9)


# --- costs and placement -------------------------------------------------------------------------------------------


def test_the_cost_of_computing_meets_both_measurements() -> None:
    assert COSTS.prefill_s(0, 10_240) == pytest.approx(0.2475, rel=0.01)
    assert COSTS.prefill_s(0, 30_000) == pytest.approx(0.90, rel=0.01)
    assert LAYOUT.block_bytes == 57_344 * LAYOUT.block_tokens


@pytest.mark.parametrize("first_block", [0, 700])
def test_blocks_in_some_seconds_is_the_inverse_of_their_seconds(first_block: int) -> None:
    assert COSTS.blocks_in(first_block, COSTS.blocks_s(first_block, 300)) == pytest.approx(300)


def test_as_many_blocks_are_under_way_as_the_client_allows() -> None:
    assert COSTS.in_flight_bytes == valkey_window._IN_FLIGHT_BYTES
    assert COSTS.max_in_flight == valkey_window._MAX_IN_FLIGHT
    assert valkey_cluster._FEW_NODES == costs._FEW_NODES
    assert [COSTS.window_blocks(num_nodes) for num_nodes in (1, 2, 3, 8, 64)] == [32, 32, 16, 9, 1]


def test_blocks_of_a_segment_share_a_slot_and_segments_do_not() -> None:
    slots = slots_of(random_hashes(512, seed=1), 128)

    assert [len(set(slots[first : first + 128])) for first in range(0, 512, 128)] == [1] * 4
    assert len(set(slots)) == 4


def test_a_segments_slot_is_that_of_its_first_block() -> None:
    hashes = random_hashes(300, seed=1)

    assert [segment.slot for segment in make_prompt(300, seed=1).segments] == slots_of(hashes)[::128]


def test_shards_have_all_slots_evenly() -> None:
    owners = [shard_of(slot, 48) for slot in range(NUM_SLOTS)]

    assert owners == sorted(owners)
    assert {owners.count(shard) for shard in range(48)} <= {NUM_SLOTS // 48, NUM_SLOTS // 48 + 1}


@pytest.mark.parametrize(("segment", "expected"), [(128, 0.69), (1, 0.01)])
def test_a_lost_shard_leaves_the_expected_share_of_a_long_prompt(segment: int, expected: float) -> None:
    shares = [usable_share(slots_of(random_hashes(6250, seed), segment), 64) for seed in range(6)]
    mean = sum(shares) / len(shares)

    assert usable_share_expected(6250 / segment, 64) == pytest.approx(expected, abs=0.005)
    assert mean == pytest.approx(expected, rel=0.1)


def test_a_prompt_on_surviving_shards_alone_stays_whole() -> None:
    assert usable_share([0] * 10, 64) == pytest.approx(63 / 64)


# --- hosts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_hosts", [1, 4, 50])
def test_one_hot_segment_divides_its_shard_among_all_hosts(num_hosts: int) -> None:
    prompt = make_prompt(128, seed=1)
    fleet = Fleet(FleetConfig(num_hosts=num_hosts, num_shards=64, shard_rate=1e9, decides=False))
    fleet.fill([prompt])
    for host in fleet.hosts:
        fleet.ask(host, prompt)
    fleet.clock.run()

    computing_s = COSTS.step_s + COSTS.prefill_s(2048, prompt.question_tokens)
    loading_s = num_hosts * prompt.nbytes / 1e9 + 128 * COSTS.match_key_s
    assert [outcome.ttft_s for outcome in fleet.outcomes] == pytest.approx([loading_s + computing_s] * num_hosts)


def test_a_host_that_has_the_prompt_itself_does_not_ask_the_cluster() -> None:
    prompt = make_prompt(256, seed=1)
    fleet = Fleet(FleetConfig(num_hosts=1, num_shards=4, local_bytes=prompt.nbytes))
    fleet.warm(fleet.hosts[0], [prompt])
    fleet.ask(fleet.hosts[0], prompt)
    fleet.clock.run()

    assert fleet.outcomes[0].loaded_bytes == 0
    assert fleet.outcomes[0].computed_blocks == 0
    assert fleet.num_matched_keys == 0


def test_loading_from_the_back_meets_computing_from_the_front() -> None:
    prompt = make_prompt(1920, seed=1, question_tokens=1)
    fleet = Fleet(FleetConfig(num_hosts=1, num_shards=64, host_rate=2e9))
    fleet.fill([prompt])
    host = fleet.hosts[0]
    host.rates.append(2e9)
    fleet.ask(host, prompt)
    fleet.clock.run()

    (outcome,) = fleet.outcomes
    # Blocks n from the front such that computing them takes as long as loading the others.
    met = next(n for n in range(1920) if COSTS.blocks_s(0, n) >= bytes_of(1920 - n) / 2e9)
    assert outcome.computed_blocks == pytest.approx(met, abs=25)
    expected_s = 1920 * COSTS.match_key_s + COSTS.blocks_s(0, met) + COSTS.step_s
    assert outcome.ttft_s == pytest.approx(expected_s, rel=0.05)
    assert outcome.loaded_bytes == pytest.approx(bytes_of(1920 - met), rel=0.05)


def test_a_load_that_is_late_is_given_up_and_the_rest_is_computed() -> None:
    prompt = make_prompt(512, seed=1)
    fleet = Fleet(FleetConfig(num_hosts=1, num_shards=64, host_rate=1e7))
    fleet.fill([prompt])
    fleet.ask(fleet.hosts[0], prompt)
    fleet.clock.run()

    (outcome,) = fleet.outcomes
    assert outcome.ttft_s < 2.2 * COSTS.blocks_s(0, 512)
    assert outcome.computed_blocks > 500
    assert fleet.hosts[0].rest_until > 0


@pytest.mark.parametrize(("sharing", "num_puts"), [(Sharing.NOTHING, 20), (Sharing.CLAIM, 1)])
def test_hosts_that_compute_at_once_store_it_each_unless_one_claims_it(sharing: Sharing, num_puts: int) -> None:
    prompt = make_prompt(128, seed=1)
    fleet = Fleet(FleetConfig(num_hosts=20, num_shards=4, sharing=sharing))
    for host in fleet.hosts:
        fleet.ask(host, prompt)
    fleet.clock.run()

    assert fleet.num_puts == num_puts
    assert prompt.segments[0].name in fleet.shard(prompt.segments[0]).segments


def test_a_shard_that_hangs_costs_one_deadline_and_then_nothing() -> None:
    prompt = make_prompt(128, seed=1)
    fleet = Fleet(FleetConfig(num_hosts=1, num_shards=4))
    fleet.fill([prompt])
    fleet.lose(fleet.owners[prompt.segments[0].slot], keeps_blocks=True)
    for at in (0.0, 10.0):
        fleet.clock.at(at, lambda: fleet.ask(fleet.hosts[0], prompt))
    fleet.clock.run()

    first, second = (outcome.ttft_s for outcome in fleet.outcomes)
    assert first - second == pytest.approx(COSTS.deadline_s)


@pytest.mark.parametrize("keeps_blocks", [True, False])
def test_a_shard_that_is_back_has_its_blocks_only_if_a_replica_had_them(keeps_blocks: bool) -> None:
    prompt = make_prompt(128, seed=1)
    fleet = Fleet(FleetConfig(num_hosts=1, num_shards=4, stores=False))
    fleet.fill([prompt])
    number = fleet.owners[prompt.segments[0].slot]
    fleet.lose(number, keeps_blocks=keeps_blocks)
    fleet.clock.at(3.0, lambda: fleet.restore(number))
    fleet.clock.at(5.0, lambda: fleet.ask(fleet.hosts[0], prompt))
    fleet.clock.run()

    assert fleet.outcomes[0].missing_blocks == (0 if keeps_blocks else 128)


def test_a_slot_that_moves_takes_its_blocks_along() -> None:
    prompt = make_prompt(128, seed=1)
    fleet = Fleet(FleetConfig(num_hosts=1, num_shards=4))
    fleet.fill([prompt])
    (segment,) = prompt.segments
    target = (fleet.owners[segment.slot] + 1) % 4

    fleet.move_slot(segment.slot, target)

    assert segment.name in fleet.shards[target].segments
    assert sum(shard.held_bytes for shard in fleet.shards) == prompt.nbytes


def test_a_full_shard_evicts_what_was_asked_for_longest_ago() -> None:
    prompts = [make_prompt(16, seed) for seed in range(1, 5)]
    fleet = Fleet(FleetConfig(num_hosts=1, num_shards=1, shard_bytes=bytes_of(32)))

    fleet.fill(prompts)

    assert list(fleet.shards[0].segments) == [prompt.segments[0].name for prompt in prompts[2:]]


def test_a_fleet_delivers_what_its_requests_loaded_and_no_shard_more_than_its_network() -> None:
    workload = Workload("few", 8, 4096, skew=1.0, rate=2.0)
    prompts = workload.prompts()
    fleet = Fleet(FleetConfig(num_hosts=20, num_shards=4, shard_rate=1e9))
    fleet.fill(prompts)
    drive(fleet, workload, prompts, 5.0)
    fleet.clock.run()

    delivered = sum(shard.gets.delivered_bytes for shard in fleet.shards)
    assert delivered == pytest.approx(sum(outcome.loaded_bytes for outcome in fleet.outcomes), rel=1e-6)
    for shard in fleet.shards:
        assert shard.gets.delivered_bytes <= 1e9 * fleet.clock.now
    assert all(host.loading is None and host.computing is None for host in fleet.hosts), "every request is done"


def test_a_router_sends_a_prompt_to_the_host_that_has_it_unless_that_is_much_busier() -> None:
    prompt = make_prompt(16, seed=1)
    fleet = Fleet(FleetConfig(num_hosts=3, num_shards=1, local_bytes=prompt.nbytes))
    fleet.warm(fleet.hosts[1], [prompt])
    router = Router(fleet, random.Random(1))

    assert router.pick(prompt) is fleet.hosts[1]
    fleet.hosts[1].num_requests = 5
    assert router.pick(prompt) is not fleet.hosts[1]


@pytest.mark.parametrize("settings", [{"num_hosts": 0}, {"num_shards": 0}, {"num_shards": 1 << 20}, {"host_rate": 0.0}])
def test_a_fleet_that_cannot_be_is_refused(settings: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"hosts, and from 1|positive"):
        FleetConfig(**{"num_hosts": 1, "num_shards": 1, **settings})  # type: ignore[arg-type]


# --- the program ---------------------------------------------------------------------------------------------------


def test_a_tiny_run_writes_its_figures_and_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "QUICK", TINY)
    target = tmp_path / "scale.json"

    status = program.main(["--quick", "--json", str(target)])

    document = json.loads(target.read_text())
    assert status in (0, 1)
    assert set(program.BARS) <= set(document["figures"])
    assert {row["table"] for row in document["rows"]} == {scenario(TINY).name for scenario in _CHEAP} | _OTHERS
    assert document["settings"]["bars"] == program.BARS


_CHEAP = (scenarios.loading, scenarios.counting, scenarios.in_flight)
_OTHERS = {"losses", "hot", "hot_spread", "network", "lost", "reshard", "cold", "herd", "routing"}


def test_a_missed_bar_is_status_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "SCENARIOS", (scenarios.loading,))
    monkeypatch.setattr(program, "BARS", {"even_network_gbs": "<= 0.5"})

    assert program.main(["--json", str(tmp_path / "scale.json")]) == 1


def test_a_question_alone_has_no_bars(tmp_path: Path) -> None:
    target = tmp_path / "scale.json"

    assert program.main(["--only", "counting", "--json", str(target)]) == 0
    assert {row["table"] for row in json.loads(target.read_text())["rows"]} == {"counting"}


def test_the_same_run_gives_the_same_figures() -> None:
    runs = []
    for _ in range(2):
        fleet = Fleet(FleetConfig(num_hosts=5, num_shards=8))
        drive(fleet, SYSTEM_PROMPTS, SYSTEM_PROMPTS.prompts(), 3.0)
        fleet.clock.run()
        runs.append(fleet.outcomes)

    assert runs[0] == runs[1]
