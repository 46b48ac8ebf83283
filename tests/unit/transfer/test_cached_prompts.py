"""How much of a prompt is cached is found by asking for a few of its pages."""

from __future__ import annotations

import pytest

from kvtier.transfer.cached_prompts import CachedPrompts, Prompt
from kvtier.wire.prompt_news import CachedPrompt

_PAGE_TOKENS = 16
_MANY = 1000


class Bench:
    """Prompts whose pages are in `cached`, or not."""

    def __init__(self, max_prompts: int = 100) -> None:
        self.cached: set[bytes] = set()
        self.computed: set[str] = set()
        self.num_asked = 0
        self.prompts = CachedPrompts(self._is_cached, max_prompts)

    def _is_cached(self, page: bytes) -> bool:
        self.num_asked += 1
        return page in self.cached

    def add(self, name: str, num_pages: int) -> None:
        self.cached |= set(pages_of(name, num_pages))
        self.prompts.add(Prompt.of(name, pages_of(name, num_pages), _PAGE_TOKENS), lambda: name in self.computed)
        self.computed.add(name)
        self.prompts.settle()

    def evict(self, name: str, first: int, end: int) -> None:
        self.cached -= set(pages_of(name, end)[first:])

    def news(self, max_prompts: int = _MANY) -> dict[str, tuple[int, int]]:
        return {one.prompt_id: (one.num_cached, one.num_tokens) for one in self.prompts.look(max_prompts)}


def pages_of(name: str, count: int) -> list[bytes]:
    return [f"{name} {number}".encode() for number in range(count)]


def test_a_prompt_is_reported_once_it_is_computed() -> None:
    bench = Bench()
    bench.prompts.add(Prompt.of("a", pages_of("a", 3), _PAGE_TOKENS), lambda: "a" in bench.computed)
    bench.prompts.settle()
    assert bench.news() == {}

    bench.cached |= set(pages_of("a", 3))
    bench.computed.add("a")
    bench.prompts.settle()

    assert bench.news() == {"a": (48, 48)}
    assert bench.news() == {}


@pytest.mark.parametrize("num_pages", [1, 2, 7, 8, 9, 100, 2000])
def test_what_is_evicted_is_reported(num_pages: int) -> None:
    bench = Bench()
    bench.add("a", num_pages)
    num_tokens = num_pages * _PAGE_TOKENS
    assert bench.news() == {"a": (num_tokens, num_tokens)}

    for first in range(num_pages - 1, 0, -1):
        bench.evict("a", first, num_pages)
        for num_cached, _ in bench.news().values():
            assert first * _PAGE_TOKENS - num_tokens / 8 <= num_cached <= first * _PAGE_TOKENS
    bench.evict("a", 0, num_pages)
    bench.news()

    assert bench.prompts.reported() == []
    assert len(bench.prompts) == 0


def test_a_prompt_of_which_nothing_is_left_is_reported_for_the_last_time() -> None:
    bench = Bench()
    bench.add("a", 4)
    bench.news()
    bench.cached.clear()

    assert bench.news() == {"a": (0, 64)}
    assert bench.news() == {}

    bench.add("b", 4)
    bench.cached.clear()

    assert bench.news() == {"b": (0, 64)}


def test_few_pages_are_asked_for() -> None:
    bench = Bench()
    bench.add("a", 2000)
    bench.news()
    bench.num_asked = 0
    bench.news()
    assert bench.num_asked == 1

    bench.evict("a", 5, 2000)
    bench.news()

    assert bench.num_asked <= 6


def test_prompts_take_turns_and_new_ones_come_first() -> None:
    bench = Bench()
    for number in range(10):
        bench.add(f"{number}", 1)
    bench.news()
    bench.add("new", 1)
    bench.cached.clear()

    assert list(bench.news(1)) == ["new"]
    assert len([bench.news(3) for _ in range(4)]) == 4
    assert len(bench.prompts) == 0


def test_the_oldest_are_forgotten_beyond_the_bound() -> None:
    bench = Bench(max_prompts=4)
    for number in range(10):
        bench.add(f"{number}", 1)
        bench.news()

    assert bench.prompts.reported() == [CachedPrompt(f"{number}", 16, 16) for number in range(6, 10)]

    waiting = CachedPrompts(lambda page: True, max_prompts=4)
    for number in range(10):
        waiting.add(Prompt.of(f"{number}", [b"page"], _PAGE_TOKENS), lambda: False)

    assert len(waiting) == 4


def test_an_id_counts_once_and_an_empty_prompt_not_at_all() -> None:
    bench = Bench()
    bench.add("a", 2)
    bench.add("a", 5)
    bench.prompts.add(Prompt("b", ()), lambda: True)

    assert bench.news() == {"a": (32, 32)}
