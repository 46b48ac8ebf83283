"""A real browser for tests: Debian's chromium, driven by playwright, or a sentence why there is none."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

_NAMES = ("chromium", "chromium-browser", "google-chrome")
DESKTOP = {"width": 1180, "height": 820}
PHONE = {"width": 390, "height": 844}


def find_chromium() -> str:
    """Skips the test where there is none."""
    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, _NAMES)), None)
    if found is None:
        pytest.skip("there is no chromium on this machine: apt-get install chromium, or set CHROMIUM to its path")
    return found


@contextlib.contextmanager
def open_browser() -> Iterator[Browser]:
    path = find_chromium()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        try:
            yield browser
        finally:
            browser.close()


class Tab:
    """A page and all that went wrong in it: errors of scripts, and what the content security policy refused."""

    def __init__(self, context: BrowserContext) -> None:
        self.page: Page = context.new_page()
        self.problems: list[str] = []
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("console", lambda message: self._note(message.type, message.text))

    def _note(self, kind: str, text: str) -> None:
        if kind == "error" and "status of 401" not in text:  # the browser's own line for a refused request
            self.problems.append(text)

    def picture(self, name: str, *, is_whole: bool = False) -> None:
        """Written where PICTURES says, for the docs; `is_whole` with what lies below the window's edge."""
        folder = os.environ.get("PICTURES")
        if folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
            self.page.screenshot(path=Path(folder) / f"page-{name}.png", animations="disabled", full_page=is_whole)
