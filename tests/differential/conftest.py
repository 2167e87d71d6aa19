"""A fixture for all comparisons: it fails a test if a part of a plan fails, even if the answer is right."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def no_failed_plans(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    died = [r.getMessage() for r in caplog.get_records("call") if "a planned part died" in r.getMessage()]
    assert not died, died
