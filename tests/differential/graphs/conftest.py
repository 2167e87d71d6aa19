"""Fixtures of graphs without and with acceleration."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from differential.graphs.sides import Side, side


@pytest.fixture(scope="package")
def original_side() -> Iterator[Side]:
    """Return the side of original graphs."""
    with side(accelerated=False) as made:
        yield made


@pytest.fixture(scope="package")
def accelerated_side() -> Iterator[Side]:
    """Return the side of accelerated graphs."""
    with side(accelerated=True) as made:
        yield made


@pytest.fixture(autouse=True)
def nothing_fell_back(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Fail the test if the accelerator reported a failure, since the result would be equal without its help, too."""
    yield
    warnings = [one for one in caplog.records if one.name.startswith("teola_plugin") and one.levelno >= logging.WARNING]
    assert not warnings, [one.getMessage() for one in warnings]
