"""Direct reads into shared memory: as it lies when it became resident page by page, and joined to huge pages.

    python -m benchmarks.persistence_kv_cache.test_huge_pages [--quick] [--json FILE] [--folder DIR]

32 threads read a file in pieces of two blocks, as the cache server's readers do, into shared memory of half its size.
Once that memory was touched from its first page to its last, once in no order, as by threads that read or write all
over it, and once in no order and then joined (`memory/huge_pages`). The three take turns.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.harness import Result, console, make_parser, print_figures, print_table, read_options
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
    memory_bytes = (512 if options.quick else 1024) * HUGE_BYTES
    repeats = 2 * options.repeats
    settings = {"memory_bytes": memory_bytes, "threads": NUM_THREADS, "repeats": repeats, "quick": options.quick}
    result = Result("persistence_kv_cache.test_huge_pages", settings)
    piece_bytes = 2 * SHAPES["Qwen2.5-7B"].slot_bytes
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(tempfile.NamedTemporaryFile(prefix="kvtier-bench-", dir=arguments.folder))
        reader = Reader(file.name, 2 * memory_bytes, piece_bytes)
        stack.callback(reader.close)
        memories = {name: stack.enter_context(memory(name, memory_bytes)) for name in (IN_ORDER, SCATTERED, JOINED)}
        speeds: dict[str, list[float]] = {name: [] for name in memories}
        for repeat in range(repeats + 1):
            for name, target in memories.items():
                gbs = reader.read(target) / 1e9
                if repeat:
                    speeds[name].append(gbs)
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


@contextlib.contextmanager
def memory(name: str, nbytes: int) -> Iterator[memoryview]:
    """Shared memory that is all resident."""
    fd = os.memfd_create("kvtier-bench", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, nbytes)
        pages = list(range(0, nbytes, mmap.PAGESIZE))
        if name != IN_ORDER:
            random.Random(1).shuffle(pages)
        with mmap.mmap(fd, nbytes) as mapped:
            for page in pages:
                mapped[page] = 1
            if name == JOINED:
                huge = HugePages(fd, nbytes)
                started_at = time.perf_counter()
                huge.join(0, nbytes)
                console.print(f"joined {format_size(nbytes)} in {time.perf_counter() - started_at:.2f} s")
                huge.close()
            with memoryview(mapped) as view:
                yield view
    finally:
        os.close(fd)


class Reader:
    """A file that is read by direct I/O."""

    def __init__(self, path: str, nbytes: int, piece_bytes: int) -> None:
        self._nbytes = nbytes // piece_bytes * piece_bytes
        self._piece_bytes = piece_bytes
        self._fd = os.open(path, os.O_RDWR | os.O_DIRECT)
        with mmap.mmap(-1, piece_bytes) as source:
            source[:] = random.Random(2).randbytes(piece_bytes)
            for start in range(0, self._nbytes, piece_bytes):
                os.pwrite(self._fd, source, start)
        os.fdatasync(self._fd)

    def read(self, target: memoryview) -> float:
        """Bytes a second."""
        starts = iter(range(0, self._nbytes, self._piece_bytes))
        lock = threading.Lock()
        room = len(target) // self._piece_bytes * self._piece_bytes

        def work() -> None:
            while True:
                with lock:
                    start = next(starts, None)
                if start is None:
                    return
                place = start % room
                os.preadv(self._fd, [target[place : place + self._piece_bytes]], start)

        workers = [threading.Thread(target=work) for _ in range(NUM_THREADS)]
        started_at = time.perf_counter()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        return self._nbytes / (time.perf_counter() - started_at)

    def close(self) -> None:
        os.close(self._fd)


if __name__ == "__main__":
    main()
