"""Blocks through the object tier, beside bare obstore with the same objects: in a folder, and over HTTP.

    python -m benchmarks.objects.test_segments [--quick] [--json FILE]

A put waits for the writes in the background. The tier has to copy blocks for them, so its bars compare with obstore
after a plain copy (`copied`). The store over HTTP is the tests' own, in its own process: it shows what the tier adds,
not the speed of a real store. Also: the size in the store of documents behind one system prompt. Status 1 if a figure
misses its bar.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import obstore
from obstore.store import from_url

from benchmarks.harness import BlockMemory, Contender, Result, console, finish, make_parser, print_table, race
from kvtier.blocks.hashing import block_hashes
from kvtier.blocks.layout import KvLayout
from kvtier.blocks.namespace import Namespace
from kvtier.observe.metrics import TierMetrics
from kvtier.sizes import format_size
from kvtier.stores.objects.config import ObjectsConfig
from kvtier.tiers.objects import ObjectTier, open_object_tier
from tests.support.object_store import object_server

LAYOUT = KvLayout(layers=32, kv_heads=8, head_dim=64, dtype="float16", block_tokens=16)
"""1 MiB a block."""
NAMESPACE = Namespace(bytes(range(32)))
SEGMENT = 32

BARS = {
    "folder_put_of_copied": ">= 0.5",
    "folder_get_of_bare": ">= 0.5",
    "http_put_of_copied": ">= 0.5",
    "http_get_of_bare": ">= 0.4",
    "stored_over_distinct": "<= 1.1",
}
_TIMEOUT_S = 60.0
_BUFFER_BYTES = 1 << 30
"""All blocks fit in the queue of writes: blocks beyond it would be lost."""
_WRITERS = 2
_READERS = 16
"""As many threads as the tier has."""
_MAX_WAIT_S = 300.0


class Place(NamedTuple):
    """Where objects are kept, as obstore names it."""

    url: str
    settings: dict[str, str]

    def bare(self) -> Any:
        if self.url.startswith("file:"):
            return from_url(self.url, mkdir=True)
        options: Mapping[str, Any] = {"config": self.settings, "client_options": {"allow_http": True}}
        return from_url(self.url, **options)

    def opened(self, name: str) -> ObjectTier:
        url = f"{self.url}/{name}"
        config = ObjectsConfig(
            url=url, settings=self.settings, segment=SEGMENT, timeout_s=_TIMEOUT_S, buffer=_BUFFER_BYTES
        )
        return open_object_tier(config, LAYOUT, NAMESPACE, TierMetrics())


class BareObjects:
    """The same bytes under other names, with plain calls of obstore."""

    def __init__(self, place: Place, num_segments: int) -> None:
        self._store = place.bare()
        self._names = [f"bare/{number}" for number in range(num_segments)]
        self._threads = ThreadPoolExecutor(_READERS)
        self._writers = ThreadPoolExecutor(_WRITERS)

    def put(self, blocks: Sequence[bytes | memoryview]) -> None:
        def write(number: int) -> None:
            segment = blocks[number * SEGMENT : (number + 1) * SEGMENT]
            obstore.put(self._store, self._names[number], segment, use_multipart=False)

        list(self._writers.map(write, range(len(self._names))))

    def drop(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            obstore.delete(self._store, self._names)

    def get(self, blocks: list[memoryview]) -> None:
        def read(number: int) -> None:
            end = SEGMENT * LAYOUT.block_bytes
            found = memoryview(obstore.get_range(self._store, self._names[number], start=0, end=end))
            for position in range(SEGMENT):
                start = position * LAYOUT.block_bytes
                blocks[number * SEGMENT + position][:] = found[start : start + LAYOUT.block_bytes]

        list(self._threads.map(read, range(len(self._names))))

    def close(self) -> None:
        self._threads.shutdown()
        self._writers.shutdown()


def main() -> int:
    parser = make_parser(__doc__ or "")
    arguments = parser.parse_args()
    num_blocks = 128 if arguments.quick else 512
    repeats = arguments.repeats or (3 if arguments.quick else 7)
    result = Result("objects.test_segments", {"blocks": num_blocks, "segment": SEGMENT, "repeats": repeats})
    console.print(f"{num_blocks} blocks of {format_size(LAYOUT.block_bytes)}, {SEGMENT} an object, {repeats} repeats")
    with folder() as place:
        measure("folder", place, num_blocks, repeats, result)
    with served() as place:
        measure("http", place, num_blocks, repeats, result)
    with folder() as place:
        result.figures["stored_over_distinct"] = measure_documents(place)
    return finish(result, BARS, arguments.json)


def measure(kind: str, place: Place, num_blocks: int, repeats: int, result: Result) -> None:
    """A put goes to an empty store; a get is by a tier that has not seen the blocks."""
    source = BlockMemory(num_blocks, LAYOUT.block_bytes, seed=2)
    target = BlockMemory(num_blocks, LAYOUT.block_bytes)
    hashes = block_hashes(NAMESPACE, range(num_blocks * LAYOUT.block_tokens), LAYOUT.block_tokens)
    with contextlib.closing(BareObjects(place, num_blocks // SEGMENT)) as bare, Tiers(place) as tiers:

        def put() -> None:
            for first in range(0, num_blocks, SEGMENT):  # as the engine hands them on
                tiers.now.offer(hashes[first : first + SEGMENT], source.blocks[first : first + SEGMENT])
            if not tiers.now.flush(_MAX_WAIT_S):
                raise AssertionError("not all blocks were written")

        def get() -> None:
            with tiers.now.match(hashes, timeout_s=_TIMEOUT_S) as lease:
                if lease.fetch(target.blocks) != num_blocks:
                    raise AssertionError("not all blocks came")

        def forget() -> None:
            target.poison()
            tiers.renew(hashes, drop=False)

        seconds = race(
            [
                Contender(f"{kind}: bare put", lambda: bare.put(source.blocks), bare.drop),
                Contender(f"{kind}: copied put", lambda: bare.put(list(map(bytes, source.blocks))), bare.drop),
                Contender(f"{kind}: kvtier put", put, lambda: tiers.renew(hashes, drop=True)),
                Contender(
                    f"{kind}: bare get", lambda: bare.get(target.blocks), target.poison, lambda: target.expect(source)
                ),
                Contender(
                    f"{kind}: kvtier get",
                    get,
                    forget,
                    lambda: target.expect(source),
                ),
            ],
            repeats,
        )
    rows: list[dict[str, object]] = [
        {"what": name, "ms": f"{1000 * value:.1f}", "GB/s": source.nbytes / 1e9 / value}
        for name, value in seconds.items()
    ]
    print_table(f"{num_blocks} blocks, medians", rows)
    result.rows += rows
    for act, peer in (("put", "bare"), ("put", "copied"), ("get", "bare")):
        ratio = seconds[f"{kind}: {peer} {act}"] / seconds[f"{kind}: kvtier {act}"]
        result.figures[f"{kind}_{act}_of_{peer}"] = ratio


class Tiers:
    """Tiers on the same store, one after the other, each without what the ones before knew."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self.now = place.opened("tier")

    def renew(self, hashes: list[Any], *, drop: bool) -> None:
        if drop:
            self.now.drop()
        self.now.close()
        self.now = self._place.opened("tier")
        self.now.learn(hashes)

    def __enter__(self) -> Tiers:
        return self

    def __exit__(self, *error: object) -> None:
        self.now.close()


def measure_documents(place: Place) -> float:
    """Bytes stored for documents of 8 segments behind a system prompt of 2.5, over their distinct bytes."""
    num_beginning, num_own, num_documents = 2 * SEGMENT + SEGMENT // 2, 6 * SEGMENT - SEGMENT // 2, 4
    tokens = LAYOUT.block_tokens
    with contextlib.closing(place.opened("documents")) as tier:
        source = BlockMemory(SEGMENT, LAYOUT.block_bytes, seed=3)
        for number in range(1, num_documents + 1):
            beginning = range(num_beginning * tokens)
            own = range(number * 1_000_000, number * 1_000_000 + num_own * tokens)
            hashes = block_hashes(NAMESPACE, [*beginning, *own], tokens)
            tier.learn(hashes)
            first = 0 if number == 1 else num_beginning // SEGMENT * SEGMENT  # whole ones are hits, and known
            for start in range(first, len(hashes), SEGMENT):
                tier.offer(hashes[start : start + SEGMENT], source.blocks)
            if not tier.flush(_MAX_WAIT_S) or not all(tier.contains(hashes)):
                raise AssertionError("a document is not there")
    folder_of = Path(place.url.removeprefix("file://"))
    stored = sum(path.stat().st_size for path in folder_of.rglob("*") if path.is_file())
    distinct = (num_beginning + num_documents * num_own) * LAYOUT.block_bytes
    return stored / distinct


@contextlib.contextmanager
def folder() -> Iterator[Place]:
    path = tempfile.mkdtemp(prefix="kvtier-objects-")
    try:
        yield Place(Path(path).as_uri(), {})
    finally:
        shutil.rmtree(path)


@contextlib.contextmanager
def served() -> Iterator[Place]:
    """The tests' store, in its own process."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,))
    process.start()
    try:
        yield Place(*ours.recv())
    finally:
        ours.send(None)
        process.join()


def _serve(told: Connection) -> None:
    with object_server() as server:
        told.send((server.url, server.settings))
        told.recv()


if __name__ == "__main__":
    sys.exit(main())
