"""The browser that tests of the page drive: which one, and what it means that there is none."""

import os
import shutil
from contextlib import contextmanager
from urllib.parse import urlencode

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
CHROMIUM = os.environ.get("REGARD_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
MISSING = "no Chromium: apt-get install chromium, or name it in REGARD_CHROMIUM"
USUAL = {"width": 1280, "height": 860}
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


@contextmanager
def opened(browser, address, **options):
    """A window of its own on the page at an address; what goes wrong in it is listed in `page.wrong`."""
    context = browser.new_context(**{"viewport": USUAL, "accept_downloads": True} | options)
    page = context.new_page()
    page.set_default_timeout(60_000)  # machines that test are not free
    page.address, page.wrong = address, []
    own = (address, "blob:", "data:", "file:", "about:")
    page.on("pageerror", lambda error: page.wrong.append(str(error)))
    page.on("dialog", lambda dialog: (page.wrong.append(f"dialog {dialog.message}"), dialog.dismiss()))
    page.on("console", lambda line: page.wrong.append(line.text) if line.type == "error" else None)
    page.on("request", lambda request: None if request.url.startswith(own) else page.wrong.append(request.url))
    yield page
    context.close()


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
