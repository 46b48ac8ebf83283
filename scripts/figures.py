"""Writes docs/figures.md and the ten figures of README.md from benchmarks/results.

python scripts/figures.py            write both
python scripts/figures.py --check    fail if either differs from the results
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
README, PAGE = ROOT / "README.md", ROOT / "docs" / "figures.md"
START, END = "<!-- figures -->", "<!-- end of figures -->"
MISSED = "✗"

ROWS = [
    ("match + lease + views of 512 blocks, of one memcpy", "server", "shm_views_x", "≤ 0.1"),
    ("get into own buffers over shared memory, of one memcpy", "server", "shm_get_x", "≤ 1.15"),
    ("set over shared memory, of one memcpy", "server", "shm_set_x", "≤ 1.2"),
    ("get over TCP, of a bare socket loop's speed", "server", "tcp_get_of_raw", "≥ 0.9"),
    ("stream_get over TCP, of a bare socket loop's speed", "server", "tcp_stream_get_of_raw", "≥ 0.9"),
    ("set over TCP, of a bare socket loop's speed", "server", "tcp_set_of_raw", "≥ 0.9"),
    ("TCP get and set, of the fastest peer's speed (the smaller)", "server", "tcp_over_best_peer", "≥ 1"),
    ("hash 100,000 tokens, of a bare SHA-256 loop", "server", "hash_x", "≤ 2.5"),
    ("match 100,000 tokens against a full server, ms", "server", "match_ms", "≤ 10"),
    ("server with an empty 8 GiB arena, MiB resident", "server", "server_rss_mib", "≤ 100"),
    ("Python heap per stored block, bytes", "server", "heap_bytes_per_block", "≤ 500"),
    ("512 blocks onto disk until flushed, of raw direct I/O", "disk", "disk_set_of_raw", "≥ 0.9"),
    ("512 blocks from disk, of raw direct I/O", "disk", "disk_get_of_raw", "≥ 0.9"),
    ("stream_get from disk, of raw direct I/O", "disk", "disk_stream_get_of_raw", "≥ 0.9"),
    ("hits from memory beside a saturated disk, of their speed alone", "disk", "memory_hit_beside_disk", "≥ 0.9"),
    ("recover 100,000 blocks, s", "disk", "recover_100k_s", "≤ 2"),
    ("engine without hits: prefix_caching over naive", "baseline", "prefix_over_naive_0", "≥ 0.98"),
    ("engine without hits: yoco over naive", "baseline", "yoco_over_naive_0", "≥ 0.97"),
    ("engine, prompts that part after two tokens: yoco over naive", "baseline", "yoco_over_naive_fork", "≥ 0.97"),
    ("engine with nothing but hits: yoco over prefix_caching", "baseline", "yoco_over_prefix_100", "≥ 0.98"),
    ("engine: scheduling and hashing a step of 64 requests, ms", "baseline", "schedule_step_ms", "≤ 1"),
    ("engine: decoding, of the memory's bandwidth", "long_prefill", "decode_of_limit", ""),
    ("engine storing into host memory, of its speed without storing", "swap_out", "swap_out_qps_min", "≥ 0.97"),
    (
        "engine storing into a cache server, of its speed without storing",
        "transfer_out",
        "transfer_out_qps_min",
        "≥ 0.97",
    ),
    (
        "engine restarted, everything in the server, over the cold run",
        "transfer_in",
        "transfer_in_second_over_first",
        "≥ 2.5",
    ),
    ("load or compute: the decision over the better one, worst cell", "load_or_compute", "decision_worst", "≤ 1.05"),
    ("server's arena to GPU, of pinned memory's speed", "gpu_hit", "gpu_hit_of_pinned_Qwen2.5-7B", ""),
    ("32 streams: tokens/s through the OpenAI API, of the engine's own", "http", "http_over_engine", "≥ 0.95"),
    ("32 streams: time to the first token, over the engine's own", "http", "http_ttft_over_engine", "≤ 1.05"),
    (
        "a deployment, hit on the device: times faster than computing",
        "speed",
        "device_hit_x",
        "≥ 20",
    ),
    ("engine restarted, hit in the cache server: times faster than computing", "speed", "server_hit_x", "≥ 10"),
    ("everything restarted, hit on the server's disk: times faster than computing", "speed", "disk_hit_x", "≥ 5"),
    ("GPU: 512 scattered blocks copied in by the engine's copier, GB/s", "copies", "copy_in_gbs", "≥ 51"),
    ("GPU: 512 scattered blocks copied out, GB/s", "copies", "copy_out_gbs", "≥ 51"),
    ("GPU: 512 scattered blocks copied in beside a running prefill, GB/s", "copies", "copy_in_loaded_gbs", "≥ 51"),
    ("GPU: 512 scattered blocks copied out beside a running prefill, GB/s", "copies", "copy_out_loaded_gbs", "≥ 51"),
    ("GPU: share of its speed that the prefill loses to the copies", "copies", "prefill_loss", "≤ 0.03"),
    ("GPU: 30,000 tokens cached on the GPU, first token, ms", "long_prefill", "ttft_30k_gpu_hit_ms", "≤ 12"),
    ("GPU: 30,000 tokens in host memory, first token, ms", "host", "host_ttft_30k_ms", "≤ 38"),
    (
        "GPU: decode step of 10 requests at 10,240 tokens, over weights + KV at 4.8 TB/s",
        "long_prefill",
        "decode_long_over_h200_limit",
        "≤ 1.3",
    ),
    (
        "GPU: engine storing into host memory, of its speed without storing",
        "swap_out",
        "swap_out_qps_gpu_min",
        "≥ 0.98",
    ),
    (
        "GPU: engine storing into a cache server, of its speed without storing",
        "transfer_out",
        "transfer_out_qps_gpu_min",
        "≥ 0.98",
    ),
    ("GPU: server hit after a restart, of a host hit's speed", "restart", "server_over_host", "≥ 0.95"),
    ("GPU: hit over TCP loopback, of a bare socket's speed", "restart", "tcp_of_raw_socket", ""),
    ("GPU: disk hit after both restarted, of the disk's raw read rate", "restart_disk", "disk_of_raw", "≥ 0.9"),
    (
        "GPU: disk hit after both restarted, with the decision by speed, over computing",
        "restart_disk",
        "disk_decided_over_computing",
        "≥ 0.98",
    ),
    (
        "GPU: 80% of each prompt from host memory, over 80% from the GPU's cache",
        "swap_in",
        "host_over_gpu_80",
        "≥ 0.95",
    ),
    (
        "GPU: p99 between tokens of 16 requests beside 30,000-token loads from disk, over p99 without loads",
        "decode_beside_load",
        "decode_p99_growth",
        "≤ 1.05",
    ),
    ("GPU: fp8 weights, prefill, times the speed of bf16", "quantized", "fp8_prefill_x", "≥ 1.4"),
    ("GPU: fp8 weights, decode of one request, times the speed of bf16", "quantized", "fp8_decode_x", "≥ 1.5"),
    ("GPU: GPTQ-Int4, decode of one request, times the speed of bf16", "quantized", "gptq_decode_x", "≥ 1"),
]
_NAMES = (
    *("server", "disk", "gpu_hit", "baseline", "long_prefill"),
    *("swap_out", "transfer_out", "transfer_in", "load_or_compute", "http", "speed"),
    *("copies", "host", "restart", "restart_disk", "swap_in", "decode_beside_load", "quantized"),
)
MACHINES = (("2 cores", "cpu"), ("16 cores, H200", "h200"))
_CPU_ONLY = ("speed",)
"""Benchmarks whose aims hold for two cores and a small model only."""

# Figures whose aims are in their own result: (heading, file, label by figure).
_BY_RESULT = [
    (
        "kvtier inside vLLM 0.32 on an H200 (Qwen2.5-7B shape)",
        "h200_vllm",
        {
            "vllm_ttft_30k_kvtier_over_native": "30,000 tokens, GPU cache emptied: first token, over vLLM's offloading",
            "vllm_ttft_30k_reset_ms": "30,000 tokens, GPU cache emptied: first token, ms",
            "vllm_restart_ttft_30k_ms": "30,000 tokens after a restart of vLLM: first token, ms",
            "vllm_host_hit_n2": "10 prompts of 10,240 tokens, 2 out, GPU cache emptied: requests/s",
            "vllm_host_hit_n32": "10 prompts of 10,240 tokens, 32 out, GPU cache emptied: requests/s",
            "vllm_own_hit_over_plain": "a hit in vLLM's own cache: first token, over vLLM without the plug-in",
            "vllm_disk_of_raw": "disk hit after both restarted, of the disk's raw read rate",
            "vllm_decode_p99_growth": "p99 between tokens beside loads, over p99 beside hits in vLLM's own cache",
            "vllm_overhead_prefill": "throughput with nothing cached, over vLLM without the plug-in: prefill",
            "vllm_overhead_mixed": "throughput with nothing cached, over vLLM without the plug-in: mixed",
            "vllm_overhead_decode": "throughput with nothing cached, over vLLM without the plug-in: decode",
            "vllm_same_tokens": "share of single requests that get the tokens of vLLM's own hit",
        },
    ),
    (
        "The same with `whole_prompts`",
        "h200_vllm_whole_prompts",
        {
            "vllm_ttft_30k_kvtier_over_native": "30,000 tokens, GPU cache emptied: first token, over vLLM's offloading",
            "vllm_ttft_30k_reset_ms": "30,000 tokens, GPU cache emptied: first token, ms",
            "vllm_restart_ttft_30k_ms": "30,000 tokens after a restart of vLLM: first token, ms",
            "vllm_host_hit_n2": "10 prompts of 10,240 tokens, 2 out, GPU cache emptied: requests/s",
            "vllm_own_hit_over_plain": "a hit in vLLM's own cache: first token, over vLLM without the plug-in",
            "vllm_disk_of_raw": "disk hit after both restarted, of the disk's raw read rate",
            "vllm_decode_p99_growth": "p99 between tokens beside loads, over p99 beside hits in vLLM's own cache",
            "vllm_overhead_prefill": "throughput with nothing cached, over vLLM without the plug-in: prefill",
            "vllm_overhead_mixed": "throughput with nothing cached, over vLLM without the plug-in: mixed",
            "vllm_overhead_decode": "throughput with nothing cached, over vLLM without the plug-in: decode",
            "vllm_same_tokens": "share of single requests that get the tokens of vLLM's own hit",
        },
    ),
    (
        "Ten starts of vLLM with the plug-in on an H200, each with a new server of 64 GiB",
        "h200_vllm_starts",
        {"vllm_starts": "engines that started, answered and hit after a reset"},
    ),
    (
        "vLLM with the plug-in on an H200 while its server is killed or hangs",
        "h200_vllm_failures",
        {"vllm_finished_beside_failures": "share of 40 prompts that were answered"},
    ),
    (
        "512 blocks between vLLM's pages and the server's memory on an H200, by the order of the pages",
        "h200_vllm_pages",
        {
            f"pages_{order.lower()}_{figure}": f"{order}: {label}"
            for order in ("BLHNC", "LBHNC", "LBNHC")
            for figure, label in (("in_gbs", "into the pages, GB/s"), ("out_gbs", "out of the pages, GB/s"))
        }
        | {
            f"pages_{order.lower()}_beside_ratio": f"{order}: time of matrix products beside stores, over alone"
            for order in ("BLHNC", "LBNHC")
        },
    ),
    (
        "kvtier inside vLLM 0.32 on two cores (36 million parameters)",
        "cpu_vllm_ttft",
        {
            "vllm_restart_x": "1,920 tokens after a restart: times faster than computing",
            "vllm_restart_long_x": "7,680 tokens after a restart: times faster than computing",
            "vllm_reset_over_native": "hit in the server: first token, over vLLM's offloading",
            "vllm_restart_over_native": "hit after vLLM's restart: first token, over vLLM's offloading",
            "vllm_server_restart_over_native": "hit after the server's restart: first token, over vLLM's offloading",
        },
    ),
    (
        "Throughput of vLLM with the plug-in on two cores",
        "cpu_vllm_overhead",
        {
            "vllm_overhead_ratio": "tokens/s with nothing cached, over vLLM without the plug-in",
            "connector_step_ms": "time in the connector a step, ms",
        },
    ),
    (
        "A Valkey cluster of three nodes on two cores, 512 blocks; LMCache's client is valkey-glide",
        "cpu_valkey",
        {
            "valkey_get_of_bare": "get, of bare sockets' speed",
            "valkey_put_of_bare": "put, of bare sockets' speed",
            "over_lmcache_get": "get, times the speed of valkey-glide",
            "over_lmcache_put": "put, times the speed of valkey-glide",
            "match_over_lmcache": "match, times the speed of valkey-glide",
            "client_cpu_s_per_gb_put": "put, CPU seconds per GB",
            "client_cpu_s_per_gb_get": "get, CPU seconds per GB",
            "client_cpu_s_per_gb": "the larger of both",
            "client_cpu_s_per_gb_summed_put": "put through bare sockets with checksums, CPU seconds per GB",
            "client_cpu_s_per_gb_summed_get": "get through bare sockets with checksums, CPU seconds per GB",
            "client_cpu_s_per_gb_bare_put": "put through bare sockets without checksums, CPU seconds per GB",
            "client_cpu_s_per_gb_bare_get": "get through bare sockets without checksums, CPU seconds per GB",
            "client_cpu_over_bare": "CPU time over that of bare sockets with checksums, worse of both",
            "dead_shard_match_ms": "match with a dead node, ms",
            "prefix_hits_of_ideal": "prefix hits of a cluster that is too small, of the ideal",
        },
    ),
    (
        "A prompt that another host has computed, through two cache servers and a Valkey cluster, two cores",
        "cpu_two_hosts",
        {
            "cluster_of_compute": "first token, over computing, worst of 256, 1,024 and 2,048 tokens",
            "loaded_of_prompt": "share of the prompt that came from the cluster",
        },
    ),
    (
        "An object store, 512 blocks in objects of 32 MiB, two cores",
        "cpu_objects",
        {
            "folder_put_of_copied": "put into a folder, of obstore with one copy",
            "folder_get_of_bare": "get from a folder, of bare obstore",
            "http_put_of_copied": "put over HTTP, of obstore with one copy",
            "http_get_of_bare": "get over HTTP, of bare obstore",
            "stored_over_distinct": "bytes stored, over distinct bytes",
        },
    ),
    (
        "Eviction, share of prompt tokens that hit (hit rates do not depend on the machine)",
        "cpu_eviction",
        {
            "agentic_500": "the agents' trace, 500 blocks of 512 tokens",
            "agentic_1000": "the same, 1,000 blocks",
            "agentic_2000": "the same, 2,000 blocks",
            "agentic_4000": "the same, 4,000 blocks",
            "agentic_8000": "the same, 8,000 blocks",
            "worst_below_lru": "most that ours is below LRU, any trace and size",
            "worst_below_arc_mooncake": "most that ours is below ARC on Mooncake's traces",
            "lru_off": "our LRU, off the known one",
        },
    ),
    (
        "Eviction on a trace that is held out, 500 to 64,000 blocks",
        "cpu_eviction_held_out",
        {
            "held_out_below_lru": "most that ours is below LRU",
            "held_out_below_arc": "most that ours is below ARC",
        },
    ),
    (
        "CPU time of match, set and eviction of 512 blocks, the adaptive policy over LRU",
        "cpu_eviction_cost",
        {
            "adaptive_over_lru_8192": "in a pool of 8,192 blocks",
            "adaptive_over_lru_65536": "in a pool of 65,536 blocks",
            "deciding_over_lru_8192": "in a pool of 8,192 blocks, while LRU rules in it",
            "deciding_over_lru_65536": "in a pool of 65,536 blocks, while LRU rules in it",
        },
    ),
    (
        "Warmed, restarted, asked: a document of 8,000 tokens, two cores, the model of the demo",
        "cpu_test_warm",
        {
            "warmed_x": "first token from disk after `kvtier warm`: times faster than computing",
            "imported_x": "the same of another deployment's pack: times faster than computing",
        },
    ),
    (
        "A pack of a 100,000-token document, seconds over the disk's own, two cores",
        "cpu_test_pack",
        {
            "export_vs_disk": "export, over writing as many bytes",
            "import_vs_disk": "import, over reading as many bytes",
            "signed_export_vs_disk": "export, signed",
            "signed_import_vs_disk": "import, signed",
        },
    ),
    (
        "The page with 100,000 blocks and 1,000 requests a minute, two cores",
        "cpu_test_page",
        {
            "update_ms": "an update, ms of CPU in the server",
            "load_ms": "a load in a browser until the tiers are shown, ms",
            "prefixes_load_ms": "a load until the tree of prefixes is shown, ms",
            "page_on_over_off": "tokens/s of 32 streams with the page and a reader, over those without a page",
            "page_cpu_off_over_on": "CPU time per token of the whole deployment: without a page, over with it",
            "page_cpu_share": "CPU time of the page with a reader, of one core",
        },
    ),
    (
        "The hit curve that a server keeps of its traffic, over recorded traces",
        "cpu_live_curve",
        {
            "curve_points_off": "points off exact LRU, any trace, size and choice of hashes",
            "asked_points_off": "the same, of full blocks",
        },
    ),
    (
        "Structured output on an H200, 32 streams (Qwen2.5-7B shape)",
        "h200_json_schema",
        {
            "json_schema_x": "tokens/s with a JSON schema, over tokens/s without one",
            "beside_json_schema_x": "tokens/s of streams without a schema: beside 16 with one, over none with",
        },
    ),
]

# README's ten figures: label, kvtier's value, the peer and its value.
Row = dict[str, Any]


def _row(file: str, **where: object) -> Row:
    """The only row of a result with the values `where`."""
    rows: list[Row] = json.loads((RESULTS / f"{file}.json").read_text())["rows"]
    (found,) = (row for row in rows if all(row.get(name) == value for name, value in where.items()))
    return found


def _figure(file: str, name: str) -> float:
    return float(json.loads((RESULTS / f"{file}.json").read_text())["figures"][name])


def _ten() -> list[tuple[str, str, str]]:
    cold = _row("h200_house_long", part="first token", what="cold")
    device = _row("h200_house_long", part="first token", what="hit")
    host = _row("h200_house_host", what="first token, host memory")
    batch = _row("h200_house_host", N=2, what="host, device cache off")
    restarted = _row("h200_house_restart", what="server")
    computed = _row("h200_house_restart", what="computed")
    half = _row("h200_house_sweep", **{"hit %": 50})
    reset = {
        engine: _row("h200_vllm", what="first token", state="reset", engine=engine)["ms"]
        for engine in ("kvtier", "own offloading")
    }
    new_engine = _row("h200_vllm", what="first token", state="new engine, from the server's memory")["ms"]
    plain = _row("h200_vllm", what="first token", state="cold", engine="no connector")["ms"]
    overhead = _figure("h200_vllm", "vllm_overhead_prefill")
    valkey, glide = (float(_row("cpu_valkey", what=f"{name} get")["ms"]) for name in ("kvtier", "glide"))
    return [
        ("30,000 tokens on the GPU: first token", _ms(device["ms"]), f"vLLM: {_ms(device['vLLM ms'])}"),
        ("30,000 tokens in host memory", _ms(host["ms"]), f"vLLM: {_ms(host['vLLM 0.24 ms'])}"),
        ("30,000 tokens computed", _ms(cold["ms"]), f"vLLM: {_ms(cold['vLLM ms'])}"),
        ("10 × 10,240 tokens in host memory", _rate(batch["later QPS"]), f"vLLM: {_rate(batch['vLLM 0.24'])}"),
        ("10 × 10,240 tokens after a restart", _rate(restarted["QPS"]), f"computed: {_rate(computed['QPS'])}"),
        ("1,000 prompts, half of each shared", _rate(half["QPS"]), f"vLLM: {_rate(half['vLLM 0.24'])}"),
        ("vLLM + kvtier, 30,000 tokens", _ms(reset["kvtier"]), f"vLLM's offloading: {_ms(reset['own offloading'])}"),
        ("vLLM + kvtier, 30,000 tokens after a restart", _ms(new_engine), f"vLLM computes: {_ms(plain)}"),
        ("vLLM + kvtier, nothing cached: throughput", f"{overhead:.1%}", "vLLM alone: 100%"),
        ("Valkey cluster, 512 blocks, 2 cores", _ms(valkey), f"valkey-glide: {_ms(glide)}"),
    ]


def _ms(value: float) -> str:
    return f"{value:.0f} ms" if value >= 20 else f"{value:.1f} ms"


def _rate(value: float) -> str:
    return f"{value:.3g} requests/s"


def readme_lines() -> list[str]:
    lines = ["| | kvtier | peer |", "|---|---|---|"]
    return lines + [f"| {what} | {ours} | {theirs} |" for what, ours, theirs in _ten()]


# -- docs/figures.md -------------------------------------------------------------------------------------------------

_HEAD = f"""# Figures

`python scripts/figures.py` writes this page from `benchmarks/results/`; `make check` fails when they differ. A figure
that misses its aim is marked {MISSED}. `benchmarks/README.md` says how each is measured, and
[seeds.md](seeds.md) compares kvtier with the documents that the project started from.
"""


def page() -> str:
    lines = [_HEAD, *_aimed_lines(), ""]
    for title, file, names in _BY_RESULT:
        if not (RESULTS / f"{file}.json").exists():  # it is recorded once the code that it is about is there
            continue
        lines += [f"## {title}", "", *_result_lines(file, names), ""]
    lines += ["## A deployment of glm-4-9b on an H200", "", *_deployment_lines(), ""]
    lines += ["## The engine on an H200, beside vLLM", "", *_engine_lines()]
    return "\n".join(lines).rstrip() + "\n"


def _aimed_lines() -> list[str]:
    figures = {
        (machine, name): json.loads(path.read_text())["figures"]
        for _, machine in MACHINES
        for name in _NAMES
        if (path := _path(machine, name)).exists()
    }
    lines = [
        "## Cache server and engine",
        "",
        "The worst of two to five model shapes, 512 blocks, the server in its own process, medians of 3 to 7 runs.",
        "",
        "| what | aim | " + " | ".join(label for label, _ in MACHINES) + " |",
        "|---|---|" + "---|" * len(MACHINES),
    ]
    for label, name, figure, aim in ROWS:
        cells = [
            cell(figures.get((machine, name), {}).get(figure), "" if machine != "cpu" and name in _CPU_ONLY else aim)
            for _, machine in MACHINES
        ]
        shown = f"{aim} (2 cores)" if name in _CPU_ONLY else aim
        if any(cells):
            lines.append(f"| {label} | {shown} | " + " | ".join(cells) + " |")
    return lines


def _result_lines(file: str, names: dict[str, str]) -> list[str]:
    result = json.loads((RESULTS / f"{file}.json").read_text())
    bars = {name: bar.replace("<=", "≤").replace(">=", "≥") for name, bar in result["settings"].get("bars", {}).items()}
    lines = ["| what | aim | measured |", "|---|---|---|"]
    for name, label in names.items():
        if name not in result["figures"]:  # recorded before there was this figure
            continue
        lines.append(f"| {label} | {bars.get(name, '')} | {cell(result['figures'].get(name), bars.get(name, ''))} |")
    return lines


def cell(value: float | None, aim: str) -> str:
    if value is None:
        return ""
    return _shown(value) if is_met(value, aim) else f"{_shown(value)} {MISSED}"


def is_met(value: float, aim: str) -> bool:
    """An aim is text such as "≤ 1.15"; an empty aim is always met."""
    if not aim:
        return True
    sign, limit = aim.split()
    return value <= float(limit) if sign == "≤" else value >= float(limit)


def _shown(value: float) -> str:
    """Many aims are close to 1 or to 51: values there get one more digit, which shows whether they are met."""
    return f"{value:.4g}" if 1 <= value < 2 or value > 50 else f"{value:.3g}"


_OF_H200_PARTS = {
    "long_prefill": "long",
    "copies": "copies",
    "host": "host",
    "restart": "restart",
    "restart_disk": "restart_disk",
    "swap_in": "swap_in",
    "swap_out": "swap_out",
    "transfer_out": "transfer_out",
    "decode_beside_load": "beside",
    "quantized": "quantized",
    "baseline": "pairs",
    "sweep": "sweep",
}
"""The names of benchmarks in `benchmarks.h200`."""
_OF_SEEDS = {"server": "s0_server", "speed": "s2_speed", "stress": "s2_stress"}


def _path(machine: str, name: str) -> Path:
    """The file of a result: the newest one, if there are two."""
    if machine == "h200" and name in _OF_H200_PARTS:
        return RESULTS / f"h200_house_{_OF_H200_PARTS[name]}.json"
    of_seeds = RESULTS / "seeds" / f"{machine}_{_OF_SEEDS.get(name)}.json"
    if of_seeds.exists():
        return of_seeds
    file = {"baseline": "baseline", "speed": "speed_test"}.get(name, f"test_{name}")
    return RESULTS / f"{machine}_{file}.json"


# An RTX 4090 with the engine that the examples come from: seconds, the same documents, tiers of the same sizes.
_BEFORE = [
    [33.94],
    [0.33, 33.97],
    [1.25, 1.18, 33.89],
    [3.49, 2.48, 2.59, 33.88],
    [5.76, 5.84, 6.20, 6.24, 33.81],
    [5.91, 6.33, 6.29, 5.90, 5.94, 34.36],
]


def _deployment_lines() -> list[str]:
    """The triangle of stress_test beside the one it is modelled on."""
    result = json.loads(_path("h200", "stress").read_text())
    rows, count = result["rows"], result["settings"]["n"]
    lines = [
        "A deployment of the glm-4-9b shape (fp8, random weights) on an H200, with 10.5 GiB of the GPU for KV, 20 GiB",
        "of host memory, a cache server with 20 GiB and an SSD: seconds to the first token about documents of",
        f"{result['settings']['prompt_tokens']:,} tokens. Round n asks about documents 1 to n, the last of them new.",
        "In brackets what [wde](https://github.com/noooop/wde), where this test comes from, reports on an RTX 4090.",
        "",
        "| n | " + " | ".join(str(number) for number in range(1, count + 1)) + " |",
        "|---|" + "---|" * count,
    ]
    for number in range(1, count + 1):
        found = [row["ttft_s"] for row in rows if row["round"] == number]
        cells = [f"{seconds:.2f} ({before})" for seconds, before in zip(found, _BEFORE[number - 1], strict=True)]
        lines.append(f"| {number} | " + " | ".join(cells + [""] * (count - number)) + " |")
    return lines


def _engine_lines() -> list[str]:
    """The engine on a GPU beside vLLM, from rows that hold both."""
    rows = json.loads(_path("h200", "long_prefill").read_text())["rows"]
    lines = [
        "The engine on an H200, Qwen2.5-7B shape, bf16, random weights; vLLM 0.24.0 was measured on the same kind of",
        "machine at another time. Requests per second, 10 prompts of 10240 tokens, N tokens out:",
        "",
        "| N | cold | vLLM | prefix cached on the GPU | vLLM |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        if row["part"] == "long prompts" and row["manager"] == "prefix_caching" and "vLLM cold" in row:
            cells = (row["N"], row["cold QPS"], row["vLLM cold"], row["hit QPS"], row["vLLM hit"])
            lines.append("| " + " | ".join(map(_shown, cells)) + " |")
    lines += ["", *_tier_lines()]
    sweep = sorted(json.loads(_path("h200", "sweep").read_text())["rows"], key=lambda row: row["hit %"])
    lines += [
        "",
        "1000 prompts of 1000 tokens, 24 out, up to 16384 tokens a step, by the share of the prompt that is a common",
        "prefix; one round each:",
        "",
        "| | " + " | ".join(f"{row['hit %']}%" for row in sweep) + " |",
        "|---|" + "---|" * len(sweep),
        "| kvtier | " + " | ".join(_shown(row["QPS"]) for row in sweep) + " |",
        "| vLLM | " + " | ".join(_shown(row["vLLM 0.24"]) for row in sweep) + " |",
    ]
    return lines


def _tier_lines() -> list[str]:
    """The same prompts from the tiers below the GPU."""
    host = json.loads(_path("h200", "host").read_text())["rows"]
    server = json.loads(_path("h200", "restart").read_text())["figures"]
    lines = [
        "The same prompts with the GPU's own cache off, from host memory, and from a cache server after a restart:",
        "",
        "| N | host memory | vLLM, CPU offloading | cache server, after a restart |",
        "|---|---|---|---|",
    ]
    for row in host:
        if row["what"] == "host, device cache off" and "vLLM 0.24" in row:
            known = server.get(f"server_hit_n{row['N']}")
            restarted = "" if known is None else _shown(known)
            lines.append(f"| {row['N']} | {_shown(row['later QPS'])} | {_shown(row['vLLM 0.24'])} | {restarted} |")
    return lines


def _with_figures(readme: str) -> str:
    block = f"{START}\n" + "\n".join(readme_lines()) + f"\n{END}"
    return re.sub(f"{START}.*?{END}", lambda _: block, readme, flags=re.DOTALL)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if something would change")
    is_check = parser.parse_args().check
    wanted: dict[Path, Callable[[str], str]] = {README: _with_figures, PAGE: lambda _: page()}
    stale = []
    for path, make in wanted.items():
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        after = make(before)
        if after != before:
            stale.append(path.name)
            if not is_check:
                path.write_text(after, encoding="utf-8")
    if stale and is_check:
        print(f"{', '.join(stale)}: not what benchmarks/results say; run python scripts/figures.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
