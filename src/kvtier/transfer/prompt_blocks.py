"""The blocks that a prefetch works on: an engine implements this protocol for each of its prompts."""

from __future__ import annotations

from typing import Protocol

from kvtier.blocks.hashing import BlockHash
from kvtier.transfer.device_lease import DeviceLease


class PromptBlocks(Protocol):
    """One prompt's tokens, and its blocks on the device as its engine keeps them."""

    block_tokens: int

    @property
    def ids(self) -> list[int]:
        """Its blocks on the device, in order."""
        ...

    @property
    def hashes(self) -> list[BlockHash]:
        """The hashes of its full blocks, as far as they were computed."""
        ...

    @property
    def num_tokens(self) -> int:
        """Number of tokens known so far."""
        ...

    @property
    def num_computed(self) -> int:
        """Tokens already available. The last is always computed."""
        ...

    @property
    def num_filled(self) -> int:
        """Tokens whose KV is in the blocks: `num_computed`, or one more if that includes the last token."""
        ...

    @property
    def num_wanted(self) -> int:
        """Leading blocks that are useful if they are hits."""
        ...

    def hash_up_to(self, end: int | None) -> None:
        """Hash full blocks of known tokens, but none beyond block `end` from now on; without `end`, all of them."""
        ...

    def extend_hashes(self) -> None:
        """Hash the full blocks of known tokens that are not hashed yet, up to the limit of `hash_up_to`."""
        ...

    def num_on_device(self) -> int:
        """Leading blocks that the device has, or will compute for another prompt."""
        ...

    def extend(self) -> bool:
        """Take the next blocks that the device has. False if another prompt is computing the next one: wait."""
        ...

    def grow(self, num_blocks: int) -> bool:
        """Have `num_blocks` blocks, to load into. False, and nothing changes, if there is no room."""
        ...

    def fill(self, num_blocks: int) -> None:
        """The first `num_blocks` were loaded."""
        ...

    def show(self) -> None:
        """Loaded blocks are now valid for every later step and for other prompts."""
        ...

    def unclaim(self) -> None:
        """Blocks taken beyond `num_computed` will not be loaded: no prompt need wait for them."""
        ...

    def lease(self, first: int, end: int) -> DeviceLease:
        """Blocks `first..end`, to be copied away."""
        ...
