"""How long a real browser takes to show the page of a cache server with many blocks."""

from __future__ import annotations

import os
import shutil
import statistics
import time

from benchmarks.harness import console
from kvtier.api.page.standalone import PageServer
from kvtier.cacheserver.server import CacheServer
from kvtier.transport.address import TcpAddress

_LEVELS = "section[aria-labelledby=tiers-title] tbody tr"
_TREE = "details"


def measure_load(server: CacheServer, repeats: int) -> dict[str, float] | None:
    """Medians in milliseconds, from an empty browser's first request to the tiers and to the tree of prefixes.

    None, and the reason, without playwright or chromium.
    """
    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium")
    try:
        from playwright.sync_api import sync_playwright  # noqa: PLC0415 - not everywhere installed
    except ImportError:
        console.print("the page's load is not measured: there is no playwright (make test-browser installs it)")
        return None
    if chromium is None:
        console.print("the page's load is not measured: there is no chromium")
        return None
    page_server = PageServer(TcpAddress("127.0.0.1", 0), server, "unix:c.sock")
    took: dict[str, list[float]] = {"load_ms": [], "prefixes_load_ms": []}
    try:
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
            for _ in range(repeats + 1):
                for name, path, shown in (("load_ms", "", _LEVELS), ("prefixes_load_ms", "#prefixes", _TREE)):
                    context = browser.new_context()  # nothing of the page is in its cache
                    page = context.new_page()
                    began_at = time.monotonic()
                    page.goto(f"{page_server.url}{path}", wait_until="commit")
                    page.locator(shown).first.wait_for()
                    took[name].append(1000 * (time.monotonic() - began_at))
                    context.close()
            browser.close()
    finally:
        page_server.close()
    return {name: statistics.median(each[1:]) for name, each in took.items()}  # the first one starts the browser
