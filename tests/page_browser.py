"""A Chromium for tests of the page: tabs that notice what goes wrong in them. Its fixtures are conftest.py's.

In: a page's path and a link's fragment. Out: an Opened tab.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
#: Why tests of the page are skipped, with what installs what they miss; conftest.py says how many were.
NO_PLAYWRIGHT = "playwright is not installed: pip install 'vramprobe[test]'"
NO_CHROMIUM = "no Chromium is installed: apt-get install chromium"


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Skips where there is none."""
    pytest.importorskip("playwright", reason=NO_PLAYWRIGHT)
    if CHROMIUM is None:
        pytest.skip(NO_CHROMIUM)
    from page_example import chromium

    with chromium() as launched:
        yield launched


@pytest.fixture(scope="session")
def html(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The calculator alone."""
    from page_example import content

    return written(tmp_path_factory.mktemp("page"), content())


@pytest.fixture(scope="session")
def with_tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of what is published."""
    from page_example import published

    return written(tmp_path_factory.mktemp("page"), published())


def written(folder: Path, content: Any) -> Path:
    """The page of this content, as a file."""
    from vramprobe.report.page import page

    path = folder / "index.html"
    path.write_text(page(content), encoding="utf-8")
    return path


class Opened:
    """A tab: what it asks of the network and what goes wrong in it are kept."""

    def __init__(self, tab: Any, path: Path, fragment: str = "") -> None:
        self.tab = tab
        self.problems: list[str] = []
        self._listeners = {
            "console": lambda message: self.problems.append(message.text),
            "pageerror": lambda error: self.problems.append(str(error)),
            "request": lambda request: self._note(request.url),
        }
        for event, listener in self._listeners.items():
            tab.on(event, listener)
        self.url = path.as_uri()
        tab.goto(self.url + fragment)
        tab.wait_for_selector("html[data-ready]")

    def _note(self, url: str) -> None:
        if not url.startswith(("file:", "data:", "blob:")):
            self.problems.append(f"asked for {url}")

    def leave(self) -> None:
        """The next test's page begins anew, in the same process."""
        for event, listener in self._listeners.items():
            self.tab.remove_listener(event, listener)
        self.tab.goto("about:blank")

    def text(self, selector: str) -> str:
        return self.tab.inner_text(selector).strip()

    def settle(self) -> None:
        """Wait until the largest counts and the other options are there."""
        self.tab.wait_for_selector("#gpus-rows[data-done]", state="attached")

    @property
    def fragment(self) -> str:
        return self.tab.evaluate("location.hash")

    def cells(self, table: str, column: int) -> list[str]:
        """The texts of a column's cells, of the rows that are shown."""
        return [
            text.strip()
            for text in self.tab.locator(f"#{table} tbody tr:not([hidden]) > :nth-child({column})").all_inner_texts()
        ]


#: On a busy machine what takes a second takes many: playwright's own 30 s, and 5 s for assertions, were too few there.
_PATIENCE_MS = 120_000


@pytest.fixture(scope="session")
def shared_tabs(browser: Any) -> list[Any]:
    """Tabs that tests have left."""
    return []


@pytest.fixture
def opened(browser: Any, html: Path, shared_tabs: list[Any]) -> Iterator[Any]:
    """Opens tabs, and fails where any of them logged an error or asked for anything.

    One with options, or that is to be the test's ``own`` (it may change the tab itself), is closed with its test.
    """
    tabs: list[tuple[Opened, bool]] = []

    def open_page(fragment: str = "", path: Path = html, *, own: bool = False, **options: Any) -> Opened:
        is_shared = not (own or options)
        tab = shared_tabs.pop() if is_shared and shared_tabs else new_tab(browser, **options)
        tabs.append((Opened(tab, path, fragment), is_shared))
        return tabs[-1][0]

    yield open_page
    for one, is_shared in tabs:
        if is_shared and one.problems == []:
            one.leave()
            shared_tabs.append(one.tab)
        else:
            one.tab.context.close()
    for one, _ in tabs:
        assert one.problems == []


def new_tab(browser: Any, **options: Any) -> Any:
    """A tab of a context with these options, alone in it."""
    context = browser.new_context(**({"viewport": {"width": 1280, "height": 900}} | options))
    context.set_default_timeout(_PATIENCE_MS)
    return context.new_page()


def waiting(locator: Any) -> Any:
    """Assertions that wait until they hold."""
    from playwright.sync_api import expect

    expect.set_options(timeout=_PATIENCE_MS)
    return expect(locator)
