"""The browser that tests of the page drive: which one, and what it means that there is none."""

import os
import shutil
from contextlib import contextmanager
from urllib.parse import urlencode

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


READY = "() => window.regard && window.regard.view && !document.getElementById('view').hasAttribute('aria-busy')"
AXE = """async (rules) => {
  const { violations } = await axe.run(document, { resultTypes: ["violations"], ...(rules && { runOnly: rules }) });
  return violations.filter(({ impact }) => impact === "serious" || impact === "critical")
    .map(({ id, nodes }) => [id, nodes.slice(0, 3).map((node) => `${node.target} ${node.failureSummary}`)]);
}"""


def visit(page, **state):
    page.goto("about:blank")
    page.goto(f"{page.address}#{urlencode({'run': 'shipped'} | state)}")
    page.wait_for_function(READY)
    # pictures are drawn with the next frame
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def data(page, selector):
    """The numbers of a part of the page, with all their digits."""
    return [
        float(value)
        for value in page.eval_on_selector_all(f"{selector} data", "nodes => nodes.map(node => node.value)")
    ]
