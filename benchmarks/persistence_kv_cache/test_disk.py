"""512 blocks through the cache server's disk, beside raw direct I/O of the same sizes on the same filesystem.

    python -m benchmarks.persistence_kv_cache.test_disk [--quick] [--json FILE] [--folder DIR]

set is timed until `flush` has returned. The server keeps blocks on disk alone (--disk-only), so that every get comes
from there, and its I/O is direct, so that no page cache helps. Raw is the best of 1, 4 and 16 threads on a
preallocated, already written file, with fdatasync at the end. Both have run once before they are timed: memory and
file are warm. Checksums are on, as always. "Encrypted" is the same server with a key (--encryption-key-file).
"""

from __future__ import annotations

import contextlib
import mmap
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import kvtier
from benchmarks.harness import BlockMemory, Result, console, make_parser, print_figures, print_table, read_options
from benchmarks.shapes import NUM_BLOCKS, SHAPES
from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.layout import KvLayout
from kvtier.blocks.namespace import Namespace, NamespaceFields
from kvtier.client.client import CacheClient
from kvtier.sizes import format_size
from kvtier.stores.disk import DiskStore
from kvtier.testing.servers import cache_server

BARS = {
    "disk_set_of_raw": ">= 0.9",
    "disk_get_of_raw": ">= 0.9",
    "disk_stream_get_of_raw": ">= 0.9",
    "recover_100k_s": "<= 2",
    "memory_hit_beside_disk": ">= 0.9",
}
RAW_THREADS = (1, 4, 16)
RECOVERED_BLOCKS = 100_000
_TRIES = 5
_PATIENCE_S = 300.0


def main() -> None:
    parser = make_parser(__doc__ or "")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="where to put the files")
    options, arguments = read_options(parser, ("Qwen2.5-7B", "Llama-3.1-8B"))
    result = Result(
        "persistence_kv_cache.test_disk",
        {"blocks": NUM_BLOCKS, "repeats": options.repeats, "shapes": options.shapes, "quick": options.quick},
    )
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-", dir=arguments.folder) as folder:
        worst: dict[str, float] = {}
        for shape in options.shapes:
            for name, value in measure_shape(shape, Path(folder), options.repeats, result).items():
                worst[name] = min(value, worst.get(name, value))
        result.figures.update(worst)
        console.print(f"recovering {RECOVERED_BLOCKS} blocks of 4KiB")
        result.figures["recover_100k_s"] = measure_recovery(Path(folder) / "recovery", options.repeats)
    print_figures(result.figures, BARS)
    result.write(options.json)


def measure_shape(shape: str, folder: Path, repeats: int, result: Result) -> dict[str, float]:
    layout = SHAPES[shape]
    source = BlockMemory(NUM_BLOCKS, layout.block_bytes, seed=7)
    target = BlockMemory(NUM_BLOCKS, layout.block_bytes)
    console.print(f"{shape}: {NUM_BLOCKS} blocks of {format_size(layout.block_bytes)}, {repeats} repeats")
    seconds: dict[str, list[float]] = {}

    def note(name: str, value: float) -> None:
        seconds.setdefault(name, []).append(value)

    folder = folder / shape
    folder.mkdir()
    with RawFile(folder / "raw", source, target) as raw:
        with DiskServer(folder / "cache", layout, "--disk-only") as disk:
            for repeat in range(repeats + 1):
                for threads in RAW_THREADS:
                    note(f"raw write, {threads} threads", raw.write(threads))
                    note(f"raw read, {threads} threads", raw.read(threads))
                note("set + flush", disk.set(source, deferred=False))
                note("set deferred + flush", disk.set(source, deferred=True))
                note("get", disk.get(source, target))
                note("stream_get", disk.stream_get(source, target))
                if not repeat:
                    seconds.clear()
        (folder / "key").write_bytes(os.urandom(32))
        options = ("--disk-only", "--encryption-key-file", str(folder / "key"))
        with DiskServer(folder / "encrypted", layout, *options) as disk:
            for repeat in range(repeats + 1):
                set_s, get_s = disk.set(source, deferred=False), disk.get(source, target)
                if repeat:
                    note("encrypted set + flush", set_s)
                    note("encrypted get", get_s)
    with DiskServer(folder / "both", layout) as disk:
        alone, beside = disk.memory_hits_beside_disk(source, target, repeats)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    rows = [
        {"what": name, "ms": f"{value * 1000:.1f}", "GB/s": f"{source.nbytes / value / 1e9:.2f}"}
        for name, value in medians.items()
    ]
    rows.append({"what": "memory get, disk idle", "ms": f"{alone * 1000:.1f}", "GB/s": ""})
    rows.append({"what": "memory get, disk saturated", "ms": f"{beside * 1000:.1f}", "GB/s": ""})
    print_table(f"{shape}: {NUM_BLOCKS} blocks, {format_size(source.nbytes)}, medians", rows)
    result.rows += [{"shape": shape, **row} for row in rows]
    raw_write_s = min(medians[f"raw write, {threads} threads"] for threads in RAW_THREADS)
    raw_read_s = min(medians[f"raw read, {threads} threads"] for threads in RAW_THREADS)
    return {
        "disk_set_of_raw": raw_write_s / medians["set + flush"],
        "disk_get_of_raw": raw_read_s / medians["get"],
        "disk_stream_get_of_raw": raw_read_s / medians["stream_get"],
        "encrypted_set_of_plain": medians["set + flush"] / medians["encrypted set + flush"],
        "encrypted_get_of_plain": medians["get"] / medians["encrypted get"],
        "memory_hit_beside_disk": alone / beside,
    }


class RawFile:
    """The device's rates of direct I/O in pieces of a block's size."""

    def __init__(self, path: Path, source: BlockMemory, target: BlockMemory) -> None:
        self._source = source
        self._target = target
        self._nbytes = len(source.blocks[0])
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        os.posix_fallocate(self._fd, 0, source.nbytes)
        self.write(4)

    def write(self, threads: int) -> float:
        def act(position: int, number: int) -> None:
            os.pwrite(self._fd, self._source.blocks[position], position * self._nbytes)

        return self._timed(act, threads)

    def read(self, threads: int, into: Sequence[memoryview] | None = None) -> float:
        """Read into the target, unless given other buffers."""
        blocks = self._target.blocks if into is None else into

        def act(position: int, number: int) -> None:
            os.preadv(self._fd, [blocks[position]], position * self._nbytes)

        return self._timed(act, threads)

    def __enter__(self) -> RawFile:
        return self

    def __exit__(self, *exc: object) -> None:
        os.close(self._fd)

    def _timed(self, act: Callable[[int, int], None], threads: int) -> float:
        positions = iter(range(len(self._source.blocks)))
        lock = threading.Lock()

        def work(number: int) -> None:
            while True:
                with lock:
                    position = next(positions, None)
                if position is None:
                    return
                act(position, number)

        workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
        started_at = time.perf_counter()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        os.fdatasync(self._fd)
        return time.perf_counter() - started_at


class DiskServer:
    """A running server with a folder."""

    def __init__(self, folder: Path, layout: KvLayout, *options: str) -> None:
        self._folder = folder
        self._layout = layout
        self._namespace = NamespaceFields(layout=layout, weights="benchmark")
        self._stack = contextlib.ExitStack()
        memory = 3 * NUM_BLOCKS * layout.slot_bytes
        self._server = self._stack.enter_context(
            cache_server(
                *("--folder", str(folder), "--disk", str(memory), "--max-leased", str(memory), "--touch-memory"),
                *options,
                memory=str(memory),
            )
        )
        while self._server.resident_bytes() < memory:  # as in a server that has run for a while
            time.sleep(0.01)
        self._client = self._stack.enter_context(self._connect())
        self._client.arena.populate(0, memory)  # likewise a client's own map of it
        self._hashes = self._client.hashes(range(NUM_BLOCKS * layout.block_tokens))

    def __enter__(self) -> DiskServer:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def set(self, source: BlockMemory, *, deferred: bool) -> float:
        client = self._client
        client.drop()
        started_at = time.perf_counter()
        stored = client.set(self._hashes, source.blocks, deferred=deferred)
        client.flush(timeout_s=60)
        elapsed = time.perf_counter() - started_at
        if stored < NUM_BLOCKS or self._number("disk_blocks") < NUM_BLOCKS:
            raise RuntimeError(f"only {stored} of {NUM_BLOCKS} blocks were stored")
        return elapsed

    def get(self, source: BlockMemory, target: BlockMemory) -> float:
        return self._read(source, target, lambda: self._client.get(self._hashes, target.blocks))

    def stream_get(self, source: BlockMemory, target: BlockMemory) -> float:
        return self._read(source, target, lambda: sum(1 for _ in self._client.stream_get(self._hashes, target.blocks)))

    def _read(self, source: BlockMemory, target: BlockMemory, act: Callable[[], int]) -> float:
        """Seconds until all blocks have come from disk. A turn in which some were still in memory does not count."""
        for _ in range(_TRIES):
            target.poison()
            self._settle()
            before = self._number("disk_read_blocks")
            started_at = time.perf_counter()
            arrived = act()
            elapsed = time.perf_counter() - started_at
            if arrived < NUM_BLOCKS:
                raise RuntimeError(f"only {arrived} of {NUM_BLOCKS} blocks came back from disk")
            target.expect(source)
            if self._number("disk_read_blocks") >= before + NUM_BLOCKS:
                return elapsed
        raise RuntimeError(f"in {_TRIES} turns not all blocks came from disk: memory keeps some of them")

    def _number(self, name: str) -> int:
        return int(str(self._client.stats()[name]))

    def _settle(self) -> None:
        """Wait until the device has written everything, as raw writing does at its end."""
        fd = os.open(self._folder / "blocks.kvtier", os.O_RDONLY)
        os.fdatasync(fd)
        os.close(fd)

    def memory_hits_beside_disk(self, source: BlockMemory, target: BlockMemory, repeats: int) -> tuple[float, float]:
        """Median seconds of a get of 64 blocks from memory, with the disk idle and while it writes all the time."""
        hot = 64
        client, hashes = self._client, self._hashes
        client.drop()
        client.set(hashes[:hot], source.blocks[:hot])
        client.flush(timeout_s=60)
        stop = threading.Event()
        writer = threading.Thread(target=self._saturate, args=(stop,))
        alone: list[float] = []
        beside: list[float] = []
        deadline = time.monotonic() + _PATIENCE_S
        for times in (alone, beside):
            if times is beside:
                writer.start()
                time.sleep(0.3)
            while len(times) < 10 * repeats:
                started_at = time.perf_counter()
                arrived = client.get(hashes[:hot], target.blocks[:hot])
                elapsed = time.perf_counter() - started_at
                if arrived == hot:
                    times.append(elapsed)
                elif time.monotonic() > deadline:
                    stop.set()
                    raise RuntimeError("the blocks that are read all the time do not stay in memory")
                else:  # this thread stood still so long that others' blocks took their place
                    client.set(hashes[:hot], source.blocks[:hot])
                time.sleep(0.005)
        stop.set()
        writer.join()
        return statistics.median(alone), statistics.median(beside)

    def _saturate(self, stop: threading.Event) -> None:
        """Commits slots as they are, so that the disk, not a copy, is what is busy."""
        with self._connect() as client:
            number = 0
            while not stop.is_set():
                number += 1
                with client.reserve(client.hashes([number] * (64 * self._layout.block_tokens))) as slots:
                    slots.commit()
                client.flush(timeout_s=60)

    def _connect(self) -> CacheClient:
        return kvtier.connect(self._server.unix, layout=self._layout, namespace=self._namespace, timeout_s=60)


def measure_recovery(folder: Path, repeats: int) -> float:
    namespace = Namespace(bytes(32))
    store = DiskStore(folder, 1 << 30)
    space = store.open(namespace, "benchmark", 4096, 16)
    block = memoryview(mmap.mmap(-1, 4096))
    for number in range(RECOVERED_BLOCKS):
        store.write(space, [BlockHash(number.to_bytes(32, "big"))], [block])
    store.close()
    times = []
    for _ in range(repeats):
        started_at = time.perf_counter()
        store = DiskStore(folder, 1 << 30)
        times.append(time.perf_counter() - started_at)
        assert store.recovery.num_blocks == RECOVERED_BLOCKS
        store.close()
    return statistics.median(times)


if __name__ == "__main__":
    main()
