"""Processes of two hosts on one folder of chunk files: the rate of each, and of all together.

    python -m benchmarks.vineyard.test_shared_folder [--quick] [--json FILE] [--folder DIR]

5 MiB a token and 16 tokens a chunk, as in Vineyard's own test. 1 to 32 processes, each with a `KVCache` of its own on
the same folder, half of them as another host's: they do not know each other's processes, as on a shared filesystem. All
begin at once: each stores a sequence of its own, then each reads that of a process of the other host. I/O is direct,
checksums are on, and every byte read is compared. The baseline is the same number of processes on plain files of a
chunk's size, by direct I/O. Rates of one process are medians; `all` is all bytes over the time from the first start to
the last end.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

from benchmarks.harness import BlockMemory, Result, console, expect_same, finish, make_parser, print_table, read_options
from benchmarks.vineyard.test_file_store import CHUNK_TOKENS, LARGE, RawFiles, token_tensors
from kvtier.vineyard import FileCacheConfig, KVCache, file_owner

BARS = {"shared_query_of_raw": ">= 0.9", "shared_update_of_raw": ">= 0.9"}
PROCESSES = (1, 2, 4, 8, 16, 32)
QUICK_PROCESSES = (1, 4)
RAW, CACHE = "raw", "cache"
_PIECE_BYTES = 4 << 20
_PATIENCE_S = 600.0


def main() -> int:
    if sys.argv[1:2] == ["worker"]:
        return work(json.loads(sys.argv[2]))
    parser = make_parser(__doc__ or "")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="where to put the files")
    parser.add_argument("--processes", type=int, nargs="+", help=f"how many ({' '.join(map(str, PROCESSES))})")
    parser.add_argument("--chunks", type=int, help="chunks of 80 MiB that each stores (2)")
    options, arguments = read_options(parser, ())
    counts = tuple(arguments.processes or (QUICK_PROCESSES if options.quick else PROCESSES))
    num_chunks = arguments.chunks or (1 if options.quick else 2)
    repeats = arguments.repeats or (1 if options.quick else 3)
    result = Result(
        "vineyard.test_shared_folder",
        {"processes": counts, "hosts": 2, "chunks": num_chunks, "repeats": repeats, "quick": options.quick},
    )
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-", dir=arguments.folder) as folder:
        for count in counts:
            measure(Path(folder), count, num_chunks, repeats, result)
    print_table(f"{num_chunks * CHUNK_TOKENS} tokens of 5 MiB a process, medians of {repeats}", result.rows)
    return finish(result, BARS, options.json)


def measure(folder: Path, count: int, num_chunks: int, repeats: int, result: Result) -> None:
    """One row: raw files and the cache take turns."""
    nbytes = num_chunks * CHUNK_TOKENS * LARGE.token_bytes
    times: dict[str, list[Mapping[str, float]]] = {RAW: [], CACHE: []}
    for _ in range(repeats):
        for kind in (RAW, CACHE):
            root = folder / kind
            root.mkdir(mode=0o700)
            times[kind].append(_turn(kind, root, count, num_chunks))
            shutil.rmtree(root)
            os.sync()
    row: dict[str, object] = {"processes": count}
    for act in ("write", "read"):
        of_raw = statistics.median(
            raw[f"{act} all"] / own[f"{act} all"] for raw, own in zip(times[RAW], times[CACHE], strict=True)
        )
        for kind in (RAW, CACHE):
            one = statistics.median(turn[act] for turn in times[kind])
            together = statistics.median(turn[f"{act} all"] for turn in times[kind])
            row[f"{kind} {act} MiB/s"] = round(nbytes / one / (1 << 20))
            row[f"{kind} {act} all MiB/s"] = round(count * nbytes / together / (1 << 20))
        name = "query" if act == "read" else "update"
        row[f"{name} token/s"] = round(num_chunks * CHUNK_TOKENS / statistics.median(t[act] for t in times[CACHE]))
        row[f"{name} of raw"] = round(of_raw, 3)
        figure = f"shared_{name}_of_raw"
        result.figures[figure] = min(of_raw, result.figures.get(figure, of_raw))
    console.print(", ".join(f"{name} {value}" for name, value in row.items()))
    result.rows.append(row)


def _turn(kind: str, root: Path, count: int, num_chunks: int) -> dict[str, float]:
    """Median seconds of a process and seconds of all together, for writing and for reading."""
    boot = root.parent / "boot id of the other host"
    boot.write_text("another machine since its start")
    processes = []
    try:
        for number in range(count):
            job = {
                "kind": kind,
                "root": str(root),
                "number": number,
                "other": (number + max(1, count // 2)) % count,
                "count": count,
                "num_chunks": num_chunks,
                "boot": str(boot) if number >= -(-count // 2) else "",
            }
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "benchmarks.vineyard.test_shared_folder", "worker", json.dumps(job)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
        found: dict[str, float] = {}
        _all_say(processes, "ready")
        for act in ("write", "read"):
            for process in processes:
                assert process.stdin is not None
                process.stdin.write("go\n")
                process.stdin.flush()
            spans = [json.loads(line) for line in _all_say(processes, "[")]
            found[act] = statistics.median(end - start for start, end in spans)
            found[f"{act} all"] = max(end for _, end in spans) - min(start for start, _ in spans)
        for process in processes:
            if process.wait(_PATIENCE_S):
                raise RuntimeError(f"a process ended with status {process.returncode}")
        return found
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                pipe.close()


def _all_say(processes: Sequence[subprocess.Popen[str]], beginning: str) -> list[str]:
    lines = []
    for process in processes:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line.startswith(beginning):
            raise RuntimeError(f"a process ended with status {process.wait(_PATIENCE_S)}, without an answer")
        lines.append(line)
    return lines


def work(job: Mapping[str, object]) -> int:
    """One process: prints `ready`; on each `go` it writes, then reads, and prints the times."""
    root, number, other = Path(str(job["root"])), int(str(job["number"])), int(str(job["other"]))
    num_chunks = int(str(job["num_chunks"]))
    if job["boot"]:
        file_owner._BOOT_ID = Path(str(job["boot"]))
    chunk_bytes = CHUNK_TOKENS * LARGE.token_bytes
    source = BlockMemory(num_chunks, chunk_bytes, seed=number)
    target = BlockMemory(num_chunks, chunk_bytes)
    if job["kind"] == RAW:
        _work_raw(root, number, other, source, target)
        return 0
    config = FileCacheConfig(chunk_size=CHUNK_TOKENS, root=str(root))
    # Room for twice the data: a chunk that was just written still counts as announced until its writer is done.
    capacity = 2 * (int(str(job["count"])) + 1) * num_chunks * CHUNK_TOKENS
    cache = KVCache(config, tensor_bytes=LARGE.tensor_bytes, cache_capacity=capacity, layer=LARGE.layer)
    with closing(cache):
        num_tokens = num_chunks * CHUNK_TOKENS
        sources, targets = token_tensors(source.view, LARGE), token_tensors(target.view, LARGE)
        _wait_for_go("ready")
        started_at = time.time()
        stored = cache.update(None, _tokens(number, num_tokens), sources)
        _say(started_at)
        assert stored == num_tokens, stored
        started_at = time.time()
        matched = cache.query(_tokens(other, num_tokens), targets)
        _say(started_at, is_last=True)
        assert matched == num_tokens, matched
    target.expect(BlockMemory(num_chunks, chunk_bytes, seed=other))
    return 0


def _work_raw(root: Path, number: int, other: int, source: BlockMemory, target: BlockMemory) -> None:
    files = RawFiles(root / str(number), 8, _PIECE_BYTES)
    _wait_for_go("ready")
    started_at = time.time()
    files.write(source.blocks)
    _say(started_at)
    started_at = time.time()
    RawFiles(root / str(other), 8, _PIECE_BYTES).read(target.blocks)
    _say(started_at, is_last=True)
    expect_same(target.view, BlockMemory(len(target.blocks), len(target.blocks[0]), seed=other).view)


def _tokens(number: int, count: int) -> list[int]:
    return list(range(number * count, (number + 1) * count))


def _wait_for_go(said: str) -> None:
    print(said, flush=True)
    if sys.stdin.readline() != "go\n":
        raise SystemExit("the parent is gone")


def _say(started_at: float, *, is_last: bool = False) -> None:
    """Wall time, which is the same in all processes."""
    line = json.dumps([started_at, time.time()])
    if is_last:
        print(line, flush=True)
    else:
        _wait_for_go(line)


if __name__ == "__main__":
    sys.exit(main())
