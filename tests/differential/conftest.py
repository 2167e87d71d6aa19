"""A fixture for all comparisons: a plan that fails must be reported, although the answer is right."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def no_dead_parts(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    died = [r.getMessage() for r in caplog.get_records("call") if "a planned part died" in r.getMessage()]
    assert not died, died
