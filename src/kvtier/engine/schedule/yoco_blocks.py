"""You only compute once: partial blocks are reused too. No torch.

The continuations of a block are indexed by their first token; the one that agrees longest with a request's next tokens
is copied into a block of the request's own, which continues from there. The last block of a prompt can be copied as
soon as the step that fills it was handed to the device, and stays cached after its request.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.blocks.block import Block, BlockState
from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.namespace import Namespace
from kvtier.engine.schedule.naive_blocks import extend_hashes, root_of
from kvtier.engine.schedule.request import Request
from kvtier.engine.schedule.shared_blocks import SharedBlocks
from kvtier.engine.schedule.step import BlockCopy

_PARTIAL = b"partial block"


@dataclass(slots=True)
class _Continuation:
    """The tokens that a block holds, or will hold once the current step is handed over (`is_ready`)."""

    parent: bytes
    tokens: list[int]
    is_ready: bool


class YocoBlocks(SharedBlocks):
    """Like `SharedBlocks`, but only one token of a repeated prompt is computed."""

    def __init__(self, num_blocks: int, block_tokens: int, namespace: Namespace) -> None:
        super().__init__(num_blocks, block_tokens, namespace)
        self._continuations: dict[Block, _Continuation] = {}
        self._by_first: dict[tuple[bytes, int], dict[Block, None]] = {}
        self._sources: dict[Block, Block] = {}
        self._filling: list[Block] = []

    def extend(self, request: Request, *, partially: bool = True) -> bool:
        if not super().extend(request):
            return False
        if not partially:
            return True
        offset = request.num_computed % self.block_tokens
        if offset or len(request.tokens) - request.num_computed <= 1:
            return True
        source, count = self._longest(request)
        if source is None:
            return True
        if not self._continuations[source].is_ready:
            return False
        self._start_from(request, source, count)
        return True

    def grow(self, request: Request, num_tokens: int, *, is_loaded: bool = False) -> bool:
        if not super().grow(request, num_tokens, is_loaded=is_loaded):
            return False
        if not is_loaded and num_tokens == len(request.tokens) > request.blocks.num_filled:
            # All known tokens of the request: requests with the same tokens also wait for their end.
            extend_hashes(request, self.namespace, self.block_tokens)
            position = (num_tokens - 1) // self.block_tokens
            block = request.blocks.blocks[position]
            self._note(block, request, position, num_tokens - position * self.block_tokens, is_ready=False)
            self._filling.append(block)
        return True

    def note_submitted(self) -> None:
        self._pool.free(list(self._sources.values()))
        self._sources.clear()
        for block in self._filling:
            if block in self._continuations:
                self._continuations[block].is_ready = True
        self._filling.clear()

    def take_copies(self) -> list[BlockCopy]:
        return [BlockCopy(source.start, target.start) for target, source in self._sources.items()]

    def let_go(self, request: Request) -> None:
        """The computed part of the last block stays, under a hash of its own."""
        for block in request.blocks.blocks:
            source = self._sources.pop(block, None)
            if source is not None:  # the copy was never made
                self._pool.free([source])
                request.num_computed = request.num_computed // self.block_tokens * self.block_tokens
        self._keep_partial(request)
        super().let_go(request)

    def _keep_partial(self, request: Request) -> None:
        blocks = request.blocks
        known = min(request.num_computed, len(request.tokens))
        position, offset = divmod(known, self.block_tokens)
        kept: Block | None = None
        if offset and position < len(blocks.blocks):
            block = blocks.blocks[position]
            if block.state is BlockState.PRIVATE and block not in self._filling:
                name = _partial_hash(self._parent(request, position), request.tokens[-offset + known : known])
                if self._pool.name(block, self._index, name, is_ready=True):
                    self._note(block, request, position, offset, is_ready=True)
                    kept = block
        for block in blocks.blocks:
            if block is not kept and block.state is not BlockState.READY:
                self._forget(block)

    def _start_from(self, request: Request, source: Block, count: int) -> None:
        """Copy `source` into a block of the request's own; if there is no room for one, nothing changes."""
        self._pool.reference([source])
        position = request.num_computed // self.block_tokens
        blocks = request.blocks
        if len(blocks.blocks) == position:
            taken = self._pool.take(1, 1)
            if not taken:
                self._pool.free([source])
                return
            blocks.blocks += taken
            blocks.ids.append(taken[0].start)
        self._sources[blocks.blocks[position]] = source
        request.num_computed += count

    def _longest(self, request: Request) -> tuple[Block | None, int]:
        """The block that agrees longest with the request's next tokens, and how long; at least one token is left."""
        position = request.num_computed // self.block_tokens
        first = request.num_computed
        # Less than a block: a whole one would be shared under its hash, not copied.
        wanted = request.tokens[first : min(first + self.block_tokens, len(request.tokens)) - 1]
        if not wanted:
            return None, 0
        best: Block | None = None
        longest = 0
        for block in self._by_first.get((self._parent(request, position), wanted[0]), ()):
            length = _common(self._continuations[block].tokens, wanted)
            is_longer = length > longest
            if is_longer or (length == longest and best is not None and not self._continuations[best].is_ready):
                best, longest = block, length
        return best, longest

    def _parent(self, request: Request, position: int) -> bytes:
        return request.blocks.hashes[position - 1] if position else root_of(request, self.namespace)

    def _note_shown(self, request: Request, positions: Sequence[int]) -> None:
        for position in positions:
            self._note(request.blocks.blocks[position], request, position, self.block_tokens, is_ready=True)

    def _note(self, block: Block, request: Request, position: int, count: int, *, is_ready: bool) -> None:
        self._forget(block)
        parent = self._parent(request, position)
        first = position * self.block_tokens
        tokens = request.tokens[first : first + count]
        self._continuations[block] = _Continuation(parent, tokens, is_ready)
        self._by_first.setdefault((parent, tokens[0]), {})[block] = None

    def _note_evicted(self, block: Block) -> None:
        self._forget(block)

    def _forget(self, block: Block) -> None:
        known = self._continuations.pop(block, None)
        if known is None:
            return
        key = (known.parent, known.tokens[0])
        siblings = self._by_first[key]
        del siblings[block]
        if not siblings:
            del self._by_first[key]


def _common(tokens: list[int], others: list[int]) -> int:
    """The number of equal leading tokens."""
    count = min(len(tokens), len(others))
    if tokens[:count] == others[:count]:
        return count
    return next(position for position in range(count) if tokens[position] != others[position])


def _partial_hash(parent: bytes, tokens: list[int]) -> BlockHash:
    """Never equal to that of a full block: it is over other bytes."""
    return BlockHash(hashlib.sha256(_PARTIAL + parent + array("I", tokens).tobytes()).digest())
