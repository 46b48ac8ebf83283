"""Blocks in an object store: what is found, written and lost, and what a store that fails or lies costs."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.blocks.hashing import BlockHash
from kvtier.blocks.namespace import Namespace
from kvtier.errors import ConfigError, RemoteProtocolError, TierError, TierRefused, TierTimeout, TierUnavailable
from kvtier.stores.objects.blocks import ObjectBlocks
from kvtier.stores.objects.collector import Collector
from kvtier.stores.objects.config import ObjectsConfig, open_blocks
from kvtier.stores.objects.index import decode_index, encode_index, index_bytes
from kvtier.stores.objects.segment_book import SegmentBook, SegmentPlace
from kvtier.testing.tier_contract import LAYOUT, NAMESPACE, chain, payloads
from tests.support.object_store import Fault, ObjectServer, object_server
from tests.support.waiting import CALL_S, LIMIT_S

SEGMENT = 4
HASHES = chain(1, 10)


@pytest.fixture
def server() -> Iterator[ObjectServer]:
    with object_server() as running:
        yield running


@contextlib.contextmanager
def opened(
    server: ObjectServer, losses: Counter[str] | None = None, *, namespace: Namespace = NAMESPACE, **more: Any
) -> Iterator[ObjectBlocks]:
    counted = Counter[str]() if losses is None else losses
    config = ObjectsConfig(url=server.url, settings=server.settings, segment=SEGMENT, **{"timeout_s": CALL_S, **more})
    blocks = open_blocks(config, namespace, LAYOUT.block_bytes, lambda kind, count: counted.update({kind: count}))
    with contextlib.closing(blocks):
        yield blocks


def soon() -> float:
    return time.monotonic() + CALL_S


def store(blocks: ObjectBlocks, hashes: list[BlockHash]) -> int:
    blocks.learn(hashes)
    num_taken = blocks.put(hashes, [memoryview(payload) for payload in payloads(hashes)])
    assert blocks.flush(LIMIT_S)
    return num_taken


def read(blocks: ObjectBlocks, hashes: list[BlockHash], deadline: float | None = None) -> list[bytes]:
    into = [bytearray(LAYOUT.block_bytes) for _ in hashes]
    blocks.learn(hashes)
    arrived = blocks.get(hashes, list(map(memoryview, into)), soon() if deadline is None else deadline)
    return [bytes(buffer) for buffer, is_there in zip(into, arrived, strict=True) if is_there]


# --- what is written -------------------------------------------------------------------------------------------------


def test_an_object_is_a_whole_segment_under_its_last_block(server: ObjectServer) -> None:
    with opened(server) as blocks:
        assert store(blocks, HASHES) == 10
        names = [f"kv/kvt1/{NAMESPACE.hex()}/{HASHES[last].hex()}" for last in (3, 7)]
        assert sorted(server.objects) == sorted(names)
        assert {len(one) for one in server.objects.values()} == {4 * LAYOUT.block_bytes + index_bytes(4)}
        assert server.objects[names[0]].startswith(b"".join(payloads(HASHES[:4])))


def test_a_segment_is_written_when_its_last_block_came_in_whatever_order(server: ObjectServer) -> None:
    with opened(server) as blocks:
        blocks.learn(HASHES[:3])
        blocks.put(HASHES[:3], [memoryview(payload) for payload in payloads(HASHES[:3])])  # as an answer grows
        assert blocks.flush(LIMIT_S)
        assert not server.objects
        blocks.learn(HASHES[:4])
        blocks.put(HASHES[3:4], [memoryview(payload) for payload in payloads(HASHES[3:4])])
        assert blocks.flush(LIMIT_S)
        assert read(blocks, HASHES[:4]) == payloads(HASHES[:4])


def test_what_another_host_has_written_is_not_written_again(server: ObjectServer) -> None:
    with opened(server) as one, opened(server) as other:
        store(one, HASHES)
        before = dict(server.objects)
        num_read = server.num_read
        store(other, HASHES)
        assert server.objects == before
        assert server.num_read == num_read + 2, "each segment's index was looked at, and no more"
        assert other.put(HASHES[:4], [memoryview(payload) for payload in payloads(HASHES[:4])]) == 0


def test_prompts_that_part_within_a_segment_have_one_each(server: ObjectServer) -> None:
    fork = HASHES[:2] + chain(2, 6)
    with opened(server) as blocks:
        store(blocks, HASHES)
        store(blocks, fork)
        for _ in range(2):
            assert read(blocks, HASHES) == payloads(HASHES[:8])
            assert read(blocks, fork) == payloads(fork)


def offer(blocks: ObjectBlocks, hashes: list[BlockHash]) -> int:
    return blocks.put(hashes, [memoryview(payload) for payload in payloads(hashes)])


def test_documents_behind_one_beginning_are_each_kept_when_offered_whole_in_any_order(server: ObjectServer) -> None:
    documents = [HASHES[:2] + chain(seed, 6) for seed in range(2, 8)]
    with opened(server) as blocks:
        for document in documents:
            blocks.learn(document)
            offer(blocks, document[2:])  # its beginning was found
        assert blocks.flush(LIMIT_S)
        assert len(server.objects) == len(documents), "the second segment of each, of which all was computed"
        num_taken = [offer(blocks, document[:4]) for document in reversed(documents)]  # another was seen last
        assert num_taken == [2, 2, 0, 0, 0, 0], "a beginning that others need is kept, and not copied again"
        assert blocks.flush(LIMIT_S)
        assert len(server.objects) == 2 * len(documents)
        for document in documents:
            assert read(blocks, document) == payloads(document)


def test_a_beginning_is_written_once_and_a_document_that_ends_within_its_segment_is_not(server: ObjectServer) -> None:
    with opened(server) as blocks:
        store(blocks, HASHES[:4])
        before = dict(server.objects)
        for seed in range(2, 50):
            store(blocks, HASHES[:6] + chain(seed, 1))
            assert offer(blocks, HASHES[:4]) == 0
        assert server.objects == before


def test_what_is_found_does_not_depend_on_who_was_seen_last(server: ObjectServer) -> None:
    document, absent = HASHES[:2] + chain(2, 6), HASHES[:2] + chain(3, 6)
    with opened(server) as writer, opened(server) as blocks:
        store(writer, document)
        blocks.learn(document)
        places = blocks.places(document, soon())
        blocks.learn(absent)
        assert blocks.find(document, soon()) == [True] * 8
        assert not any(blocks.find(absent, soon()))
        into = [bytearray(LAYOUT.block_bytes) for _ in range(2)]
        assert blocks.get(document[:2], list(map(memoryview, into)), soon(), places[:2]) == [True, True]
        assert list(map(bytes, into)) == payloads(document[:2])


def test_what_was_lost_is_told_after_a_while(server: ObjectServer) -> None:
    now = [1000.0]
    names = [HASHES[3], HASHES[7]]
    with opened(server) as blocks:
        blocks._clock = lambda: now[0]
        assert blocks.has_segments(names) == [None, None]
        server.fault = "refuse"
        store(blocks, HASHES[:4])
        assert blocks.has_segments(names) == [None, None], "it would be refused again"
        now[0] += 60
        assert blocks.has_segments(names) == [False, None]
        server.fault = None
        store(blocks, HASHES)
        assert blocks.has_segments(names) == [True, True]


def test_segments_that_come_too_fast_are_lost_counted_and_told(server: ObjectServer) -> None:
    losses = Counter[str]()
    now = [1000.0]
    with opened(server, losses, buffer=2 * SEGMENT * LAYOUT.block_bytes) as blocks:  # one waits, one is written
        blocks._clock = lambda: now[0]
        server.fault = "hang"
        blocks.learn(HASHES)
        offer(blocks, HASHES)
        assert losses["busy"] == SEGMENT
        assert blocks.has_segments([HASHES[3], HASHES[7]]) == [True, None]
        now[0] += 60
        assert blocks.has_segments([HASHES[7]]) == [False]
        server.is_over.set()
        server.fault = None
        assert blocks.flush(LIMIT_S)


# --- what is read ----------------------------------------------------------------------------------------------------


def test_a_prompt_that_is_not_there_costs_one_look_for_a_while(server: ObjectServer) -> None:
    now = [1000.0]
    long = chain(3, 400)
    with opened(server) as other, opened(server) as blocks:
        blocks._clock = lambda: now[0]
        blocks.learn(long)
        assert not any(blocks.find(long, soon()))
        store(other, long[:4])
        assert not any(blocks.find(long, soon())), "it was not there a moment ago"
        now[0] += 60
        assert blocks.find(long, soon())[:5] == [True] * 4 + [False]


def test_what_was_deleted_behind_our_back_is_a_miss_and_then_known_to_be_gone(server: ObjectServer) -> None:
    with opened(server) as blocks:
        store(blocks, HASHES)
        name = next(name for name in server.objects if name.endswith(HASHES[3].hex()))
        del server.objects[name]
        assert read(blocks, HASHES) == payloads(HASHES[4:8])
        assert blocks.find(HASHES, soon())[:4] == [False] * 4


@pytest.mark.parametrize("is_known", [True, False])
def test_bytes_that_were_altered_are_misses_counted_and_never_blocks(server: ObjectServer, is_known: bool) -> None:
    losses = Counter[str]()
    with opened(server) as writer, opened(server, losses) as blocks:
        store(writer, HASHES)
        if is_known:
            blocks.learn(HASHES)
            assert blocks.find(HASHES, soon()).count(True) == 8
        server.fault = "lie"
        assert read(blocks, HASHES) == []
        assert losses["corrupt"] > 0
        server.fault = None
        if is_known:
            assert not server.objects, "they are deleted"


def test_an_object_is_not_deleted_because_others_forgot_it_meanwhile(
    server: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = Counter[str]()
    with opened(server, losses) as blocks:
        store(blocks, HASHES)
        read_all = blocks._bucket.read_all

        def forgetting(wanted: Any, deadline: float) -> list[bytes | None]:
            if wanted:  # payloads: the indices are known
                blocks._known.clear()
                blocks.learn(HASHES[:2] + chain(2, 6))
            return read_all(wanted, deadline)

        monkeypatch.setattr(blocks._bucket, "read_all", forgetting)
        assert read(blocks, HASHES) == payloads(HASHES[:8])
        assert len(server.objects) == 2
        assert not losses


def test_settings_are_not_shown(server: ObjectServer) -> None:
    assert "secret" not in repr(ObjectsConfig(url="s3://b", settings={"secret_access_key": "secret"}))


@pytest.mark.parametrize(
    ("fault", "error"), [("refuse", TierRefused), ("fail", TierUnavailable), ("hang", TierTimeout)]
)
def test_a_store_that_fails_is_told_in_time(server: ObjectServer, fault: Fault, error: type[TierError]) -> None:
    with opened(server, timeout_s=0.5) as blocks:
        server.fault = fault
        blocks.learn(HASHES)
        with pytest.raises(error, match="object store"):
            blocks.find(HASHES, time.monotonic() + (0.2 if fault == "hang" else CALL_S))
        server.is_over.set()
        server.fault = None


@pytest.mark.parametrize("length", [0, 100, LAYOUT.block_bytes + 1, 4 * LAYOUT.block_bytes, -1])
def test_an_object_that_is_too_short_is_a_miss_of_its_own(server: ObjectServer, length: int) -> None:
    with opened(server) as writer, opened(server) as blocks:
        store(writer, HASHES)
        for name, payload in server.objects.items():
            if name.endswith(HASHES[3].hex()):
                server.objects[name] = payload[:length]
        for each in (writer, blocks):  # one that knows the object, and one that does not
            assert read(each, HASHES) in ([], payloads(HASHES[4:8]), payloads(HASHES[:8]))
            assert read(each, chain(2, 4)) == []


@pytest.mark.parametrize("fault", ["cut", "short"])
def test_an_answer_that_is_cut_is_no_block(server: ObjectServer, fault: Fault) -> None:
    with opened(server) as writer, opened(server, timeout_s=0.5) as blocks:
        store(writer, HASHES)
        blocks.learn(HASHES)
        assert blocks.find(HASHES, soon()).count(True) == 8
        server.fault = fault
        assert read(blocks, HASHES) == []
        with pytest.raises(TierUnavailable):
            blocks.find(HASHES, soon())
        server.fault = None
        assert read(blocks, HASHES) == payloads(HASHES[:8])


def test_what_cannot_be_written_is_lost_and_offered_again(server: ObjectServer) -> None:
    losses = Counter[str]()
    with opened(server, losses) as blocks:
        server.fault = "refuse"
        store(blocks, HASHES[:4])
        assert losses["refused"] == 4
        server.fault = None
        store(blocks, HASHES[:4])
        assert read(blocks, HASHES[:4]) == payloads(HASHES[:4])


def test_all_of_a_namespace_goes_and_nothing_of_another(server: ObjectServer) -> None:
    other = Namespace(bytes(31) + b"\1")
    with opened(server) as blocks, opened(server, namespace=other) as others:
        store(blocks, HASHES)
        store(others, HASHES)
        assert blocks.drop_all(soon()) == 8
        assert read(blocks, HASHES) == []
        assert read(others, HASHES) == payloads(HASHES[:8])


# --- the parts -------------------------------------------------------------------------------------------------------


def test_an_index_is_what_was_written() -> None:
    encoded = encode_index(NAMESPACE, 100, HASHES[:4], [1, 2, 3, (1 << 64) - 1])

    assert len(encoded) == index_bytes(4)
    index = decode_index(NAMESPACE, 100, 4, encoded)
    assert index == (tuple(HASHES[:4]), (1, 2, 3, (1 << 64) - 1))


@given(st.data())
def test_any_other_index_is_refused(data: st.DataObject) -> None:
    encoded = encode_index(NAMESPACE, 100, HASHES[:4], [1, 2, 3, 4])
    damaged = bytearray(encoded)
    damaged[data.draw(st.integers(0, len(encoded) - 1))] ^= data.draw(st.integers(1, 255))
    cut = encoded[: data.draw(st.integers(0, len(encoded) - 1))]

    for wrong in (bytes(damaged), cut, encoded + b"x"):
        with pytest.raises(RemoteProtocolError):
            decode_index(NAMESPACE, 100, 4, wrong)
    for asked in ((Namespace(b"x" * 32), 100, 4), (NAMESPACE, 101, 4), (NAMESPACE, 100, 3)):
        with pytest.raises(RemoteProtocolError):
            decode_index(*asked, encoded)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 12), st.integers(0, 12)), max_size=12))
def test_whoever_was_seen_last_has_all_blocks_of_its_segments(prompts: list[tuple[int, int, int]]) -> None:
    book = SegmentBook(SEGMENT)
    for seed, num_shared, num_own in prompts:
        prompt = HASHES[:num_shared] + chain(1000 + 100 * seed + num_shared, num_own)
        book.learn(prompt)
        for position in range(len(prompt) // SEGMENT * SEGMENT):
            last = prompt[position // SEGMENT * SEGMENT + SEGMENT - 1]
            assert book.places(prompt[position : position + 1]) == [SegmentPlace(last, position % SEGMENT)]
            assert book.blocks_of(last)[position % SEGMENT] == prompt[position]


def test_what_is_remembered_of_prompts_is_bounded() -> None:
    book = SegmentBook(SEGMENT, max_blocks=40)
    for seed in range(100):
        book.learn(chain(seed, 12))

    assert len(book._segments) <= 10
    assert len(book._places) <= 40
    assert book.places(chain(99, 12)[:1]) != [None]
    assert book.places(chain(0, 12)) == [None] * 12


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 12), st.integers(0, 12)), max_size=12))
def test_a_segment_is_known_by_its_last_block_whoever_was_seen_last(prompts: list[tuple[int, int, int]]) -> None:
    book = SegmentBook(SEGMENT)
    known = [HASHES[:shared] + chain(1000 + 100 * seed + shared, own) for seed, shared, own in prompts]
    for prompt in known:
        book.learn(prompt)
    for prompt in known:
        num_whole = len(prompt) // SEGMENT * SEGMENT
        for first in range(num_whole):
            assert book.places(prompt[first:num_whole]) == [
                SegmentPlace(prompt[position // SEGMENT * SEGMENT + SEGMENT - 1], position % SEGMENT)
                for position in range(first, num_whole)
            ]


def test_blocks_that_do_not_follow_each_other_have_the_places_they_have() -> None:
    book = SegmentBook(SEGMENT)
    other = chain(2, 8)
    book.learn(HASHES)
    book.learn(other)

    assert book.places([other[5], HASHES[3], chain(3, 1)[0], HASHES[0]]) == [
        SegmentPlace(other[7], 1),
        SegmentPlace(HASHES[3], 3),
        None,
        SegmentPlace(HASHES[3], 0),
    ]


def test_blocks_are_shared_with_a_segment_that_was_seen_since() -> None:
    book = SegmentBook(SEGMENT)
    fork = HASHES[:3] + chain(2, 1)
    book.learn(HASHES)
    assert book.shared(HASHES[3]) == set()
    book.learn(fork)

    assert book.shared(HASHES[3]) == set(HASHES[:3])
    assert book.shared(fork[3]) == set()
    assert book.shared(chain(3, 1)[0]) == set()


def test_blocks_that_wait_too_long_go_first() -> None:
    collector = Collector(block_bytes=10, max_bytes=35)
    for block_hash in HASHES[:4]:
        assert collector.add(block_hash, memoryview(bytes(10)))

    assert not collector.has(HASHES[:1])
    assert collector.has(HASHES[1:4])
    assert not collector.add(HASHES[3], memoryview(bytes(10)))
    collector.discard(HASHES[:4])
    assert not collector.has(HASHES[3:4])
    assert not Collector(10, 5).add(HASHES[0], memoryview(bytes(10)))


def test_a_block_that_is_offered_again_has_not_waited_long() -> None:
    collector = Collector(block_bytes=10, max_bytes=30)
    for block_hash in [*HASHES[:3], HASHES[0], HASHES[3]]:
        collector.add(block_hash, memoryview(bytes(10)))

    assert collector.has([HASHES[0], *HASHES[2:4]])
    assert not collector.has(HASHES[1:2])


def test_what_is_taken_waits_no_longer_but_for_what_others_need() -> None:
    collector = Collector(block_bytes=10, max_bytes=100)
    for block_hash in HASHES[:4]:
        collector.add(block_hash, memoryview(block_hash[:10]))

    assert collector.take(HASHES[:5]) is None
    assert collector.take([]) is None
    assert collector.take(HASHES[:4], {HASHES[1]}) == [block_hash[:10] for block_hash in HASHES[:4]]
    assert [collector.has([block_hash]) for block_hash in HASHES[:4]] == [False, True, False, False]


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"url": "ftp://x"}, "url must begin with s3://, gs://, az://, file://"),
        ({"url": "x" * 5000}, "url must begin"),
        ({"url": "s3://b", "segment": 0}, "segment must be from 1 to 4096"),
        ({"url": "s3://b", "buffer": -1}, "buffer must be"),
        ({"url": "s3://b", "timeout_s": float("nan")}, "timeout_s must be"),
        ({"url": "s3://b", "settings": {"endpoint": "http://10.0.0.1:80"}}, "is not encrypted"),
        ({"url": "s3://b", "settings": {"AWS_ENDPOINT_URL": "HTTP://10.0.0.1:80"}}, "is not encrypted"),
        ({"url": "s3://key:secret@b"}, "url must not hold a key"),
        ({"url": 5}, "url must be text"),
        ({"url": "s3://b", "settings": {str(number): "" for number in range(100)}}, "settings must be at most"),
    ],
)
def test_settings_that_cannot_work_are_one_sentence(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        ObjectsConfig(**fields)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"settings": {"no_such_setting": "1"}}, "object store s3://b"),
        ({"settings": {"timeout": "1"}}, "object store s3://b"),
        ({"buffer": 10}, "it must hold two"),
    ],
)
def test_what_only_the_store_knows_is_told_when_it_is_opened(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        open_blocks(ObjectsConfig(url="s3://b", **fields), NAMESPACE, LAYOUT.block_bytes, lambda kind, count: None)
