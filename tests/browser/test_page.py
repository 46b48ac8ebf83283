"""Every view of the page in a real browser, against a real deployment of a tiny checkpoint under load."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Iterator

import httpx
import pytest

pytest.importorskip("playwright", reason="playwright is not installed: make test-browser installs it")

from playwright.sync_api import Browser, Page, Route, expect

from tests.browser.browsing import DESKTOP, PHONE, Tab, find_chromium, open_browser
from tests.support.deployments import DeploymentProcess
from tests.support.serving import MODEL, save_model

_TEXT = """\
models:
  - model: tiny
    kv_cache_space: 4MiB
    always_load: true
    explain_text: true
cache:
  memory: 6MiB
  disk: 64MiB
  folder: cache
page:
  gpu_hour_price: 2.5
"""
_ADMIN, _READER, _USER = "key-of-admin", "key-of-reader", "key-of-user"
_KEYS = [
    {"name": "admin", "key": _ADMIN, "admin": True},
    {"name": "reader", "key": _READER, "metrics": True},
    {"name": "user", "key": _USER},
]
_WAIT_MS = 120_000
_HTML = "<img src=x onerror='window.wasHit=1'><script>window.wasHit=1</script>"
_DOCUMENT = "The village has a mill, a well and a bridge. " * 20


class Traffic(threading.Thread):
    """Asks about documents that the device and the server's memory cannot all hold, until `stop`."""

    def __init__(self, url: str) -> None:
        super().__init__(name="traffic", daemon=True)
        self._url = url
        self._is_over = threading.Event()

    def run(self) -> None:
        with httpx.Client(base_url=self._url, headers={"authorization": f"Bearer {_USER}"}, timeout=60) as client:
            number = 0
            while not self._is_over.wait(0.05):
                number += 1
                document = f"Village {number * number % 23}. {_DOCUMENT}"
                text = f"{document} Question {number % 7}: who lives there? {_HTML if number % 5 == 0 else ''}"
                with contextlib.suppress(httpx.HTTPError):
                    client.post("/v1/completions", json={"model": MODEL, "prompt": text, "max_tokens": 4})

    def stop(self) -> None:
        self._is_over.set()
        self.join()


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeploymentProcess]:
    find_chromium()
    folder = tmp_path_factory.mktemp("page")
    save_model(folder / MODEL)
    with DeploymentProcess(folder, _TEXT, http={"api_keys": _KEYS}) as running:
        traffic = Traffic(running.openai_url)
        traffic.start()
        try:
            yield running
        finally:
            traffic.stop()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as browser:
        yield browser


@contextlib.contextmanager
def logged_in(browser: Browser, url: str, key: str = _ADMIN, **options: object) -> Iterator[Tab]:
    """A tab that has logged in, in a browser without other cookies. No script of it may fail."""
    context = browser.new_context(**{"viewport": DESKTOP, **options})  # type: ignore[arg-type]
    context.set_default_timeout(_WAIT_MS)
    expect.set_options(timeout=_WAIT_MS)
    try:
        tab = Tab(context)
        tab.page.goto(url)
        tab.page.get_by_label("API key").fill(key)
        tab.page.get_by_role("button", name="Log in").click()
        expect(tab.page.locator("#status")).to_have_text("ready")
        yield tab
        assert tab.problems == []
    finally:
        context.close()


def part(deployment: DeploymentProcess) -> str:
    """Two prompts that part in their last words; the id of the second."""
    request_id = ""
    with httpx.Client(base_url=deployment.openai_url, headers={"authorization": f"Bearer {_USER}"}) as client:
        for end in ("Today is Monday.", f"{_HTML} is Tuesday."):
            body = {"model": MODEL, "prompt": f"A letter. {_DOCUMENT} {end}", "max_tokens": 4}
            response = client.post("/v1/completions", json=body, timeout=60)
            assert response.status_code == 200
            request_id = response.headers["x-request-id"]
    return request_id


def show(page: Page, view: str) -> None:
    page.get_by_role("navigation").get_by_role("link", name=view).click()


def test_a_wrong_key_shows_nothing_but_a_sentence(deployment: DeploymentProcess, browser: Browser) -> None:
    context = browser.new_context(viewport=DESKTOP)
    tab = Tab(context)
    tab.page.goto(deployment.openai_url)
    tab.page.get_by_label("API key").fill("no-key")
    tab.page.keyboard.press("Enter")

    expect(tab.page.get_by_role("alert")).to_have_text("the API key is unknown", timeout=_WAIT_MS)
    assert tab.page.locator("nav").count() == 0
    context.close()


def test_the_overview_shows_tiers_hits_and_savings(deployment: DeploymentProcess, browser: Browser) -> None:
    with logged_in(browser, deployment.openai_url) as tab:
        page = tab.page
        tiers = page.get_by_role("table", name="What is in which tier")
        for tier in ("device", "memory", "disk"):
            expect(tiers.get_by_role("cell", name=tier, exact=True).first).to_be_visible()
        device = tiers.get_by_role("row").filter(has=page.get_by_role("cell", name="device", exact=True))
        expect(device.locator("td[data-label=Used]")).to_contain_text("MiB")
        expect(page.locator(".card", has_text="GPU time saved").locator(".value")).not_to_have_text("–")
        expect(page.locator(".card", has_text="Money saved").locator(".value")).to_contain_text("$")
        expect(page.locator(".card", has_text="last 5 minutes").locator(".value")).to_contain_text("%")
        expect(page.locator("figure canvas").first).to_be_visible()
        page.get_by_role("button", name="Last day").click()
        expect(page.get_by_role("button", name="Last day")).to_have_attribute("aria-pressed", "true")
        page.get_by_role("button", name="Last hour").click()
        for tier in ("device", "memory", "disk"):
            row = tiers.get_by_role("row").filter(has=page.get_by_role("cell", name=tier, exact=True))
            expect(row.get_by_role("cell").last).to_contain_text("/s")
        expect(page.locator("figure", has_text="other memory sizes")).to_be_visible()
        if os.environ.get("PICTURES"):
            page.wait_for_timeout(20_000)  # for more points of lines
        tab.picture("overview", is_whole=True)


def test_requests_come_by_themselves_and_are_explained_with_text(
    deployment: DeploymentProcess, browser: Browser
) -> None:
    with logged_in(browser, deployment.openai_url) as tab:
        page = tab.page
        show(page, "Requests")
        rows = page.locator("table.requests tbody tr")
        expect(rows.first).to_be_visible()
        newest = rows.first.get_by_role("button")
        label = newest.get_attribute("aria-label")
        assert label is not None
        expect(newest).not_to_have_attribute("aria-label", label)
        parted = part(deployment)
        explain = page.get_by_role("button", name=f"Explain {parted}")
        expect(explain).to_be_visible()
        page.get_by_role("button", name="Pause").click()
        expect(rows.first).to_contain_text(MODEL)
        tab.picture("requests")
        explain.click()
        dialog = page.get_by_role("dialog")
        expect(dialog).to_contain_text("The match ended")
        expect(dialog.locator("ins")).to_contain_text("<img")  # eight tokens of it
        assert dialog.locator("img").count() == 0
        tab.picture("explain")
        page.keyboard.press("Escape")
        expect(dialog).to_have_count(0)
        assert page.evaluate("window.wasHit") is None


def test_a_reader_sees_no_text_of_others_and_no_buttons(deployment: DeploymentProcess, browser: Browser) -> None:
    with logged_in(browser, deployment.openai_url, _READER) as tab:
        page = tab.page
        show(page, "Requests")
        page.locator("table.requests tbody tr").first.get_by_role("button", name="Explain").click()
        expect(page.get_by_role("dialog")).to_contain_text("The match ended")
        assert page.get_by_role("dialog").locator("pre").count() == 0
        page.keyboard.press("Escape")
        show(page, "Prefixes")
        expect(page.locator("details").first).to_be_visible()
        assert page.get_by_role("button", name="Warm a document").count() == 0


def test_a_document_is_warmed_pinned_renamed_and_dropped(deployment: DeploymentProcess, browser: Browser) -> None:
    with logged_in(browser, deployment.openai_url) as tab:
        page = tab.page
        show(page, "Prefixes")
        page.get_by_role("button", name="Warm a document").click()
        page.get_by_label("Name").fill("handbook")
        page.get_by_label("Or text").fill(f"The handbook. {_DOCUMENT}")
        page.get_by_role("button", name="Warm", exact=True).click()
        expect(page.locator("form.warm [role=status]")).to_contain_text("handbook is warm")
        page.get_by_role("button", name="Close").click()
        page.get_by_role("button", name="Pin handbook", exact=True).click()
        expect(page.get_by_role("button", name="Unpin handbook")).to_be_visible()
        tab.picture("prefixes")
        page.get_by_role("button", name="Rename handbook").click()
        page.get_by_role("dialog").get_by_role("textbox").fill("guide")
        page.get_by_role("dialog").get_by_role("button", name="Rename").click()
        page.get_by_role("button", name="Drop guide").click()
        page.get_by_role("dialog").get_by_role("button", name="Drop").click()
        expect(page.get_by_role("button", name="Drop guide")).to_have_count(0)


def test_servers_show_engines_caches_and_warnings(deployment: DeploymentProcess, browser: Browser) -> None:
    with logged_in(browser, deployment.openai_url) as tab:
        page = tab.page
        show(page, "Servers")
        expect(page.get_by_role("table", name="Engines")).to_contain_text("ready")
        expect(page.get_by_role("table", name="Cache servers")).to_contain_text("unix:")
        expect(page.locator("ol.log")).to_contain_text("wrong API key")
        tab.picture("servers")


def test_it_works_with_a_keyboard_alone(deployment: DeploymentProcess, browser: Browser) -> None:
    with logged_in(browser, deployment.openai_url) as tab:
        page = tab.page
        passed = []
        while "Servers" not in passed and len(passed) < 10:
            page.keyboard.press("Tab")
            passed.append(page.evaluate("document.activeElement.textContent"))
        assert passed == ["Skip to the content", "Overview", "Requests", "Prefixes", "Servers"]
        page.keyboard.press("Enter")
        expect(page.get_by_role("heading", name="Engines")).to_be_visible()
        assert page.get_by_role("link", name="Servers").get_attribute("aria-current") == "page"


def test_it_fits_a_phone_in_the_dark(deployment: DeploymentProcess, browser: Browser) -> None:
    with logged_in(browser, deployment.openai_url, viewport=PHONE, color_scheme="dark", device_scale_factor=1) as tab:
        page = tab.page
        expect(page.get_by_role("heading", name="Tiers")).to_be_visible()
        for view in ("Requests", "Prefixes", "Servers", "Overview"):
            show(page, view)
            page.wait_for_timeout(500)
            width = page.evaluate("document.documentElement.scrollWidth")
            assert width <= PHONE["width"], f"{view} is {width} wide"
        red, green, blue = page.evaluate(
            "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).slice(0, 3).map(Number)"
        )
        assert max(red, green, blue) < 80
        tab.picture("phone")


def test_names_and_texts_from_elsewhere_are_only_text(deployment: DeploymentProcess, browser: Browser) -> None:
    with logged_in(browser, deployment.openai_url) as tab:
        page = tab.page
        events = _nasty_events(deployment)
        page.route("**/kvtier/v1/events", lambda route: route.fulfill(body=events, content_type="text/event-stream"))
        page.route("**/kvtier/v1/requests?*", lambda route: _with_html(route, "requests"))
        page.route("**/kvtier/v1/requests/*", lambda route: _with_html(route, ""))
        page.route("**/kvtier/v1/prefixes*", _nasty_prefixes)
        page.route("**/kvtier/v1/namespaces", lambda route: _with_html(route, "namespaces"))
        page.route("**/kvtier/v1/warnings", lambda route: _with_html(route, "warnings"))
        page.reload()
        hostile = {
            "Overview": "section[aria-labelledby=tiers-title] table",
            "Requests": "table.requests",
            "Prefixes": "details table",
            "Servers": "[aria-labelledby=engines-title] table, [aria-labelledby=caches-title] table, ol.log",
        }
        for view, places in hostile.items():
            show(page, view)
            for place in places.split(", "):
                expect(page.locator(place).first).to_contain_text(_HTML)
            assert page.locator("main img, main script").count() == 0
        _open_dialogs(page)
        assert page.evaluate("window.wasHit") is None


def test_a_log_out_ends_everything(deployment: DeploymentProcess, browser: Browser) -> None:
    with logged_in(browser, deployment.openai_url) as tab:
        tab.page.get_by_role("button", name="Log out").click()
        expect(tab.page.get_by_label("API key")).to_be_visible()
        assert tab.page.evaluate("fetch('/kvtier/v1/state').then((one) => one.status)") == 401


def _open_dialogs(page: Page) -> None:
    """Each shows the hostile name as it is, and nothing of it is an element."""
    dialog = page.get_by_role("dialog")
    show(page, "Requests")
    page.get_by_role("button", name="Explain").last.click()
    expect(dialog).to_contain_text(_HTML)
    assert dialog.locator("img, script").count() == 0
    page.keyboard.press("Escape")
    show(page, "Prefixes")
    for act in ("Rename", "Drop"):
        page.get_by_role("button", name=f"{act} {_HTML}").click()
        expect(dialog).to_contain_text(_HTML)
        assert dialog.locator("img, script").count() == 0
        page.keyboard.press("Escape")
        expect(dialog).to_have_count(0)
    page.get_by_role("button", name="Warm a document").click()
    expect(page.get_by_label("Model").locator("option")).to_have_text([_HTML])
    assert page.locator("form img, form script").count() == 0


def _with_html(route: Route, name: str) -> None:
    """The answer of the server, with every text in it but ids replaced."""
    response = route.fetch()
    found = response.json()
    if name == "warnings":
        found = {"warnings": [{"at": 1.0, "level": "error", "source": _HTML, "text": _HTML}]}
    route.fulfill(response=response, body=json.dumps(_replaced(found)))


def _nasty_events(deployment: DeploymentProcess) -> str:
    found = {}
    with httpx.Client(base_url=deployment.openai_url, headers={"authorization": f"Bearer {_ADMIN}"}) as client:
        for name, path in (("state", "state"), ("requests", "requests?limit=5")):
            found[name] = json.dumps(_replaced(client.get(f"/kvtier/v1/{path}", timeout=60).json()))
    return "".join(f"event: {name}\ndata: {data}\n\n" for name, data in found.items())


def _replaced(value: object) -> object:
    if isinstance(value, dict):
        return {key: one if key in ("request_id", "status", "kind") else _replaced(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_replaced(one) for one in value]
    return _HTML if isinstance(value, str) else value


def _nasty_prefixes(route: Route) -> None:
    prefix = {
        "name": _HTML,
        "model": _HTML,
        "namespace": _HTML,
        "tokens": 1,
        "blocks": 1,
        "bytes": 1,
        "bytes_by_tier": {_HTML: 1},
        "last_used": None,
        "hits": None,
        "is_pinned": False,
        "pinned_blocks": _HTML,
        "expires_at": None,
    }
    route.fulfill(json={"prefixes": [prefix], "is_cut": True})
