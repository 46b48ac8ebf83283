"""Blocks of one namespace in an object store: whole segments under ``kvt1/<namespace>/<segment>``. Thread-safe.

Finding a block lists nothing: an object's name follows from the prompt. An object that was found once is assumed to
exist until reading it fails; one that was absent is not looked for again for a while. Segments are written in the
background, one at a time, and those that cannot be written soon are lost.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.namespace import Namespace
from kvtier.errors import RemoteProtocolError, TierError
from kvtier.memory.checksum import checksum_of
from kvtier.observe.log_limit import LogLimit
from kvtier.stores.objects.bucket import Bucket
from kvtier.stores.objects.collector import Collector
from kvtier.stores.objects.index import Index, decode_index, encode_index, index_bytes
from kvtier.stores.objects.segment_book import SegmentBook, SegmentPlace

logger = logging.getLogger(__name__)

_MAX_KNOWN = 4096
_MAX_KNOWN_BLOCKS = 1 << 18
_ABSENT_S = 10.0
_UPLOAD_THREADS = 2
_IN_FLIGHT_BYTES = 256 << 20
_FIRST_LOOK = 1
_LOOK = 16
_CLOSE_S = 10.0

OnLoss: TypeAlias = Callable[[str, int], None]


class _Upload(NamedTuple):
    segment: BlockHash
    hashes: Sequence[BlockHash]
    payloads: list[bytes]


class ObjectBlocks:
    """Owns `bucket`. `on_loss` is called with the kind of each loss and its number of blocks."""

    def __init__(
        self,
        bucket: Bucket,
        namespace: Namespace,
        block_bytes: int,
        *,
        segment_blocks: int,
        buffer_bytes: int,
        on_loss: OnLoss = lambda kind, count: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bucket = bucket
        self._namespace = namespace
        self._block_bytes = block_bytes
        self.segment_blocks = segment_blocks
        self._book = SegmentBook(segment_blocks)
        self._collector = Collector(block_bytes, buffer_bytes - buffer_bytes // 2)
        self._max_uploads = max(1, buffer_bytes // 2 // (segment_blocks * block_bytes))
        self._on_loss = on_loss
        self._clock = clock
        self._log = LogLimit(logger)
        self._putting = threading.Lock()
        """One `put` at a time: blocks that a segment still lacks must not go to another segment meanwhile."""
        self._lock = threading.Condition(threading.Lock())
        self._known: dict[BlockHash, Index] = {}
        self._absent: dict[BlockHash, float] = {}
        self._uploading: set[BlockHash] = set()
        self._uploads: queue.SimpleQueue[_Upload | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._upload_all, name="kvtier-objects-write", daemon=True)
            for _ in range(_UPLOAD_THREADS)
        ]
        for thread in self._threads:
            thread.start()

    def learn(self, hashes: Sequence[BlockHash]) -> None:
        """All of a prompt's hashes so far, from its first block on; see `SegmentBook`."""
        self._book.learn(hashes)

    def find(self, hashes: Sequence[BlockHash], deadline: float) -> list[bool]:
        """Which blocks are present. Looks no further than the first absent segment."""
        return [place is not None for place in self.places(hashes, deadline)]

    def places(self, hashes: Sequence[BlockHash], deadline: float) -> list[SegmentPlace | None]:
        """Like `find`, with the place of each present block."""
        found = self._look(hashes, self._book.places(hashes), deadline)
        return [None if one is None else one.place for one in found]

    def get(
        self,
        hashes: Sequence[BlockHash],
        into: Sequence[memoryview],
        deadline: float,
        places: Sequence[SegmentPlace | None] | None = None,
    ) -> list[bool]:
        """Which blocks arrived whole: fewer if the store fails. An object with a damaged block is deleted.

        They are read from `places`, if given.
        """
        arrived = [False] * len(hashes)
        places = self._book.places(hashes) if places is None else places
        try:
            self._read(self._look(hashes, places, deadline), into, arrived, deadline)
        except TierError as error:
            self._on_loss(error.kind, 1)
            self._log.warning(error.kind, "objects: %s", str(error))
            for segment in _segments_of(places):
                self._forget(segment)  # the next lookup finds out whether the store works
        return arrived

    def put(self, hashes: Sequence[BlockHash], blocks: Sequence[memoryview]) -> int:
        """Take blocks; those whose segment is now whole are written in the background. Returns how many were taken."""
        num_taken = 0
        with self._putting:
            places = self._book.places(hashes)
            offered = zip(places, hashes, blocks, strict=True)
            for segment, group in itertools.groupby(offered, lambda one: one[0] and one[0].segment):
                if segment is None or not self._has(segment):
                    num_taken += sum([self._collector.add(block_hash, payload) for _, block_hash, payload in group])
                    if segment is not None:
                        self._write_behind(segment)
        return num_taken

    def has_segments(self, names: Sequence[BlockHash]) -> list[bool | None]:
        """Whether each is present or being written; False if it was absent or lost a while ago. Never waits."""
        return [self._has(name) for name in names]

    def drop(self, hashes: Sequence[BlockHash], deadline: float) -> int:
        """Drop the known segments that contain one of these. Returns how many of `hashes` were dropped."""
        self._collector.discard(hashes)
        self.flush(max(0.0, deadline - time.monotonic()))
        found = self.places(hashes, deadline)
        self._delete(set(_segments_of(found)), deadline)
        return len(found) - found.count(None)

    def drop_all(self, deadline: float) -> int:
        """Returns how many blocks the segments had."""
        names = self._bucket.list_names(self._prefix)
        self._bucket.delete(names, deadline)
        with self._lock:
            self._known.clear()
        return len(names) * self.segment_blocks

    def flush(self, timeout_s: float) -> bool:
        """Wait until all whole segments taken so far are written, or lost; False on timeout."""
        with self._lock:
            return self._lock.wait_for(lambda: not self._uploading, timeout_s)

    def close(self) -> None:
        """Segments being written get a few seconds."""
        deadline = time.monotonic() + _CLOSE_S
        for _ in self._threads:
            self._uploads.put(None)
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._bucket.close()

    # --- private: finding ------------------------------------------------------------------------------------------

    @property
    def _prefix(self) -> str:
        return f"kvt1/{self._namespace.hex()}"

    def _name(self, segment: BlockHash) -> str:
        return f"{self._prefix}/{segment.hex()}"

    def _indices(self, segments: Sequence[BlockHash], deadline: float) -> list[Index | None]:
        """None for a segment that does not exist. Raises a `TierError`."""
        now = self._clock()
        with self._lock:
            asked = [
                segment
                for segment in segments
                if segment not in self._known and self._absent.get(segment, float("-inf")) < now - _ABSENT_S
            ]
        start = self.segment_blocks * self._block_bytes
        end = start + index_bytes(self.segment_blocks)
        wanted = [(self._name(segment), start, end) for segment in asked]
        for segment, encoded in zip(asked, self._bucket.read_all(wanted, deadline), strict=True):
            self._note(segment, encoded)
        with self._lock:
            return [self._known.get(segment) for segment in segments]

    def _has(self, segment: BlockHash) -> bool | None:
        with self._lock:
            if segment in self._known or segment in self._uploading:
                return True
            return None if self._absent.get(segment, float("inf")) > self._clock() - _ABSENT_S else False

    def _note(self, segment: BlockHash, encoded: bytes | None) -> None:
        """Note the bytes read where an object's index should be."""
        index = None
        if encoded is not None:
            try:
                index = decode_index(self._namespace, self._block_bytes, self.segment_blocks, bytes(encoded))
            except RemoteProtocolError as error:
                self._on_loss("corrupt", 1)
                self._log.warning("corrupt", "objects: segment %s has %s", segment.hex()[:16], str(error))
        with self._lock:
            if index is not None and index.hashes[-1] == segment:
                self._remember(segment, index)
                return
            self._note_absent(segment)

    def _note_absent(self, segment: BlockHash) -> None:
        self._absent[segment] = self._clock()
        while len(self._absent) > _MAX_KNOWN:
            del self._absent[next(iter(self._absent))]

    def _remember(self, segment: BlockHash, index: Index) -> None:
        self._absent.pop(segment, None)
        self._known[segment] = index
        while len(self._known) > max(1, min(_MAX_KNOWN, _MAX_KNOWN_BLOCKS // self.segment_blocks)):
            del self._known[next(iter(self._known))]

    def _forget(self, segment: BlockHash) -> None:
        with self._lock:
            self._known.pop(segment, None)

    def _look(
        self, hashes: Sequence[BlockHash], places: Sequence[SegmentPlace | None], deadline: float
    ) -> list[_Found | None]:
        """The place of each block, and its object's index; None for absent blocks."""
        indices: dict[BlockHash, Index | None] = {}
        for names in _rounds(places):
            indices.update(zip(names, self._indices(names, deadline), strict=True))
            if None in indices.values():
                break
        found: list[_Found | None] = []
        for place, block_hash in zip(places, hashes, strict=True):
            index = None if place is None else indices.get(place.segment)
            if place is None or index is None or index.hashes[place.number] != block_hash:
                found.append(None)
            else:
                found.append(_Found(place, index))
        return found

    def _read(
        self, found: Sequence[_Found | None], into: Sequence[memoryview], arrived: list[bool], deadline: float
    ) -> None:
        runs = list(_runs(found))
        damaged: set[BlockHash] = set()
        at_once = max(1, _IN_FLIGHT_BYTES // (self.segment_blocks * self._block_bytes))
        for first in range(0, len(runs), at_once):
            some = runs[first : first + at_once]
            wanted = [(self._name(run.segment), *run.range_of(self._block_bytes)) for run in some]
            for run, payloads in zip(some, self._bucket.read_all(wanted, deadline), strict=True):
                if payloads is None:
                    self._forget(run.segment)  # deleted, perhaps by the bucket's own rules
                elif not self._copy(run, payloads, into, arrived):
                    damaged.add(run.segment)
        if damaged:
            self._on_loss("corrupt", len(damaged))
            self._log.warning("corrupt", "objects: %d segments were damaged, and are deleted", len(damaged))
            self._delete(damaged, deadline)

    def _copy(self, run: _Run, payloads: bytes, into: Sequence[memoryview], arrived: list[bool]) -> bool:
        """Copy the intact blocks of `run`. False unless all of them are intact."""
        index = run.contents
        if len(payloads) != run.num_blocks * self._block_bytes:
            return False
        with memoryview(payloads) as view:
            for offset in range(run.num_blocks):
                with view[offset * self._block_bytes : (offset + 1) * self._block_bytes] as payload:
                    block_hash, checksum = index.hashes[run.number + offset], index.checksums[run.number + offset]
                    if checksum_of(self._namespace, block_hash, payload) != checksum:
                        return False
                    into[run.first + offset][:] = payload
                arrived[run.first + offset] = True
        return True

    def _delete(self, segments: set[BlockHash], deadline: float) -> None:
        for segment in segments:
            self._forget(segment)
        self._bucket.delete([self._name(segment) for segment in segments], deadline)

    # --- private: writing ------------------------------------------------------------------------------------------

    def _write_behind(self, segment: BlockHash) -> None:
        """Queue a segment for writing if all of its blocks are here and the queue is not too long."""
        hashes = self._book.blocks_of(segment)
        if not self._collector.has(hashes):
            return
        with self._lock:
            if len(self._uploading) >= self._max_uploads:
                self._note_absent(segment)
                self._on_loss("busy", len(hashes))
                return
        payloads = self._collector.take(hashes, self._book.shared(segment))
        if payloads is None:  # it was just dropped
            return
        with self._lock:
            self._uploading.add(segment)
        self._uploads.put(_Upload(segment, hashes, payloads))

    def _upload_all(self) -> None:
        while (upload := self._uploads.get()) is not None:
            try:
                self._upload(upload)
            except TierError as error:
                self._on_loss(error.kind, len(upload.hashes))
                self._log.warning(error.kind, "objects: a segment was not written: %s", str(error))
            except Exception:
                logger.exception("writing a segment failed")  # the thread continues
            finally:
                with self._lock:
                    if upload.segment not in self._known:
                        self._note_absent(upload.segment)
                    self._uploading.discard(upload.segment)
                    self._lock.notify_all()

    def _upload(self, upload: _Upload) -> None:
        """Write it unless another host has written it."""
        checksums = [
            checksum_of(self._namespace, block_hash, memoryview(payload))
            for block_hash, payload in zip(upload.hashes, upload.payloads, strict=True)
        ]
        start = self.segment_blocks * self._block_bytes
        name = self._name(upload.segment)
        self._note(upload.segment, self._bucket.read(name, start, start + index_bytes(self.segment_blocks)))
        with self._lock:
            if upload.segment in self._known:
                return
        index = encode_index(self._namespace, self._block_bytes, upload.hashes, checksums)
        self._bucket.write(name, [*upload.payloads, index])
        with self._lock:
            self._remember(upload.segment, Index(tuple(upload.hashes), tuple(checksums)))


class _Found(NamedTuple):
    """The location of a block."""

    place: SegmentPlace
    contents: Index


class _Run(NamedTuple):
    """`num_blocks` blocks from `number` on in an object; among the requested blocks, they begin at `first`."""

    segment: BlockHash
    contents: Index
    number: int
    first: int
    num_blocks: int

    def range_of(self, block_bytes: int) -> tuple[int, int]:
        return self.number * block_bytes, (self.number + self.num_blocks) * block_bytes


def _segments_of(places: Sequence[SegmentPlace | None]) -> list[BlockHash]:
    """Each segment once, in order."""
    return list(dict.fromkeys(place.segment for place in places if place is not None))


def _rounds(places: Sequence[SegmentPlace | None]) -> Iterator[list[BlockHash]]:
    """The segments of these places in order, up to the first block without one: one alone, then many at once.

    Most prompts are absent altogether, as the first segment shows.
    """
    names: dict[BlockHash, None] = {}
    for place in places:
        if place is None:
            break
        names[place.segment] = None
    ordered = list(names)
    yield ordered[:_FIRST_LOOK]
    for first in range(_FIRST_LOOK, len(ordered), _LOOK):
        yield ordered[first : first + _LOOK]


def _runs(found: Sequence[_Found | None]) -> Iterator[_Run]:
    """Runs that can be read at once: blocks that are consecutive both here and in their object."""
    run: _Run | None = None
    for position, one in enumerate(found):
        if run is not None and one is not None and one.place == SegmentPlace(run.segment, run.number + run.num_blocks):
            run = run._replace(num_blocks=run.num_blocks + 1)
            continue
        if run is not None:
            yield run
        run = None if one is None else _Run(one.place.segment, one.contents, one.place.number, position, 1)
    if run is not None:
        yield run
