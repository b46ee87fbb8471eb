"""A page in headless Chromium."""

import contextlib
import shutil
from collections.abc import Iterator
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
