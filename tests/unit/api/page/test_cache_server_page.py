"""The page of a cache server alone: over real counts, on a port of its own."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import pytest

from kvtier.api.page.cache_reader import CacheReader
from kvtier.api.page.cache_server_view import CacheServerView
from kvtier.api.page.curve_cache import CurveCache
from kvtier.api.page.standalone import PageServer
from kvtier.cacheserver.config import CacheServerConfig
from kvtier.cacheserver.server import CacheServer
from kvtier.client.client import CacheClient
from kvtier.errors import ConfigError
from kvtier.tiers.explanation import Explanation, MatchEnd
from kvtier.tiers.parting import How, Parting
from kvtier.transport.address import TcpAddress, UnixAddress
from tests.support.actors import chain, open_client, payloads
from tests.support.certificates import make_certificate, needs_openssl
from tests.support.waiting import LIMIT_S, wait_until

LOOPBACK = TcpAddress("127.0.0.1", 0)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[CacheServer]:
    server = new_server(tmp_path)
    yield server
    server.close()


def new_server(folder: Path) -> CacheServer:
    return CacheServer(CacheServerConfig(memory_bytes=1 << 20, unix=UnixAddress(str(folder / "c.sock"))))


def explanation(request_id: str, cached: int) -> Explanation:
    return Explanation(
        request_id=request_id,
        model="tiny",
        namespace="ab",
        prompt_tokens=100,
        block_tokens=16,
        cached_tokens={"device": 0, "server": cached},
        ended_at_tokens=cached,
        reason=MatchEnd.EVICTED,
        tier="server",
    )


def note(server: CacheServer, *explanations: Explanation) -> None:
    for one in explanations:
        server.catalog.tenants.owner.notes.put(one.request_id, one.to_json())


def test_it_shows_levels_and_what_engines_noted(server: CacheServer) -> None:
    note(server, explanation("r-1", 16), explanation("0_r-2", 32), explanation("r-2", 32))
    page = PageServer(LOOPBACK, server, "unix:c.sock")
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{page.port}") as client:
            state = client.get("/kvtier/v1/state").json()
            requests = client.get("/kvtier/v1/requests").json()["requests"]
            explained = client.get("/kvtier/v1/requests/r-1").json()
            missing = client.get("/kvtier/v1/requests/none")
            assert "app.js" in client.get("/").text
    finally:
        page.close()

    assert (state["kind"], state["tiers"][0]["room_bytes"]) == ("cache-server", 1 << 20)
    assert [(one["request_id"], one["cached_tokens"]) for one in requests] == [
        ("r-2", {"server": 32}),
        ("r-1", {"server": 16}),
    ]
    assert "evicted" in explained["sentence"]
    assert missing.status_code == 404


def test_the_history_has_what_was_noted_while_nobody_looked(server: CacheServer) -> None:
    page = PageServer(LOOPBACK, server, "unix:c.sock")
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{page.port}") as client:
            assert client.get("/kvtier/v1/history").json()["steps"] == []
            note(server, explanation("r-1", 16))
            wait_until(lambda: client.get("/kvtier/v1/history").json()["steps"])
            [step] = client.get("/kvtier/v1/history").json()["steps"]
    finally:
        page.close()

    assert (step["prompt"], step["cached"]) == (100, {"server": 16})


def test_what_goes_in_and_out_of_a_server_is_shown(server: CacheServer, tmp_path: Path) -> None:
    page = PageServer(LOOPBACK, server, "unix:c.sock")
    numbers = itertools.count(1)

    def rates(http: httpx.Client, client: CacheClient) -> list[float]:
        hashes = chain(next(numbers), 4)
        client.set(hashes, payloads(hashes))
        client.match(hashes).release()
        [memory] = http.get("/kvtier/v1/state").json()["tiers"]
        return [memory["in_bytes_per_s"] or 0, memory["out_bytes_per_s"] or 0]

    try:
        with (
            httpx.Client(base_url=f"http://127.0.0.1:{page.port}") as http,
            open_client(f"unix:{tmp_path}/c.sock") as one,
        ):
            wait_until(lambda: min(rates(http, one)) > 0)
    finally:
        page.close()


def test_notes_that_come_later_are_added_once(server: CacheServer) -> None:
    page = PageServer(LOOPBACK, server, "unix:c.sock")
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{page.port}") as client:
            client.get("/kvtier/v1/state")
            note(server, explanation("r-1", 16))
            wait_until(lambda: client.get("/kvtier/v1/requests").json()["requests"])
            note(server, explanation("r-2", 32))
            wait_until(lambda: len(client.get("/kvtier/v1/requests").json()["requests"]) == 2)
            tokens = client.get("/kvtier/v1/state").json()["tokens"]["5m"]
    finally:
        page.close()

    assert (tokens["requests"], tokens["prompt"], tokens["cached"]) == (2, 200, {"server": 48})


def test_with_a_token_whoever_looks_has_to_know_it(server: CacheServer) -> None:
    page = PageServer(LOOPBACK, server, "unix:c.sock", b"secret-token")
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{page.port}") as client:
            assert client.get("/kvtier/v1/state").status_code == 401
            assert client.post("/kvtier/v1/session", json={"key": "wrong"}).status_code == 401
            session = client.post("/kvtier/v1/session", json={"key": "secret-token"}).json()
            assert client.get("/kvtier/v1/state").status_code == 200
    finally:
        page.close()

    assert not session["may_change"]
    assert not session["has_prefixes"]


def test_other_hosts_need_a_token(server: CacheServer) -> None:
    with pytest.raises(ConfigError, match="needs --token-file"):
        PageServer(TcpAddress("0.0.0.0", 0), server, "unix:c.sock")


@needs_openssl
def test_other_hosts_are_served_with_the_certificate(server: CacheServer, tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path, "page")
    anywhere = TcpAddress("0.0.0.0", 0)
    page = PageServer(anywhere, server, "unix:c.sock", b"secret-token", (Path(certificate), Path(key)))
    try:
        assert page.url == f"https://0.0.0.0:{page.port}/"
        context = ssl.create_default_context(cafile=certificate)
        with httpx.Client(base_url=f"https://127.0.0.1:{page.port}", verify=context) as client:
            response = client.post("/kvtier/v1/session", json={"key": "secret-token"})
            assert "secure" in response.headers["set-cookie"].lower()
            assert client.get("/kvtier/v1/state").status_code == 200
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"http://127.0.0.1:{page.port}/")
    finally:
        page.close()


def test_a_page_for_other_hosts_is_no_way_around_an_encrypted_port(tmp_path: Path) -> None:
    for name in ("token", "secret"):
        (tmp_path / name).write_text(name * 8)
    arguments = [
        "--memory",
        "1MiB",
        "--socket",
        str(tmp_path / "s.sock"),
        "--tcp",
        "127.0.0.1:0",
        "--page",
        "0.0.0.0:0",
    ]
    arguments += ["--token-file", str(tmp_path / "token"), "--tcp-secret-file", str(tmp_path / "secret")]
    command = [sys.executable, "-m", "kvtier", "cache-server", *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)

    assert ended.returncode == 1
    assert "a page on 0.0.0.0 needs --tls-cert" in ended.stderr


def test_a_certificate_that_cannot_be_used_is_said_in_a_sentence(server: CacheServer, tmp_path: Path) -> None:
    pair = (tmp_path / "none.pem", tmp_path / "none.key")
    with pytest.raises(ConfigError, match="cannot use the TLS certificate"):
        PageServer(TcpAddress("0.0.0.0", 0), server, "unix:c.sock", b"secret-token", pair)


def test_text_in_a_note_is_for_those_who_may_see_text(server: CacheServer) -> None:
    parting = Parting(how=How.PARTED, token=2, prompt_tokens=3, before="before", recorded="secret", now="other")
    note(server, msgspec.structs.replace(explanation("r-1", 16), parting=parting))
    view = CacheServerView(server, "unix:c.sock")

    whole = asyncio.run(view.explain("r-1", with_text=True))
    without = asyncio.run(view.explain("r-1", with_text=False))
    assert "secret" in str(whole)
    assert "secret" not in str(without)
    assert "parting_sentence" in (without or {})


def test_an_address_in_use_is_said_in_a_sentence(server: CacheServer) -> None:
    page = PageServer(LOOPBACK, server, "unix:c.sock")
    try:
        with pytest.raises(ConfigError, match=r"cannot show a page on 127\.0\.0\.1"):
            PageServer(TcpAddress("127.0.0.1", page.port), server, "unix:c.sock")
    finally:
        page.close()


def test_a_deployments_page_asks_the_server_over_its_socket(server: CacheServer, tmp_path: Path) -> None:
    note(server, explanation("r-1", 16))
    reader = CacheReader("cache", f"unix:{tmp_path / 'c.sock'}")
    try:
        stats = reader.stats()
        assert stats is not None
        assert stats["memory_bytes"] == 1 << 20
        assert Explanation.from_json(reader.noted("r-1")).cached_tokens["server"] == 16
        assert reader.noted("none") == ""
    finally:
        reader.close()


def test_a_server_that_is_away_is_none_until_it_answers(tmp_path: Path) -> None:
    reader = CacheReader("cache", f"unix:{tmp_path / 'none.sock'}")
    assert reader.stats() is None
    assert reader.noted("r-1") == ""


def test_a_server_that_was_started_again_answers_the_next_question(tmp_path: Path) -> None:
    with contextlib.closing(CacheReader("cache", f"unix:{tmp_path / 'c.sock'}")) as reader:
        for _ in range(2):
            with contextlib.closing(new_server(tmp_path)):
                assert reader.stats() is not None


def test_the_hit_curve_comes_with_the_counts_of_a_server(server: CacheServer, tmp_path: Path) -> None:
    hashes = chain(1, 8)
    with open_client(f"unix:{tmp_path}/c.sock") as client:
        client.set(hashes, payloads(hashes))
        for _ in range(2):
            client.match(hashes).release()
    reader = CacheReader("cache", f"unix:{tmp_path}/c.sock")
    page = PageServer(LOOPBACK, server, "unix:c.sock")
    try:
        wait_until(lambda: server.miss_curve()["requests"] == 2)
        stats = reader.stats()
        with httpx.Client(base_url=f"http://127.0.0.1:{page.port}") as http:
            [curve] = http.get("/kvtier/v1/state").json()["curves"]
    finally:
        page.close()
        reader.close()

    assert stats is not None
    assert stats["hit_curve"] == curve["points"] == server.miss_curve()["points"]
    assert max(share for _, share in curve["points"]) > 0


def test_a_curve_is_read_again_after_a_while() -> None:
    documents = iter([{"points": [[1, 0.5]]}, None, {"points": [[2, 0.5]]}])
    now = [0.0]
    cache = CurveCache(lambda: next(documents), lambda: now[0])

    assert (cache.points(), cache.points()) == ([[1, 0.5]], [[1, 0.5]])
    now[0] = 10.0
    assert cache.points() is None
    now[0] = 20.0
    assert cache.points() == [[2, 0.5]]
