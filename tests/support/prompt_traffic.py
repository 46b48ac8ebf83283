"""Made-up traffic: sessions that grow turn by turn behind prompts that they share, and what exact LRU hits of it."""

from __future__ import annotations

import hashlib
import random
from collections import OrderedDict
from collections.abc import Sequence

Prompt = tuple[int, ...]


def sessions(num_sessions: int, num_turns: int, *, seed: int = 1, system_blocks: int = 6) -> list[Prompt]:
    """Prompts as sequences of block numbers: each is a session's last one and some more blocks."""
    rng = random.Random(seed)
    next_block = 100
    prompts: list[list[int]] = [[*range(system_blocks)] for _ in range(num_sessions)]
    asked: list[Prompt] = []
    for _ in range(num_sessions * num_turns):
        prompt = prompts[min(int(rng.expovariate(3 / num_sessions)), num_sessions - 1)]
        grown = rng.randrange(1, 12)
        prompt += range(next_block, next_block + grown)
        next_block += grown
        asked.append(tuple(prompt))
        if rng.random() < 0.02:
            del prompt[rng.randrange(system_blocks, len(prompt)) :]
    return asked


def hashed(prompt: Prompt) -> bytes:
    """The prompt as a run of hashes."""
    return b"".join(hashlib.sha256(b"%d" % number).digest() for number in prompt)


def lru_hit_share(prompts: Sequence[Prompt], num_blocks: int) -> float:
    """Hits are the leading resident blocks; a prompt is used from its end to its beginning."""
    resident: OrderedDict[int, None] = OrderedDict()
    num_hit = num_asked = 0
    for prompt in prompts:
        num_asked += len(prompt)
        num_hit += next((place for place, block in enumerate(prompt) if block not in resident), len(prompt))
        for block in reversed(prompt):
            resident[block] = None
            resident.move_to_end(block)
        while len(resident) > num_blocks:
            resident.popitem(last=False)
    return num_hit / num_asked
