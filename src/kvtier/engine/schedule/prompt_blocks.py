"""A request's tokens and blocks, as `transfer` asks for them. No torch."""

from __future__ import annotations

from kvtier.blocks.hashing import BlockHash
from kvtier.engine.schedule.block_manager import BlockManager
from kvtier.engine.schedule.naive_blocks import extend_hashes, num_reusable_blocks
from kvtier.engine.schedule.request import Request
from kvtier.transfer.device_lease import DeviceLease


class RequestBlocks:
    """A `PromptBlocks` over the engine's block manager."""

    __slots__ = ("_manager", "_request", "block_tokens")

    def __init__(self, request: Request, manager: BlockManager) -> None:
        self._request = request
        self._manager = manager
        self.block_tokens = manager.block_tokens

    @property
    def ids(self) -> list[int]:
        return self._request.blocks.ids

    @property
    def hashes(self) -> list[BlockHash]:
        return self._request.blocks.hashes

    @property
    def num_tokens(self) -> int:
        return len(self._request.tokens)

    @property
    def num_computed(self) -> int:
        return self._request.num_computed

    @property
    def num_filled(self) -> int:
        return self._request.num_there

    @property
    def num_wanted(self) -> int:
        return num_reusable_blocks(len(self._request.tokens), self.block_tokens)

    def hash_up_to(self, end: int | None) -> None:
        self._request.blocks.max_hashes = end

    def extend_hashes(self) -> None:
        extend_hashes(self._request, self._manager.namespace, self.block_tokens)

    def num_on_device(self) -> int:
        return self._manager.num_known_blocks(self._request)

    def extend(self) -> bool:
        """Whole blocks only: a slower tier may have the rest of a block that the device has in part."""
        request = self._request
        start = request.num_computed
        is_clear = self._manager.extend(request, partially=False)
        if not request.num_preemptions:
            request.cached_tokens += request.num_computed - start
        return is_clear

    def grow(self, num_blocks: int) -> bool:
        return self._manager.grow(self._request, num_blocks * self.block_tokens, is_loaded=True)

    def fill(self, num_blocks: int) -> None:
        self._request.fill(num_blocks * self.block_tokens)

    def show(self) -> None:
        self._manager.note_computed(self._request)

    def unclaim(self) -> None:
        self._manager.unclaim(self._request)

    def lease(self, first: int, end: int) -> DeviceLease:
        return self._manager.hold(self._request, first, end)
