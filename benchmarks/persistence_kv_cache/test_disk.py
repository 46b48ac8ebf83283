"""512 blocks through the cache server's disk, beside raw direct I/O of the same sizes on the same filesystem.

    python -m benchmarks.persistence_kv_cache.test_disk [--quick] [--json FILE] [--folder DIR]

set is timed until `flush` has returned; get comes from disk: the server is restarted before each one, and its I/O is
direct, so no page cache helps. Raw is the best of 1, 4 and 16 threads on a preallocated, already written file, with
fdatasync at the end. The server's file has been written once too. Checksums are on, as always.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import kvtier
from benchmarks.harness import BlockMemory, Result, console, make_parser, print_figures, print_table, read_options
from benchmarks.shapes import NUM_BLOCKS, SHAPES
from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.layout import KvLayout
from kvtier.blocks.namespace import Namespace, NamespaceFields
from kvtier.client.client import SingleClient
from kvtier.sizes import format_size
from kvtier.stores.disk import DiskStore
from kvtier.testing.servers import ServerProcess, cache_server

BARS = {
    "disk_set_of_raw": ">= 0.9",
    "disk_get_of_raw": ">= 0.9",
    "disk_stream_get_of_raw": ">= 0.9",
    "recover_100k_s": "<= 2",
    "memory_hit_beside_disk": ">= 0.9",
}
RAW_THREADS = (1, 4, 16)
RECOVERED_BLOCKS = 100_000


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

    with RawFile(folder / "raw", source) as raw:
        disk = DiskServer(folder / "cache", layout)
        disk.set(source, deferred=False)  # writes the file once
        for _ in range(repeats):
            for threads in RAW_THREADS:
                note(f"raw write, {threads} threads", raw.write(threads))
                note(f"raw read, {threads} threads", raw.read(threads))
            note("set + flush", disk.set(source, deferred=False))
            note("set deferred + flush", disk.set(source, deferred=True))
            note("get", disk.get(source, target))
            note("stream_get", disk.stream_get(source, target))
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
        "memory_hit_beside_disk": alone / beside,
    }


class RawFile:
    """What the device does with direct I/O of a block's size."""

    def __init__(self, path: Path, source: BlockMemory) -> None:
        self._source = source
        self._nbytes = len(source.blocks[0])
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        os.posix_fallocate(self._fd, 0, source.nbytes)
        self._sink = [mmap.mmap(-1, self._nbytes) for _ in range(max(RAW_THREADS))]
        self.write(4)

    def write(self, threads: int) -> float:
        def act(position: int, number: int) -> None:
            os.pwrite(self._fd, self._source.blocks[position], position * self._nbytes)

        return self._timed(act, threads)

    def read(self, threads: int) -> float:
        def act(position: int, number: int) -> None:
            os.preadv(self._fd, [self._sink[number]], position * self._nbytes)

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
    """A server with a folder, started anew for each measurement."""

    def __init__(self, folder: Path, layout: KvLayout) -> None:
        self._folder = folder
        self._layout = layout
        self._namespace = NamespaceFields(layout=layout, weights="benchmark")
        self._memory = 3 * NUM_BLOCKS * layout.slot_bytes

    def set(self, source: BlockMemory, *, deferred: bool) -> float:
        with self._running() as (_, client, hashes):
            client.drop()
            _touch(client, hashes, source)  # the arena's pages, not the disk
            started_at = time.perf_counter()
            stored = client.set(hashes, source.blocks, deferred=deferred)
            client.flush(timeout_s=60)
            elapsed = time.perf_counter() - started_at
            assert stored == NUM_BLOCKS, stored
            assert client.stats()["disk_blocks"] == NUM_BLOCKS
        return elapsed

    def get(self, source: BlockMemory, target: BlockMemory) -> float:
        target.poison()
        with self._running() as (_, client, hashes):
            _touch_elsewhere(client, NUM_BLOCKS)
            started_at = time.perf_counter()
            arrived = client.get(hashes, target.blocks)
            elapsed = time.perf_counter() - started_at
            assert arrived == NUM_BLOCKS, arrived
            assert client.stats()["disk_read_blocks"] == NUM_BLOCKS
        target.expect(source)
        return elapsed

    def stream_get(self, source: BlockMemory, target: BlockMemory) -> float:
        target.poison()
        with self._running() as (_, client, hashes):
            _touch_elsewhere(client, NUM_BLOCKS)
            started_at = time.perf_counter()
            arrived = sum(1 for _ in client.stream_get(hashes, target.blocks))
            elapsed = time.perf_counter() - started_at
            assert arrived == NUM_BLOCKS, arrived
        target.expect(source)
        return elapsed

    def memory_hits_beside_disk(self, source: BlockMemory, target: BlockMemory, repeats: int) -> tuple[float, float]:
        """Median seconds of a get of 64 blocks from memory, with the disk idle and while it writes all the time."""
        hot = 64
        with self._running() as (server, client, hashes):
            client.drop()
            client.set(hashes[:hot], source.blocks[:hot])
            client.flush(timeout_s=60)
            stop = threading.Event()
            writer = threading.Thread(target=self._saturate, args=(server, source, stop))
            alone: list[float] = []
            beside: list[float] = []
            for times in (alone, beside):
                if times is beside:
                    writer.start()
                    time.sleep(0.3)
                for _ in range(10 * repeats):
                    started_at = time.perf_counter()
                    arrived = client.get(hashes[:hot], target.blocks[:hot])
                    times.append(time.perf_counter() - started_at)
                    assert arrived == hot
                    time.sleep(0.005)
            stop.set()
            writer.join()
        return statistics.median(alone), statistics.median(beside)

    def _saturate(self, server: ServerProcess, source: BlockMemory, stop: threading.Event) -> None:
        """Writes into the arena in place and commits, so that the disk, not a copy, is what is busy."""
        with kvtier.connect(server.unix, layout=self._layout, namespace=self._namespace, timeout_s=60) as client:
            number = 0
            while not stop.is_set():
                number += 1
                hashes = client.hashes([number] * (64 * self._layout.block_tokens))
                with client.reserve(hashes) as slots:
                    slots.commit()
                client.flush(timeout_s=60)

    @contextlib.contextmanager
    def _running(self) -> Iterator[tuple[ServerProcess, SingleClient, list[BlockHash]]]:
        file_space = str(3 * NUM_BLOCKS * self._layout.slot_bytes)
        options = ("--folder", str(self._folder), "--disk", file_space, "--max-leased", str(self._memory))
        with cache_server(*options, "--touch-memory", memory=str(self._memory)) as server:
            while server.resident_bytes() < self._memory:  # as in a server that has run for a while
                time.sleep(0.01)
            with kvtier.connect(server.unix, layout=self._layout, namespace=self._namespace, timeout_s=60) as client:
                yield server, client, client.hashes(range(NUM_BLOCKS * self._layout.block_tokens))


def _touch(client: SingleClient, hashes: list[BlockHash], source: BlockMemory) -> None:
    """Have the arena's pages resident and mapped, as they are in a server that has run for a while."""
    other = [BlockHash(bytes(reversed(block_hash))) for block_hash in hashes]
    with client.reserve(other) as slots:
        slots.fill([source.blocks[position] for position in slots.positions])


def _touch_elsewhere(client: SingleClient, count: int) -> None:
    other = [BlockHash(number.to_bytes(32, "big")) for number in range(count)]
    with client.reserve(other) as slots:
        for view in slots.views():
            view[:: mmap.PAGESIZE] = bytes(len(view[:: mmap.PAGESIZE]))


def measure_recovery(folder: Path, repeats: int) -> float:
    namespace = Namespace(bytes(32))
    store = DiskStore(folder, 1 << 30)
    space = store.open(namespace, "benchmark", 4096, 16)
    block = memoryview(mmap.mmap(-1, 4096))
    for number in range(RECOVERED_BLOCKS):
        store.write(space, BlockHash(number.to_bytes(32, "big")), block)
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
