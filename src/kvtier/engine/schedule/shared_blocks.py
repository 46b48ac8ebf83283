"""Blocks with a prefix cache: full blocks are shared under their hashes, each is computed once. No torch.

Once a chunk is scheduled, the block that it will fill is PENDING under its hash, so other requests wait for the one
that computes it; it is READY once the step was handed to the device. If its producer is aborted or preempted first, the
block is removed, and the next request that needs it computes it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from kvtier.blocks.block import Block, PrefixIndex, Presence
from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.namespace import Namespace
from kvtier.blocks.pool import BlockPool
from kvtier.engine.schedule.naive_blocks import extend_hashes, num_reusable_blocks
from kvtier.engine.schedule.request import Request
from kvtier.engine.schedule.step import BlockCopy
from kvtier.transfer.device_lease import DeviceLease


class SharedBlocks:
    """A pool of equal blocks; a block's id is its place in the pool."""

    def __init__(self, num_blocks: int, block_tokens: int, namespace: Namespace) -> None:
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self.namespace = namespace
        self._pool = BlockPool(num_blocks, on_evict=self._note_evicted)
        self._index = PrefixIndex(1)
        self._awaited: dict[Request, BlockHash] = {}

    @property
    def num_free_blocks(self) -> int:
        return self.num_blocks - self._pool.referenced_units

    @property
    def num_held_blocks(self) -> int:
        return self.num_blocks - self._pool.free_units

    def extend(self, request: Request, *, partially: bool = True) -> bool:
        """Only at a block boundary: within a block, the request owns the block, or has all that it needs."""
        awaited = self._awaited.get(request)
        if awaited is not None:
            if self._index.presence(awaited) is Presence.PENDING:
                return False
            del self._awaited[request]
        position, offset = divmod(request.num_computed, self.block_tokens)
        if offset:
            return True
        extend_hashes(request, self.namespace, self.block_tokens)
        blocks = request.blocks
        end = num_reusable_blocks(len(request.tokens), self.block_tokens)
        match = self._pool.match(self._index, blocks.hashes[position:end])
        if match.blocks:
            self._put_back(request, position)
            blocks.blocks += match.blocks
            blocks.ids += [block.start for block in match.blocks]
            blocks.num_shown = len(blocks.ids)
            request.fill((position + len(match.blocks)) * self.block_tokens)
        if match.ended is Presence.PENDING:
            self._awaited[request] = blocks.hashes[position + len(match.blocks)]
            return False
        return True

    def chunk(self, request: Request, count: int) -> int:
        """Ends where the next block that is cached or being computed begins."""
        first = -(-request.num_computed // self.block_tokens)
        end = min((request.num_computed + count) // self.block_tokens, len(request.blocks.hashes))
        known = self._index.blocks
        for position in range(first, end):
            if request.blocks.hashes[position] in known and position * self.block_tokens > request.num_computed:
                return position * self.block_tokens - request.num_computed
        return count

    def grow(self, request: Request, num_tokens: int, *, is_loaded: bool = False) -> bool:
        blocks = request.blocks
        missing = -(-num_tokens // self.block_tokens) - len(blocks.ids)
        if missing > self.num_free_blocks:
            return False  # if asked for too much, the pool would still evict what it has
        if missing > 0:
            taken = self._pool.take(missing, 1)
            blocks.blocks += taken
            blocks.ids += [block.start for block in taken]
        self._claim(request, num_tokens)
        return True

    def note_computed(self, request: Request) -> None:
        """Show the full blocks whose tokens are known."""
        blocks = request.blocks
        num_full = min(request.num_computed, len(request.tokens)) // self.block_tokens
        if num_full <= blocks.num_shown:
            return
        extend_hashes(request, self.namespace, self.block_tokens)
        first = blocks.num_shown
        shown = self._pool.show(blocks.blocks[first:num_full], self._index, blocks.hashes[first:num_full])
        self._note_shown(request, [first + position for position in shown])
        blocks.num_shown = num_full

    def num_known_blocks(self, request: Request) -> int:
        extend_hashes(request, self.namespace, self.block_tokens)
        hashes = request.blocks.hashes[: num_reusable_blocks(len(request.tokens), self.block_tokens)]
        return len(list(itertools.takewhile(self._index.blocks.__contains__, hashes)))

    def unclaim(self, request: Request) -> None:
        for block in request.blocks.blocks[-(-request.num_computed // self.block_tokens) :]:
            self._pool.unname(block)

    def hold(self, request: Request, first: int, end: int) -> DeviceLease:
        blocks = request.blocks.blocks[first:end]
        self._pool.reference(blocks)
        return DeviceLease([block.start for block in blocks], blocks)

    def hold_cached(self, hashes: Sequence[BlockHash]) -> DeviceLease:
        blocks = self._pool.match(self._index, hashes).blocks
        return DeviceLease([block.start for block in blocks], blocks)

    def take_spare(self, num_blocks: int) -> DeviceLease | None:
        if num_blocks > self.num_free_blocks:
            return None
        blocks = self._pool.take(num_blocks, 1)
        return DeviceLease([block.start for block in blocks], blocks)

    def release(self, held: DeviceLease) -> None:
        self._pool.free(held.blocks)

    def free(self, request: Request) -> None:
        self._awaited.pop(request, None)
        self.let_go(request)

    def let_go(self, request: Request) -> None:
        self._pool.free(request.blocks.blocks)
        request.blocks.clear()

    def take_copies(self) -> list[BlockCopy]:
        return []

    def note_submitted(self) -> None:
        pass

    def _claim(self, request: Request, num_tokens: int) -> None:
        """Make others wait for the full blocks of known tokens that the scheduled chunk fills."""
        blocks = request.blocks
        end = min(num_tokens // self.block_tokens, len(blocks.hashes))
        claimed = slice(blocks.num_shown, max(blocks.num_shown, end))
        self._pool.name_pending(blocks.blocks[claimed], self._index, blocks.hashes[claimed])

    def _put_back(self, request: Request, position: int) -> None:
        """Return blocks that were taken for tokens that turn out to be cached."""
        blocks = request.blocks
        if len(blocks.ids) > position:
            self._pool.free(blocks.blocks[position:])
            del blocks.blocks[position:]
            del blocks.ids[position:]
            blocks.version += 1

    def _note_shown(self, request: Request, positions: Sequence[int]) -> None:
        """Blocks of the request have been shown."""

    def _note_evicted(self, block: Block) -> None:
        """A cached block was evicted."""
