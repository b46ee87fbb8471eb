"""A page in headless Chromium."""

import contextlib
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = "--no-sandbox --disable-gpu --disable-background-networking --disable-sync --no-first-run"


@contextlib.contextmanager
def browser_page(width: int = 1300, height: int = 900) -> Iterator[Any]:
    """A page of so many pixels; the test is skipped where no browser is installed."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"no browser is here: none of {', '.join(BROWSERS)}")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=browser, args=FLAGS.split())
        try:
            page = chromium.new_page(viewport={"width": width, "height": height})
            page.set_default_timeout(120_000)  # ms; other tests may keep all cores busy
            yield page
        finally:
            chromium.close()


def assert_self_contained(path: Path, headings: Sequence[str], pictures: int) -> str:
    """Check a page in a narrow window, and that it needs no other file; return its text."""
    requests, faults = [], []
    with browser_page(400) as page:
        page.on("request", lambda request: requests.append(request.url))
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda message: faults.append(message.text))
        page.goto(path.as_uri())
        assert page.locator("h2").all_inner_texts() == [*headings]
        shown = page.evaluate("[...document.images].map(i => [i.naturalWidth, i.alt])")
        assert page.evaluate("document.documentElement.scrollWidth") <= 400
        text = page.inner_text("body")
    assert len(shown) == pictures
    assert all(width > 50 and description for width, description in shown)
    assert [url for url in requests if not url.startswith("data:")] == [path.as_uri()]
    assert not faults
    return str(text)
