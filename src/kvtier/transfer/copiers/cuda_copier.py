"""The copier of a CUDA device: whole blocks by DMA, in batches, on streams beside compute.

Loads and stores have a stream each. A large load goes in groups of layers, so that a step may begin on the first while
the rest arrives. Any thread may copy; a thread of the copier's own gives back what copies hold, whether or not somebody
waits for them.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from kvtier.blocks.layout import KvLayout
from kvtier.errors import TierUnavailable
from kvtier.latency_guard import give_way, yield_to
from kvtier.memory.cuda import PIECE_BYTES, Direction, Registration, load_cudart
from kvtier.memory.mapped import MappedArena
from kvtier.memory.registered import RegisteredArenas
from kvtier.transfer.copier import DeviceArena, Mark, Transfer

NUM_GROUPS = 4
"""A step begins after a quarter of the load; the whole of it takes 0 to 2% longer than in one group."""

MIN_GROUPED_BYTES = 96 << 20
"""Less than this is here in two milliseconds, in one group: each costs its thread some turns with the interpreter. More
than a unit from disk."""

_MIN_PART_BYTES = 128 << 10
"""Copies of less than this leave the bus idle."""
_FIRST_CALL_BLOCKS = 64
_MAX_CALL_BLOCKS = 1024
"""Blocks handed over in a call: a microsecond each, and only then does the device begin on them. So few at first, and
twice as many each time, since a thread that has to wait for the interpreter between two calls may wait long."""

_SWITCH_INTERVAL_S = 0.0005
"""By default a thread that computes keeps the interpreter for ten times as long from those that hand copies over."""


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers of a block that are copied together: `nbytes` from byte `first_byte` of it."""

    first_layer: int
    num_layers: int
    first_byte: int
    nbytes: int


def layer_groups(layout: KvLayout, num_groups: int = NUM_GROUPS) -> list[LayerGroup]:
    """All layers, in order, in `num_groups` groups that differ by a layer at most; in fewer where those were small."""
    num_groups = max(1, min(num_groups, layout.layers, layout.block_bytes // _MIN_PART_BYTES))
    layer_bytes = layout.block_bytes // layout.layers
    bounds = [layout.layers * number // num_groups for number in range(num_groups + 1)]
    return [
        LayerGroup(first, end - first, first * layer_bytes, (end - first) * layer_bytes)
        for first, end in itertools.pairwise(bounds)
    ]


class CudaArena(DeviceArena, Protocol):
    """A device's arena as a tensor."""

    blocks: torch.Tensor


class _CudaTransfer:
    """Copies under way. Their arena stays mapped until somebody sees that they are done; the copier's thread does."""

    def __init__(self, arena: MappedArena, groups: Sequence[LayerGroup], num_blocks: int, device: torch.device) -> None:
        """Raises `LeaseError` when the arena is closed."""
        self._groups = groups
        self._num_blocks = num_blocks
        self._device = device
        self._arrivals: list[torch.cuda.Event] = []
        self._lock = threading.Lock()
        self._use = contextlib.ExitStack()
        self._use.enter_context(arena.in_use())

    def submitted(self, stream: torch.cuda.Stream) -> None:
        """The next group was handed to `stream`."""
        event = torch.cuda.Event(blocking=True)
        event.record(stream)
        self._arrivals.append(event)

    @property
    def is_done(self) -> bool:
        try:
            is_done: bool = self._arrivals[-1].query()
        except RuntimeError as error:
            self.end_use()
            raise TierUnavailable(f"the device failed: {error}") from error
        if is_done:
            self.end_use()
        return is_done

    @property
    def num_bytes_left(self) -> int:
        """Groups count as a whole."""
        if self.is_done:
            return 0
        pairs = zip(self._groups, self._arrivals, strict=True)
        return self._num_blocks * sum(group.nbytes for group, arrival in pairs if not arrival.query())

    def wait(self) -> None:
        try:
            if not self._arrivals[-1].query():  # which keeps the interpreter
                self._arrivals[-1].synchronize()
                give_way()
        except RuntimeError as error:
            raise TierUnavailable(f"the device failed: {error}") from error
        finally:
            self.end_use()

    def precede(self, layer: int) -> None:
        number = next(i for i, group in enumerate(self._groups) if layer < group.first_layer + group.num_layers)
        torch.cuda.current_stream(self._device).wait_event(self._arrivals[number])

    def end_use(self) -> None:
        with self._lock:
            self._use.close()


class CudaCopier:
    """A `Copier` for an arena on a GPU. Closed after all who copy, and before the arenas that it adopted."""

    def __init__(
        self,
        kv: CudaArena,
        num_groups: int = NUM_GROUPS,
        piece_bytes: int = PIECE_BYTES,
        min_grouped_bytes: int = MIN_GROUPED_BYTES,
        let_pass: Callable[[], None] | None = None,
    ) -> None:
        """Raises `TierUnavailable` when torch's CUDA runtime cannot be found.

        Threads of this process take turns more often from now on. The copier's own does `let_pass` where it can.
        """
        self._kv = kv
        self._device = kv.blocks.device
        self._base = kv.address
        self._block_bytes = kv.layout.block_bytes
        self._groups = layer_groups(kv.layout, num_groups)
        self._whole = layer_groups(kv.layout, 1)
        self._min_grouped_bytes = min_grouped_bytes
        self._cudart = load_cudart((int(torch.version.cuda.split(".")[0]),))
        self._loads = torch.cuda.Stream(self._device, priority=-1)  # a request waits for them; for stores nobody does
        self._stores = torch.cuda.Stream(self._device, priority=0)
        sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_INTERVAL_S))
        self._condition = threading.Condition()
        self._is_closed = False
        self._num_submitting = 0
        self._to_end: queue.SimpleQueue[_CudaTransfer | Registration | None] = queue.SimpleQueue()
        self._arenas = RegisteredArenas(
            self._cudart, self._device.index, kv.layout.slot_bytes, self._to_end.put, piece_bytes
        )
        self._thread = threading.Thread(target=self._run, args=(let_pass,), name="kvtier-copies", daemon=True)
        self._thread.start()

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def load(self, arena: MappedArena, offsets: Sequence[int], block_ids: Sequence[int], after: Mark) -> Transfer:
        is_large = len(block_ids) * self._block_bytes >= self._min_grouped_bytes
        groups = self._groups if is_large else self._whole
        return self._begin(Direction.TO_DEVICE, self._loads, groups, arena, offsets, block_ids, after)

    def store(self, block_ids: Sequence[int], arena: MappedArena, offsets: Sequence[int], after: Mark) -> Transfer:
        return self._begin(Direction.TO_HOST, self._stores, self._whole, arena, offsets, block_ids, after)

    def adopt(self, arena: MappedArena) -> None:
        """Register it in the background. Until then, and if that fails, copies are right but slow: their call waits.

        It stays registered, and mapped, until this copier closes or nobody else has a reference to it.
        """
        self._arenas.adopt(arena)

    def registration(self, arena: MappedArena) -> Registration | None:
        """What `adopt` has begun."""
        return self._arenas.registration(arena)

    def close(self) -> None:
        """Wait for all copies, and unregister. Copies asked for from now on raise `TierUnavailable`."""
        with self._condition:
            self._is_closed = True
            self._condition.wait_for(lambda: not self._num_submitting)
        self._to_end.put(None)
        self._thread.join()
        with torch.cuda.device(self._device):
            self._arenas.close()

    # --- copies ----------------------------------------------------------------------------------------------------

    def _begin(
        self,
        direction: Direction,
        stream: torch.cuda.Stream,
        groups: Sequence[LayerGroup],
        arena: MappedArena,
        offsets: Sequence[int],
        block_ids: Sequence[int],
        after: Mark,
    ) -> _CudaTransfer:
        assert len(block_ids) == len(offsets)
        assert not block_ids or 0 <= min(block_ids) <= max(block_ids) < self._kv.num_blocks
        assert not offsets or 0 <= min(offsets) <= max(offsets) <= arena.nbytes - self._block_bytes
        with self._submitting():
            transfer = _CudaTransfer(arena, groups, len(block_ids), self._device)
            try:
                with torch.cuda.device(self._device):
                    stream.wait_event(after)
                    num_blocks = _FIRST_CALL_BLOCKS
                    for group in groups:
                        first = 0
                        while first < len(block_ids):
                            part = slice(first, first + num_blocks)
                            self._submit(direction, stream, group, arena, offsets[part], block_ids[part])
                            first += num_blocks
                            num_blocks = min(2 * num_blocks, _MAX_CALL_BLOCKS)
                        transfer.submitted(stream)
            except BaseException as error:
                with contextlib.suppress(RuntimeError):
                    stream.synchronize()  # what was handed over still uses the memory
                transfer.end_use()
                if isinstance(error, RuntimeError):
                    raise TierUnavailable(f"the device failed: {error}") from error
                raise
            self._to_end.put(transfer)
        return transfer

    def _submit(
        self,
        direction: Direction,
        stream: torch.cuda.Stream,
        group: LayerGroup,
        arena: MappedArena,
        offsets: Sequence[int],
        block_ids: Sequence[int],
    ) -> None:
        """Hand over one group of some blocks."""
        start, block_bytes, nbytes = self._base + group.first_byte, self._block_bytes, group.nbytes
        device = [start + block_id * block_bytes for block_id in block_ids]
        offsets = [offset + group.first_byte for offset in offsets]
        self._arenas.copy(device, arena, offsets, nbytes, direction, stream.cuda_stream)

    @contextlib.contextmanager
    def _submitting(self) -> Iterator[None]:
        with self._condition:
            if self._is_closed:
                raise TierUnavailable("this copier is closed")
            self._num_submitting += 1
        try:
            yield
        finally:
            with self._condition:
                self._num_submitting -= 1
                self._condition.notify_all()

    # --- the copier's own thread -----------------------------------------------------------------------------------

    def _run(self, let_pass: Callable[[], None] | None) -> None:
        yield_to(let_pass)
        torch.cuda.set_device(self._device)
        while (ending := self._to_end.get()) is not None:
            if isinstance(ending, Registration):
                self._arenas.end(ending)
            else:
                with contextlib.suppress(TierUnavailable):  # told to whoever waits for it
                    ending.wait()
