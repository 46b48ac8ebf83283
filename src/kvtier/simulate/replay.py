"""Replays a trace through one real pool with a real policy: the share of prompt tokens that would have been hits.

Prompt blocks only; a hit is the leading run of cached blocks, at most the prompt's own tokens. A request uses all of
its blocks at the instant of its arrival, as if it were answered at once. Blocks carry no bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvtier.blocks.block import Block, PrefixIndex
from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.policies import EvictionPolicy
from kvtier.blocks.pool import BlockPool
from kvtier.simulate.trace import BLOCK_TOKENS, TracedRequest

Clock = Callable[[], float]
MakePolicy = Callable[[Clock], EvictionPolicy[Block]]


@dataclass(frozen=True, slots=True)
class Replayed:
    """The result of replaying a trace through one pool."""

    num_blocks: int
    input_tokens: int
    hit_tokens: int
    num_stored_blocks: int
    num_evicted_blocks: int

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / self.input_tokens if self.input_tokens else 0.0


class VirtualClock:
    """A clock that shows the trace's time."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def replay(
    requests: Iterable[TracedRequest], num_blocks: int, make_policy: MakePolicy, block_tokens: int = BLOCK_TOKENS
) -> Replayed:
    """Replay `requests`, which must be in the order of their arrival; see `by_arrival`."""
    clock = VirtualClock()
    pool, index = BlockPool(num_blocks, make_policy(clock)), PrefixIndex(1)
    names = BlockNames()
    input_tokens = hit_tokens = num_stored = 0
    for request in requests:
        clock.now_s = request.arrived_s
        hashes = names.of(request.hashes)
        matched = pool.match(index, hashes).blocks
        input_tokens += request.input_length
        hit_tokens += min(len(matched) * block_tokens, request.input_length)
        granted = pool.reserve(index, hashes).blocks if len(matched) < len(hashes) else []
        pool.commit(granted)
        pool.free(matched + granted)
        num_stored += len(granted)
    return Replayed(num_blocks, input_tokens, hit_tokens, num_stored, pool.num_evicted)


class BlockNames:
    """Block hashes for the numbers in a trace, each made once."""

    def __init__(self) -> None:
        self._known: dict[int, BlockHash] = {}

    def of(self, numbers: tuple[int, ...]) -> list[BlockHash]:
        known = self._known
        return [known.get(number) or self._named(number) for number in numbers]

    def _named(self, number: int) -> BlockHash:
        name = self._known[number] = BlockHash(number.to_bytes(8, "little"))
        return name
