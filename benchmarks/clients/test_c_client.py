"""The C client beside Python's: the same blocks of the same server, taking turns.

    make clients && python -m benchmarks.clients.test_c_client [--quick] [--json FILE]

512 blocks of Qwen2.5-7B's size (and a small one without --quick), all in the server's memory. `get` copies them into
memory of the client's process; `views` is match, views of all blocks and release. Each repeat asks both clients once,
and medians are compared: `c_get_of_python` and `c_views_of_python` are C's speed over Python's.
`c_tcp_get_of_python` has no bar: two cores serve the server, two connections and their checksums.
Bytes are compared after each series. Ends with status 1 when a figure misses its bar.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import kvtier
from benchmarks.harness import BlockMemory, Result, console, finish, make_parser, print_table, read_options
from benchmarks.shapes import SHAPES
from kvtier.blocks.hashing import BlockHash, block_hashes
from kvtier.blocks.layout import KvLayout
from kvtier.blocks.namespace import Namespace
from kvtier.client.client import CacheClient
from kvtier.testing.servers import ServerProcess, cache_server

BARS = {"c_get_of_python": ">= 0.95", "c_views_of_python": ">= 1.0"}
NUM_BLOCKS = 512
NAMESPACE = Namespace(bytes(range(32)))
PROGRAM = Path(__file__).parents[2] / "clients" / "c" / "build" / "bench"
SMALL = KvLayout(layers=4, kv_heads=2, head_dim=64, dtype="bfloat16")
TURNS = 5
"""Measurements of each client within a repeat."""


class CClient:
    """The program `bench` as a process."""

    def __init__(self, address: str, layout: KvLayout, token: str | None) -> None:
        arguments = [address, NAMESPACE.hex(), str(layout.block_bytes), str(layout.block_tokens), str(NUM_BLOCKS)]
        self._process = subprocess.Popen(
            [str(PROGRAM), *arguments, *([] if token is None else [token])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, line: str) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        answer = int(self._process.stdout.readline() or 0)
        if not answer:
            raise AssertionError(f"the C client failed at {line}")
        return answer

    def seconds(self, line: str) -> float:
        return self.ask(line) / 1e9

    def close(self) -> None:
        self._process.communicate("")


def main() -> int:
    options, _ = read_options(make_parser(__doc__ or ""), ("Qwen2.5-7B",))
    if not PROGRAM.exists():
        console.print(f"{PROGRAM} is not built: run make clients")
        return 2
    layouts = {name: SHAPES[name] for name in options.shapes}
    if not options.quick:
        layouts["small"] = SMALL
    result = Result(
        "clients.test_c_client", {"num_blocks": NUM_BLOCKS, "repeats": options.repeats, "quick": options.quick}
    )
    ratios: dict[str, list[float]] = {}
    for name, layout in layouts.items():
        memory = str(2 * NUM_BLOCKS * layout.slot_bytes + (64 << 20))
        with cache_server("--max-leased", memory, memory=memory, tcp=True) as server:
            measure(name, layout, server, options.repeats, result, ratios)
    result.figures.update({name: min(values) for name, values in ratios.items()})
    return finish(result, BARS, options.json)


def measure(
    name: str,
    layout: KvLayout,
    server: ServerProcess,
    repeats: int,
    result: Result,
    ratios: dict[str, list[float]],
) -> None:
    hashes = block_hashes(NAMESPACE, [1] * (NUM_BLOCKS * layout.block_tokens), layout.block_tokens)
    with kvtier.connect(server.unix, layout=layout, namespace=NAMESPACE, timeout_s=60) as client:
        payload = [block_hash * (layout.block_bytes // len(block_hash)) for block_hash in hashes]
        if client.set(hashes, payload) != NUM_BLOCKS:
            raise AssertionError("not all blocks were stored")
    rows = []
    for transport, address, token in (("unix", server.unix, None), ("tcp", server.tcp, server.token)):
        with kvtier.connect(address, layout=layout, namespace=NAMESPACE, timeout_s=60, token=token) as client:
            c = CClient(address, layout, token)
            try:
                for act in ("get", "views") if transport == "unix" else ("get",):
                    seconds = take_turns(act, client, c, hashes, layout, repeats)
                    rows.append(row(name, transport, act, seconds, NUM_BLOCKS * layout.block_bytes))
                    key = f"c_{act}_of_python" if transport == "unix" else f"c_tcp_{act}_of_python"
                    ratios.setdefault(key, []).append(seconds["Python"] / seconds["C"])
            finally:
                c.close()
    print_table(f"{NUM_BLOCKS} blocks of {layout.block_bytes} bytes ({name}), medians", rows)
    result.rows += rows


def take_turns(
    act: str, client: CacheClient, c: CClient, hashes: list[BlockHash], layout: KvLayout, repeats: int
) -> dict[str, float]:
    """Median seconds of both."""
    memory = BlockMemory(NUM_BLOCKS, layout.block_bytes)
    python = get_of(client, hashes, memory) if act == "get" else views_of(client, hashes)
    seconds: dict[str, list[float]] = {"Python": [], "C": []}
    for repeat in range(repeats + 1):
        for _ in range(TURNS):
            started_at = time.perf_counter()
            python()
            elapsed = {"Python": time.perf_counter() - started_at, "C": c.seconds(act)}
            if repeat:
                for name, value in elapsed.items():
                    seconds[name].append(value)
    if act == "get":
        c.ask("check")
        for block_hash, block in zip(hashes, memory.blocks, strict=True):
            if bytes(block) != block_hash * (layout.block_bytes // len(block_hash)):
                raise AssertionError("Python's client has read wrong bytes")
    return {name: statistics.median(values) for name, values in seconds.items()}


def get_of(client: CacheClient, hashes: list[BlockHash], memory: BlockMemory) -> Callable[[], None]:
    def get() -> None:
        if client.get(hashes, memory.blocks) != NUM_BLOCKS:
            raise AssertionError("not all blocks were read")

    return get


def views_of(client: CacheClient, hashes: list[BlockHash]) -> Callable[[], None]:
    def look() -> None:
        with client.match(hashes) as lease:
            if len(lease.views()) != NUM_BLOCKS:
                raise AssertionError("not all blocks were leased")

    return look


def row(name: str, transport: str, act: str, seconds: dict[str, float], nbytes: int) -> dict[str, object]:
    shown: dict[str, object] = {"shape": name, "transport": transport, "what": act}
    for who, value in seconds.items():
        shown[f"{who} ms"] = f"{1000 * value:.3f}"
        if act == "get":
            shown[f"{who} GB/s"] = f"{nbytes / value / 1e9:.2f}"
    shown["C over Python"] = f"{seconds['Python'] / seconds['C']:.2f}"
    return shown


if __name__ == "__main__":
    sys.exit(main())
