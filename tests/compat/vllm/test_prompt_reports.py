"""A router is told which of the prompts that it has sent are in vLLM's own prefix cache."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

from kvtier.testing.servers import ServerProcess
from kvtier.wire.prompt_news import decode_news
from tests.compat.vllm.engines import begin, drive, engine, forget_prefixes, model_folder, tokens_of
from tests.support.waiting import LIMIT_S

_PAGE_TOKENS = 32
_IDS = [f"{number:024x}" for number in range(20)]


class Router:
    """`known` is what it was told: cached tokens and all tokens, by prompt."""

    def __init__(self, path: Path) -> None:
        self.known: dict[str, tuple[int, int]] = {}
        self._sock = socket.socket(socket.AF_UNIX)
        self._sock.settimeout(LIMIT_S)
        self._sock.connect(str(path))
        self._lines = self._sock.makefile("rb")

    def hears(self, prompt_id: str, wanted: tuple[int, int]) -> None:
        while self.known.get(prompt_id) != wanted:
            news = decode_news(self._lines.readline())
            if news.is_all:
                self.known.clear()
            self.known |= {one.prompt_id: (one.num_cached, one.num_tokens) for one in news.prompts}

    def close(self) -> None:
        self._lines.close()
        self._sock.close()


@contextlib.contextmanager
def router(path: Path) -> Iterator[Router]:
    found = Router(path)
    try:
        yield found
    finally:
        found.close()


def test_a_prompt_is_reported_until_it_is_evicted_or_the_cache_is_reset(server: ServerProcess, tmp_path: Path) -> None:
    path = tmp_path / "prompts.sock"
    settings = {"prompt_events": f"unix:{path}"}
    whole = 9 * _PAGE_TOKENS
    few = {"num_gpu_blocks_override": 24, "max_model_len": 512}
    with engine(model_folder(), server.unix, settings=settings, **few) as llm:
        with router(path) as first:
            begin(llm, f"chatcmpl-{_IDS[0]}", tokens_of(300))
            begin(llm, "nobody's", tokens_of(300, 2))
            drive(llm)
            first.hears(_IDS[0], (whole, whole))
            for number in range(1, 4):
                begin(llm, f"chatcmpl-{_IDS[number]}", tokens_of(300, 10 + number))
                drive(llm)
            first.hears(_IDS[0], (0, whole))
            first.hears(_IDS[3], (whole, whole))
            assert set(first.known) <= set(_IDS[:4])
        with router(path) as second:
            second.hears(_IDS[3], (whole, whole))
            assert _IDS[0] not in second.known
            forget_prefixes(llm)
            second.hears(_IDS[3], (0, whole))

    assert not path.exists()
