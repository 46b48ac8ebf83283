"""The view of prefixes in a real browser: what its buttons do, before and after the server was started again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import pytest

pytest.importorskip("playwright", reason="playwright is not installed: make test-browser installs it")

from playwright.sync_api import Browser, Page, expect

from kvtier.api.config import ApiConfig, ApiKey, PageConfig
from tests.browser.browsing import DESKTOP, open_browser
from tests.support.fake_engine import running
from tests.support.storing_engine import StoringEngine, storing_engine
from tests.support.waiting import LIMIT_S

_WAIT_MS = LIMIT_S * 1000
_PREFIXES = "/kvtier/v1/prefixes"
_DOCUMENT = " ".join(f"word{number}" for number in range(60))
_KEYS = (ApiKey(name="root", key="key-root", admin=True), ApiKey(name="ann", key="key-ann"))


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as browser:
        yield browser


@pytest.fixture
def below(tmp_path: Path) -> Iterator[StoringEngine]:
    with storing_engine(tmp_path) as one:
        yield one


@contextlib.contextmanager
def opened(browser: Browser, url: str) -> Iterator[Page]:
    context = browser.new_context(viewport=DESKTOP)
    context.set_default_timeout(_WAIT_MS)
    expect.set_options(timeout=_WAIT_MS)
    try:
        page = context.new_page()
        page.goto(f"{url}/#prefixes")
        yield page
    finally:
        context.close()


def config_of(below: StoringEngine, keys: tuple[ApiKey, ...] = ()) -> ApiConfig:
    return msgspec.structs.replace(below.config(keys), page=PageConfig())


def warm(url: str, name: str) -> None:
    body = {"name": name, "documents": [_DOCUMENT]}
    httpx.post(f"{url}{_PREFIXES}", json=body, timeout=LIMIT_S).raise_for_status()


def test_buttons_still_work_after_the_server_was_started_again(browser: Browser, below: StoringEngine) -> None:
    config = config_of(below)
    with contextlib.ExitStack() as stack:
        with running("openai", config) as server:
            warm(server.url, "rules")
            page = stack.enter_context(opened(browser, server.url))
            expect(page.get_by_role("button", name="Pin rules", exact=True)).to_be_visible()
            expect(page.locator("#status")).to_have_text("ready")
        expect(page.locator("#status")).to_have_text("connecting")

        with running("openai", config, port=server.address[1]):
            expect(page.locator("#status")).to_have_text("ready")
            page.get_by_role("button", name="Pin rules", exact=True).click()
            expect(page.get_by_role("button", name="Unpin rules", exact=True)).to_be_visible()
            expect(page.locator("main [role=status]").first).to_have_text("Done.")


def test_an_admin_warms_a_document_for_chats_of_another_key(browser: Browser, below: StoringEngine) -> None:
    with running("openai", config_of(below, _KEYS)) as server, opened(browser, server.url) as page:
        page.get_by_label("API key").fill("key-root")
        page.get_by_role("button", name="Log in").click()
        expect(page.locator("#status")).to_have_text("ready")
        page.get_by_role("button", name="Warm a document").click()
        page.get_by_label("Name", exact=True).fill("rules")
        page.get_by_label("For chats of the API key").fill("ann")
        page.get_by_label("Or text").fill(_DOCUMENT)
        page.get_by_role("button", name="Warm", exact=True).click()
        expect(page.get_by_role("table", name="Prefixes")).to_contain_text("rules of ann")


def test_a_change_made_elsewhere_is_shown_and_the_focus_stays(browser: Browser, below: StoringEngine) -> None:
    with running("openai", config_of(below)) as server:
        warm(server.url, "rules")
        with opened(browser, server.url) as page:
            expect(page.locator("#status")).to_have_text("ready")
            page.get_by_role("button", name="Rename rules", exact=True).focus()
            httpx.post(f"{server.url}{_PREFIXES}/rules/pin", json={}, timeout=LIMIT_S).raise_for_status()
            expect(page.get_by_role("button", name="Unpin rules", exact=True)).to_be_visible()
            expect(page.get_by_role("button", name="Rename rules", exact=True)).to_be_focused()
            httpx.post(f"{server.url}{_PREFIXES}/rules/drop", json={}, timeout=LIMIT_S).raise_for_status()
            expect(page.get_by_role("button", name="Rename rules", exact=True)).to_have_count(0)


def test_a_pin_of_what_is_cached_in_part_is_said_to_be_partial(browser: Browser, below: StoringEngine) -> None:
    with running("openai", config_of(below)) as server:
        warm(server.url, "rules")
        below.client.drop([block_hash for block_hash, _ in below.client.list_blocks()][:5])
        with opened(browser, server.url) as page:
            page.get_by_role("button", name="Pin rules", exact=True).click()
            expect(page.locator("main [role=status]").first).to_contain_text("10 of 15 blocks of rules are pinned")


def test_all_that_is_cached_of_a_model_is_dropped_once_that_is_confirmed(
    browser: Browser, below: StoringEngine
) -> None:
    with running("openai", config_of(below)) as server:
        warm(server.url, "rules")
        with opened(browser, server.url) as page:
            drop = page.get_by_role("button", name="Drop everything of ")
            drop.click()
            page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
            assert below.client.list_blocks()
            drop.click()
            page.get_by_role("dialog").get_by_role("button", name="Drop", exact=True).click()
            expect(page.locator("main [role=status]").first).to_have_text("Done.")
            expect(drop).to_have_count(0)
            expect(page.get_by_role("table", name="Prefixes")).to_contain_text("rules")
        assert not below.client.list_blocks()
