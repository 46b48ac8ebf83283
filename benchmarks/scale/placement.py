"""Which shard has which segment: kvtier's own names of blocks and the cluster's own slots."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from benchmarks.scale.costs import LAYOUT, bytes_of
from kvtier.blocks.hashing import BlockHash, block_hashes
from kvtier.blocks.namespace import Namespace
from kvtier.stores.valkey.blocks import ClusterBlocks
from kvtier.stores.valkey.cluster import Cluster
from kvtier.stores.valkey.config import DEFAULT_SEGMENT, DEFAULT_TTL_S
from kvtier.stores.valkey.slots import NUM_SLOTS

NAMESPACE = Namespace(bytes(range(32)))


@dataclass(frozen=True, slots=True)
class Segment:
    """Blocks of a prompt that lie in one slot. `first_block` is the place of its first one in the prompt."""

    name: int
    slot: int
    first_block: int
    num_blocks: int

    @property
    def nbytes(self) -> int:
        return bytes_of(self.num_blocks)

    @property
    def end_block(self) -> int:
        return self.first_block + self.num_blocks


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt's cacheable part, and the tokens of a question behind it, which are always computed."""

    segments: tuple[Segment, ...]
    question_tokens: int = 64

    @property
    def num_blocks(self) -> int:
        return self.segments[-1].end_block

    @property
    def nbytes(self) -> int:
        return bytes_of(self.num_blocks)


def names_of(segment_blocks: int = DEFAULT_SEGMENT) -> ClusterBlocks:
    """kvtier's own naming of blocks. Names need no cluster, so there is none."""
    return ClusterBlocks(
        cast("Cluster", None), NAMESPACE, LAYOUT.block_bytes, ttl_s=DEFAULT_TTL_S, segment_blocks=segment_blocks
    )


def slots_of(hashes: Sequence[BlockHash], segment_blocks: int = DEFAULT_SEGMENT) -> list[int]:
    """The slot of each block of a prompt, given from its first block on."""
    return names_of(segment_blocks).keys_of(hashes)[1]


_names = names_of()


def slot_of_segment(head: BlockHash) -> int:
    """The slot of a segment's first block, which all of its blocks share."""
    return _names.keys_of([head])[1][0]


def shard_of(slot: int, num_shards: int) -> int:
    """Like a new cluster: each node has a run of slots of the same length."""
    return slot * num_shards // NUM_SLOTS


def random_hashes(num_blocks: int, seed: int) -> list[BlockHash]:
    tokens = array("I")
    tokens.frombytes(random.Random(seed).randbytes(tokens.itemsize * num_blocks * LAYOUT.block_tokens))
    return block_hashes(NAMESPACE, tokens, LAYOUT.block_tokens)


def make_prompt(num_blocks: int, seed: int, segment_blocks: int = DEFAULT_SEGMENT, question_tokens: int = 64) -> Prompt:
    hashes = random_hashes(num_blocks, seed)
    segments = tuple(
        Segment(seed << 16 | number, slot_of_segment(hashes[first]), first, min(segment_blocks, num_blocks - first))
        for number, first in enumerate(range(0, num_blocks, segment_blocks))
    )
    return Prompt(segments, question_tokens)


def usable_share(slots: Sequence[int], num_shards: int) -> float:
    """The share of a prompt's blocks that is a usable prefix when one shard is lost: the mean over all shards."""
    first_lost: dict[int, int] = {}
    for position, slot in enumerate(slots):
        first_lost.setdefault(shard_of(slot, num_shards), position)
    usable = sum(first_lost.values()) + (num_shards - len(first_lost)) * len(slots)
    return usable / (num_shards * len(slots))


def usable_share_expected(num_segments: float, num_shards: int) -> float:
    """The same for segments that lie anywhere, independently."""
    survives = 1 - 1 / num_shards
    all_survive: float = survives**num_segments
    return survives * (1 - all_survive) / ((1 - survives) * num_segments)


def fullest_over_mean(num_segments: int, num_shards: int, seed: int) -> float:
    """How much more the fullest shard has than the mean, with `num_segments` segments that are not related."""
    counts = [0] * num_shards
    for number in range(num_segments):
        (head,) = random_hashes(1, seed << 32 | number)
        counts[shard_of(slot_of_segment(head), num_shards)] += 1
    return max(counts) * num_shards / num_segments
