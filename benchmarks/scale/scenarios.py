"""The scenarios, each with a table and some figures."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from benchmarks.scale.costs import LAYOUT, Costs, bytes_of
from benchmarks.scale.fleet import Fleet, FleetConfig, Sharing
from benchmarks.scale.placement import (
    Prompt,
    fullest_over_mean,
    random_hashes,
    shard_of,
    slot_of_segment,
    slots_of,
    usable_share,
    usable_share_expected,
)
from benchmarks.scale.workload import (
    DOCUMENTS,
    SYSTEM_PROMPTS,
    Workload,
    between,
    computed_share,
    drive,
    missing_share,
    ttft_s,
    warm_hosts,
    warm_up,
)
from kvtier.blocks.hashing import BlockHash
from kvtier.stores.valkey.config import DEFAULT_SEGMENT
from kvtier.stores.valkey.shard import CONNECTIONS_PER_SHARD
from kvtier.stores.valkey.slots import NUM_SLOTS

NUM_SHARDS = 64
SHARD_RATE = 3.125e9
"""25 GbE."""
LOCAL_BYTES = 20 << 30
"""A host's own memory in front of the cluster, if any."""
LONG_BLOCKS = 6250
"""100,000 tokens."""
_MIN_SPREAD_SEGMENT = 64
_MAX_CLIENTS = 10_000
"""Valkey's own default of `maxclients`."""
_ENGINES_PER_HOST = 8


@dataclass(frozen=True, slots=True)
class Table:
    """The results of a scenario."""

    name: str
    title: str
    rows: list[dict[str, object]]
    figures: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Size:
    """The size of the simulation."""

    hosts: tuple[int, ...]
    fleet_hosts: int
    seconds: float
    num_long_prompts: int
    num_documents: int
    num_prompt_sets: int
    held_bytes: float

    @property
    def documents(self) -> Workload:
        return replace(DOCUMENTS, num_prompts=self.num_documents)


FULL = Size((10, 30, 100, 300, 1000), 100, 12.0, 20, 300, 9, 1e12)
QUICK = Size((10, 100), 30, 8.0, 4, 60, 2, 1e11)


def losses(size: Size) -> Table:
    """Usable prefixes of long prompts when one shard is gone, by `segment`; how evenly segments lie."""
    prompts = [random_hashes(LONG_BLOCKS, seed) for seed in range(size.num_long_prompts)]
    rows: list[dict[str, object]] = []
    figures: dict[str, float] = {}
    for segment in (1, 16, 64, DEFAULT_SEGMENT, 512):
        slots = [slots_of(hashes, segment) for hashes in prompts]
        row: dict[str, object] = {"segment, blocks": segment}
        for num_shards in (3, 16, NUM_SHARDS):
            share = statistics.fmean(usable_share(one, num_shards) for one in slots)
            row[f"usable, 1 of {num_shards} lost"] = round(share, 3)
            if num_shards == NUM_SHARDS and segment in (1, DEFAULT_SEGMENT):
                name = "usable_prefixes_shard_lost" if segment > 1 else "usable_prefixes_without_segments"
                figures[name] = share
        row["expected, 1 of 64"] = round(usable_share_expected(LONG_BLOCKS / segment, NUM_SHARDS), 3)
        row["fullest of 64 over mean"] = ""
        if segment >= _MIN_SPREAD_SEGMENT:
            held = int(size.held_bytes / bytes_of(segment))
            row["fullest of 64 over mean"] = round(fullest_over_mean(held, NUM_SHARDS, seed=1), 2)
        rows.append(row)
    title = f"{size.num_long_prompts} prompts of 100,000 tokens; {size.held_bytes / 1e12:g} TB held"
    return Table("losses", title, rows, figures)


def loading(size: Size) -> Table:
    """One prompt on an idle cluster: load, compute, or both from the two ends."""
    del size
    costs = Costs()
    rows: list[dict[str, object]] = []
    for gigabytes_per_s in (0.1, 0.3, 1.0, 3.0, 10.0):
        rate = min(gigabytes_per_s * 1e9, costs.client_rate)
        row: dict[str, object] = {"network, GB/s": gigabytes_per_s}
        for tokens in (4_096, 30_720, 102_400):
            load_s = tokens // LAYOUT.block_tokens * LAYOUT.block_bytes / rate
            compute_s = costs.prefill_s(0, tokens)
            name = f"{tokens // 1024}k tokens"
            row[f"{name}: load"] = round(load_s, 3)
            row[f"{name}: compute"] = round(compute_s, 3)
            row[f"{name}: both"] = round(1 / (1 / load_s + 1 / compute_s), 3)
        rows.append(row)
    even_rate = bytes_of(1920) / costs.blocks_s(0, 1920)
    return Table("loading", "one prompt, seconds", rows, {"even_network_gbs": even_rate / 1e9})


def hot_prompts(size: Size) -> Table:
    """Many hosts ask for a few system prompts: the shards of the hottest one are the limit."""
    workload = SYSTEM_PROMPTS
    prompts = workload.prompts()
    plain = FleetConfig(num_hosts=1, num_shards=NUM_SHARDS, shard_rate=SHARD_RATE)
    ways = {
        "always loads": replace(plain, decides=False),
        "decides": plain,
        "decides, own memory": replace(plain, local_bytes=LOCAL_BYTES),
    }
    rows: list[dict[str, object]] = []
    figures: dict[str, float] = {}
    idle_s = _idle_load_s(prompts[0])
    for num_hosts in size.hosts:
        for way, base in ways.items():
            config = replace(base, num_hosts=num_hosts)
            fleet = Fleet(config)
            warm_up(fleet, workload, prompts)
            drive(fleet, workload, prompts, size.seconds)
            fleet.clock.run(size.seconds)
            busiest = max(shard.gets.delivered_bytes for shard in fleet.shards) / (config.shard_rate * size.seconds)
            fleet.clock.run()
            settled = between(fleet.outcomes, size.seconds / 2, size.seconds)
            p50_s, p99_s = ttft_s(settled, 0.5), ttft_s(settled, 0.99)
            rows.append(
                {
                    "hosts": num_hosts,
                    "way": way,
                    "TTFT p50, ms": round(1e3 * p50_s, 1),
                    "p99, ms": round(1e3 * p99_s, 1),
                    "computed": round(computed_share(settled, prompts[0].num_blocks), 3),
                    "busiest shard": round(busiest, 2),
                }
            )
            if num_hosts == size.hosts[-1]:
                key = {"always loads": "hot_always_x", "decides": "hot_decides_x"}.get(way, "hot_own_memory_x")
                figures[key] = p99_s / idle_s
    return Table("hot", f"64 system prompts of 8,192 tokens, {NUM_SHARDS} shards, 25 GbE", rows, figures)


def hot_spread(size: Size) -> Table:
    """How many hosts without memory of their own fill the busiest shard, by `segment`, over several sets of prompts."""
    workload = SYSTEM_PROMPTS
    hosts: dict[int, list[float]] = {segment: [] for segment in (16, 32, 64, DEFAULT_SEGMENT, 512)}
    for number in range(1, size.num_prompt_sets + 1):
        prompts = [random_hashes(workload.num_blocks, 1000 * number + place) for place in range(workload.num_prompts)]
        for segment, found in hosts.items():
            found.append(SHARD_RATE / _busiest_rate(workload, prompts, segment))
    evenly = SHARD_RATE * NUM_SHARDS / (workload.rate * bytes_of(workload.num_blocks))
    rows: list[dict[str, object]] = [
        {
            "segment, blocks": segment,
            "hosts, worst set": round(min(found)),
            "median": round(statistics.median(found)),
            "best": round(max(found)),
            "if all shards were as busy": round(evenly),
        }
        for segment, found in hosts.items()
    ]
    title = f"hosts that fill the busiest of {NUM_SHARDS} shards, {size.num_prompt_sets} sets of system prompts"
    return Table("hot_spread", title, rows, {"hot_full_hosts": statistics.median(hosts[DEFAULT_SEGMENT])})


def network(size: Size) -> Table:
    """Hosts with slow and fast networks ask for documents."""
    workload = size.documents
    prompts = workload.prompts()
    rows: list[dict[str, object]] = []
    figures: dict[str, float] = {}
    for gigabytes_per_s in (0.1, 0.3, 1.0, 3.0, 10.0):
        for decides in (False, True):
            rate = gigabytes_per_s * 1e9
            config = FleetConfig(
                num_hosts=size.fleet_hosts,
                num_shards=NUM_SHARDS,
                host_rate=rate,
                shard_rate=rate,
                local_bytes=LOCAL_BYTES,
                decides=decides,
                stores=False,
            )
            fleet = Fleet(config)
            warm_up(fleet, workload, prompts)
            drive(fleet, workload, prompts, size.seconds)
            fleet.clock.run()
            gpu_share = sum(host.gpu_busy_s for host in fleet.hosts) / (size.seconds * size.fleet_hosts)
            settled = between(fleet.outcomes, 0.0, size.seconds)
            p99_s = ttft_s(settled, 0.99)
            rows.append(
                {
                    "network, GB/s": gigabytes_per_s,
                    "way": "decides" if decides else "always loads",
                    "TTFT p50, s": round(ttft_s(settled, 0.5), 3),
                    "p99, s": round(p99_s, 2),
                    "computed": round(computed_share(settled, prompts[0].num_blocks), 3),
                    "GPU busy with prefill": round(gpu_share, 3),
                }
            )
            if decides and gigabytes_per_s == 0.1:
                figures["slow_network_p99_x"] = p99_s / _computing_p99_s(size, workload, prompts)
    return Table("network", f"{size.fleet_hosts} hosts, documents of 30,720 tokens", rows, figures)


def shard_lost(size: Size) -> Table:
    """A shard dies and comes back empty after ten seconds, or its replica takes over."""
    workload = size.documents
    rows: list[dict[str, object]] = []
    figures: dict[str, float] = {}
    lost_at, span_s = size.seconds, size.seconds
    for name, segment, has_replica in (("segment 128", 128, False), ("segment 16", 16, False), ("replica", 128, True)):
        prompts = workload.prompts(segment)
        config = FleetConfig(num_hosts=size.fleet_hosts, num_shards=NUM_SHARDS, local_bytes=LOCAL_BYTES)
        fleet = Fleet(config)
        warm_up(fleet, workload, prompts)
        victim = fleet.owners[prompts[0].segments[0].slot]
        away_s = fleet.costs.failover_s if has_replica else 10.0
        fleet.clock.at(lost_at, lambda f=fleet, v=victim, r=has_replica: f.lose(v, keeps_blocks=r))  # type: ignore[misc]
        fleet.clock.at(lost_at + away_s, lambda f=fleet, v=victim: f.restore(v))  # type: ignore[misc]
        drive(fleet, workload, prompts, lost_at + away_s + span_s)
        fleet.clock.run()
        phases = {
            "before": (lost_at / 2, lost_at),
            "while down": (lost_at, lost_at + away_s),
            "back, first 5 s": (lost_at + away_s, lost_at + away_s + 5),
            "later": (lost_at + away_s + 5, lost_at + away_s + span_s),
        }
        for phase, (begin_s, end_s) in phases.items():
            outcomes = between(fleet.outcomes, begin_s, end_s)
            share = missing_share(outcomes, prompts[0].num_blocks)
            rows.append(
                {
                    "cluster": name,
                    "phase": phase,
                    "missing": round(share, 3),
                    "computed": round(computed_share(outcomes, prompts[0].num_blocks), 3),
                    "TTFT p50, s": round(ttft_s(outcomes, 0.5), 3),
                    "p99, s": round(ttft_s(outcomes, 0.99), 2),
                }
            )
            if name == "segment 128" and phase in ("while down", "later"):
                figures["lost_missing" if phase == "while down" else "refilled_missing"] = share
    return Table("lost", f"{size.fleet_hosts} hosts, 1 of {NUM_SHARDS} shards lost, documents", rows, figures)


def resharding(size: Size) -> Table:
    """A cluster grows to twice its shards while it is used; slots move with their blocks."""
    workload = size.documents
    prompts = workload.prompts()
    rows: list[dict[str, object]] = []
    figures: dict[str, float] = {}
    for share in (0.1, 0.5, 0.9):
        config = FleetConfig(num_hosts=size.fleet_hosts, num_shards=NUM_SHARDS, local_bytes=LOCAL_BYTES, stores=False)
        fleet = Fleet(config)
        fleet.owners = [2 * shard_of(slot, NUM_SHARDS // 2) for slot in range(NUM_SLOTS)]
        warm_up(fleet, workload, prompts)
        moved_s = _move_half(fleet, begins_at=size.seconds, share=share)
        drive(fleet, workload, prompts, size.seconds + moved_s + size.seconds)
        fleet.clock.run()
        row: dict[str, object] = {"share of the network": share, "moves for, s": round(moved_s, 1)}
        phases = {"before": (size.seconds / 2, size.seconds), "meanwhile": (size.seconds, size.seconds + moved_s)}
        phases["after"] = (size.seconds + moved_s, 2 * size.seconds + moved_s)
        for phase, (begin_s, end_s) in phases.items():
            outcomes = between(fleet.outcomes, begin_s, end_s)
            row[f"p99 {phase}, s"] = round(ttft_s(outcomes, 0.99), 2)
            row[f"computed {phase}"] = round(computed_share(outcomes, prompts[0].num_blocks), 3)
        rows.append(row)
        if share == 0.1:
            meanwhile = ttft_s(between(fleet.outcomes, *phases["meanwhile"]), 0.99)
            figures["reshard_p99_x"] = meanwhile / ttft_s(between(fleet.outcomes, *phases["before"]), 0.99)
    return Table("reshard", f"{NUM_SHARDS // 2} shards become {NUM_SHARDS}", rows, figures)


def cold_start(size: Size) -> Table:
    """All hosts begin with an empty cluster: what is computed and stored more than once."""
    rows: list[dict[str, object]] = []
    for workload in (SYSTEM_PROMPTS, size.documents):
        for num_hosts in (size.fleet_hosts, size.hosts[-1]):
            for sharing in Sharing:
                fleet = Fleet(_cold_config(num_hosts, sharing))
                drive(fleet, workload, workload.prompts(), size.seconds)
                fleet.clock.run()
                rows.append({"prompts": workload.name, **_cold_row(fleet, workload.prompts())})
    return Table("cold", f"everything empty, {size.seconds:g} s of requests", rows)


def herd(size: Size) -> Table:
    """All hosts are asked for one prompt within a tenth of a second, and the cluster is empty."""
    prompt = SYSTEM_PROMPTS.prompts()[0]
    rows: list[dict[str, object]] = []
    figures: dict[str, float] = {}
    for num_hosts in size.hosts:
        for sharing in Sharing:
            fleet = Fleet(_cold_config(num_hosts, sharing))
            for number, host in enumerate(fleet.hosts):
                fleet.clock.at(0.1 * number / num_hosts, lambda f=fleet, h=host: f.ask(h, prompt))  # type: ignore[misc]
            fleet.clock.run()
            rows.append({**_cold_row(fleet, [prompt]), "until all is stored, s": round(fleet.clock.now, 2)})
            if num_hosts == size.hosts[-1]:
                name = sharing.name.lower()
                figures[f"herd_stored_{name}_x"] = fleet.num_puts / len(prompt.segments)
                figures[f"herd_p99_{name}_s"] = ttft_s(fleet.outcomes, 0.99)
    return Table("herd", "one prompt of 8,192 tokens, asked for by all hosts at once", rows, figures)


def counting(size: Size) -> Table:
    """Without simulation: connections, requests and bytes by the number of hosts."""
    costs = Costs()
    rows: list[dict[str, object]] = []
    figures: dict[str, float] = {}
    prompt_keys = 30_720 // LAYOUT.block_tokens
    computed_rate = bytes_of(prompt_keys) / costs.blocks_s(0, prompt_keys)
    for num_hosts in size.hosts:
        keys_per_s = num_hosts * DOCUMENTS.rate * prompt_keys
        all_rate = num_hosts * DOCUMENTS.rate * bytes_of(prompt_keys)
        rows.append(
            {
                "hosts": num_hosts,
                "connections to a node": CONNECTIONS_PER_SHARD * num_hosts,
                "with 8 engines each": CONNECTIONS_PER_SHARD * _ENGINES_PER_HOST * num_hosts,
                "matches, of a node's core": round(keys_per_s * costs.shard_key_s / NUM_SHARDS, 3),
                "all loaded, of 25 GbE": round(all_rate / (NUM_SHARDS * SHARD_RATE), 2),
                "all stored: 4 TB last, s": round(NUM_SHARDS * 64e9 / all_rate),
                "0.1 GB/s each: 4 TB last, s": round(NUM_SHARDS * 64e9 / (num_hosts * 0.1e9)),
            }
        )
    figures["hosts_of_8_engines_by_maxclients"] = _MAX_CLIENTS / (CONNECTIONS_PER_SHARD * _ENGINES_PER_HOST)
    figures["computed_kv_gbs"] = computed_rate / 1e9
    title = f"{NUM_SHARDS} shards, {DOCUMENTS.rate:g} documents of 30,720 tokens a second and host"
    return Table("counting", title, rows, figures)


def routing(size: Size) -> Table:
    """Documents sent to any host, or to one that has them."""
    workload = size.documents
    prompts = workload.prompts()
    rows: list[dict[str, object]] = []
    figures: dict[str, float] = {}
    for gigabytes_per_s in (0.1, 1.0, 3.125):
        for is_routed in (False, True):
            rate = gigabytes_per_s * 1e9
            fleet = Fleet(
                FleetConfig(
                    num_hosts=size.fleet_hosts,
                    num_shards=NUM_SHARDS,
                    host_rate=rate,
                    shard_rate=rate,
                    local_bytes=LOCAL_BYTES,
                )
            )
            warm_up(fleet, workload, prompts)
            drive(fleet, workload, prompts, size.seconds, is_routed=is_routed)
            fleet.clock.run()
            loaded = sum(outcome.loaded_bytes for outcome in fleet.outcomes)
            asked = len(fleet.outcomes) * prompts[0].nbytes
            p99_s = ttft_s(fleet.outcomes, 0.99)
            rows.append(
                {
                    "network, GB/s": gigabytes_per_s,
                    "sent to": "a host that has it" if is_routed else "any host",
                    "TTFT p50, s": round(ttft_s(fleet.outcomes, 0.5), 3),
                    "p99, s": round(p99_s, 2),
                    "from the cluster": round(loaded / asked, 3),
                    "computed": round(computed_share(fleet.outcomes, prompts[0].num_blocks), 3),
                }
            )
            if gigabytes_per_s == 1.0:
                figures["routed_p99_s" if is_routed else "unrouted_p99_s"] = p99_s
    figures["routed_p99_x"] = figures["routed_p99_s"] / figures["unrouted_p99_s"]
    return Table("routing", f"{size.fleet_hosts} hosts, documents of 30,720 tokens", rows, figures)


def in_flight(size: Size) -> Table:
    """The rate of a load by round trip: of one segment, from one node, and of several from as many at once."""
    del size
    costs = Costs()
    rows: list[dict[str, object]] = []
    figures: dict[str, float] = {}
    for num_nodes in (1, 2, 3, 8, NUM_SHARDS):
        window = costs.window_blocks(num_nodes)
        nbytes = bytes_of(window)
        row: dict[str, object] = {"nodes asked at once": num_nodes, "blocks under way to each": window}
        for round_trip_ms in (0.2, 1.0, 10.0):
            rate = min(costs.client_rate, num_nodes * nbytes / (round_trip_ms / 1e3 + nbytes / SHARD_RATE))
            row[f"GB/s, {round_trip_ms:g} ms away"] = round(rate / 1e9, 2)
        if num_nodes == 1:
            figures["one_segment_1ms_gbs"] = float(str(row["GB/s, 1 ms away"]))
        rows.append(row)
    return Table("in_flight", "loads from nodes at once, 25 GbE", rows, figures)


SCENARIOS: Sequence[Callable[[Size], Table]] = (
    losses,
    loading,
    hot_prompts,
    hot_spread,
    network,
    shard_lost,
    resharding,
    cold_start,
    herd,
    routing,
    counting,
    in_flight,
)


def _cold_config(num_hosts: int, sharing: Sharing) -> FleetConfig:
    return FleetConfig(num_hosts=num_hosts, num_shards=NUM_SHARDS, local_bytes=LOCAL_BYTES, sharing=sharing)


def _cold_row(fleet: Fleet, prompts: Sequence[Prompt]) -> dict[str, object]:
    """Times: over computing and storing each prompt once."""
    once = sum(prompt.num_blocks for prompt in prompts)
    num_segments = sum(len(prompt.segments) for prompt in prompts)
    return {
        "hosts": len(fleet.hosts),
        "hosts tell": fleet.config.sharing.name.lower(),
        "computed, times": round(sum(outcome.computed_blocks for outcome in fleet.outcomes) / once, 1),
        "stored, times": round(fleet.num_puts / num_segments, 1),
        "TTFT p50, s": round(ttft_s(fleet.outcomes, 0.5), 3),
        "p99, s": round(ttft_s(fleet.outcomes, 0.99), 2),
    }


def _idle_load_s(prompt: Prompt) -> float:
    """The time to first token of one host that loads `prompt` from an idle cluster."""
    fleet = Fleet(FleetConfig(num_hosts=1, num_shards=NUM_SHARDS, decides=False))
    fleet.fill([prompt])
    fleet.ask(fleet.hosts[0], prompt)
    fleet.clock.run()
    return fleet.outcomes[0].ttft_s


def _busiest_rate(workload: Workload, prompts: Sequence[Sequence[BlockHash]], segment_blocks: int) -> float:
    """The bytes per second that one host asks of the busiest shard."""
    rates = [0.0] * NUM_SHARDS
    total = sum(workload.weights())
    for hashes, weight in zip(prompts, workload.weights(), strict=True):
        for first in range(0, len(hashes), segment_blocks):
            nbytes = bytes_of(min(segment_blocks, len(hashes) - first))
            shard = shard_of(slot_of_segment(hashes[first]), NUM_SHARDS)
            rates[shard] += workload.rate * weight / total * nbytes
    return max(rates)


def _computing_p99_s(size: Size, workload: Workload, prompts: Sequence[Prompt]) -> float:
    """The same requests without a cluster; hosts have their own memory."""
    config = FleetConfig(
        num_hosts=size.fleet_hosts, num_shards=NUM_SHARDS, local_bytes=LOCAL_BYTES, decides=False, stores=False
    )
    fleet = Fleet(config)
    warm_hosts(fleet, workload, prompts)
    drive(fleet, workload, prompts, size.seconds)
    fleet.clock.run()
    return ttft_s(between(fleet.outcomes, 0.0, size.seconds), 0.99)


def _move_half(fleet: Fleet, begins_at: float, share: float) -> float:
    """Each even shard gives the later half of its slots to the next, within `share` of its network. Returns seconds."""
    rate = fleet.config.shard_rate
    moved_s = 0.0
    for source in range(0, NUM_SHARDS, 2):
        slots = [slot for slot, owner in enumerate(fleet.owners) if owner == source]
        slots = slots[len(slots) // 2 :]
        nbytes: dict[int, int] = dict.fromkeys(slots, 0)
        for segment in fleet.shards[source].segments.values():
            if segment.slot in nbytes:
                nbytes[segment.slot] += segment.nbytes
        at = begins_at
        for slot in slots:
            at += nbytes[slot] / (share * rate)
            fleet.clock.at(at, lambda slot=slot, to=source + 1: fleet.move_slot(slot, to))  # type: ignore[misc]
        left_rate = (1 - share) * min(rate, fleet.costs.shard_get_rate)
        link = fleet.shards[source].gets
        fleet.clock.at(begins_at, lambda link=link, left=left_rate: link.set_rate(left))  # type: ignore[misc]
        fleet.clock.at(at, lambda link=link: link.set_rate(rate))  # type: ignore[misc]
        moved_s = max(moved_s, at - begins_at)
    return moved_s
