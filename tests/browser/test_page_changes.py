"""An open page while things change behind it: a canary's alarm, and a server that is started again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

pytest.importorskip("playwright", reason="playwright is not installed: make test-browser installs it")

from playwright.sync_api import Browser, Locator, Page, Route, expect

from kvtier.api.config import ApiConfig, PageConfig
from tests.browser.browsing import DESKTOP, open_browser
from tests.support.fake_engine import MODEL, FakeEngine, Running, config_of, fake_engine, running
from tests.support.waiting import LIMIT_S

_WAIT_MS = LIMIT_S * 1000
_WRONG = "block 3 of a prompt is off by 90% in layer 1"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as browser:
        yield browser


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[FakeEngine]:
    with fake_engine(tmp_path) as engine:
        yield engine


@pytest.fixture
def config(engine: FakeEngine) -> ApiConfig:
    return config_of(engine, page=PageConfig())


@contextlib.contextmanager
def opened(browser: Browser, url: str) -> Iterator[Page]:
    context = browser.new_context(viewport=DESKTOP)
    context.set_default_timeout(_WAIT_MS)
    expect.set_options(timeout=_WAIT_MS)
    page = context.new_page()
    page.goto(url)
    try:
        yield page
    finally:
        context.close()


def complete(server: Running) -> str:
    response = httpx.post(f"{server.url}/v1/completions", json={"model": MODEL, "prompt": "a b c d"}, timeout=LIMIT_S)
    assert response.status_code == 200
    request_id: str = response.headers["x-request-id"]
    return request_id


def explain_button(page: Page, request_id: str) -> Locator:
    return page.get_by_role("button", name=f"Explain {request_id}", exact=True)


def test_an_alarm_says_that_an_engine_loads_nothing_any_more(
    browser: Browser, engine: FakeEngine, config: ApiConfig
) -> None:
    with running("openai", config) as server, opened(browser, server.url) as page:
        expect(page.locator("#status")).to_have_text("ready")
        assert page.locator(".alarm").count() == 0
        engine.canary_checks = {"sound": 40, "wrong": 1}
        engine.loading_off = _WRONG

        expect(page.locator(".alarm")).to_contain_text(f"engine-0 loads nothing from its tiers: {_WRONG}")
        page.get_by_role("link", name="Servers").click()
        engines = page.get_by_role("table", name="Engines")
        expect(engines).to_contain_text(f"off: {_WRONG}")
        expect(engines).to_contain_text("40 sound, 1 wrong")

        engine.loading_off = ""
        expect(engines.get_by_role("cell", name="on", exact=True)).to_be_visible()
        page.get_by_role("link", name="Overview").click()
        expect(page.locator(".card").first).to_be_visible()
        expect(page.locator(".alarm")).to_have_count(0)


def test_requests_go_on_coming_after_the_server_was_started_again(browser: Browser, config: ApiConfig) -> None:
    with contextlib.ExitStack() as stack:
        with running("openai", config) as server:
            page = stack.enter_context(opened(browser, server.url))
            page.get_by_role("link", name="Requests").click()
            earlier = [complete(server) for _ in range(3)]
            expect(explain_button(page, earlier[-1])).to_be_visible()
        expect(page.locator("#status")).to_have_text("connecting")

        with running("openai", config, port=server.address[1]) as server:
            later = complete(server)
            expect(explain_button(page, later)).to_be_visible()
            expect(explain_button(page, earlier[-1])).to_have_count(0)


def test_a_request_that_the_stream_tells_first_hides_none_that_came_before(browser: Browser, config: ApiConfig) -> None:
    with running("openai", config) as server:
        earlier = complete(server)
        with opened(browser, "about:blank") as page:
            held: list[Route] = []

            def hold(route: Route) -> None:
                held.append(route)

            page.route("**/kvtier/v1/requests?*", hold)
            page.goto(f"{server.url}/#requests")
            expect(page.locator("#status")).to_have_text("ready")
            later = complete(server)
            expect(explain_button(page, later)).to_be_visible()
            while not held:
                page.wait_for_timeout(50)
            held[0].continue_()
            page.unroute("**/kvtier/v1/requests?*")

            expect(explain_button(page, earlier)).to_be_visible()
            rows = page.locator("table.requests tbody tr")
            expect(rows).to_have_count(2)
            expect(rows.first.get_by_role("button")).to_have_attribute("aria-label", f"Explain {later}")
