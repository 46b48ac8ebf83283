"""Direct reads into shared memory: as it lies when it became resident page by page, and joined to huge pages.

    python -m benchmarks.persistence_kv_cache.test_huge_pages [--quick] [--json FILE] [--folder DIR]

32 threads read a file in pieces of two blocks, as the cache server's readers do, into shared memory of its size. Once
that memory was touched from its first page to its last, once in no order, as by threads that read or write all over it,
and once in no order and then joined (`memory/huge_pages`). The three take turns, and all of them get the file's bytes.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import statistics
import tempfile
import time
from pathlib import Path

from benchmarks.harness import BlockMemory, Result, console, make_parser, print_figures, print_table, read_options
from benchmarks.persistence_kv_cache.test_disk import RawFile
from benchmarks.shapes import SHAPES
from kvtier.memory.huge_pages import HUGE_BYTES, HugePages
from kvtier.sizes import format_size

BARS = {"joined_over_scattered": ">= 1.2", "joined_over_in_order": ">= 0.95"}
NUM_THREADS = 32
IN_ORDER, SCATTERED, JOINED = "touched in order", "touched in no order", "touched in no order, joined"


def main() -> None:
    parser = make_parser(__doc__ or "")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="where to put the file")
    options, arguments = read_options(parser, ("Qwen2.5-7B",))
    piece_bytes = 2 * SHAPES["Qwen2.5-7B"].slot_bytes
    num_pieces = (512 if options.quick else 1024) * HUGE_BYTES // piece_bytes
    memory_bytes = num_pieces * piece_bytes
    repeats = 2 * options.repeats
    settings = {"memory_bytes": memory_bytes, "threads": NUM_THREADS, "repeats": repeats, "quick": options.quick}
    result = Result("persistence_kv_cache.test_huge_pages", settings)
    source = BlockMemory(num_pieces, piece_bytes, seed=2)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvtier-bench-", dir=arguments.folder))
        file = stack.enter_context(RawFile(Path(folder) / "file", source, source))
        targets = {name: memory(name, num_pieces, piece_bytes) for name in (IN_ORDER, SCATTERED, JOINED)}
        speeds: dict[str, list[float]] = {name: [] for name in targets}
        for repeat in range(repeats + 1):
            for name, target in targets.items():
                seconds = file.read(NUM_THREADS, target)
                if repeat:
                    speeds[name].append(memory_bytes / seconds / 1e9)
                elif any(bytes(found) != bytes(block) for found, block in zip(target, source.blocks, strict=True)):
                    raise RuntimeError(f"memory that was {name} has other bytes than the file")
            if repeat:
                shown = ", ".join(f"{name} {values[-1]:.2f}" for name, values in speeds.items())
                console.print(f"round {repeat}, GB/s: {shown}")
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    result.rows += [{"memory": name, "GB/s": f"{gbs:.2f}"} for name, gbs in medians.items()]
    print_table(f"direct reads of {format_size(piece_bytes)}, {NUM_THREADS} threads, medians", result.rows)
    result.figures["joined_over_scattered"] = medians[JOINED] / medians[SCATTERED]
    result.figures["joined_over_in_order"] = medians[JOINED] / medians[IN_ORDER]
    print_figures(result.figures, BARS)
    result.write(options.json)


def memory(name: str, num_pieces: int, piece_bytes: int) -> list[memoryview]:
    """Shared memory that is all resident, in pieces. It goes with the last of them."""
    nbytes = num_pieces * piece_bytes
    fd = os.memfd_create("kvtier-bench", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, nbytes)
        mapped = mmap.mmap(fd, nbytes)
        pages = list(range(0, nbytes, mmap.PAGESIZE))
        if name != IN_ORDER:
            random.Random(1).shuffle(pages)
        for page in pages:
            mapped[page] = 1
        if name == JOINED:
            huge = HugePages(fd, nbytes)
            started_at = time.perf_counter()
            huge.join(0, nbytes)
            console.print(f"joined {format_size(nbytes)} in {time.perf_counter() - started_at:.2f} s")
            huge.close()
    finally:
        os.close(fd)
    whole = memoryview(mapped)
    return [whole[start : start + piece_bytes] for start in range(0, nbytes, piece_bytes)]


if __name__ == "__main__":
    main()
