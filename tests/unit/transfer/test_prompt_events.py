"""A router that connects is told all, then what changes; whatever it does, the engine goes on."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.errors import ConfigError
from kvtier.transfer.cached_prompts import Prompt
from kvtier.transfer.prompt_events import PromptEvents
from kvtier.transport.address import UnixAddress
from kvtier.wire.prompt_news import CachedPrompt, PromptNews, decode_news
from tests.support.waiting import LIMIT_S, wait_until

_IDS = [f"{number:024x}" for number in range(10)]


class Bench:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.cached: set[bytes] = set()
        self.events = PromptEvents(UnixAddress(str(path)), lambda page: page in self.cached, every_s=0.01)

    def add(self, prompt_id: str) -> CachedPrompt:
        self.cached.add(prompt_id.encode())
        self.events.note(Prompt.of(prompt_id, [prompt_id.encode()], 16), lambda: True)
        return CachedPrompt(prompt_id, 16, 16)


class Router:
    def __init__(self, path: Path) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(LIMIT_S)
        self.sock.connect(str(path))
        self._lines = self.sock.makefile("rb")

    def read(self) -> PromptNews | None:
        line = self._lines.readline()
        return decode_news(line) if line else None

    def close(self) -> None:
        self._lines.close()
        self.sock.close()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    found = Bench(tmp_path / "prompts.sock")
    try:
        yield found
    finally:
        found.events.close()


def read_until_known(router: Router, wanted: CachedPrompt) -> None:
    while True:
        news = router.read()
        assert news is not None
        if wanted in news.prompts:
            return


def test_a_router_is_told_all_and_then_what_changes(bench: Bench) -> None:
    first = Router(bench.path)
    assert first.read() == PromptNews([], is_all=True)
    one, other = bench.add(_IDS[0]), bench.add(_IDS[1])
    read_until_known(first, other)
    bench.cached.discard(_IDS[0].encode())
    read_until_known(first, CachedPrompt(_IDS[0], 0, 16))
    first.close()

    second = Router(bench.path)

    assert second.read() == PromptNews([other], is_all=True)
    assert one.num_cached
    second.close()


def test_the_newest_router_is_told(bench: Bench) -> None:
    first = Router(bench.path)
    first.read()
    second = Router(bench.path)
    second.read()

    assert first.read() is None
    read_until_known(second, bench.add(_IDS[0]))
    first.close()
    second.close()


def test_a_router_is_let_go_that_says_something(bench: Bench) -> None:
    router = Router(bench.path)
    router.read()
    router.sock.sendall(b"hello")

    with contextlib.suppress(ConnectionResetError):  # it is closed before it is read
        assert router.read() is None
    router.close()
    again = Router(bench.path)
    assert again.read() is not None
    again.close()


def test_prompts_without_a_router_are_bounded_and_told_later(bench: Bench) -> None:
    wanted = bench.add(_IDS[3])
    wait_until(lambda: not bench.events._noted)
    router = Router(bench.path)

    read_until_known(router, wanted)
    router.close()


def test_an_address_in_use_is_one_sentence(bench: Bench) -> None:
    with pytest.raises(ConfigError, match="in use"):
        PromptEvents(UnixAddress(str(bench.path)), lambda page: True)


def test_a_close_is_a_close(bench: Bench) -> None:
    router = Router(bench.path)
    router.read()
    bench.events.close()
    bench.events.close()

    assert router.read() is None
    assert not bench.path.exists()
    router.close()
