from __future__ import annotations

from typing import Any

from kvtier.blocks.namespace import Namespace
from kvtier.cacheserver.namespaces import MemorySpace
from kvtier.cacheserver.notes import Notes
from kvtier.cacheserver.tenants import Tenant
from kvtier.cacheserver.traffic import Asking, ServerTraffic
from tests.support.prompt_traffic import hashed

BLOCK_BYTES = 8192
PROMPT = hashed((1, 2, 3, 4))


def space() -> MemorySpace:
    namespace = Namespace(bytes(range(32)))
    return MemorySpace(1, Tenant("", Notes(), sees_all=True), namespace, namespace, "tiny", BLOCK_BYTES, 16)


def curve(traffic: ServerTraffic) -> dict[str, Any]:
    return traffic.curve()


def test_a_prompt_that_is_matched_lazily_and_then_again_counts_once() -> None:
    traffic, asked = ServerTraffic(1 << 20, None, "lru"), space()

    traffic.note_asked(asked, PROMPT, Asking.LAZY_MATCH)
    traffic.note_asked(asked, PROMPT, Asking.MATCH)
    traffic.note_asked(asked, PROMPT, Asking.GET)

    assert curve(traffic)["requests"] == 1
    assert curve(traffic)["asked_tokens"] == 64
    assert curve(traffic)["asked_bytes"] == 4 * BLOCK_BYTES


def test_a_client_that_only_gets_is_counted_too() -> None:
    traffic, asked = ServerTraffic(1 << 20, None, "lru"), space()

    for _ in range(2):
        traffic.note_asked(asked, PROMPT, Asking.GET)

    assert curve(traffic)["points"][-1][1] == 0.5


def test_the_table_of_a_shared_cache_is_no_prompt() -> None:
    traffic, asked = ServerTraffic(1 << 20, None, "lru"), space()

    traffic.note_asked(asked, bytes(asked.namespace), Asking.MATCH)

    assert curve(traffic)["requests"] == 0


def test_sizes_reach_beyond_memory_and_disk() -> None:
    assert curve(ServerTraffic(1 << 20, 1 << 24, "lru"))["file_bytes"] == 1 << 24
    traffic, asked = ServerTraffic(1 << 20, 1 << 24, "lru"), space()
    traffic.note_asked(asked, PROMPT, Asking.MATCH)

    assert curve(traffic)["points"][-1][0] == 1 << 26
