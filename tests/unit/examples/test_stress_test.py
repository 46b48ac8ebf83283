"""A document cut to a number of tokens, by a server that knows how long they are."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest

from examples.use_remote_KV_cache.asking import Refused
from examples.use_remote_KV_cache.stress_test import cut

CHARACTERS_PER_TOKEN = 5


class CountingServer(BaseHTTPRequestHandler):
    """Has a prompt's length for every question, and no answer."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        tokens = len(body["messages"][0]["content"]) // CHARACTERS_PER_TOKEN
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"data: %s\n\n" % json.dumps({"choices": [], "usage": {"prompt_tokens": tokens}}).encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), CountingServer) as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_document_is_cut_to_about_so_many_tokens(url: str) -> None:
    document = cut("word " * 100_000, 20_000, url=url, model="m")

    assert len(document) == pytest.approx(20_000 * CHARACTERS_PER_TOKEN, rel=0.02)


def test_one_that_has_about_as_many_is_left_as_it_is(url: str) -> None:
    text = "word " * 20_000

    assert cut(text, 20_500, url=url, model="m") == text


@pytest.mark.parametrize("text", ["word " * 10_000, ""])
def test_one_that_is_too_short_is_refused(url: str, text: str) -> None:
    with pytest.raises(Refused, match=r"has about \d+ tokens: make a longer one with make_dummy_inputs"):
        cut(text, 20_000, url=url, model="m")
