"""The browser that tests of the page drive: which one, and what it means that there is none."""

import os
import shutil
from contextlib import contextmanager

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
CHROMIUM = os.environ.get("REGARD_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
MISSING = "no Chromium: apt-get install chromium, or name it in REGARD_CHROMIUM"
# continuous integration that cannot look at the page has not checked it
needs_chromium = pytest.mark.skipif(CHROMIUM is None and os.environ.get("CI") != "true", reason=MISSING)


@contextmanager
def launched():
    """A browser without a window, for as long as it is looked at."""
    if CHROMIUM is None:
        pytest.fail(MISSING)
    from playwright import sync_api

    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM,
            args=["--no-sandbox", "--disable-gpu", "--disable-background-networking"],
            headless=True,
        )
        yield browser
        browser.close()
