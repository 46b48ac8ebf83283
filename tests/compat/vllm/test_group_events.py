"""What the cache server has of models with several groups is published by group, as vLLM publishes its own pages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier.testing.servers import ServerProcess
from tests.compat.vllm.engines import ask_one, engine, tokens_of
from tests.compat.vllm.group_models import WINDOW_TOKENS, group_model_folder
from tests.compat.vllm.routers import Router, hears, meets, two_routers
from tests.compat.vllm.test_groups import hands_over

_PROMPT = tokens_of(300)
_ARGUMENTS: dict[str, dict[str, Any]] = {"gemma3": {}, "lfm2": {"enable_prefix_caching": True}}


@pytest.fixture
def routers(tmp_path: Path) -> Iterator[tuple[Router, Router]]:
    with two_routers(tmp_path) as routers:
        yield routers


@hands_over
@pytest.mark.parametrize("name", ["gemma3", pytest.param("lfm2", marks=pytest.mark.nightly)])
def test_the_pages_of_every_group_are_published_as_vllms_own_and_again_by_an_engine_that_finds_them(
    server: ServerProcess, routers: tuple[Router, Router], name: str
) -> None:
    router, other = routers
    folder, arguments = group_model_folder(name), _ARGUMENTS[name]
    with engine(folder, server.unix, kv_events_config=router.config, **arguments) as llm:
        meets(llm, router)
        ask_one(llm, _PROMPT, max_tokens=1)
        hears(llm, router, lambda: _has_every_group(router), "pages of every group in memory")
    own = {block_hash: described for (_, block_hash), described in router.blocks["GPU"].items()}
    ours = dict(router.blocks["CPU"])

    # Groups with pages of one size have the same hashes. vLLM does not publish pages that a window has left.
    assert list(ours.values()) == [own[block_hash] for _, block_hash in ours]
    if name == "gemma3":
        windows = {event.kv_cache_spec_sliding_window for event in router.stored if event.medium == "CPU"}
        assert windows == {None, WINDOW_TOKENS}

    with engine(folder, server.unix, kv_events_config=other.config, **arguments) as llm:
        meets(llm, other)
        ask_one(llm, _PROMPT, max_tokens=1)
        hears(llm, other, lambda: _has_every_group(other), "what the second engine found")

    assert other.blocks["CPU"].items() <= ours.items()


def _has_every_group(router: Router) -> bool:
    """Pages of every group are in the server; of the group that looks back to the first token, all pages."""
    own = Counter(group for group, _ in router.blocks.get("GPU", ()))
    ours = Counter(group for group, _ in router.held.get("CPU", ()))
    return len(own) > 1 and set(ours) == set(own) and max(ours.values()) == max(own.values())
