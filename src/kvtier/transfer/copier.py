"""Moves whole blocks between the device's KV arena and memory of this host. Here: the interface, and a device that
is the host itself.

Loads and stores are begun by the tiers' threads and run beside compute. What orders them with the steps is a *mark*: a
point in the device's work, taken by the engine's thread, after which a copy may begin.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvtier.blocks.layout import KvLayout
from kvtier.memory.copying import copy_blocks
from kvtier.memory.mapped import MappedArena


class DeviceArena(Protocol):
    """The device's KV memory: `num_blocks` blocks of `layout`, side by side from `address` on."""

    num_blocks: int
    layout: KvLayout

    @property
    def address(self) -> int: ...


class Mark(Protocol):
    """A point in the device's work."""

    def query(self) -> bool:
        """The device is past it."""
        ...


class Arrival(Protocol):
    """Something whose layers come one after the other."""

    def precede(self, layer: int) -> None:
        """What the engine's thread hands to the device from now on runs after `layer` of every block has arrived."""
        ...


class Transfer(Arrival, Protocol):
    """Copies that were begun."""

    @property
    def is_done(self) -> bool: ...

    @property
    def num_bytes_left(self) -> int:
        """No more than these have still to come."""
        ...

    def wait(self) -> None:
        """Until they are done. Other threads run meanwhile."""
        ...


class Copier(Protocol):
    """Thread-safe but for `mark`, which is the engine's thread's."""

    def mark(self) -> Mark:
        """After all that was handed to the device so far."""
        ...

    def load(self, arena: MappedArena, offsets: Sequence[int], block_ids: Sequence[int], after: Mark) -> Transfer:
        """Begin to copy what lies at `offsets` of `arena` into the device's blocks."""
        ...

    def store(self, block_ids: Sequence[int], arena: MappedArena, offsets: Sequence[int], after: Mark) -> Transfer:
        """Begin to copy the device's blocks to `offsets` of `arena`."""
        ...

    def adopt(self, arena: MappedArena) -> None:
        """This arena is going to be copied from and to: make that fast, in the background. A second call is free."""
        ...

    def close(self) -> None: ...


class _Done:
    """Copies that were over when their call returned."""

    is_done = True
    num_bytes_left = 0

    def query(self) -> bool:
        return True

    def wait(self) -> None:
        pass

    def precede(self, layer: int) -> None:
        pass


_DONE = _Done()


class HostCopier:
    """The device is the host's memory: a copy is a move, done by the thread that asks for it."""

    def __init__(self, kv: DeviceArena) -> None:
        self._block_bytes = kv.layout.block_bytes
        self._base = kv.address
        self._kv = kv  # keeps the memory

    def mark(self) -> Mark:
        return _DONE

    def load(self, arena: MappedArena, offsets: Sequence[int], block_ids: Sequence[int], after: Mark) -> Transfer:
        with arena.in_use():
            copy_blocks(self._device(block_ids), [arena.address + offset for offset in offsets], self._block_bytes)
        return _DONE

    def store(self, block_ids: Sequence[int], arena: MappedArena, offsets: Sequence[int], after: Mark) -> Transfer:
        with arena.in_use():
            for offset in offsets:
                arena.populate(offset, self._block_bytes)
            copy_blocks([arena.address + offset for offset in offsets], self._device(block_ids), self._block_bytes)
        return _DONE

    def adopt(self, arena: MappedArena) -> None:
        pass

    def close(self) -> None:
        pass

    def _device(self, block_ids: Sequence[int]) -> list[int]:
        return [self._base + block_id * self._block_bytes for block_id in block_ids]
