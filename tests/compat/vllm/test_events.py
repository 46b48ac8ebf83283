"""The cache server's contents are published as vLLM's own events, in a form that routers understand."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import KVEventsConfig
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

import kvtier
from kvtier.blocks.hashing import BlockHash
from kvtier.plugins.vllm import events as events_module
from kvtier.plugins.vllm.events import PageGroup, ServerEvents, blocks_between, server_events
from kvtier.plugins.vllm.identity import BLOCK_TOKENS
from kvtier.testing.servers import ServerProcess, cache_server
from kvtier.wire.messages import LISTED_DISK, LISTED_MEMORY
from tests.compat.vllm.engines import (
    ask_one,
    engine,
    forget_prefixes,
    layout_of,
    model_folder,
    namespaces_at,
    tokens_of,
    wait_until,
)
from tests.compat.vllm.routers import Router, hears, meets, two_routers

_PROMPT = tokens_of(300)
_PAGE_TOKENS = 32
_NUM_PAGES = 9


@pytest.fixture
def routers(tmp_path: Path) -> Iterator[tuple[Router, Router]]:
    with two_routers(tmp_path) as routers:
        yield routers


@pytest.fixture
def router(routers: tuple[Router, Router]) -> Router:
    return routers[0]


def test_saved_pages_are_published_as_vllms_own_and_again_by_an_engine_that_finds_them(
    server: ServerProcess, routers: tuple[Router, Router]
) -> None:
    router, other = routers
    with engine(model_folder(), server.unix, kv_events_config=router.config) as llm:
        meets(llm, router)
        ask_one(llm, _PROMPT, max_tokens=1)
        hears(llm, router, lambda: len(router.held.get("CPU", ())) == _NUM_PAGES, "pages in memory")
    own = router.blocks["GPU"]
    ours = dict(router.blocks["CPU"])
    described = {
        (event.locality, event.ownership, event.block_size) for event in router.stored if event.medium == "CPU"
    }
    kinds = {event.kv_cache_spec_kind for event in router.stored}

    assert ours == {block_hash: own[block_hash] for block_hash in ours}
    assert sorted(len(tokens) for _, tokens in ours.values()) == [_PAGE_TOKENS] * _NUM_PAGES
    assert described == {("LOCAL", "kvtier", _PAGE_TOKENS)}
    assert len(kinds) == 1

    with engine(model_folder(), server.unix, kv_events_config=other.config) as llm:
        meets(llm, other)
        ask_one(llm, _PROMPT, max_tokens=1)
        hears(llm, other, lambda: len(other.held.get("CPU", ())) == _NUM_PAGES, "pages in memory")

    assert other.blocks["CPU"] == ours


@pytest.mark.nightly
def test_pages_that_go_to_disk_and_out_of_memory_are_told_so(tmp_path: Path, router: Router) -> None:
    options = ("--folder", str(tmp_path / "cache"), "--disk", "64MiB")
    with cache_server(*options, folder=tmp_path, memory="2MiB") as server:
        with engine(model_folder(), server.unix, kv_events_config=router.config) as llm:
            meets(llm, router)
            ask_one(llm, _PROMPT, max_tokens=1)
            hears(llm, router, lambda: len(router.held.get("STORAGE", ())) == _NUM_PAGES, "pages on disk")
            first = set(router.held["STORAGE"])
            for number in range(4):
                ask_one(llm, tokens_of(600, seed=10 + number), max_tokens=1)
            hears(llm, router, lambda: not first & router.held["CPU"], "pages out of memory")

            assert first <= router.held["STORAGE"]


@pytest.mark.nightly
def test_pages_that_are_evicted_or_dropped_are_told_as_removed(tmp_path: Path, router: Router) -> None:
    with cache_server(folder=tmp_path, memory="2MiB") as server:
        with engine(model_folder(), server.unix, kv_events_config=router.config) as llm:
            meets(llm, router)
            ask_one(llm, _PROMPT, max_tokens=1)
            hears(llm, router, lambda: len(router.held.get("CPU", ())) == _NUM_PAGES, "pages in memory")
            first = set(router.held["CPU"])
            for number in range(4):
                ask_one(llm, tokens_of(600, seed=10 + number), max_tokens=1)
            hears(llm, router, lambda: not first & router.held["CPU"], "pages evicted")
            assert router.held["CPU"]
            (known,) = namespaces_at(server.unix)
            with kvtier.connect(server.unix, layout=layout_of(known), namespace=known.namespace) as client:
                client.drop()
            hears(llm, router, lambda: not router.held["CPU"], "pages dropped")


@pytest.mark.nightly
def test_when_vllm_says_that_all_is_cleared_what_the_server_has_is_told_again(
    server: ServerProcess, router: Router
) -> None:
    with engine(model_folder(), server.unix, kv_events_config=router.config) as llm:
        meets(llm, router)
        ask_one(llm, _PROMPT, max_tokens=1)
        hears(llm, router, lambda: len(router.held.get("CPU", ())) == _NUM_PAGES, "pages in memory")
        forget_prefixes(llm)
        hears(llm, router, lambda: "GPU" not in router.held, "all cleared")
        hears(llm, router, lambda: len(router.held.get("CPU", ())) == _NUM_PAGES, "pages in memory, again")


@pytest.mark.nightly
def test_answers_are_published_too(server: ServerProcess, router: Router) -> None:
    with engine(model_folder(), server.unix, kv_events_config=router.config) as llm:
        meets(llm, router)
        answer = ask_one(llm, _PROMPT, max_tokens=100)
        hears(llm, router, lambda: len(router.held.get("CPU", ())) == 12, "pages in memory")
    known = [token for _, tokens in router.blocks["CPU"].values() for token in tokens]

    assert sorted(known) == sorted((_PROMPT + answer.tokens)[: 12 * _PAGE_TOKENS])


def test_nothing_is_done_where_events_are_off() -> None:
    for config in (None, KVEventsConfig(enable_kv_cache_events=False)):
        vllm_config: Any = SimpleNamespace(kv_events_config=config)

        assert server_events(vllm_config, None, None, None) is None  # type: ignore[arg-type]


class _Client:
    """A client of a server that has all blocks in the same place."""

    is_local = True

    def __init__(self) -> None:
        self.flags = LISTED_MEMORY

    def look(self, hashes: Sequence[BlockHash]) -> list[int]:
        return [self.flags] * len(hashes)


def _events(client: Any, page_tokens: int) -> ServerEvents:
    """The events of an engine with one group."""
    blocks_of = functools.partial(blocks_between, page_tokens, BLOCK_TOKENS)
    group = PageGroup(page_tokens, {"block_size": page_tokens, "group_idx": 0}, blocks_of)
    return ServerEvents(client, [group], hash_tokens=page_tokens, block_tokens=BLOCK_TOKENS)


def _told(pages: Sequence[bytes]) -> list[Any]:
    """The hashes of pages as events name them."""
    return [maybe_convert_block_hash(page) for page in pages]


def _request(**named: object) -> Any:
    plain = {"lora_request": None, "mm_features": [], "cache_salt": None, "prompt_embeds": None}
    return SimpleNamespace(all_token_ids=list(range(96)), **{**plain, **named})


@pytest.mark.parametrize(("page_tokens", "num_pages"), [(8, 12), (16, 6), (32, 3)])
def test_pages_of_any_size_are_told_of(page_tokens: int, num_pages: int) -> None:
    client: Any = _Client()
    events = _events(client, page_tokens)
    pages = [bytes([number]) * 32 for number in range(num_pages)]
    heard: list[Any] = []

    def hear(count: int) -> None:
        wait_until(lambda: heard.extend(events.take()) or len(heard) >= count, f"{count} events")

    events.note(_request(cache_salt="salt"), pages, [BlockHash(bytes([9, number]) * 16) for number in range(6)], 0, 6)
    hear(1)
    client.flags = LISTED_DISK
    hear(3)
    events.close()
    stored, moved, removed = heard

    assert (stored.medium, moved.medium, removed.medium) == ("CPU", "STORAGE", "CPU")
    assert stored.block_hashes == moved.block_hashes == removed.block_hashes == _told(pages)
    assert stored.token_ids == list(range(96))
    assert stored.parent_block_hash is None
    assert stored.extra_keys == [("salt",)] + [None] * (num_pages - 1)


def test_a_page_whose_blocks_are_saved_one_by_one_is_told_of_when_it_is_whole() -> None:
    client: Any = _Client()
    events = _events(client, _PAGE_TOKENS)
    pages = [bytes([number]) * 32 for number in range(3)]
    hashes: list[BlockHash] = []
    for number in range(6):
        hashes.append(BlockHash(bytes([9, number]) * 16))
        events.note(_request(), pages, hashes, number, number + 1)
    heard: list[Any] = []
    wait_until(lambda: heard.extend(events.take()) or sum(len(event.block_hashes) for event in heard) == 3, "3 pages")
    events.close()

    assert [block_hash for event in heard for block_hash in event.block_hashes] == _told(pages)


def test_notes_that_are_too_many_are_dropped_with_one_line(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    client: Any = _Client()
    is_open = threading.Event()
    look = client.look
    client.look = lambda hashes: is_open.wait(60) and look(hashes)
    logger = logging.getLogger("events under test")
    monkeypatch.setattr(events_module, "logger", logger)  # vLLM's are set up anew by the first engine
    events = _events(client, _PAGE_TOKENS)
    pages = [bytes([number]) * 32 for number in range(3)]
    hashes = [BlockHash(bytes([9, number]) * 16) for number in range(6)]
    with caplog.at_level(logging.WARNING, logger.name):
        for _ in range(1100):
            events.note(_request(), pages, hashes, 0, 6)
    is_open.set()
    events.close()

    assert [record.getMessage() for record in caplog.records if record.name == logger.name] == [
        "KV events are missing: the cache server's answers are too slow for this engine"
    ]
