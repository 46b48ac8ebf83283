"""`kvtier cache-server --page`, as its operator meets it."""

from __future__ import annotations

import httpx
import pytest

from kvtier.plugins.embedded_server import EmbeddedServer
from kvtier.testing.servers import cache_server
from tests.support.actors import chain, open_client, payloads
from tests.support.deployments import free_ports
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow


def test_it_shows_what_the_server_has_and_ends_with_it() -> None:
    [port] = free_ports(1)
    hashes = chain(1, 8)
    with cache_server("--page", f"127.0.0.1:{port}") as server, open_client(server.unix) as client:
        client.set(hashes, payloads(hashes))
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as browser:
            state = browser.get("/kvtier/v1/state").json()
            namespaces = browser.get("/kvtier/v1/namespaces").json()["namespaces"]
            with browser.stream("GET", "/kvtier/v1/events") as events:
                assert next(events.iter_bytes())
                assert server.stop() == 0

    assert state["tiers"][0]["blocks"] == 8
    assert [one["blocks"] for one in namespaces] == [8]


def test_the_server_that_a_plug_in_starts_may_have_one() -> None:
    [port] = free_ports(1)
    server = EmbeddedServer(8 << 20, name=f"page-{port}", unused_s=0.5, page=f"127.0.0.1:{port}")
    server.ensure()
    try:
        wait_until(lambda: _room_bytes(port) == 8 << 20)  # the page comes up behind the server
    finally:
        server.close()


def _room_bytes(port: int) -> int | None:
    try:
        state = httpx.get(f"http://127.0.0.1:{port}/kvtier/v1/state", timeout=60).json()
    except httpx.ConnectError:
        return None
    found: int = state["tiers"][0]["room_bytes"]
    return found
