"""Where a prompt parted, in Ollama's API: in the last line of an answer, if `explain` asks for it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from kvtier.engine.process.messages import Parted, Submit
from kvtier.tiers.parting import How, Parting
from tests.support.fake_engine import (
    MODEL,
    FakeEngine,
    Step,
    accepted,
    config_of,
    fake_engine,
    http_client,
    pieces,
    running,
)


def explaining(submit: Submit) -> Iterator[Step]:
    yield accepted(submit)
    if submit.explains:
        yield Parted(submit.number, Parting(how=How.NOTHING_RECORDED, token=0, prompt_tokens=1))
    yield from pieces(submit, ["yes", "indeed"])


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[FakeEngine]:
    with fake_engine(tmp_path) as one:
        one.script = explaining
        yield one


@pytest.fixture
def client(engine: FakeEngine) -> Iterator[httpx.Client]:
    with running("ollama", config_of(engine)) as server, http_client(server) as one:
        yield one


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_the_last_line_says_where_the_prompt_parted(client: httpx.Client, path: str, is_streamed: bool) -> None:
    asked: dict[str, object] = {"model": MODEL, "stream": is_streamed}
    asked |= {"messages": [{"role": "user", "content": "hi"}]} if path == "/api/chat" else {"prompt": "hi"}

    explained = client.post(path, json={**asked, "explain": True})
    plain = client.post(path, json=asked)

    assert (explained.status_code, plain.status_code) == (200, 200)
    *before, last = [json.loads(line) for line in explained.text.splitlines()]
    assert all("parted" not in line and not line["done"] for line in before)
    assert last["done"] is True
    assert last["parted"]["how"] == How.NOTHING_RECORDED.value
    assert last["parted"]["sentence"]
    assert "parted" not in plain.text
    assert json.loads(plain.text.splitlines()[-1])["done"] is True


def test_explain_is_true_or_false(client: httpx.Client) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "explain": "yes"}
    assert client.post("/api/chat", json=body).status_code == 400
