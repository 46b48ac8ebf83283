"""The file half of `kvtier.vineyard` beside plain direct I/O of the same sizes, and over the length of a sequence.

    python -m benchmarks.vineyard.test_file_store [--quick] [--json FILE] [--folder DIR]

5 MiB a token, as in Vineyard's own test: 16 tokens a chunk, so files of 80 MiB. With 1 to 32 workers, `update` writes
new files and `query` reads them into other memory; both are direct, so that no page cache helps, and checksums are
on, as always. Raw is the same number of threads on as many new files of the same size: direct I/O from and to
aligned memory, without a copy or a checksum, fdatasync for each file; of whole files or of 4 MiB a call, whichever is
faster. The figures are of tensors in whole pages of memory, as raw I/O needs them; "unaligned" are tensors that lie 64
bytes off, so that each is copied. All have run once before they are timed; then they take turns, in another order each
time, and a figure is the median over the turns of raw's seconds over the cache's in the same turn, for the number of
workers where it is lowest. Raw files are open before the clock starts and closed after it has stopped; the cache's are
not.

Then 4 KiB a token: time and disk space for each token of 64,000 over those of 4,000, in one call and chunk by chunk
with an ever longer prefix.
"""

from __future__ import annotations

import functools
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import (
    BlockMemory,
    Result,
    console,
    expect_same,
    finish,
    make_parser,
    print_table,
    read_options,
)
from kvtier.memory.copying import address_of
from kvtier.sizes import format_size
from kvtier.vineyard import FileCacheConfig, KVCache, KVTensor
from kvtier.vineyard.chunk_files import is_chunk_folder
from kvtier.vineyard.kv_tensor import TokenTensors

BARS = {"file_query_of_raw": ">= 0.9", "file_update_of_raw": ">= 0.9", "file_64k_over_4k": "<= 1.25"}
CHUNK_TOKENS = 16
LARGE_TOKENS = 128
RAW_PIECES = (1 << 40, 4 << 20)
SHORT_TOKENS, LONG_TOKENS = 4_000, 64_000


@dataclass(frozen=True)
class Shape:
    """Bytes of one token."""

    layer: int
    tensor_bytes: int

    @property
    def token_bytes(self) -> int:
        return 2 * self.layer * self.tensor_bytes


LARGE = Shape(layer=80, tensor_bytes=32 << 10)
SMALL = Shape(layer=4, tensor_bytes=512)


def main() -> int:
    parser = make_parser(__doc__ or "")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="where to put the files")
    options, arguments = read_options(parser, ())
    workers = (1, 4, 16) if options.quick else (1, 2, 4, 8, 16, 32)
    result = Result(
        "vineyard.test_file_store",
        {"tokens": LARGE_TOKENS, "repeats": options.repeats, "workers": workers, "quick": options.quick},
    )
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-", dir=arguments.folder) as folder:
        result.figures.update(measure_rate(Path(folder), workers, options.repeats, result))
        result.figures.update(measure_length(Path(folder), options.repeats, result))
    return finish(result, BARS, options.json)


def measure_rate(folder: Path, worker_counts: Sequence[int], repeats: int, result: Result) -> dict[str, float]:
    chunk_bytes = CHUNK_TOKENS * LARGE.token_bytes
    num_chunks = LARGE_TOKENS // CHUNK_TOKENS
    nbytes = num_chunks * chunk_bytes
    source = BlockMemory(num_chunks + 1, chunk_bytes, seed=7)
    target = BlockMemory(num_chunks + 1, chunk_bytes)
    console.print(f"{LARGE_TOKENS} tokens of {format_size(LARGE.token_bytes)}, {repeats} repeats")
    worst = {"file_query_of_raw": float("inf"), "file_update_of_raw": float("inf")}
    rows: list[dict[str, object]] = []
    for workers in worker_counts:
        turns = _race(folder, workers, source, target, repeats)
        raw_read = min((f"raw read {piece}" for piece in RAW_PIECES), key=turns.median)
        raw_write = min((f"raw write {piece}" for piece in RAW_PIECES), key=turns.median)
        query_of_raw, update_of_raw = turns.ratio(raw_read, "query"), turns.ratio(raw_write, "update")
        worst["file_query_of_raw"] = min(worst["file_query_of_raw"], query_of_raw)
        worst["file_update_of_raw"] = min(worst["file_update_of_raw"], update_of_raw)
        rows.append(
            {
                "workers": workers,
                **{
                    f"{name} MiB/s": f"{nbytes / turns.median(what) / (1 << 20):.0f}"
                    for name, what in (
                        ("raw read", raw_read),
                        ("query", "query"),
                        ("raw write", raw_write),
                        ("update", "update"),
                    )
                },
                "query token/s": f"{LARGE_TOKENS / turns.median('query'):.0f}",
                "update token/s": f"{LARGE_TOKENS / turns.median('update'):.0f}",
                "query of raw": f"{query_of_raw:.3f}",
                "update of raw": f"{update_of_raw:.3f}",
                "query unaligned": f"{turns.ratio(raw_read, 'query unaligned'):.3f}",
                "update unaligned": f"{turns.ratio(raw_write, 'update unaligned'):.3f}",
            }
        )
    print_table(f"{LARGE_TOKENS} tokens, {format_size(nbytes)}, medians", rows)
    result.rows += rows
    return worst


class Turns:
    """Seconds of everything that takes turns, turn by turn."""

    def __init__(self) -> None:
        self._seconds: dict[str, list[float]] = {}

    def add(self, seconds: Mapping[str, float]) -> None:
        for name, value in seconds.items():
            self._seconds.setdefault(name, []).append(value)

    def median(self, name: str) -> float:
        return statistics.median(self._seconds[name])

    def ratio(self, name: str, other: str) -> float:
        """The median of the ratio within a turn, which a slow turn does not change."""
        return statistics.median(
            mine / others for mine, others in zip(self._seconds[name], self._seconds[other], strict=True)
        )


def _race(folder: Path, workers: int, source: BlockMemory, target: BlockMemory, repeats: int) -> Turns:
    """Raw and cached I/O, which take turns; the first turn is not counted."""
    turns = Turns()
    blocks, into = source.blocks[:-1], target.blocks[:-1]
    with _cache(folder / "cache", LARGE, LARGE_TOKENS, workers) as cache:

        def time_raw(piece: int) -> dict[str, float]:
            raw = RawFiles(folder / "raw", workers, piece)
            write_s = raw.write(blocks)
            target.poison()
            read_s = raw.read(into)
            expect_same(into[-1], blocks[-1])
            _remove(folder / "raw")
            return {f"raw write {piece}": write_s, f"raw read {piece}": read_s}

        def time_cache(name: str, offset: int) -> dict[str, float]:
            update_s, query_s = _time_cache(cache, source, target, offset)
            _empty(folder / "cache")
            return {f"update{name}": update_s, f"query{name}": query_s}

        contenders = [
            *(functools.partial(time_raw, piece) for piece in RAW_PIECES),
            functools.partial(time_cache, "", 0),
            functools.partial(time_cache, " unaligned", 64),
        ]
        for repeat in range(repeats + 1):
            first = repeat % len(contenders)
            for contender in contenders[first:] + contenders[:first]:
                seconds = contender()
                if repeat:
                    turns.add(seconds)
    return turns


def _time_cache(cache: KVCache, source: BlockMemory, target: BlockMemory, offset: int) -> tuple[float, float]:
    """Seconds of an update from `offset` on, and of a query."""
    tokens = list(range(LARGE_TOKENS))
    end = offset + LARGE_TOKENS * LARGE.token_bytes
    sources, targets = token_tensors(source.view[offset:end], LARGE), token_tensors(target.view[offset:end], LARGE)
    started_at = time.perf_counter()
    stored = cache.update(None, tokens, sources)
    update_s = time.perf_counter() - started_at
    assert stored == LARGE_TOKENS, stored
    target.poison()
    started_at = time.perf_counter()
    matched = cache.query(tokens, targets)
    query_s = time.perf_counter() - started_at
    assert matched == LARGE_TOKENS, matched
    expect_same(target.view[offset:end], source.view[offset:end])
    return update_s, query_s


class RawFiles:
    """New files of a chunk's size by direct I/O, `piece_bytes` a call, one thread for each worker."""

    def __init__(self, folder: Path, workers: int, piece_bytes: int) -> None:
        """`folder` is created if missing; files in it belong to other `RawFiles`."""
        self._folder = folder
        self._workers = workers
        self._piece_bytes = piece_bytes
        folder.mkdir(exist_ok=True)

    def write(self, blocks: Sequence[memoryview]) -> float:
        fds = [
            os.open(self._folder / str(number), os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600)
            for number in range(len(blocks))
        ]
        left = [-(-len(block) // self._piece_bytes) for block in blocks]
        lock = threading.Lock()

        def act(number: int, start: int) -> None:
            os.pwrite(fds[number], blocks[number][start : start + self._piece_bytes], start)
            with lock:
                left[number] -= 1
                is_last = not left[number]
            if is_last:
                os.fdatasync(fds[number])

        return self._timed(fds, blocks, act)

    def read(self, blocks: Sequence[memoryview]) -> float:
        fds = [os.open(self._folder / str(number), os.O_RDONLY | os.O_DIRECT) for number in range(len(blocks))]

        def act(number: int, start: int) -> None:
            os.preadv(fds[number], [blocks[number][start : start + self._piece_bytes]], start)

        return self._timed(fds, blocks, act)

    def _timed(self, fds: Sequence[int], blocks: Sequence[memoryview], act: Callable[[int, int], None]) -> float:
        units = iter(
            [
                (number, start)
                for number, block in enumerate(blocks)
                for start in range(0, len(block), self._piece_bytes)
            ]
        )
        lock = threading.Lock()

        def work() -> None:
            while True:
                with lock:
                    unit = next(units, None)
                if unit is None:
                    return
                act(*unit)

        threads = [threading.Thread(target=work) for _ in range(self._workers)]
        started_at = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        elapsed = time.perf_counter() - started_at
        for fd in fds:
            os.close(fd)
        return elapsed


def measure_length(folder: Path, repeats: int, result: Result) -> dict[str, float]:
    """The cost of a token in a long sequence over one in a short one: the worst of times, and space on disk."""
    console.print(f"{SHORT_TOKENS} and {LONG_TOKENS} tokens of {format_size(SMALL.token_bytes)}, {repeats} repeats")
    num_turns = {SHORT_TOKENS: LONG_TOKENS // SHORT_TOKENS // 4, LONG_TOKENS: 1}
    times: dict[int, list[dict[str, float]]] = {SHORT_TOKENS: [], LONG_TOKENS: []}
    space: dict[int, float] = {}
    for repeat in range(repeats + 1):
        for num_tokens, turns in num_turns.items():
            taken = [_time_length(folder / "cache", num_tokens) for _ in range(turns)]
            space[num_tokens] = taken[-1].pop("bytes")
            if repeat:
                times[num_tokens] += taken
    rows: list[dict[str, object]] = []
    worst = 0.0
    for what in times[LONG_TOKENS][0]:
        short, long = (
            statistics.median(taken[what] for taken in times[num_tokens]) / num_tokens
            for num_tokens in (SHORT_TOKENS, LONG_TOKENS)
        )
        worst = max(worst, long / short)
        rows.append(
            {
                "what": what,
                f"us/token of {SHORT_TOKENS}": f"{short * 1e6:.1f}",
                f"us/token of {LONG_TOKENS}": f"{long * 1e6:.1f}",
                "ratio": f"{long / short:.3f}",
            }
        )
    per_token = {num_tokens: nbytes / num_tokens for num_tokens, nbytes in space.items()}
    assert per_token[LONG_TOKENS] <= 1.02 * per_token[SHORT_TOKENS], per_token
    print_table(f"{format_size(SMALL.token_bytes)} a token; {per_token[LONG_TOKENS]:.0f} bytes of disk a token", rows)
    result.rows += rows
    return {"file_64k_over_4k": worst}


def _time_length(folder: Path, num_tokens: int) -> dict[str, float]:
    num_tokens = num_tokens // CHUNK_TOKENS * CHUNK_TOKENS
    tokens = list(range(num_tokens))
    source = BlockMemory(num_tokens // CHUNK_TOKENS, CHUNK_TOKENS * SMALL.token_bytes, seed=3)
    target = BlockMemory(num_tokens // CHUNK_TOKENS, CHUNK_TOKENS * SMALL.token_bytes)
    sources, targets = token_tensors(source.view, SMALL), token_tensors(target.view, SMALL)
    seconds = {}
    with _cache(folder, SMALL, 2 * LONG_TOKENS, 8) as cache:
        started_at = time.perf_counter()
        assert cache.update(None, tokens, sources) == num_tokens
        seconds["update in one call"] = time.perf_counter() - started_at
        started_at = time.perf_counter()
        assert cache.query(tokens, targets) == num_tokens
        seconds["query"] = time.perf_counter() - started_at
        target.expect(source)
        seconds["bytes"] = float(sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file()))
    _remove(folder)
    with _cache(folder, SMALL, 2 * LONG_TOKENS, 8) as cache:
        seconds["update by chunks"] = 0.0
        for first in range(0, num_tokens, CHUNK_TOKENS):
            prefix, end = tokens[:first], first + CHUNK_TOKENS  # making the prefix is the caller's time
            started_at = time.perf_counter()
            stored = cache.update(prefix, tokens[first:end], sources[first:end])
            seconds["update by chunks"] += time.perf_counter() - started_at
            assert stored == CHUNK_TOKENS
    _remove(folder)
    return seconds


def _cache(folder: Path, shape: Shape, num_tokens: int, workers: int) -> KVCache:
    config = FileCacheConfig(chunk_size=CHUNK_TOKENS, root=str(folder), io_workers=workers)
    return KVCache(config, tensor_bytes=shape.tensor_bytes, cache_capacity=num_tokens, layer=shape.layer)


def token_tensors(memory: memoryview, shape: Shape) -> list[TokenTensors]:
    """The tensors of every token: layer by layer, K before V."""
    start = address_of(memory)
    size = shape.tensor_bytes
    return [
        [(KVTensor(key, size), KVTensor(key + size, size)) for key in range(token, token + shape.token_bytes, 2 * size)]
        for token in range(start, start + memory.nbytes, shape.token_bytes)
    ]


def _empty(root: Path) -> None:
    """Remove the chunks of an open cache, but not its root and temporary folder."""
    for folder in root.iterdir():
        if is_chunk_folder(folder.name):
            _remove(folder)


def _remove(folder: Path) -> None:
    """And let the device finish with it before the next turn."""
    shutil.rmtree(folder)
    fd = os.open(folder.parent, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


if __name__ == "__main__":
    sys.exit(main())
