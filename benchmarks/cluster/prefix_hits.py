"""Prefix hits of chats in a cluster that is too small for them, beside a pool that always evicts the right block."""

from __future__ import annotations

import random
from collections.abc import Iterator

from kvtier.blocks.hashing import BlockHash, block_hashes
from kvtier.blocks.layout import KvLayout
from kvtier.blocks.namespace import Namespace
from kvtier.tiers.host import HostTier
from kvtier.tiers.tier import Tier

LAYOUT = KvLayout(layers=1, kv_heads=1, head_dim=64, dtype="float16", block_tokens=16)
"""4 KiB a block: the question is which blocks are kept, not how fast they move."""
NAMESPACE = Namespace(bytes(32))

_NUM_CHATS = 160
_NUM_SYSTEM_PROMPTS = 6
_SYSTEM_BLOCKS = 24
_TURN_BLOCKS = (4, 40)
_MAX_BLOCKS = 400


def requests(num_requests: int, seed: int = 1) -> Iterator[list[BlockHash]]:
    """Prompts of growing chats, some more active than others, behind a few system prompts."""
    dice = random.Random(seed)
    chats: list[list[int]] = []
    for number in range(_NUM_CHATS):
        system = dice.randrange(_NUM_SYSTEM_PROMPTS)
        chats.append([system] * (_SYSTEM_BLOCKS * LAYOUT.block_tokens) + [1000 + number])
    for _ in range(num_requests):
        chat = chats[min(int(dice.paretovariate(0.9)) - 1, _NUM_CHATS - 1)]
        chat += [dice.randrange(1 << 20) for _ in range(dice.randint(*_TURN_BLOCKS) * LAYOUT.block_tokens)]
        if len(chat) > _MAX_BLOCKS * LAYOUT.block_tokens:
            del chat[_SYSTEM_BLOCKS * LAYOUT.block_tokens + 1 :]
        yield block_hashes(NAMESPACE, chat, LAYOUT.block_tokens)


def replay(tier: Tier, num_requests: int) -> float:
    """Match each prompt and store its missing blocks. Returns the share of hits among all requested blocks."""
    payload = bytes(LAYOUT.block_bytes)
    num_hit = num_asked = 0
    for hashes in requests(num_requests):
        tier.learn(hashes)
        with tier.match(hashes) as lease:
            num_found = lease.num_blocks
        num_hit += num_found
        num_asked += len(hashes)
        for first in range(num_found, len(hashes), 128):
            part = hashes[first : first + 128]
            tier.offer(part, [payload] * len(part))
    return num_hit / num_asked


def ideal_hits(num_blocks: int, num_requests: int) -> float:
    """The share of hits of an LRU pool of `num_blocks` in this process, which evicts each prompt's end first."""
    tier = HostTier(LAYOUT, num_blocks * LAYOUT.slot_bytes)
    try:
        return replay(tier, num_requests)
    finally:
        tier.close()
