"""Which blocks of the device's pool a request has: what every block manager offers to the scheduler. No torch.

The engine's thread calls everything. Blocks that a step fills count as filled once the step was handed to the device:
the device runs steps in order, so whoever reads them runs later.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

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
        """Blocks that nobody references; some of them may be cached."""
        ...

    def extend(self, request: Request, *, partially: bool = True) -> bool:
        """Give `request` what is cached of its next tokens, and count it as computed. At least one token is left.

        Not `partially`: whole blocks only, since a slower tier has the next one. False when the next block is just
        being computed by another request: wait, and ask again.
        """
        ...

    def chunk(self, request: Request, count: int) -> int:
        """How many of its next `count` tokens to compute in one go: less where cached blocks follow."""
        ...

    def grow(self, request: Request, num_tokens: int, *, is_loaded: bool = False) -> bool:
        """Blocks for the first `num_tokens`; False, and nothing changes, when there is no room.

        The step that is being scheduled fills them, unless what comes into them `is_loaded`.
        """
        ...

    def note_computed(self, request: Request) -> None:
        """The KV of its first `num_computed` tokens is there for every later step."""
        ...

    def num_known_blocks(self, request: Request) -> int:
        """How many leading blocks of its prompt are on the device, or being computed; hashes them if that is done."""
        ...

    def unclaim(self, request: Request) -> None:
        """Blocks that were taken for tokens to come, beyond `num_computed`: nobody need wait for them."""
        ...

    def hold(self, request: Request, first: int, end: int) -> DeviceLease:
        """Blocks `first..end` of the request, to be copied away: they are not written again before `release`."""
        ...

    def release(self, held: DeviceLease) -> None: ...

    def free(self, request: Request) -> None:
        """Take all blocks back; what is computed may stay cached."""
        ...

    def let_go(self, request: Request) -> None:
        """Take back what `extend` gave to a request that is not admitted after all. What it waits for is remembered."""
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
