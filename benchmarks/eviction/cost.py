"""The CPU time that each eviction policy takes for a prompt of 512 new blocks in a full pool: match, set and eviction.

    python -m benchmarks.eviction.cost [--quick] [--json FILE]

Each policy has a pool of its own. Both get the same prompts, in turns: a turn looks a new prompt up, stores its 512
blocks in place of others, and gets them in a second match; before it a known prompt comes back, outside the clock. In
one kind of traffic, a loop of twice the pool's size, the adaptive policy has hits and LRU none, so that it rules
(`adaptive_over_lru_N` with N blocks). In the other, prompts come back soon, once: LRU is ideal and rules within the
adaptive policy, which only simulates what it would do (`deciding_over_lru_N`). Figures are ratios of the medians over
all turns. The clock is the CPU time of the thread, and the garbage collector is off, so other programs count little.
Ends with status 1 when a figure misses its bar.
"""

from __future__ import annotations

import gc
import random
import statistics
import sys
import time
from collections import deque

from benchmarks.harness import Result, finish, make_parser, print_table, read_options
from kvtier.blocks.block import PrefixIndex
from kvtier.blocks.eviction import Eviction, eviction_policy
from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.pool import BlockPool

NUM_BLOCKS = (8192, 65536)
TRAFFIC = {"loop": "adaptive", "recent": "deciding"}
BARS = {f"{name}_over_lru_{num_blocks}": "<= 1.05" for name in TRAFFIC.values() for num_blocks in NUM_BLOCKS}
PROMPT_BLOCKS = 512
POLICIES: tuple[Eviction, ...] = ("lru", "adaptive")
TURNS, QUICK_TURNS = 300, 40
_TURN_S = 1.0
_WARM_TURNS = {"loop": 8, "recent": 3}
"""Before the first turn, for each prompt that fits into the pool."""


class Pool:
    """One policy's pool, and a clock that is set by hand."""

    def __init__(self, num_blocks: int, eviction: Eviction) -> None:
        self.now_s = 0.0
        policy = eviction_policy(eviction, declines=True, clock=lambda: self.now_s)
        self._pool = BlockPool(num_blocks, policy, clock=lambda: self.now_s)
        self._index = PrefixIndex(1)

    def store(self, hashes: list[BlockHash]) -> int:
        """Use a prompt: match it and store its missing blocks. Returns how many were hits."""
        matched = self._pool.match(self._index, hashes).blocks
        granted = self._pool.reserve(self._index, hashes[len(matched) :], may_decline=False).blocks
        self._pool.commit(granted)
        self._pool.free(matched + granted)
        if len(matched) + len(granted) != len(hashes):
            raise RuntimeError(f"{len(matched) + len(granted)} of {len(hashes)} blocks are stored")
        return len(matched)

    def find(self, hashes: list[BlockHash]) -> None:
        matched = self._pool.match(self._index, hashes).blocks
        if len(matched) != len(hashes):
            raise RuntimeError(f"{len(matched)} of {len(hashes)} blocks were found")
        self._pool.free(matched)


class Prompts:
    """New prompts, and known ones that come back: each of twice as many as fit in its turn, or the recent ones."""

    def __init__(self, num_fitting: int, traffic: str) -> None:
        self._chance = random.Random(1)
        known = [self._made() for _ in range(2 * num_fitting if traffic == "loop" else num_fitting // 4)]
        self._known = deque(known, maxlen=len(known))
        self._is_loop = traffic == "loop"

    def new_and_returning(self) -> tuple[list[BlockHash], list[BlockHash]]:
        new, returning = self._made(), self._known[0]
        self._known.append(returning if self._is_loop else new)
        return new, returning

    def _made(self) -> list[BlockHash]:
        return [BlockHash(self._chance.randbytes(32)) for _ in range(PROMPT_BLOCKS)]


def main() -> int:
    options, _ = read_options(make_parser(__doc__ or ""), ())
    turns = QUICK_TURNS if options.quick else TURNS
    result = Result("eviction.cost", {"turns": turns, "prompt_blocks": PROMPT_BLOCKS})
    gc.disable()
    for traffic, name in TRAFFIC.items():
        for num_blocks in NUM_BLOCKS:
            cpu_s = _measure(num_blocks, turns, traffic)
            ratio = statistics.median(cpu_s["adaptive"]) / statistics.median(cpu_s["lru"])
            result.figures[f"{name}_over_lru_{num_blocks}"] = ratio
            result.rows += [
                {
                    "traffic": traffic,
                    "blocks": num_blocks,
                    "policy": policy,
                    "CPU time, us": round(1e6 * statistics.median(cpu_s[policy]), 1),
                }
                for policy in POLICIES
            ]
    gc.enable()
    print_table("CPU time of match, set and eviction of 512 blocks", result.rows)
    return finish(result, BARS, options.json)


def _measure(num_blocks: int, turns: int, traffic: str) -> dict[Eviction, list[float]]:
    pools = {policy: Pool(num_blocks, policy) for policy in POLICIES}
    num_fitting = num_blocks // PROMPT_BLOCKS
    prompts = Prompts(num_fitting, traffic)
    num_hits = dict.fromkeys(POLICIES, 0)
    cpu_s: dict[Eviction, list[float]] = {policy: [] for policy in POLICIES}
    num_warm = _WARM_TURNS[traffic] * num_fitting
    for turn in range(num_warm + turns):
        new, returning = prompts.new_and_returning()
        for policy in POLICIES[:: -1 if turn % 2 else 1]:
            pool = pools[policy]
            pool.now_s = turn * _TURN_S
            num_hit = pool.store(returning)
            started_at = time.thread_time()
            pool.store(new)
            pool.find(new)
            if turn >= num_warm:
                cpu_s[policy].append(time.thread_time() - started_at)
                num_hits[policy] += num_hit
    if (traffic == "loop") != (num_hits["adaptive"] > num_hits["lru"]):
        raise RuntimeError(f"the other policy ruled in the traffic {traffic}: {num_hits} hits")
    return cpu_s


if __name__ == "__main__":
    sys.exit(main())
