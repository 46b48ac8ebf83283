"""The CPU time that each eviction policy takes for a prompt of 512 new blocks in a full pool: match, set and eviction.

    python -m benchmarks.eviction.cost [--quick] [--json FILE]

Each policy has a pool of its own, full of chats that come back after different times, so that the adaptive policy has
classes to compare and has taken over from LRU. Both get the same prompts, in turns. A turn looks a new prompt up,
stores its 512 blocks in place of others, and gets them in a second match; between turns a chat comes back, outside the
clock. The clock is the CPU time of the thread, and the garbage collector is off, so other programs count little.
`adaptive_over_lru_N` is the ratio of the medians over all turns with N blocks. Ends with status 1 when it misses its
bar.
"""

from __future__ import annotations

import gc
import random
import statistics
import sys
import time

from benchmarks.harness import Result, finish, make_parser, print_table, read_options
from kvtier.blocks.block import PrefixIndex
from kvtier.blocks.eviction import Eviction, eviction_policy
from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.pool import BlockPool

BARS = {"adaptive_over_lru_8192": "<= 1.05", "adaptive_over_lru_65536": "<= 1.05"}
NUM_BLOCKS = (8192, 65536)
PROMPT_BLOCKS = 512
POLICIES: tuple[Eviction, ...] = ("lru", "adaptive")
TURNS, QUICK_TURNS = 300, 40
_TURN_S = 1.0
_WARM_CAPACITIES = 4
"""Blocks asked for before the first turn, in capacities; after two of them the adaptive policy may rule."""


class Pool:
    """One policy's pool, and a clock that is set by hand."""

    def __init__(self, num_blocks: int, eviction: Eviction) -> None:
        self.now_s = 0.0
        policy = eviction_policy(eviction, declines=True, clock=lambda: self.now_s)
        self._pool = BlockPool(num_blocks, policy, clock=lambda: self.now_s)
        self._index = PrefixIndex(1)

    def store(self, hashes: list[BlockHash]) -> None:
        """Use a prompt: match it and store its missing blocks."""
        matched = self._pool.match(self._index, hashes).blocks
        granted = self._pool.reserve(self._index, hashes[len(matched) :], may_decline=False).blocks
        self._pool.commit(granted)
        self._pool.free(matched + granted)
        if len(matched) + len(granted) != len(hashes):
            raise RuntimeError(f"{len(matched) + len(granted)} of {len(hashes)} blocks are stored")

    def find(self, hashes: list[BlockHash]) -> None:
        matched = self._pool.match(self._index, hashes).blocks
        if len(matched) != len(hashes):
            raise RuntimeError(f"{len(matched)} of {len(hashes)} blocks were found")
        self._pool.free(matched)


class Prompts:
    """New prompts, and chats that come back: some every few turns, others so seldom that they are evicted before."""

    def __init__(self, num_chats: int) -> None:
        self._chance = random.Random(1)
        self._chats = [self.new() for _ in range(num_chats)]
        self._weights = [1 / (place + 1) for place in range(num_chats)]

    def new(self) -> list[BlockHash]:
        return [BlockHash(self._chance.randbytes(32)) for _ in range(PROMPT_BLOCKS)]

    def returning(self) -> list[BlockHash]:
        return self._chance.choices(self._chats, self._weights)[0]


def main() -> int:
    options, _ = read_options(make_parser(__doc__ or ""), ())
    turns = QUICK_TURNS if options.quick else TURNS
    result = Result("eviction.cost", {"turns": turns, "prompt_blocks": PROMPT_BLOCKS})
    gc.disable()
    for num_blocks in NUM_BLOCKS:
        cpu_s = _measure(num_blocks, turns)
        ratio = statistics.median(cpu_s["adaptive"]) / statistics.median(cpu_s["lru"])
        result.figures[f"adaptive_over_lru_{num_blocks}"] = ratio
        result.rows += [
            {"blocks": num_blocks, "policy": policy, "CPU time, us": round(1e6 * statistics.median(cpu_s[policy]), 1)}
            for policy in POLICIES
        ]
    gc.enable()
    print_table("CPU time of match, set and eviction of 512 blocks", result.rows)
    return finish(result, BARS, options.json)


def _measure(num_blocks: int, turns: int) -> dict[Eviction, list[float]]:
    pools = {policy: Pool(num_blocks, policy) for policy in POLICIES}
    prompts = Prompts(2 * num_blocks // PROMPT_BLOCKS)
    now_s = 0.0
    for _ in range(_WARM_CAPACITIES * num_blocks // (2 * PROMPT_BLOCKS)):
        now_s += _TURN_S
        for prompt in (prompts.new(), prompts.returning()):
            for pool in pools.values():
                pool.now_s = now_s
                pool.store(prompt)
    cpu_s: dict[Eviction, list[float]] = {policy: [] for policy in POLICIES}
    for turn in range(turns):
        now_s += _TURN_S
        new, returning = prompts.new(), prompts.returning()
        for policy in POLICIES[:: -1 if turn % 2 else 1]:
            pool = pools[policy]
            pool.now_s = now_s
            pool.store(returning)
            started_at = time.thread_time()
            pool.store(new)
            pool.find(new)
            cpu_s[policy].append(time.thread_time() - started_at)
    return cpu_s


if __name__ == "__main__":
    sys.exit(main())
