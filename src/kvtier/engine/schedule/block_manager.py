"""The interface of block managers for the scheduler: which of the device's blocks a request has. No torch.

The engine's thread calls everything. Blocks that a step fills count as filled once the step was handed to the device:
the device runs steps in order, so their readers run later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, Protocol

from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.namespace import Namespace
from kvtier.engine.schedule.naive_blocks import HashedBlocks, NaiveBlocks
from kvtier.engine.schedule.request import Request
from kvtier.engine.schedule.shared_blocks import SharedBlocks
from kvtier.engine.schedule.step import BlockCopy
from kvtier.engine.schedule.yoco_blocks import YocoBlocks
from kvtier.transfer.device_lease import DeviceLease

BlockManagerName = Literal["naive", "disable_prefix_caching", "prefix_caching", "yoco"]


class BlockManager(Protocol):
    """Owns the ids of the device's blocks."""

    num_blocks: int
    block_tokens: int
    namespace: Namespace

    @property
    def num_free_blocks(self) -> int:
        """Unreferenced blocks; some of them may be cached."""
        ...

    @property
    def num_held_blocks(self) -> int:
        """Blocks that are referenced or cached: the others are empty."""
        ...

    def extend(self, request: Request, *, partially: bool = True) -> bool:
        """Give `request` the cached blocks of its next tokens, and count those as computed. At least one token is left.

        Unless `partially`, only whole blocks, since a slower tier has the next one. False if another request is
        computing the next block: wait, and ask again.
        """
        ...

    def chunk(self, request: Request, count: int) -> int:
        """How many of its next `count` tokens to compute at once: fewer if cached blocks follow."""
        ...

    def grow(self, request: Request, num_tokens: int, *, is_loaded: bool = False) -> bool:
        """Take blocks for the first `num_tokens`; False, and nothing changes, if there is no room.

        The step being scheduled fills them, unless `is_loaded`: then a load does.
        """
        ...

    def note_computed(self, request: Request) -> None:
        """The KV of its first `num_computed` tokens is present for every later step."""
        ...

    def num_known_blocks(self, request: Request) -> int:
        """How many leading blocks of its prompt are on the device, or being computed; hashes them if necessary."""
        ...

    def unclaim(self, request: Request) -> None:
        """Blocks taken for later tokens, beyond `num_computed`, will not be computed: no request need wait for them."""
        ...

    def hold(self, request: Request, first: int, end: int) -> DeviceLease:
        """Blocks `first..end` of the request, to be copied away: they are not written again before `release`."""
        ...

    def hold_cached(self, hashes: Sequence[BlockHash]) -> DeviceLease:
        """The leading blocks of `hashes` that are cached, held until `release`."""
        ...

    def take_spare(self, num_blocks: int) -> DeviceLease | None:
        """Blocks for the caller's own use until `release`; None if not enough are free."""
        ...

    def release(self, held: DeviceLease) -> None: ...

    def free(self, request: Request) -> None:
        """Take all blocks back; computed ones may stay cached."""
        ...

    def let_go(self, request: Request) -> None:
        """Take back what `extend` gave to a request that is not admitted after all. The block it waits for is kept."""
        ...

    def take_copies(self) -> list[BlockCopy]:
        """Copies that must precede the step that is being scheduled."""
        ...

    def note_submitted(self) -> None:
        """The step was handed to the device, with its copies."""
        ...


_MANAGERS: dict[str, Callable[[int, int, Namespace], BlockManager]] = {
    "naive": NaiveBlocks,
    "disable_prefix_caching": HashedBlocks,
    "prefix_caching": SharedBlocks,
    "yoco": YocoBlocks,
}


def make_block_manager(
    name: BlockManagerName, num_blocks: int, block_tokens: int, namespace: Namespace
) -> BlockManager:
    return _MANAGERS[name](num_blocks, block_tokens, namespace)
