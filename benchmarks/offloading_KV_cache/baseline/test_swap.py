"""Swapping: 8,192 tokens of KV from host memory into a GPU's blocks, and back.

    python -m benchmarks.offloading_KV_cache.baseline.test_swap [--quick] [--json FILE] [--model-shape NAME]

512 blocks of 16 tokens, scattered on the device. Measured in turns: one large copy of pinned memory (the limit), one
copy per block from torch, and the engine's copier, which hands them over in batches; with registered memory of this
process, and with a cache server's. Loads come in 1, 2 or 4 groups of layers, and "first layers" is when a step could
begin. The clock stops when the device is done, as the next step sees it; `Copies.wait` sleeps, and wakes up about
0.3 ms later. Without a GPU the device is host memory, one thread copies, and one long move is the limit.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

import kvtier
from benchmarks.harness import Contender, Result, parse_options, print_table, race
from benchmarks.shapes import NUM_BLOCKS, SHAPES
from kvtier.blocks.layout import KvLayout
from kvtier.blocks.namespace import NamespaceFields
from kvtier.engine.device.kv_arena import KvArena
from kvtier.memory.mapped import MappedArena
from kvtier.testing.servers import cache_server
from kvtier.transfer.copier import Copier, Copies
from kvtier.transfer.copiers.cuda_copier import CudaCopier
from kvtier.transfer.copiers.geometry import Geometry
from kvtier.transfer.copiers.host_copier import HostCopier

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
NUM_GROUPS = (1, 2, 4) if HAS_GPU else (1,)
LIMIT = "one large copy, pinned" if HAS_GPU else "one long move"
PER_BLOCK = "torch, a copy per block"
PATIENCE_S = 120


def main() -> int:
    options = parse_options(__doc__ or "", tuple(SHAPES))
    device = torch.cuda.get_device_name(0) if HAS_GPU else "host memory"
    if not HAS_GPU:
        torch.set_num_threads(1)
    settings = {"blocks": NUM_BLOCKS, "repeats": options.repeats, "device": device}
    result = Result("offloading_KV_cache.baseline.test_swap", settings)
    for shape in options.shapes:
        with contextlib.ExitStack() as stack:
            repeats = 4 * options.repeats if HAS_GPU else options.repeats
            measure(shape, Stand(SHAPES[shape], stack, DEVICE), repeats, result)
    print_table(f"{NUM_BLOCKS} blocks between host memory and {device}, medians", result.rows)
    result.write(options.json)
    return 0


def measure(shape: str, stand: Stand, repeats: int, result: Result) -> None:
    seen = set()

    def add_rows(direction: str, seconds: dict[str, float]) -> None:
        for name, value in seconds.items():
            if (direction, name) in seen:
                continue  # the baselines are in every race
            seen.add((direction, name))
            row: dict[str, object] = {"shape": shape, "swap": direction, "what": name, "ms": f"{value * 1000:.2f}"}
            row["GB/s"] = f"{stand.nbytes / value / 1e9:.1f}"
            row["of the limit"] = f"{seconds[LIMIT] / value:.2f}"
            if name in stand.first_layers_s:
                row["first layers, ms"] = f"{statistics.median(stand.first_layers_s[name]) * 1000:.2f}"
            result.rows.append(row)
        # The last of the last race: a server's arena, in as many groups as the engine takes.
        result.figures[f"swap_{direction}_of_limit_{shape}"] = seconds[LIMIT] / list(seconds.values())[-1]

    for num_groups in NUM_GROUPS:
        with stand.copier(num_groups) as copier:
            add_rows("in", race(stand.ways_in(copier, num_groups), repeats))
    with stand.copier(1) as copier:
        add_rows("out", race(stand.ways_out(copier), repeats))


@dataclass(frozen=True)
class Memory:
    """An arena, the place in it of the bytes to load, and room to store."""

    name: str
    arena: MappedArena
    sources: list[int]
    targets: list[int]


class Stand:
    """A device's blocks and one or two kinds of host memory."""

    def __init__(
        self,
        layout: KvLayout,
        stack: contextlib.ExitStack,
        device: torch.device,
        *,
        num_blocks: int = NUM_BLOCKS,
        has_server: bool = True,
    ) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.nbytes = num_blocks * layout.block_bytes
        self.has_gpu = device.type == "cuda"
        self.first_layers_s: dict[str, list[float]] = {}
        self.kv = KvArena(2 * num_blocks, layout, device)
        self.bytes = self.kv.blocks.view(torch.uint8).view(2 * num_blocks, layout.block_bytes)
        places = random.Random(4).sample(range(2 * num_blocks), 2 * num_blocks)
        self.block_ids, self.other_ids = places[:num_blocks], places[num_blocks:]
        self.pinned = torch.empty((num_blocks, layout.block_bytes), dtype=torch.uint8, pin_memory=self.has_gpu)
        self.expected = torch.empty_like(self.pinned, device=device).random_(0, 256)
        self.pinned.copy_(self.expected)
        self.flat = torch.empty_like(self.expected)
        self.memories = [self._own(stack), self._server(stack)] if has_server else [self._own(stack)]

    @contextlib.contextmanager
    def copier(self, num_groups: int) -> Iterator[Copier]:
        """One with all memories registered."""
        geometry = Geometry(self.kv.layers, self.layout)
        if not self.has_gpu:
            yield HostCopier(geometry)
            return
        with contextlib.closing(CudaCopier(geometry, num_groups)) as copier:
            for memory in self.memories:
                copier.adopt(memory.arena)
            for memory in self.memories:
                registration = copier.registration(memory.arena)
                assert registration is not None
                assert registration.wait(PATIENCE_S), "the memory could not be registered"
            yield copier

    def ways_in(self, copier: Copier, num_groups: int) -> list[Contender]:
        def check_flat() -> None:
            assert torch.equal(self.flat, self.expected)

        groups = f", {num_groups} group{'s' if num_groups > 1 else ''}" if HAS_GPU else ""
        return [
            Contender(LIMIT, lambda: self._move(self.flat, self.pinned), self.clear, check_flat),
            Contender(PER_BLOCK, self._load_each, self.clear, self.expect_loaded),
            *(
                Contender(name, self._loading(copier, memory, name), self.clear, self.expect_loaded)
                for memory in self.memories
                for name in (f"copier, {memory.name}{groups}",)
            ),
        ]

    def ways_out(self, copier: Copier) -> list[Contender]:
        def check_flat() -> None:
            assert torch.equal(self.pinned.to(DEVICE), self.flat)

        def check_pinned() -> None:
            assert torch.equal(self.pinned.to(DEVICE), self.bytes[self.block_ids]), "the host has other bytes"

        def storing(memory: Memory) -> Callable[[], None]:
            def store() -> None:
                transfer = copier.store(self.block_ids, memory.arena, memory.targets, copier.mark())
                _synchronize()
                transfer.wait()

            return store

        return [
            Contender(LIMIT, lambda: self._move(self.pinned, self.flat), self.next_bytes, check_flat),
            Contender(PER_BLOCK, self._store_each, self.next_bytes, check_pinned),
            *(
                Contender(
                    f"copier, {memory.name}",
                    storing(memory),
                    self.next_bytes,
                    functools.partial(self.expect_stored, copier, memory),
                )
                for memory in self.memories
            ),
        ]

    def move(self, direction: str) -> float:
        """Seconds of one large copy, which is the limit."""
        to, source = (self.flat, self.pinned) if direction == "in" else (self.pinned, self.flat)
        _synchronize()
        started_at = time.perf_counter()
        self._move(to, source)
        return time.perf_counter() - started_at

    # --- before and after ------------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Clear the device's blocks."""
        self.bytes.zero_()
        self.flat.zero_()
        _synchronize()

    def next_bytes(self) -> None:
        """Write bytes other than those stored before."""
        self.bytes.add_(1)
        self.flat.add_(1)
        _synchronize()

    def expect_loaded(self) -> None:
        assert torch.equal(self.bytes[self.block_ids], self.expected), "the device has other bytes"

    def expect_stored(self, copier: Copier, memory: Memory) -> None:
        copier.load(memory.arena, memory.targets, self.other_ids, copier.mark()).wait()
        assert torch.equal(self.bytes[self.other_ids], self.bytes[self.block_ids]), "the host has other bytes"

    # --- acts ------------------------------------------------------------------------------------------------------

    def _move(self, to: torch.Tensor, source: torch.Tensor) -> None:
        if self.has_gpu:
            to.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
        else:
            ctypes.memmove(to.data_ptr(), source.data_ptr(), self.nbytes)

    def _load_each(self) -> None:
        for block_id, source in zip(self.block_ids, self.pinned, strict=True):
            self.bytes[block_id].copy_(source, non_blocking=True)
        _synchronize()

    def _store_each(self) -> None:
        for block_id, target in zip(self.block_ids, self.pinned, strict=True):
            target.copy_(self.bytes[block_id], non_blocking=True)
        _synchronize()

    def _loading(self, copier: Copier, memory: Memory, name: str) -> Callable[[], None]:
        def load() -> None:
            started_at = time.perf_counter()
            transfer = copier.load(memory.arena, memory.sources, self.block_ids, copier.mark())
            if HAS_GPU:
                _wait_for_first_layer(transfer)
                self.first_layers_s.setdefault(name, []).append(time.perf_counter() - started_at)
            _synchronize()
            transfer.wait()

        return load

    # --- memory ----------------------------------------------------------------------------------------------------

    def _own(self, stack: contextlib.ExitStack) -> Memory:
        slot_bytes, block_bytes = self.layout.slot_bytes, self.layout.block_bytes
        arena = stack.enter_context(contextlib.closing(MappedArena.create(2 * self.num_blocks * slot_bytes)))
        offsets = [slot * slot_bytes for slot in range(2 * self.num_blocks)]
        for offset, block in zip(offsets, self.pinned, strict=False):
            arena.populate(offset, block_bytes)
            ctypes.memmove(arena.address + offset, block.data_ptr(), block_bytes)
        return Memory("own memory", arena, offsets[: self.num_blocks], offsets[self.num_blocks :])

    def _server(self, stack: contextlib.ExitStack) -> Memory:
        memory = str((2 * self.num_blocks + 16) * self.layout.slot_bytes)
        server = stack.enter_context(cache_server("--max-leased", memory, memory=memory))
        namespace = NamespaceFields(layout=self.layout, weights="benchmark")
        client = stack.enter_context(kvtier.connect(server.unix, layout=self.layout, namespace=namespace, timeout_s=60))
        hashes = client.hashes(range(2 * self.num_blocks * self.layout.block_tokens))
        client.set(hashes[: self.num_blocks], [memoryview(block.numpy()) for block in self.pinned])
        lease = stack.enter_context(client.match(hashes[: self.num_blocks]))
        slots = stack.enter_context(client.reserve(hashes[self.num_blocks :]))
        assert lease.num_blocks == slots.num_blocks == self.num_blocks
        return Memory("server's arena", client.arena, list(lease.offsets), list(slots.offsets))


def _synchronize() -> None:
    if HAS_GPU:
        torch.cuda.synchronize()


def _wait_for_first_layer(transfer: Copies) -> None:
    transfer.precede(0)
    reached = torch.cuda.Event()
    reached.record()
    reached.synchronize()


if __name__ == "__main__":
    sys.exit(main())
