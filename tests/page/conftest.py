"""A browser, and a window in it on the page that the fixture `server` of a file serves."""

import pytest
from browser import USUAL, launched, opened


@pytest.fixture(scope="module")
def browser():
    with launched() as browser:
        yield browser


@pytest.fixture(scope="module")
def window(browser, server):
    with opened(browser, server.address) as page:
        yield page


@pytest.fixture
def page(window):
    """The window of all tests of a file, empty again: the state of the page is in its address. A window for each test
    would take as long as the test."""
    window.goto("about:blank")
    window.set_viewport_size(USUAL)
    window.mouse.move(0, 0)
    window.wrong.clear()
    yield window
    assert window.wrong == []
