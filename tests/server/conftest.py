"""A browser for the tests of pages."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.browser import Tab, browser


@pytest.fixture(scope="module")
def one_tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with browser(tmp_path_factory.mktemp("profile")) as chrome:
        yield chrome


@pytest.fixture
def tab(one_tab: Tab) -> Iterator[Tab]:
    """Return a browser page. An error in its console fails the test."""
    one_tab.faults.clear()
    one_tab.shape(1240, 900)
    yield one_tab
    one_tab.open("about:blank#")  # pages ask again and again
    assert one_tab.faults == []
