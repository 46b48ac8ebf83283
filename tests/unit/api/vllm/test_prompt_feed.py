"""What an engine reports about its cache decides where a prompt goes; without reports, the server's own record does."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import msgspec
import pytest

from kvtier.api.config import EngineAddress
from kvtier.api.vllm.prompt_feed import PromptFeed
from kvtier.api.vllm.seen_prefixes import SeenPrefixes
from kvtier.transfer.cached_prompts import Prompt
from kvtier.transfer.prompt_events import PromptEvents
from kvtier.transport.address import UnixAddress
from kvtier.wire.prompt_news import MAX_LINE_BYTES, CachedPrompt, encode_news
from tests.support.fake_engine import Running, http_client
from tests.support.vllm_serving import FakeVllm, chat, config_of_vllm
from tests.support.waiting import wait_until
from tests.unit.api.vllm.conftest import Serve

CHAT = "/v1/chat/completions"


class Reports:
    """The cache of a fake engine: the prompts that it was sent, until they are evicted."""

    def __init__(self, engine: FakeVllm, path: Path) -> None:
        self.engine = engine
        self.path = path
        self.cached: set[bytes] = set()
        self._num_known = 0
        self._start()

    def _start(self) -> None:
        self.events = PromptEvents(UnixAddress(str(self.path)), lambda page: page in self.cached, every_s=0.01)

    def learn(self) -> None:
        """Report all that the engine was asked since the last time."""
        asked = self.engine.asked()
        for one in asked[self._num_known :]:
            prompt_id = one.headers["x-request-id"]
            self.cached.add(prompt_id.encode())
            self.events.note(Prompt.of(prompt_id, [prompt_id.encode()], 16), lambda: True)
        self._num_known = len(asked)

    def restart(self) -> None:
        self.events.close()
        self.cached.clear()
        self._start()


@pytest.fixture
def reports(engines: list[FakeVllm], tmp_path: Path) -> Iterator[list[Reports]]:
    with ExitStack() as stack:
        found = [Reports(engine, tmp_path / f"{engine.name}.prompts.sock") for engine in engines]
        for one in found:
            stack.callback(lambda one=one: one.events.close())
        yield found


@pytest.fixture
def server(engines: list[FakeVllm], reports: list[Reports], serve: Serve) -> Running:
    config = config_of_vllm(*engines)
    [model] = config.models
    addresses = tuple(
        EngineAddress(engine.name, str(engine.path), str(one.path))
        for engine, one in zip(engines, reports, strict=True)
    )
    model = msgspec.structs.replace(model, engines=addresses)
    server = serve("openai", msgspec.structs.replace(config, models=(model,)))
    wait_until(lambda: all(feed.is_followed for feed in server.service.vllm.models[0]._feeds), "the feeds")
    return server


def ask(server: Running, text: str, *before: str) -> None:
    with http_client(server) as client:
        response: httpx.Response = client.post(CHAT, json=chat(text, *before))
    assert response.status_code == 200


def num_asked(engines: list[FakeVllm]) -> list[int]:
    return [len(engine.asked()) for engine in engines]


def record_of(server: Running, number: int) -> SeenPrefixes:
    return server.service.vllm.models[0]._records[f"vllm-{number}"]


def test_an_engine_that_has_evicted_a_prompt_no_longer_attracts_it(
    server: Running, engines: list[FakeVllm], reports: list[Reports]
) -> None:
    ask(server, "first")
    reports[0].learn()
    wait_until(lambda: all(prompt.is_reported for prompt in record_of(server, 0)._prompts.values()))
    ask(server, "second", "first", "an answer")
    assert num_asked(engines) == [2, 0]

    reports[0].learn()
    reports[0].cached.clear()
    wait_until(lambda: not record_of(server, 0)._prompts)
    ask(server, "third", "first", "an answer", "second", "an answer")

    assert num_asked(engines) == [2, 1]


def test_an_engine_that_starts_again_is_known_to_be_empty(
    server: Running, engines: list[FakeVllm], reports: list[Reports]
) -> None:
    ask(server, "first")
    reports[0].learn()
    wait_until(lambda: all(prompt.is_reported for prompt in record_of(server, 0)._prompts.values()))
    reports[0].restart()
    wait_until(lambda: not record_of(server, 0)._prompts)
    ask(server, "second", "first", "an answer")

    assert num_asked(engines) == [1, 1]


def test_an_engine_that_reports_no_more_keeps_what_it_was_known_to_have(
    server: Running, engines: list[FakeVllm], reports: list[Reports]
) -> None:
    ask(server, "first")
    reports[0].learn()
    wait_until(lambda: all(prompt.is_reported for prompt in record_of(server, 0)._prompts.values()))
    reports[0].events.close()
    wait_until(lambda: not server.service.vllm.models[0]._feeds[0].is_followed)
    ask(server, "second", "first", "an answer")

    assert num_asked(engines) == [2, 0]


@pytest.mark.parametrize(
    "lines",
    [
        b"nonsense\n",
        encode_news([CachedPrompt("ab" * 12, 0, 16)]),  # the first line must have all
        b"x" * (MAX_LINE_BYTES + 1),
        encode_news([], is_all=True) + b"nonsense\n",
        encode_news([], is_all=True) + b"\xff" * 10,
    ],
)
def test_what_cannot_be_read_changes_nothing_and_is_tried_again(tmp_path: Path, lines: bytes) -> None:
    path = str(tmp_path / "prompts.sock")
    record = SeenPrefixes()
    record.note([1, 2], "ab" * 12)
    num_connections = 0

    async def follow() -> None:
        def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal num_connections
            num_connections += 1
            writer.write(lines)
            writer.close()

        async with await asyncio.start_unix_server(serve, path):
            feed = PromptFeed("engine", path, record, retry_s=0.01)
            feed.start()
            while num_connections < 3:
                await asyncio.sleep(0.01)
            await feed.close()

    asyncio.run(asyncio.wait_for(follow(), 60))

    assert record.match([1, 2]) == 2


def test_an_engine_that_does_not_report_is_no_error(tmp_path: Path) -> None:
    async def follow() -> bool:
        feed = PromptFeed("engine", str(tmp_path / "nothing.sock"), SeenPrefixes(), retry_s=0.001)
        feed.start()
        await asyncio.sleep(0.02)
        await feed.close()
        return feed.is_followed

    assert not asyncio.run(follow())
    assert not (tmp_path / "nothing.sock").exists()


def test_a_share_of_no_tokens_is_nothing(tmp_path: Path) -> None:
    record = SeenPrefixes()
    record.note([1], "ab" * 12)
    path = str(tmp_path / "prompts.sock")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()

        async def follow() -> None:
            feed = PromptFeed("engine", path, record)
            feed.start()
            loop = asyncio.get_running_loop()
            listener.setblocking(False)
            peer, _ = await loop.sock_accept(listener)
            with peer:
                await loop.sock_sendall(peer, encode_news([CachedPrompt("ab" * 12, 0, 0)], is_all=True))
                while record.match([1]):
                    await asyncio.sleep(0.01)
            await feed.close()

        asyncio.run(asyncio.wait_for(follow(), 60))
