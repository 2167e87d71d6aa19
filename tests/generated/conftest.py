"""A fixture that fails a test if the package logs a bug of its own. Retries are expected and pass."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

_BUG = "bug of teola-plugin"


class _Bugs(logging.Filter):
    """A log filter that passes no record on and keeps those about bugs of the package."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def filter(self, record: logging.LogRecord) -> bool:
        if _BUG in record.getMessage():
            self.found.append(f"{record.getMessage()} {record.exc_info[1] if record.exc_info else ''}")
        return False


@pytest.fixture(autouse=True)
def no_bug_is_logged() -> Iterator[None]:
    logger, bugs = logging.getLogger("teola_plugin"), _Bugs()
    logger.addFilter(bugs)
    yield
    logger.removeFilter(bugs)
    assert not bugs.found
