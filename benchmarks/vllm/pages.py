"""Blocks between vLLM's pages and a cache server's memory, as its worker moves them.

    python -m benchmarks.vllm.pages [--quick] [--json FILE]

On a GPU: 512 scattered blocks of Qwen2.5-7B's shape, for each order of the pages in memory, and each of "in" and "out",
beside one large copy of pinned memory (the limit); also with the method that the copier did not choose, with pages of
128 tokens, with half of the heads, and the loss of matrix products beside stores.
On the CPU: 120 blocks of a small model in pages of 128 tokens with K transposed, beside one plain copy of as many
bytes, one that transposes K, and a loop over blocks; alone, and while another process keeps every core busy.
Every copy is checked. Ends with status 1 if a bar is missed.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from benchmarks.harness import Contender, Options, Result, finish, parse_options, print_table, race
from benchmarks.shapes import NUM_BLOCKS, SHAPES
from kvtier.blocks.layout import KvLayout
from kvtier.memory.mapped import MappedArena
from kvtier.transfer.copiers.cuda_copier import CudaCopier, Way
from kvtier.transfer.copiers.geometry import Geometry, PageOrder
from kvtier.transfer.copiers.host_copier import HostCopier
from kvtier.transfer.places import places_of
from tests.support.paged_kv import PagedKv

HAS_GPU = torch.cuda.is_available()

GPU_BARS = {"pages_blhnc_in_gbs": ">= 45", "pages_blhnc_out_gbs": ">= 45"}
CPU_BARS = {"pages_cpu_in_over_turned": "<= 1.7", "pages_cpu_out_over_turned": "<= 1.4"}
LIMIT = "one large copy, pinned"
PATIENCE_S = 120


def main() -> int:
    options = parse_options(__doc__ or "", ("Qwen2.5-7B",))
    return measure_gpu(options) if HAS_GPU else measure_cpu(options)


# --- a GPU -----------------------------------------------------------------------------------------------------------


class GpuStand:
    """Pages in one order, an arena whose first half has blocks to load, and as much pinned memory."""

    def __init__(
        self, strides: str, page_tokens: int, num_heads: int, stack: contextlib.ExitStack, way: Way | None = None
    ) -> None:
        layout = SHAPES["Qwen2.5-7B"]
        self.layout, self.num_heads = layout, num_heads
        self.tensors = gpu_tensors(strides, layout, page_tokens, num_heads)
        per_page = page_tokens // layout.block_tokens
        self.pages = random.Random(1).sample(range(self.tensors[0].shape[0]), NUM_BLOCKS // per_page)
        self.places = places_of(
            self.pages, range(NUM_BLOCKS), page_tokens=page_tokens, block_tokens=layout.block_tokens
        )
        self.nbytes = NUM_BLOCKS * layout.block_bytes * num_heads // layout.kv_heads
        self.pinned = torch.empty(self.nbytes, dtype=torch.uint8, pin_memory=True)
        self.flat = torch.empty(self.nbytes, dtype=torch.uint8, device="cuda")
        slots = random.Random(2).sample(range(NUM_BLOCKS), NUM_BLOCKS)
        self.sources = [slot * layout.slot_bytes for slot in slots]
        self.targets = [(NUM_BLOCKS + slot) * layout.slot_bytes for slot in slots]
        self.arena = stack.enter_context(contextlib.closing(MappedArena.create(2 * NUM_BLOCKS * layout.slot_bytes)))
        self.arena.populate(0, self.arena.nbytes)
        self._slots(self.sources).copy_(
            torch.randint(256, (NUM_BLOCKS, layout.slot_bytes), dtype=torch.uint8, device="cuda")
        )
        copier = CudaCopier(Geometry(self.tensors, layout), 1, way=way, switch_interval_s=None)
        self.copier = stack.enter_context(contextlib.closing(copier))
        self.copier.adopt(self.arena)
        registration = self.copier.registration(self.arena)
        assert registration is not None
        assert registration.wait(PATIENCE_S)

    def load(self) -> None:
        self.copier.load(self.arena, self.sources, self.places, self.copier.mark()).wait()

    def store(self) -> None:
        self.copier.store(self.places, self.arena, self.targets, self.copier.mark()).wait()

    def clear(self) -> None:
        for tensor in self.tensors:
            tensor.zero_()
        torch.cuda.synchronize()

    def refill(self) -> None:
        """Write numbers other than those stored before."""
        for tensor in self.tensors:
            tensor.view(torch.int16).add_(1)
        torch.cuda.synchronize()

    def check(self, offsets: Sequence[int]) -> None:
        assert torch.equal(self.in_pages(), self.in_arena(offsets)), "the blocks are not the same on both sides"

    def in_pages(self) -> torch.Tensor:
        """The blocks by plain torch, in the block format."""
        block_tokens, pages = self.layout.block_tokens, torch.tensor(self.pages, device="cuda")
        layers = [
            tensor[pages].view(torch.int16).unflatten(2, (-1, block_tokens)).transpose(1, 2).flatten(0, 1)
            for tensor in self.tensors
        ]
        return torch.stack(layers, dim=1)

    def in_arena(self, offsets: Sequence[int]) -> torch.Tensor:
        """The blocks at `offsets`, of the heads that the pages have, on the GPU."""
        # Through torch's own memory: one CUDA copy must not straddle two registered ranges.
        slots = self._slots(offsets).clone().cuda()[:, : self.layout.block_bytes]
        first = min(offsets)
        chosen = slots[torch.tensor([(offset - first) // self.layout.slot_bytes for offset in offsets], device="cuda")]
        return chosen.view(torch.int16).view(-1, *self.layout.shape)[:, :, : self.num_heads]

    def _slots(self, offsets: Sequence[int]) -> torch.Tensor:
        """The half of the arena that holds them, a row for each slot."""
        nbytes = NUM_BLOCKS * self.layout.slot_bytes
        memory = (ctypes.c_ubyte * nbytes).from_address(self.arena.address + min(offsets))
        return torch.frombuffer(memory, dtype=torch.uint8).view(NUM_BLOCKS, -1)


def gpu_tensors(strides: str, layout: KvLayout, page_tokens: int, num_heads: int) -> list[torch.Tensor]:
    """Twice as many pages as are copied."""
    sizes = {
        "L": layout.layers,
        "B": 2 * NUM_BLOCKS * layout.block_tokens // page_tokens,
        "H": num_heads,
        "N": page_tokens,
        "C": 2 * layout.head_dim,
    }
    whole = torch.empty([sizes[name] for name in strides], dtype=torch.bfloat16, device="cuda")
    whole.view(torch.int16).random_()
    return list(whole.permute([strides.index(name) for name in "LBHNC"]))


def measure_gpu(options: Options) -> int:
    repeats = 4 * options.repeats
    settings = {"blocks": NUM_BLOCKS, "repeats": repeats, "device": torch.cuda.get_device_name(0)}
    result = Result("vllm.pages", settings)
    for strides in ("BLHNC", "LBHNC", "LBNHC"):
        for name, gbs in race_gpu(strides, 16, 4, None, repeats, result).items():
            result.figures[f"pages_{strides.lower()}_{name}_gbs"] = gbs
    race_gpu("LBHNC", 16, 4, Way.DIRECT, repeats, result)
    race_gpu("BLHNC", 16, 4, Way.STAGED, repeats, result)
    race_gpu("LBNHC", 128, 4, None, repeats, result)
    race_gpu("LBHNC", 16, 2, None, repeats, result)
    for strides in ("BLHNC", "LBNHC"):
        result.figures[f"pages_{strides.lower()}_beside_ratio"] = measure_beside(strides, repeats, result)
    print_table(f"{NUM_BLOCKS} blocks between a GPU's pages and host memory, medians", result.rows)
    return finish(result, GPU_BARS, options.json)


def race_gpu(
    strides: str, page_tokens: int, num_heads: int, way: Way | None, repeats: int, result: Result
) -> dict[str, float]:
    """GB/s of a copier in and out."""
    with contextlib.ExitStack() as stack:
        here = GpuStand(strides, page_tokens, num_heads, stack, way)
        ways = {
            "in": Contender("in", here.load, here.clear, lambda: here.check(here.sources)),
            "out": Contender("out", here.store, here.refill, lambda: here.check(here.targets)),
            LIMIT + ", in": Contender(LIMIT + ", in", lambda: _move(here.flat, here.pinned)),
            LIMIT + ", out": Contender(LIMIT + ", out", lambda: _move(here.pinned, here.flat)),
        }
        seconds = race(list(ways.values()), repeats)
        gbs = {name: here.nbytes / seconds[name] / 1e9 for name in ways}
        for name in ("in", "out"):
            result.rows.append(
                {
                    "order": strides,
                    "page tokens": page_tokens,
                    "heads": num_heads,
                    "way": here.copier.way.name.lower(),
                    "copy": name,
                    "ms": f"{seconds[name] * 1e3:.2f}",
                    "GB/s": f"{gbs[name]:.1f}",
                    LIMIT: f"{gbs[f'{LIMIT}, {name}']:.1f}",
                }
            )
    torch.cuda.empty_cache()
    return {name: gbs[name] for name in ("in", "out")}


def measure_beside(strides: str, repeats: int, result: Result) -> float:
    """The time of matrix products beside endless loads and stores, over their time alone."""
    with contextlib.ExitStack() as stack:
        here = GpuStand(strides, 16, 4, stack)
        left, right = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))

        def products() -> float:
            torch.cuda.synchronize()
            started_at = time.perf_counter()
            for _ in range(20):
                left @ right
            torch.cuda.current_stream().synchronize()
            return time.perf_counter() - started_at

        products()
        alone, beside = [], []
        for _ in range(repeats):
            alone.append(products())
            with endlessly([here.load, here.store]) as counts:
                beside.append(products())
        ratio = statistics.median(beside) / statistics.median(alone)
        result.rows.append({"order": strides, "copy": "products beside / alone", "ms": f"{ratio:.3f}"})
        assert sum(counts) > 0, "nothing was copied beside the products"
    torch.cuda.empty_cache()
    return ratio


@contextlib.contextmanager
def endlessly(acts: Sequence[Callable[[], None]]) -> Iterator[list[int]]:
    """Repeat each act on a thread. Yields the number of times that each began."""
    is_over = threading.Event()
    counts = [0] * len(acts)

    def repeat(number: int) -> None:
        while not is_over.is_set():
            counts[number] += 1
            acts[number]()

    threads = [threading.Thread(target=repeat, args=(number,)) for number in range(len(acts))]
    for thread in threads:
        thread.start()
    try:
        yield counts
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


def _move(to: torch.Tensor, source: torch.Tensor) -> None:
    to.copy_(source, non_blocking=True)
    torch.cuda.synchronize()


# --- the CPU ---------------------------------------------------------------------------------------------------------

CPU_LAYOUT = KvLayout(layers=12, kv_heads=4, head_dim=64, dtype="float32")
CPU_BLOCKS = 120
CPU_PAGE_TOKENS = 128
PLAIN = "one plain copy"
TURNED = "plain copies, K turned"
LOOP = "a loop over blocks"


class CpuStand:
    def __init__(self, stack: contextlib.ExitStack) -> None:
        layout = CPU_LAYOUT
        whole = torch.randn(layout.layers, 40, layout.kv_heads, CPU_PAGE_TOKENS, 2 * layout.head_dim)
        num_pages = CPU_BLOCKS * layout.block_tokens // CPU_PAGE_TOKENS
        self.whole, tensors = whole, list(whole)
        self.pages = random.Random(1).sample(range(40), num_pages)
        self.blocks = list(range(CPU_BLOCKS))
        self.offsets = [number * layout.slot_bytes for number in self.blocks]
        self.nbytes = CPU_BLOCKS * layout.block_bytes
        self.arena = stack.enter_context(contextlib.closing(MappedArena.create(CPU_BLOCKS * layout.slot_bytes)))
        self.arena.populate(0, self.arena.nbytes)
        kind = ctypes.c_ubyte * layout.block_bytes
        self.slots = [memoryview(kind.from_address(self.arena.address + offset)).cast("B") for offset in self.offsets]
        self.twin = PagedKv(tensors, layout, PageOrder.TRANSPOSED_K)
        self.places = places_of(self.pages, self.blocks, page_tokens=CPU_PAGE_TOKENS, block_tokens=layout.block_tokens)
        geometry = Geometry(tensors, layout, PageOrder.TRANSPOSED_K)
        self.copier = stack.enter_context(contextlib.closing(HostCopier(geometry)))
        self.source = torch.randn(self.nbytes // 4)
        self.target = torch.empty_like(self.source)
        self.expected = bytearray(self.nbytes)
        buffers = [memoryview(self.expected)[n * layout.block_bytes :][: layout.block_bytes] for n in self.blocks]
        self.twin.read(self.pages, 0, buffers)
        self.before = whole.clone()

    def load(self) -> None:
        self.copier.load(self.arena, self.offsets, self.places, self.copier.mark()).wait()

    def store(self) -> None:
        self.copier.store(self.places, self.arena, self.offsets, self.copier.mark()).wait()

    def turn(self) -> None:
        """Copy half of the bytes as they are, the other half with each block's tokens as columns."""
        half, tokens = self.source.numel() // 2, CPU_LAYOUT.block_tokens
        self.target[:half].copy_(self.source[:half])
        turned = self.source[half:].view(-1, tokens, CPU_LAYOUT.head_dim).transpose(1, 2)
        self.target[half:].view(-1, CPU_LAYOUT.head_dim, tokens).copy_(turned)

    def clear_pages(self) -> None:
        self.whole[:, self.pages] = 0

    def clear_arena(self) -> None:
        ctypes.memset(self.arena.address, 0, self.arena.nbytes)

    def check_pages(self) -> None:
        assert torch.equal(self.whole, self.before), "the pages hold something else"

    def check_arena(self) -> None:
        for number, slot in enumerate(self.slots):
            first = number * CPU_LAYOUT.block_bytes
            assert slot == memoryview(self.expected)[first : first + CPU_LAYOUT.block_bytes], "a block is another one"


def measure_cpu(options: Options) -> int:
    repeats = 4 * options.repeats + 1
    settings = {"blocks": CPU_BLOCKS, "page tokens": CPU_PAGE_TOKENS, "repeats": repeats, "cores": os.cpu_count()}
    result = Result("vllm.pages", settings)
    with contextlib.ExitStack() as stack:
        here = CpuStand(stack)
        here.store()
        here.check_arena()
        for is_busy in (False, True):
            with busy() if is_busy else contextlib.nullcontext():
                seconds = race_cpu(here, repeats)
            for name, taken_s in seconds.items():
                row = {"engine": "busy" if is_busy else "idle", "what": name, "ms": f"{taken_s * 1e3:.2f}"}
                result.rows.append({**row, "GB/s": f"{here.nbytes / taken_s / 1e9:.2f}"})
            suffix = "_busy" if is_busy else ""
            for way in ("in", "out"):
                result.figures[f"pages_cpu_{way}_over_turned{suffix}"] = seconds[way] / seconds[TURNED]
                result.figures[f"pages_cpu_{way}_over_copy{suffix}"] = seconds[way] / seconds[PLAIN]
    print_table(f"{CPU_BLOCKS} blocks ({here.nbytes / 1e6:.0f} MB) from and to pages in host memory", result.rows)
    return finish(result, CPU_BARS, options.json)


def race_cpu(here: CpuStand, repeats: int) -> dict[str, float]:
    return race(
        [
            Contender(PLAIN, lambda: here.target.copy_(here.source)),
            Contender(TURNED, here.turn),
            Contender("in", here.load, here.clear_pages, here.check_pages),
            Contender("out", here.store, here.clear_arena, here.check_arena),
            Contender(
                f"in, {LOOP}", lambda: here.twin.write(here.pages, 0, here.slots), here.clear_pages, here.check_pages
            ),
            Contender(
                f"out, {LOOP}", lambda: here.twin.read(here.pages, 0, here.slots), here.clear_arena, here.check_arena
            ),
        ],
        repeats,
    )


@contextlib.contextmanager
def busy() -> Iterator[None]:
    """Another process computes on every core meanwhile."""
    process = multiprocessing.get_context("spawn").Process(target=_compute, daemon=True)
    process.start()
    time.sleep(3)  # it imports torch
    try:
        yield
    finally:
        process.kill()
        process.join()


def _compute() -> None:
    numbers = torch.randn(1024, 1024)
    while True:
        numbers @ numbers


if __name__ == "__main__":
    sys.exit(main())
