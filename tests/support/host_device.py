"""A device that is plain memory, and its copier: what tests of the engine's traffic with real tiers are built from."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from kvtier.blocks.hashing import BlockHash
from kvtier.memory.copying import address_of, copy_blocks
from kvtier.memory.mapped import MappedArena
from kvtier.testing.tier_contract import LAYOUT, payload
from kvtier.transfer.copier import Copies, Mark
from kvtier.transfer.device_lease import DeviceLease
from tests.support.waiting import LIMIT_S

WAIT_S = LIMIT_S


class Past:
    """A mark that the device is past."""

    def query(self) -> bool:
        return True


class Arrived:
    """Copies that are done as soon as they begin."""

    is_done = True
    num_bytes_left = 0

    def __init__(self, block_ids: Sequence[int]) -> None:
        self.block_ids = list(block_ids)

    def wait(self) -> None:
        pass

    def precede(self, layer: int) -> None:
        pass


class GatedTransfer:
    """Copies when a caller waits for it, once the gate is open."""

    def __init__(self, gate: threading.Event, targets: list[int], sources: list[int], arena: MappedArena) -> None:
        self._gate = gate
        self._targets = targets
        self._sources = sources
        self._arena = arena
        self._lock = threading.Lock()
        self.is_done = False
        self.num_bytes_left = len(targets) * LAYOUT.block_bytes
        self.preceded: list[int] = []
        self.error: Exception | None = None

    def wait(self) -> None:
        assert self._gate.wait(WAIT_S), "the gate stayed shut"
        if self.error is not None:
            raise self.error
        with self._lock:
            if not self.is_done:
                with self._arena.in_use():
                    copy_blocks(self._targets, self._sources, LAYOUT.block_bytes)
                self.is_done = True
                self.num_bytes_left = 0

    def precede(self, layer: int) -> None:
        self.preceded.append(layer)


class HostDevice:
    """`num_blocks` blocks and a copier for them. Copies end while `gate` is open."""

    is_whole = True

    def __init__(self, num_blocks: int = 16) -> None:
        self._memory = bytearray(num_blocks * LAYOUT.block_bytes)
        self._base = address_of(memoryview(self._memory))
        self.gate = threading.Event()
        self.gate.set()
        self.later_gate: threading.Event | None = None
        """If given, the gate of all copies but the first."""
        self.error: Exception | None = None
        """Copies cannot be begun."""
        self.late_error: Exception | None = None
        """Copies fail while they run."""
        self.stored: list[list[int]] = []
        self.transfers: list[GatedTransfer] = []
        self.is_closed = False

    def fill(self, block_ids: Sequence[int], hashes: Sequence[BlockHash]) -> DeviceLease:
        """The blocks hold the bytes that belong to `hashes`."""
        for block_id, block_hash in zip(block_ids, hashes, strict=True):
            first = block_id * LAYOUT.block_bytes
            self._memory[first : first + LAYOUT.block_bytes] = payload(block_hash)
        return DeviceLease(list(block_ids), [])

    def block(self, block_id: int) -> bytes:
        return bytes(self._memory[block_id * LAYOUT.block_bytes : (block_id + 1) * LAYOUT.block_bytes])

    def mark(self) -> Mark:
        return Past()

    def load(self, arena: MappedArena, offsets: Sequence[int], places: Sequence[int], after: Mark) -> Copies:
        self._fail()
        return self._begin(arena, self._addresses(places), [arena.address + offset for offset in offsets])

    def store(self, places: Sequence[int], arena: MappedArena, offsets: Sequence[int], after: Mark) -> Copies:
        self._fail()
        self.stored.append(list(places))
        for offset in offsets:
            arena.populate(offset, LAYOUT.block_bytes)
        return self._begin(arena, [arena.address + offset for offset in offsets], self._addresses(places))

    def adopt(self, arena: MappedArena) -> None:
        pass

    def close(self) -> None:
        self.is_closed = True

    def _begin(self, arena: MappedArena, targets: list[int], sources: list[int]) -> GatedTransfer:
        gate = self.later_gate if self.transfers and self.later_gate is not None else self.gate
        transfer = GatedTransfer(gate, targets, sources, arena)
        transfer.error = self.late_error
        self.transfers.append(transfer)
        return transfer

    def _addresses(self, block_ids: Sequence[int]) -> list[int]:
        return [self._base + block_id * LAYOUT.block_bytes for block_id in block_ids]

    def _fail(self) -> None:
        if self.error is not None:
            raise self.error
