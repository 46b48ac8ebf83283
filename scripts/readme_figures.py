"""Writes the README's figures from benchmarks/results: `python scripts/readme_figures.py`."""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
START, END = "<!-- figures -->", "<!-- end of figures -->"

ROWS = [
    ("match + lease + views of 512 blocks, of one memcpy", "server", "shm_views_x", "≤ 0.1"),
    ("get into own buffers over shared memory, of one memcpy", "server", "shm_get_x", "≤ 1.15"),
    ("set over shared memory, of one memcpy", "server", "shm_set_x", "≤ 1.2"),
    ("get over TCP, of a bare socket loop's speed", "server", "tcp_get_of_raw", "≥ 0.9"),
    ("stream_get over TCP, likewise", "server", "tcp_stream_get_of_raw", "≥ 0.9"),
    ("set over TCP, likewise", "server", "tcp_set_of_raw", "≥ 0.9"),
    ("TCP get and set, of the fastest peer's speed (the smaller)", "server", "tcp_over_best_peer", "≥ 1"),
    ("hash 100,000 tokens, of a bare SHA-256 loop", "server", "hash_x", "≤ 2.5"),
    ("match 100,000 tokens against a full server, ms", "server", "match_ms", "≤ 10"),
    ("server with an empty 8 GiB arena, MiB resident", "server", "server_rss_mib", "≤ 100"),
    ("Python heap per stored block, bytes", "server", "heap_bytes_per_block", "≤ 500"),
    ("512 blocks onto disk until flushed, of raw direct I/O", "disk", "disk_set_of_raw", "≥ 0.9"),
    ("512 blocks from disk, of raw direct I/O", "disk", "disk_get_of_raw", "≥ 0.9"),
    ("stream_get from disk, likewise", "disk", "disk_stream_get_of_raw", "≥ 0.9"),
    ("hits from memory beside a saturated disk", "disk", "memory_hit_beside_disk", "≥ 0.9"),
    ("recover 100,000 blocks, s", "disk", "recover_100k_s", "≤ 2"),
    ("engine without hits: prefix_caching over naive", "baseline", "prefix_over_naive_0", "≥ 0.98"),
    ("engine without hits: yoco over naive", "baseline", "yoco_over_naive_0", "≥ 0.97"),
    ("engine, prompts that part after two tokens: yoco over naive", "baseline", "yoco_over_naive_fork", "≥ 0.97"),
    ("engine with nothing but hits: yoco over prefix_caching", "baseline", "yoco_over_prefix_100", "≥ 0.98"),
    ("engine: scheduling and hashing a step of 64 requests, ms", "baseline", "schedule_step_ms", "≤ 1"),
    ("engine: decoding, of the memory's bandwidth", "long_prefill", "decode_of_limit", ""),
    ("engine storing into host memory, of its speed without", "swap_out", "swap_out_qps_min", "≥ 0.97"),
    ("engine storing into a cache server, likewise", "transfer_out", "transfer_out_qps_min", "≥ 0.97"),
    (
        "engine restarted, everything in the server, over the cold run",
        "transfer_in",
        "transfer_in_second_over_first",
        "≥ 2.5",
    ),
    ("load or compute: the decision over the better one, worst cell", "load_or_compute", "decision_worst", "≤ 1.05"),
    ("server's arena to GPU, of pinned memory's speed", "gpu_hit", "gpu_hit_of_pinned_Qwen2.5-7B", ""),
    ("32 streams: tokens/s through the OpenAI API, of the engine's own", "http", "http_over_engine", "≥ 0.95"),
    ("32 streams: time to the first token, likewise", "http", "http_ttft_over_engine", "≤ 1.05"),
    (
        "a deployment, hit on the device: how many times faster than computing",
        "speed",
        "device_hit_x",
        "≥ 20 on 2 cores",
    ),
    ("engine restarted, hit in the cache server, likewise", "speed", "server_hit_x", "≥ 10 on 2 cores"),
    ("everything restarted, hit on its disk, likewise", "speed", "disk_hit_x", "≥ 5 on 2 cores"),
    ("GPU: 512 scattered blocks into it by the engine's copier, GB/s", "copies", "copy_in_gbs", "≥ 51"),
    ("GPU: likewise, out", "copies", "copy_out_gbs", "≥ 51"),
    ("GPU: likewise in, beside a running prefill", "copies", "copy_in_loaded_gbs", "≥ 51"),
    ("GPU: likewise out, beside a running prefill", "copies", "copy_out_loaded_gbs", "≥ 51"),
    ("GPU: what the prefill loses by it", "copies", "prefill_loss", "≤ 0.03"),
    ("GPU: 30,000 tokens cached on the GPU, first token, ms", "long_prefill", "ttft_30k_gpu_hit_ms", "≤ 12"),
    ("GPU: 30,000 tokens in host memory, first token, ms", "host", "host_ttft_30k_ms", "≤ 38"),
    (
        "GPU: decode step of 10 requests at 10,240 tokens, over weights + KV at 4.8 TB/s",
        "long_prefill",
        "decode_long_over_h200_limit",
        "≤ 1.3",
    ),
    ("GPU: engine storing into host memory, of its speed without", "swap_out", "swap_out_qps_gpu_min", "≥ 0.98"),
    ("GPU: engine storing into a cache server, likewise", "transfer_out", "transfer_out_qps_gpu_min", "≥ 0.98"),
    ("GPU: server hit after a restart, of a host hit's speed", "restart", "server_over_host", "≥ 0.95"),
    ("GPU: hit over TCP loopback, of a bare socket's speed", "restart", "tcp_of_raw_socket", ""),
    ("GPU: disk hit after both restarted, of the disk's raw read rate", "restart_disk", "disk_of_raw", "≥ 0.9"),
    (
        "GPU: the same, decided by speed, over computing",
        "restart_disk",
        "disk_decided_over_computing",
        "≥ 0.98",
    ),
    (
        "GPU: 80% of each prompt from host memory, over the same from the GPU's cache",
        "swap_in",
        "host_over_gpu_80",
        "≥ 0.95",
    ),
    (
        "GPU: p99 between tokens of 16 requests beside 30,000-token loads from disk, of that without",
        "decode_beside_load",
        "decode_p99_growth",
        "≤ 1.05",
    ),
    ("GPU: fp8 weights, prefill, times bf16's speed", "quantized", "fp8_prefill_x", "≥ 1.4"),
    ("GPU: fp8 weights, decode of one request, likewise", "quantized", "fp8_decode_x", "≥ 1.5"),
    ("GPU: GPTQ-Int4, decode of one request, likewise", "quantized", "gptq_decode_x", "≥ 1"),
]
_NAMES = (
    *("server", "disk", "gpu_hit", "baseline", "long_prefill"),
    *("swap_out", "transfer_out", "transfer_in", "load_or_compute", "http", "speed"),
    *("copies", "host", "restart", "restart_disk", "swap_in", "decode_beside_load", "quantized"),
)
MACHINES = (("2 cores", "cpu"), ("16 cores, H200", "h200"))


def main() -> None:
    figures = {
        (machine, name): json.loads(path.read_text())["figures"]
        for _, machine in MACHINES
        for name in _NAMES
        if (path := _path(machine, name)).exists()
    }
    lines = [
        "Worst of two to five models' shapes, 512 blocks, server in its own process, medians of 3 to 7; the files are",
        "in `benchmarks/results/`.",
        "",
        "| what | aim | " + " | ".join(label for label, _ in MACHINES) + " |",
        "|---|---|" + "---|" * len(MACHINES),
    ]
    for label, name, figure, aim in ROWS:
        cells = []
        for _, machine in MACHINES:
            value = figures.get((machine, name), {}).get(figure)
            cells.append("" if value is None else _shown(value))
        if any(cells):
            lines.append(f"| {label} | {aim} | " + " | ".join(cells) + " |")
    lines += ["", *_deployment_lines(), "", *_engine_lines()]
    readme = ROOT / "README.md"
    text = readme.read_text()
    block = f"{START}\n" + "\n".join(lines) + f"\n{END}"
    readme.write_text(re.sub(f"{START}.*?{END}", lambda _: block, text, flags=re.DOTALL))


def _shown(value: float) -> str:
    """Many aims are close to 1, or to 51: one digit more tells whether they are met."""
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
"""What `benchmarks.h200` calls them."""
_OF_SEEDS = {"server": "s0_server", "speed": "s2_speed", "stress": "s2_stress"}


def _path(machine: str, name: str) -> Path:
    """Where a result is: that of the newest code, if there are two."""
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


if __name__ == "__main__":
    main()
