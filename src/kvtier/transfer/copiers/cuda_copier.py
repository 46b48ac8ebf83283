"""The copier of a CUDA device: blocks by DMA, in batches, on streams beside compute.

Loads and stores have a stream each. If a block is a few long runs on the device, the device copies those itself; a
large load goes in groups of layers, so that a step may begin on the first while the rest arrives. Otherwise, blocks are
gathered first (see `staging`). Any thread may copy; a thread of the copier's own releases what copies hold, whether or
not a caller waits for them.
"""

from __future__ import annotations

import contextlib
import enum
import importlib
import itertools
import queue
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from kvtier.blocks.layout import KvLayout
from kvtier.errors import ConfigError, TierUnavailable
from kvtier.latency_guard import give_way, yield_to
from kvtier.memory.cuda import PIECE_BYTES, CopyDirection, Registration, load_cudart
from kvtier.memory.mapped import MappedArena
from kvtier.memory.registered import RegisteredArenas
from kvtier.transfer.copier import Copies, Mark
from kvtier.transfer.copiers.geometry import ByteRun, Geometry, Pages

if TYPE_CHECKING:
    from kvtier.transfer.copiers.staging import Staging

NUM_GROUPS = 4
"""A step can begin after a quarter of the load. The whole load takes 0 to 2% longer than in one group."""

MIN_GROUPED_BYTES = 96 << 20
"""A smaller load arrives within two milliseconds, so it goes in one group: with each group, its thread has to wait a
few times for the GIL. Larger than a unit from disk."""

_MIN_PART_BYTES = 128 << 10
"""Smaller copies leave the bus idle."""
_FIRST_CALL_BLOCKS = 64
_MAX_CALL_BLOCKS = 1024
"""Blocks handed over in one call. Each takes a microsecond, and the device begins only after the call. So there are few
at first, and twice as many each time, since a thread that has to wait for the GIL between two calls may wait long."""

_SWITCH_INTERVAL_S = 0.0005
"""By default, a thread that computes keeps the GIL ten times as long, while threads with copies to hand over wait."""

_CHUNK_BYTES = 16 << 20


class Way(enum.Enum):
    """How blocks are copied: run by run as they lie on the device, or gathered first."""

    DIRECT = enum.auto()
    STAGED = enum.auto()


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers of a block that are copied together: `nbytes` from its byte `first_byte` on, as `runs` on the device."""

    first_layer: int
    num_layers: int
    first_byte: int
    nbytes: int
    runs: Sequence[ByteRun] = ()


def layer_groups(layout: KvLayout, num_groups: int = NUM_GROUPS) -> list[LayerGroup]:
    """All layers, in order, in `num_groups` groups that differ by a layer at most; fewer if groups would be small."""
    num_groups = max(1, min(num_groups, layout.layers, layout.block_bytes // _MIN_PART_BYTES))
    layer_bytes = layout.block_bytes // layout.layers
    bounds = [layout.layers * number // num_groups for number in range(num_groups + 1)]
    return [
        LayerGroup(first, end - first, first * layer_bytes, (end - first) * layer_bytes)
        for first, end in itertools.pairwise(bounds)
    ]


class _CudaCopies:
    """Copies in flight. Their arena stays mapped until a thread sees them done, at the latest the copier's own."""

    def __init__(self, arena: MappedArena, groups: Sequence[LayerGroup], num_blocks: int, device: torch.device) -> None:
        """Raises `LeaseError` if the arena is closed."""
        self.groups = groups
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
        """A group counts until all of it has arrived."""
        if self.is_done:
            return 0
        pairs = zip(self.groups, self._arrivals, strict=True)
        return self._num_blocks * sum(group.nbytes for group, arrival in pairs if not arrival.query())

    def wait(self) -> None:
        try:
            if not self._arrivals[-1].query():  # `query` keeps the GIL
                self._arrivals[-1].synchronize()
                give_way()
        except RuntimeError as error:
            raise TierUnavailable(f"the device failed: {error}") from error
        finally:
            self.end_use()

    def precede(self, layer: int) -> None:
        number = next(i for i, group in enumerate(self.groups) if layer < group.first_layer + group.num_layers)
        torch.cuda.current_stream(self._device).wait_event(self._arrivals[number])

    def end_use(self) -> None:
        with self._lock:
            self._use.close()


@dataclass(frozen=True, slots=True)
class _Lane:
    """One direction: its stream of copies, and the staging that blocks pass through unless they go directly."""

    direction: CopyDirection
    stream: torch.cuda.Stream
    staging: Staging | None

    def wait(self) -> None:
        """Wait for work handed over so far: it still uses the memory."""
        with contextlib.suppress(RuntimeError):
            self.stream.synchronize()
            if self.staging is not None:
                self.staging.kernels.synchronize()


class CudaCopier:
    """A `Copier` for KV on a GPU, in rows. Closed after all of its callers, and before the arenas that it adopted."""

    def __init__(
        self,
        geometry: Pages,
        num_groups: int = NUM_GROUPS,
        *,
        way: Way | None = None,
        chunk_bytes: int = _CHUNK_BYTES,
        piece_bytes: int = PIECE_BYTES,
        min_grouped_bytes: int = MIN_GROUPED_BYTES,
        switch_interval_s: float | None = _SWITCH_INTERVAL_S,
        let_pass: Callable[[], None] | None = None,
    ) -> None:
        """Raises `TierUnavailable` if torch's CUDA runtime cannot be found, and `ConfigError` if the layers' tensors
        have different strides, or if blocks have to be gathered and Triton is missing.

        By default, `way` depends on how the blocks lie. No engine may use the device's KV meanwhile. From now on,
        threads of this process take turns at least every `switch_interval_s`. The copier's own thread calls `let_pass`
        at safe points.
        """
        if not geometry.can_run:
            raise ConfigError("the KV tensors of layers have different strides")
        layout = geometry.layout
        self._geometry = geometry
        self._device = geometry.device
        self._groups, self._whole = (
            [
                replace(group, runs=geometry.runs(range(group.first_layer, group.first_layer + group.num_layers)))
                for group in layer_groups(layout, count)
            ]
            for count in (num_groups, 1)
        )
        has_long_runs = min(run.nbytes for run in self._whole[0].runs) >= _MIN_PART_BYTES
        self.way = way or (Way.DIRECT if geometry.plain_runs or has_long_runs else Way.STAGED)
        self._min_grouped_bytes = min_grouped_bytes
        self._cudart = cudart = load_cudart((int(torch.version.cuda.split(".")[0]),))
        self._condition = threading.Condition()
        self._is_closed = False
        self._num_submitting = 0
        self._to_end: queue.SimpleQueue[_CudaCopies | Registration | None] = queue.SimpleQueue()
        self._arenas = RegisteredArenas(cudart, self._device.index, layout.slot_bytes, self._to_end.put, piece_bytes)
        with torch.cuda.device(self._device):
            # Requests wait for loads, but never for stores.
            self._loads = self._new_lane(CopyDirection.TO_DEVICE, -1, chunk_bytes)
            self._stores = self._new_lane(CopyDirection.TO_HOST, 0, chunk_bytes)
        if switch_interval_s is not None:
            sys.setswitchinterval(min(sys.getswitchinterval(), switch_interval_s))
        self._thread = threading.Thread(target=self._run, args=(let_pass,), name="kvtier-copies", daemon=True)
        self._thread.start()

    @property
    def is_whole(self) -> bool:
        return self._geometry.is_whole

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def load(self, arena: MappedArena, offsets: Sequence[int], places: Sequence[int], after: Mark) -> Copies:
        is_large = len(offsets) * self._geometry.layout.block_bytes >= self._min_grouped_bytes
        groups = self._groups if is_large and self.way is Way.DIRECT else self._whole
        return self._begin(self._loads, groups, arena, offsets, places, after)

    def store(self, places: Sequence[int], arena: MappedArena, offsets: Sequence[int], after: Mark) -> Copies:
        return self._begin(self._stores, self._whole, arena, offsets, places, after)

    def adopt(self, arena: MappedArena) -> None:
        """Register it in the background. Until then, and if that fails, copies are correct but slow: their call waits.

        It stays registered, and mapped, until this copier closes or holds the last reference to it.
        """
        self._arenas.adopt(arena)

    def registration(self, arena: MappedArena) -> Registration | None:
        """The registration that `adopt` began."""
        return self._arenas.registration(arena)

    def close(self) -> None:
        """Wait for all copies, and unregister. Later copies raise `TierUnavailable`."""
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
        lane: _Lane,
        groups: Sequence[LayerGroup],
        arena: MappedArena,
        offsets: Sequence[int],
        places: Sequence[int],
        after: Mark,
    ) -> _CudaCopies:
        self._geometry.check(places, arena, offsets)
        with self._submitting():
            copies = _CudaCopies(arena, groups, len(offsets), self._device)
            try:
                with torch.cuda.device(self._device):
                    if lane.staging is None:
                        lane.stream.wait_event(after)
                        self._submit_runs(lane, copies, arena, offsets, places)
                    else:
                        act = lane.staging.load if lane is self._loads else lane.staging.store
                        with lane.staging.lock:
                            copies.submitted(act(arena, offsets, places, after))
            except BaseException as error:
                lane.wait()
                copies.end_use()
                if isinstance(error, RuntimeError):
                    raise TierUnavailable(f"the device failed: {error}") from error
                raise
            self._to_end.put(copies)
        return copies

    def _submit_runs(
        self,
        lane: _Lane,
        copies: _CudaCopies,
        arena: MappedArena,
        offsets: Sequence[int],
        places: Sequence[int],
    ) -> None:
        """Hand over one group of layers after another."""
        geometry, parts, num_blocks = self._geometry, self._geometry.parts_per_block, _FIRST_CALL_BLOCKS
        for group in copies.groups:
            first = 0
            while first < len(offsets):
                end = first + num_blocks
                for run in group.runs:
                    device = geometry.run_addresses(places[first * parts : end * parts], run)
                    host = geometry.run_offsets(offsets[first:end], run)
                    self._arenas.copy(device, arena, host, run.nbytes, lane.direction, lane.stream.cuda_stream)
                first = end
                num_blocks = min(2 * num_blocks, _MAX_CALL_BLOCKS)
            copies.submitted(lane.stream)

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

    def _new_lane(self, direction: CopyDirection, priority: int, chunk_bytes: int) -> _Lane:
        stream = torch.cuda.Stream(self._device, priority=priority)
        if self.way is Way.DIRECT:
            return _Lane(direction, stream, None)
        assert isinstance(self._geometry, Geometry), "opaque pages go directly"
        # Not imported above: it needs Triton, which may be missing where blocks go directly.
        try:
            module = importlib.import_module("kvtier.transfer.copiers.staging")
        except ModuleNotFoundError as error:
            raise ConfigError(f"pages on a GPU need {error.name}: pip install {error.name}") from error
        return _Lane(direction, stream, module.Staging(self._geometry, self._arenas, stream, priority, chunk_bytes))

    # --- the copier's own thread -----------------------------------------------------------------------------------

    def _run(self, let_pass: Callable[[], None] | None) -> None:
        yield_to(let_pass)
        torch.cuda.set_device(self._device)
        with self._cudart.relaxed():
            while (ending := self._to_end.get()) is not None:
                if isinstance(ending, Registration):
                    self._arenas.end(ending)
                else:
                    with contextlib.suppress(TierUnavailable):  # reported to the thread that waits for it
                        ending.wait()
