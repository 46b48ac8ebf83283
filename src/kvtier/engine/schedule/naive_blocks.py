"""Blocks without a prefix cache: a free list, and for each request a plain list of ids. No torch."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from kvtier.blocks.hashing import BlockHash, block_hashes, salted_root
from kvtier.blocks.namespace import Namespace
from kvtier.engine.schedule.request import Request
from kvtier.engine.schedule.step import BlockCopy
from kvtier.transfer.device_lease import DeviceLease


class NaiveBlocks:
    """Nothing is shared, nothing is kept."""

    def __init__(self, num_blocks: int, block_tokens: int, namespace: Namespace) -> None:
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self.namespace = namespace
        self._free_ids = deque(range(num_blocks))
        """The blocks free for longest come first: a load into others would wait for steps that still use them."""
        self._num_holds: Counter[int] = Counter()
        self._freed_while_held: set[int] = set()

    @property
    def num_free_blocks(self) -> int:
        return len(self._free_ids)

    @property
    def num_held_blocks(self) -> int:
        return self.num_blocks - len(self._free_ids)

    def extend(self, request: Request, *, partially: bool = True) -> bool:
        return True

    def num_known_blocks(self, request: Request) -> int:
        return 0

    def unclaim(self, request: Request) -> None:
        pass

    def chunk(self, request: Request, count: int) -> int:
        return count

    def grow(self, request: Request, num_tokens: int, *, is_loaded: bool = False) -> bool:
        ids = request.blocks.ids
        missing = -(-num_tokens // self.block_tokens) - len(ids)
        if missing > len(self._free_ids):
            return False
        ids += [self._free_ids.popleft() for _ in range(missing)]
        return True

    def note_computed(self, request: Request) -> None:
        pass

    def hold(self, request: Request, first: int, end: int) -> DeviceLease:
        ids = request.blocks.ids[first:end]
        self._num_holds.update(ids)
        return DeviceLease(ids, [])

    def hold_cached(self, hashes: Sequence[BlockHash]) -> DeviceLease:
        return DeviceLease([], [])

    def take_spare(self, num_blocks: int) -> DeviceLease | None:
        return None

    def release(self, held: DeviceLease) -> None:
        for block_id in held.ids:
            self._num_holds[block_id] -= 1
            if not self._num_holds[block_id]:
                del self._num_holds[block_id]
                if block_id in self._freed_while_held:
                    self._freed_while_held.remove(block_id)
                    self._free_ids.append(block_id)

    def free(self, request: Request) -> None:
        ids = request.blocks.ids
        if self._num_holds:
            held = [block_id for block_id in ids if block_id in self._num_holds]
            self._freed_while_held.update(held)
            ids = [block_id for block_id in ids if block_id not in self._num_holds]
        self._free_ids += ids
        request.blocks.clear()

    def let_go(self, request: Request) -> None:
        self.free(request)

    def take_copies(self) -> list[BlockCopy]:
        return []

    def note_submitted(self) -> None:
        pass


class HashedBlocks(NaiveBlocks):
    """Hashes every full block, like a prefix cache, but never uses the hashes: measures the cost of hashing alone."""

    def note_computed(self, request: Request) -> None:
        extend_hashes(request, self.namespace, self.block_tokens)


def num_reusable_blocks(num_tokens: int, block_tokens: int) -> int:
    """How many blocks of a prompt are useful if they are hits. The last token is always computed.

    If its block is shared, the token is not written again; blocks of one token are too small for that.
    """
    return num_tokens // block_tokens if block_tokens > 1 else num_tokens - 1


def root_of(request: Request, namespace: Namespace) -> Namespace:
    """The root from which the hashes of a request's blocks are chained."""
    blocks = request.blocks
    if blocks.root is None:
        blocks.root = salted_root(namespace, request.salt)
    return blocks.root


def extend_hashes(request: Request, namespace: Namespace, block_tokens: int) -> None:
    """Hash the full blocks of known tokens that are not hashed yet, up to the request's `max_hashes`."""
    blocks, hashes = request.blocks, request.blocks.hashes
    end = len(request.tokens) // block_tokens
    if blocks.max_hashes is not None:
        end = min(end, blocks.max_hashes)
    if len(hashes) < end:
        parent = hashes[-1] if hashes else None
        root = root_of(request, namespace)
        tokens = request.tokens[len(hashes) * block_tokens : end * block_tokens]
        hashes += block_hashes(root, tokens, block_tokens, parent=parent)
