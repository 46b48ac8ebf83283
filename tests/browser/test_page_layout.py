"""How the page's views look: words stay whole, values stand beside their names, and fields do not overlap."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

import httpx
import pytest

pytest.importorskip("playwright", reason="playwright is not installed: make test-browser installs it")

import msgspec
from playwright.sync_api import Browser, FloatRect, Page, ViewportSize, expect

from kvtier.api.config import ApiConfig, PageConfig
from tests.browser.browsing import DESKTOP, PHONE, open_browser
from tests.support.fake_engine import MODEL, Running, running
from tests.support.storing_engine import StoringEngine, storing_engine
from tests.support.waiting import LIMIT_S

_WAIT_MS = LIMIT_S * 1000
_VIEWS = ("overview", "requests", "prefixes", "servers")
_LONG_NAME = "a-very-long-name-of-a-model-" * 6
_BROKEN_WORDS = """() => {
  const broken = [];
  for (const cell of document.querySelectorAll("th, td:not(.foreign), button")) {
    const texts = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT);
    while (texts.nextNode()) {
      for (const word of texts.currentNode.data.matchAll(/\\S+/g)) {
        const range = document.createRange();
        range.setStart(texts.currentNode, word.index);
        range.setEnd(texts.currentNode, word.index + word[0].length);
        if (new Set([...range.getClientRects()].map((one) => one.top)).size > 1) broken.push(word[0]);
      }
    }
  }
  return broken;
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as browser:
        yield browser


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Running]:
    with storing_engine(tmp_path) as below, running("openai", _config(below)) as server:
        body = {"name": "the-rules-of-the-house", "documents": [" ".join(map(str, range(60)))], "pin": True}
        httpx.post(f"{server.url}/kvtier/v1/prefixes", json=body, timeout=LIMIT_S).raise_for_status()
        chat = {"model": MODEL, "messages": [{"role": "user", "content": "What is this about?"}]}
        httpx.post(f"{server.url}/v1/chat/completions", json=chat, timeout=LIMIT_S).raise_for_status()
        yield server


def _config(below: StoringEngine) -> ApiConfig:
    return msgspec.structs.replace(below.config(), page=PageConfig())


@contextlib.contextmanager
def opened(browser: Browser, url: str, size: ViewportSize = DESKTOP) -> Iterator[Page]:
    context = browser.new_context(viewport=size)
    context.set_default_timeout(_WAIT_MS)
    expect.set_options(timeout=_WAIT_MS)
    try:
        page = context.new_page()
        page.goto(url)
        expect(page.locator("#status")).to_have_text("ready")
        yield page
    finally:
        context.close()


def box(page: Page, selector: str) -> FloatRect:
    found = page.locator(selector).first.bounding_box()
    assert found is not None
    return found


@pytest.mark.parametrize("width", [1180, 1000])
def test_no_word_of_a_number_a_state_or_a_button_is_broken(browser: Browser, server: Running, width: int) -> None:
    with opened(browser, server.url, {"width": width, "height": 800}) as page:
        for view in _VIEWS:
            page.goto(f"{server.url}/#{view}")
            expect(page.locator("main td").first).to_be_visible()
            assert page.evaluate(_BROKEN_WORDS) == [], view


def test_on_a_phone_a_value_with_a_text_below_it_stands_beside_its_name(browser: Browser, server: Running) -> None:
    with opened(browser, f"{server.url}/#prefixes", PHONE) as page:
        level = box(page, "td[data-label=Tiers] .bar")
        text = box(page, "td[data-label=Tiers] small")
        assert text["x"] == pytest.approx(level["x"], abs=2)
        assert text["y"] > level["y"]


def test_fields_for_a_document_do_not_overlap_even_with_a_long_model_name(browser: Browser, server: Running) -> None:
    with opened(browser, f"{server.url}/#prefixes") as page:
        page.get_by_role("button", name="Warm a document").click()
        page.locator(".warm select").evaluate("(one, name) => one.append(new Option(name))", _LONG_NAME)
        fields = [field.bounding_box() for field in page.locator(".warm :is(input, select, textarea)").all()]
        boxes = [field for field in fields if field is not None and field["width"]]
        assert len(boxes) > 6
        assert not [pair for pair in combinations(boxes, 2) if _overlap(*pair)]


def _overlap(one: FloatRect, other: FloatRect) -> bool:
    is_beside = one["x"] + one["width"] <= other["x"] or other["x"] + other["width"] <= one["x"]
    is_apart: bool = is_beside or one["y"] + one["height"] <= other["y"] or other["y"] + other["height"] <= one["y"]
    return not is_apart


def test_a_filter_that_fits_no_request_does_not_say_that_there_was_none(browser: Browser, server: Running) -> None:
    with opened(browser, f"{server.url}/#requests") as page:
        expect(page.locator("table.requests tbody tr")).to_have_count(1)
        page.get_by_placeholder("model").fill("another")
        expect(page.locator("main")).to_contain_text("None of the last 1 requests is for such a model.")
        page.get_by_placeholder("model").fill("")
        expect(page.locator("table.requests tbody tr")).to_have_count(1)


def test_the_level_s_colours_are_explained_and_a_tier_has_one_name(browser: Browser, server: Running) -> None:
    with opened(browser, f"{server.url}/#overview") as page:
        for word in ("pinned", "leased", "other"):
            expect(page.locator("caption .key", has_text=word)).to_be_visible()
        page.goto(f"{server.url}/#prefixes")
        expect(page.get_by_role("table", name="Prefixes")).to_contain_text("memory 100%")
        expect(page.get_by_role("table", name="Prefixes")).not_to_contain_text("server")


def test_an_amount_of_money_fits_its_card_in_one_line(browser: Browser, server: Running) -> None:
    with opened(browser, f"{server.url}/#overview", PHONE) as page:
        value = page.locator(".card .value").first
        fits = value.evaluate("""(one) => {
            one.textContent = "EUR\\u00a01234.56";
            const range = document.createRange();
            range.selectNodeContents(one);
            return [range.getClientRects().length, one.scrollWidth <= one.clientWidth];
        }""")
    assert fits == [1, True]


def test_what_goes_in_differs_from_what_goes_out_without_colours_and_a_chart_begins_with_a_minute(
    browser: Browser, server: Running
) -> None:
    with opened(browser, f"{server.url}/#overview") as page:
        drawn = page.evaluate("""async () => {
            const { Chart } = await import("/page/charts.js");
            const chart = new Chart("Bytes", { format: String });
            document.body.append(chart.element);
            const series = [{ label: "in", kind: "tier-disk", isDashed: true }, { label: "out", kind: "tier-disk" }];
            chart.set(series, [[1000000000, 1000000002], [1, 2], [2, 1]], "");
            await new Promise((done) => setTimeout(done, 100));
            const markers = [...chart.element.querySelectorAll(".u-series:not(:first-child) .u-marker")];
            const { min, max } = chart.plot.scales.x;
            return [markers.map((one) => getComputedStyle(one).borderTopStyle), min, max];
        }""")
    assert drawn == [["dashed", "solid"], 1000000002 - 60, 1000000002]


def test_an_explanation_does_not_cover_another_view(browser: Browser, server: Running) -> None:
    with opened(browser, f"{server.url}/#overview") as page:
        page.get_by_role("link", name="Requests").click()
        page.get_by_role("button", name="Explain").first.click()
        expect(page.locator("dialog")).to_be_visible()
        page.go_back()
        expect(page.locator("dialog")).to_have_count(0)
        expect(page.locator(".card").first).to_be_visible()


def test_the_end_of_a_name_is_shown_even_if_it_is_not_pinned(browser: Browser, server: Running) -> None:
    body = {"name": "a-week", "documents": [" ".join(map(str, range(900, 980)))], "ttl_s": 604_800}
    httpx.post(f"{server.url}/kvtier/v1/prefixes", json=body, timeout=LIMIT_S).raise_for_status()
    with opened(browser, f"{server.url}/#prefixes") as page:
        kept = page.get_by_role("row").filter(has_text="a-week").locator("td[data-label=Kept]")
        expect(kept).to_contain_text("no; the name until ")
