"""An open page while things change behind it: a canary's alarm, and a server that is started again."""

from __future__ import annotations

import contextlib
import json
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


_COLOURS = """(canvas) => {
  const { width, height } = canvas;
  const hues = (x) => {
    const { data } = canvas.getContext("2d").getImageData(Math.round(x * width), 0, 1, Math.round(0.7 * height));
    let found = 0;
    for (let at = 0; at < data.length; at += 4) {
      if (data[at + 3] && Math.max(...data.slice(at, at + 3)) - Math.min(...data.slice(at, at + 3)) > 60) found += 1;
    }
    return found;
  };
  return [0.2, 0.5, 0.9].map(hues);
}"""
"""How many coloured pixels the chart's canvas has near its left edge, in its middle, and near its right edge."""


def test_a_chart_of_hits_has_a_gap_where_no_request_ended(browser: Browser, config: ApiConfig) -> None:
    with running("openai", config) as server, opened(browser, "about:blank") as page:
        times = [*range(0, 300, 10), *range(900, 1200, 10)]
        steps = [{"at": 1e9 + at, "requests": 1, "prompt": 10, "cached": {"disk": 8}} for at in times]
        page.route("**/history?*", lambda route: route.fulfill(json={"step_s": 10, "steps": steps}))
        page.goto(server.url)
        canvas = page.locator("section[aria-labelledby=hits-title] canvas")
        expect(canvas).to_have_count(1)
        left, middle, right = canvas.evaluate(_COLOURS)
        assert left > 10
        assert right > 10
        assert middle == 0


def test_a_chart_without_data_any_more_shows_no_old_lines(browser: Browser, config: ApiConfig) -> None:
    with running("openai", config) as server, opened(browser, "about:blank") as page:
        steps = [{"at": 1e9 + 10 * number, "requests": 1, "prompt": 10, "cached": {"disk": 5}} for number in range(9)]
        page.route("**/history?span=hour", lambda route: route.fulfill(json={"step_s": 10, "steps": steps}))
        page.route("**/history?span=day", lambda route: route.fulfill(json={"step_s": 300, "steps": []}))
        page.goto(server.url)
        hits = page.locator("section[aria-labelledby=hits-title]")
        expect(hits.locator("canvas")).to_have_count(1)
        page.get_by_role("button", name="Last day").click()
        expect(hits).to_contain_text("No request ended in the last day.")
        expect(hits.locator("canvas")).to_have_count(0)
        page.get_by_role("button", name="Last hour").click()
        expect(hits.locator("canvas")).to_have_count(1)


@pytest.mark.parametrize("view", ["overview", "requests"])
def test_an_hour_of_events_leaves_a_page_as_large_as_half_an_hour(
    browser: Browser, config: ApiConfig, view: str
) -> None:
    """A thousand requests a minute, in two streams: what the second one leaves behind is what the first one left."""
    with running("openai", config) as server, opened(browser, "about:blank") as page:
        state = httpx.get(f"{server.url}/kvtier/v1/state", timeout=LIMIT_S).json()
        halves = [_half_an_hour(state, start) for start in (0, _TICKS)]
        page.route("**/kvtier/v1/events", lambda route: _next_half(route, halves))
        page.route("**/kvtier/v1/requests?*", lambda route: route.fulfill(json={"run": "run", "requests": []}))
        session = page.context.new_cdp_session(page)
        session.send("Performance.enable")
        sizes = []
        page.goto(f"{server.url}/#{view}")
        for last in (_TICKS, 2 * _TICKS):
            newest = f"Explain {_request_id((last + 1) * _REQUESTS_PER_TICK)}"
            of_view = {
                "overview": page.get_by_role("cell", name=f"{last:,}", exact=True),
                "requests": page.get_by_role("button", name=newest, exact=True),
            }
            expect(of_view[view].first).to_be_visible()
            session.send("HeapProfiler.collectGarbage")
            found = {one["name"]: one["value"] for one in session.send("Performance.getMetrics")["metrics"]}
            sizes.append((found["JSHeapUsedSize"], found["Nodes"]))
        (half_heap, half_nodes), (whole_heap, whole_nodes) = sizes
        assert whole_nodes - half_nodes < _TICKS
        assert whole_heap - half_heap < _TICKS * _REQUESTS_PER_TICK * _BYTES_OF_REQUEST / 10


_TICKS = 900
"""Of two seconds each."""
_REQUESTS_PER_TICK = 34
_BYTES_OF_REQUEST = 300
"""Less than a request takes in a browser that keeps it."""


def _half_an_hour(state: dict[str, object], start: int) -> str:
    events = []
    for tick in range(start + 1, start + _TICKS + 1):
        first = tick * _REQUESTS_PER_TICK
        requests = [_request(number) for number in range(first + _REQUESTS_PER_TICK, first, -1)]
        told = {"run": "run", "requests": requests, "skipped": 0}
        events.append(f"event: requests\ndata: {json.dumps(told)}\n\n")
        tiers = [_tier(name, tick) for name in ("device", "memory", "disk")]
        shown = {**state, "at": 1e9 + 2.0 * tick, "tiers": tiers}
        events.append(f"event: state\ndata: {json.dumps(shown)}\n\n")
    return "".join(["retry: 1000\n\n", *events])


def _request(number: int) -> dict[str, object]:
    return {
        "number": number,
        "request_id": _request_id(number),
        "at": 1e9 + number,
        "model": MODEL,
        "key": "",
        "prompt_tokens": 8000,
        "output_tokens": 200,
        "cached_tokens": {"device": 1000, "server": 4000, "disk": number % 100},
        "ttft_s": 0.1,
        "finish_reason": "stop",
        "ended_at_tokens": 7000,
        "reason": "never stored",
        "tier": "server",
        "detail": "",
    }


def _request_id(number: int) -> str:
    return f"cmpl-{number:024d}"


def _tier(name: str, tick: int) -> dict[str, object]:
    sizes = {"room_bytes": 1 << 30, "used_bytes": tick << 10, "pinned_bytes": 0, "leased_bytes": 0, "blocks": tick}
    rates = {"in_bytes_per_s": 1e6 * (tick % 7), "out_bytes_per_s": 1e6 * (tick % 5)}
    return {"name": name, "owner": "engine-0", "is_up": True, **sizes, **rates}


def _next_half(route: Route, halves: list[str]) -> None:
    """The next stream, which ends with its half; after the last one the server does not answer."""
    if halves:
        route.fulfill(body=halves.pop(0), content_type="text/event-stream")
    else:
        route.abort()
