"""A server hit straight into GPU memory: DMA from the cache server's arena, without a copy by the CPU.

    python -m benchmarks.remote_kv_cache.baseline.test_gpu_hit [--quick] [--json FILE]

The client maps the server's arena and registers it with CUDA; 512 leased blocks are copied to the GPU straight
from the server's memory, and back into reserved slots, beside the same copy through ordinary pinned memory and
beside a copy by the CPU first. Needs torch with CUDA. One copy per run of adjacent blocks; the batched copier for
scattered blocks comes with the engine.
"""

from __future__ import annotations

import ctypes
import importlib
import itertools
import sys
from typing import Any

import kvtier
from benchmarks.harness import BlockMemory, Contender, Result, console, parse_options, print_table, race
from benchmarks.shapes import NUM_BLOCKS, SHAPES
from kvtier.blocks.namespace import NamespaceFields
from kvtier.client.client import CacheClient
from kvtier.memory.copying import address_of
from kvtier.testing.servers import cache_server


def main() -> int:
    options = parse_options(__doc__ or "", ("Qwen2.5-7B", "Llama-3.1-8B"))
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError:
        console.print("torch is not installed: this benchmark needs it, and a GPU")
        return 1
    if not torch.cuda.is_available():
        console.print("no GPU here: nothing to measure")
        return 1
    result = Result(
        "remote_kv_cache.baseline.test_gpu_hit",
        {"blocks": NUM_BLOCKS, "repeats": options.repeats, "gpu": torch.cuda.get_device_name(0)},
    )
    for shape in options.shapes:
        measure(shape, torch, options.repeats, result)
    print_table("512 blocks between a cache server and a GPU, medians", result.rows)
    result.write(options.json)
    return 0


def measure(shape: str, torch: Any, repeats: int, result: Result) -> None:
    layout = SHAPES[shape]
    source = BlockMemory(NUM_BLOCKS, layout.block_bytes, seed=8)
    memory = str(3 * NUM_BLOCKS * layout.slot_bytes)
    namespace = NamespaceFields(layout=layout, weights="benchmark")
    with cache_server("--max-leased", memory, memory=memory) as server:
        with kvtier.connect(server.unix, layout=layout, namespace=namespace, timeout_s=60) as client:
            hashes = client.hashes(range(NUM_BLOCKS * layout.block_tokens))
            client.set(hashes, source.blocks)
            with client.match(hashes) as lease:
                offsets = list(lease.offsets)
                assert len(offsets) == NUM_BLOCKS
                first = offsets[0]
                assert all(b - a == layout.slot_bytes for a, b in itertools.pairwise(offsets))
                seconds = _race(torch, client, first, source, repeats)
    for name, value in seconds.items():
        row: dict[str, object] = {"shape": shape, "what": name, "ms": f"{value * 1000:.2f}"}
        row["GB/s"] = f"{source.nbytes / value / 1e9:.1f}"
        result.rows.append(row)
    result.figures[f"gpu_hit_of_pinned_{shape}"] = seconds["pinned memory to GPU"] / seconds["server's arena to GPU"]


def _race(torch: Any, client: CacheClient, first: int, source: BlockMemory, repeats: int) -> dict[str, float]:
    arena = client.arena
    cudart = torch.cuda.cudart()
    registered_bytes = source.nbytes
    assert int(cudart.cudaHostRegister(arena.address + first, registered_bytes, 0)) == 0
    try:
        shared = _tensor_at(torch, arena.address + first, source.nbytes)
        pinned = torch.empty(source.nbytes, dtype=torch.uint8, pin_memory=True)
        pinned.copy_(_tensor_at(torch, address_of(source.view), source.nbytes))
        device = torch.empty(source.nbytes, dtype=torch.uint8, device="cuda")
        expected = pinned.to("cuda")

        def dma(origin: Any) -> None:
            device.copy_(origin, non_blocking=True)
            torch.cuda.synchronize()

        def through_cpu() -> None:
            pinned.copy_(shared)
            dma(pinned)

        def check() -> None:
            assert bool((device == expected).all()), "the GPU has other bytes"

        return race(
            [
                Contender("pinned memory to GPU", lambda: dma(pinned), device.zero_, check),
                Contender("server's arena to GPU", lambda: dma(shared), device.zero_, check),
                Contender("arena, CPU copy, pinned, GPU", through_cpu, device.zero_, check),
            ],
            4 * repeats,
        )
    finally:
        cudart.cudaHostUnregister(arena.address + first)


def _tensor_at(torch: Any, address: int, nbytes: int) -> Any:
    return torch.frombuffer((ctypes.c_ubyte * nbytes).from_address(address), dtype=torch.uint8)


if __name__ == "__main__":
    sys.exit(main())
