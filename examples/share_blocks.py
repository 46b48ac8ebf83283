"""Two processes share blocks: one writes the KV of a prompt into a cache server, the other one finds it there.

    python -m examples.share_blocks

No GPU and no model: the blocks have the shape of Qwen2.5-7B's and random bytes.
"""

from __future__ import annotations

import ctypes
import mmap
import multiprocessing
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from rich.console import Console
from rich.table import Table

import kvtier
from kvtier.blocks.namespace import NamespaceFields
from kvtier.sizes import format_size
from kvtier.testing.servers import cache_server

LAYOUT = kvtier.KvLayout(layers=28, kv_heads=4, head_dim=128, dtype="bfloat16")
NAMESPACE = NamespaceFields(layout=LAYOUT, weights="none")
PROMPT_TOKENS = 4096
NUM_BLOCKS = PROMPT_TOKENS // LAYOUT.block_tokens
TOKENS = [random.Random(0).randrange(150_000) for _ in range(PROMPT_TOKENS)]


_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Step:
    who: str
    what: str
    seconds: float
    moved_bytes: int


def main() -> None:
    console = Console()
    console.print(f"starting a cache server with {format_size(1 << 30)} of shared memory")
    context = multiprocessing.get_context("spawn")
    with cache_server(memory="1GiB") as server:
        steps: list[Step] = []
        for role in (write, read):
            console.print(f"running the {'writer' if role is write else 'reader'} in a process of its own")
            with context.Pool(1) as pool:
                steps += pool.apply(role, (server.unix,))
        with kvtier.connect(server.unix) as client:
            stats = client.stats()
    console.print(_table(steps))
    console.print(
        f"{stats['blocks']} blocks, {format_size(int(str(stats['used_bytes'])))} of KV: written by one process, "
        "read by another, every byte compared. The server never touched one."
    )


def write(address: str) -> list[Step]:
    """Fill blocks with bytes that belong to their hashes, and store them."""
    client = kvtier.connect(address, layout=LAYOUT, namespace=NAMESPACE, name="demo")
    with client:
        hashes, hash_s = _timed(lambda: client.hashes(TOKENS))
        memory = mmap.mmap(-1, NUM_BLOCKS * LAYOUT.block_bytes)
        blocks = _blocks_of(memory)
        for block, block_hash in zip(blocks, hashes, strict=True):
            block[:] = random.Random(block_hash).randbytes(LAYOUT.block_bytes)
        stored, set_s = _timed(lambda: client.set(hashes, blocks))
        assert stored == NUM_BLOCKS
        who = f"writer, pid {os.getpid()}"
        return [
            Step(who, f"hash {PROMPT_TOKENS} tokens", hash_s, 0),
            Step(who, f"set {stored} blocks (memory touched for the first time)", set_s, len(memory)),
        ]


def read(address: str) -> list[Step]:
    """Find the blocks of the same tokens, look at them in place, copy them out, compare every byte."""
    client = kvtier.connect(address, layout=LAYOUT, namespace=NAMESPACE, name="demo")
    with client:
        hashes = client.hashes(TOKENS)
        who = f"reader, pid {os.getpid()}"
        lease, match_s = _timed(lambda: client.match(hashes))
        with lease:
            views, view_s = _timed(lease.views)
            assert len(views) == NUM_BLOCKS
            for view, block_hash in zip(views, hashes, strict=True):
                assert view == random.Random(block_hash).randbytes(LAYOUT.block_bytes), "a wrong byte"
        memory = mmap.mmap(-1, NUM_BLOCKS * LAYOUT.block_bytes)
        ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(memory)), 1, len(memory))
        arrived, get_s = _timed(lambda: client.get(hashes, _blocks_of(memory)))
        assert arrived == NUM_BLOCKS
        return [
            Step(who, "match and lease them", match_s, 0),
            Step(who, "view them in place, no copy", view_s, 0),
            Step(who, "get them into memory of its own", get_s, len(memory)),
        ]


def _blocks_of(memory: mmap.mmap) -> list[memoryview]:
    view, nbytes = memoryview(memory), LAYOUT.block_bytes
    return [view[position * nbytes : (position + 1) * nbytes] for position in range(NUM_BLOCKS)]


def _timed(act: Callable[[], _Result]) -> tuple[_Result, float]:
    started_at = time.perf_counter()
    result = act()
    return result, time.perf_counter() - started_at


def _table(steps: list[Step]) -> Table:
    table = Table(title=f"one prompt of {PROMPT_TOKENS} tokens, {NUM_BLOCKS} blocks of Qwen2.5-7B's shape")
    table.add_column("who")
    table.add_column("what")
    table.add_column("ms", justify="right")
    table.add_column("GB/s", justify="right")
    for step in steps:
        speed = f"{step.moved_bytes / step.seconds / 1e9:.1f}" if step.moved_bytes else ""
        table.add_row(step.who, step.what, f"{step.seconds * 1000:.2f}", speed)
    return table


if __name__ == "__main__":
    main()
