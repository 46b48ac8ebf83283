"""A simulated device whose blocks copies may write or read during steps, and what the blocks of each hash hold.

Everything fails at once that would be silent corruption on a real device: a write to a block that is held for a store,
or that a copy is on its way to; a read from such a block.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.blocks.hashing import BlockHash, block_hashes
from kvtier.engine.schedule.request import Request
from kvtier.engine.schedule.step import Step, StepRow
from kvtier.transfer.device_lease import DeviceLease
from tests.support.engine_building import NAMESPACE, SimulatedDevice, checksums

NUM_LAYERS = 2

Sums = tuple[int, ...]
"""The KV of one block, as the simulated device keeps it."""


class BlockBook:
    """What each block hash stands for."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._sums: dict[BlockHash, Sums] = {}

    def note(self, tokens: Sequence[int]) -> list[BlockHash]:
        size = self._block_tokens
        sums = checksums(tokens)
        hashes = block_hashes(NAMESPACE, tokens, size)
        for position, block_hash in enumerate(hashes):
            self._sums[block_hash] = tuple(sums[position * size : (position + 1) * size])
        return hashes

    def sums(self, block_hash: BlockHash, requests: Sequence[Request]) -> Sums:
        if block_hash not in self._sums:
            for request in requests:
                self.note(request.tokens)
        return self._sums[block_hash]


class SimulatedTransfer:
    """Blocks on their way to the device. They land when told, or before the first step that follows."""

    def __init__(self, device: TieredDevice, block_ids: Sequence[int], blocks: Sequence[Sums]) -> None:
        self.block_ids = list(block_ids)
        self._device = device
        self._blocks = blocks
        self.has_landed = False
        self.is_done = False

    def wait(self) -> None:
        raise AssertionError("the engine's thread never waits for a copy")

    def precede(self, layer: int) -> None:
        if layer == NUM_LAYERS - 1:
            self.land()

    def land(self) -> None:
        """All that was begun before it has landed then: copies to the device run one after the other."""
        if self.has_landed:
            return
        if self._device.in_flight[0] is not self:
            self._device.in_flight[self._device.in_flight.index(self) - 1].land()
        self.has_landed = True
        self._device.in_flight.remove(self)
        for block_id, sums in zip(self.block_ids, self._blocks, strict=True):
            assert block_id not in self._device.held, "a load writes to a block that is held for a store"
            for offset, checksum in enumerate(sums):
                self._device.kv[block_id, offset] = checksum

    def finish(self) -> None:
        self.land()
        self.is_done = True


class TieredDevice(SimulatedDevice):
    """Like `SimulatedDevice`, with blocks that copies write or read during steps."""

    def __init__(self, block_tokens: int, num_slots: int) -> None:
        super().__init__(block_tokens, num_slots)
        self.in_flight: list[SimulatedTransfer] = []
        self.held: dict[int, int] = {}
        """How many stores hold each block."""
        self.num_steps = 0
        self.last_uses: dict[int, int] = {}
        """For each block the last step that read or wrote it."""

    def block(self, block_id: int) -> tuple[int | None, ...]:
        return tuple(self.kv.get((block_id, offset)) for offset in range(self.block_tokens))

    def begin(self, block_ids: Sequence[int], blocks: Sequence[Sums]) -> SimulatedTransfer:
        under_way = self.ids_in_flight()
        for block_id in block_ids:
            assert block_id not in under_way, "two loads write to one block"
            assert block_id not in self.held, "a load writes to a block that is held for a store"
            for offset in range(self.block_tokens):
                self.kv.pop((block_id, offset), None)
        transfer = SimulatedTransfer(self, block_ids, blocks)
        self.in_flight.append(transfer)
        return transfer

    def ids_in_flight(self) -> set[int]:
        return {block_id for transfer in self.in_flight for block_id in transfer.block_ids}

    def hold(self, held: DeviceLease) -> None:
        for block_id in held.ids:
            self.held[block_id] = self.held.get(block_id, 0) + 1

    def release(self, held: DeviceLease) -> None:
        for block_id in held.ids:
            self.held[block_id] -= 1
            if not self.held[block_id]:
                del self.held[block_id]

    def run(self, step: Step, running: Sequence[Request]) -> list[tuple[StepRow, int]]:
        self.num_steps += 1
        for copy in step.copies:
            self.last_uses[copy.source] = self.last_uses[copy.target] = self.num_steps
        for row in step.rows:
            used = row.request.blocks.ids[: self._num_blocks(row)]
            self.last_uses.update(dict.fromkeys(used, self.num_steps))
        return super().run(step, running)

    def _copy(self, step: Step) -> None:
        under_way = self.ids_in_flight()
        for copy in step.copies:
            assert copy.source not in under_way, "a copy reads a block that has not arrived"
            assert copy.target not in under_way, "a copy writes where a load writes"
            assert copy.target not in self.held, "a copy writes to a block that is held for a store"
        super()._copy(step)
        for transfer in step.arrivals:
            for layer in range(NUM_LAYERS):
                transfer.precede(layer)

    def _read(self, row: StepRow) -> list[int]:
        under_way = self.ids_in_flight()
        size = self.block_tokens
        ids = row.request.blocks.ids
        end = row.start + row.count
        assert not under_way & set(ids[: -(-end // size)]), f"{row.request} reads or writes what has not arrived"
        written = ids[row.start // size : -(-end // size)] if row.writes else []
        assert not self.held.keys() & set(written), f"{row.request} writes to a block that is held for a store"
        return super()._read(row)
