"""Fixtures of graphs without and with acceleration."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from differential.graphs.sides import Side, side


@pytest.fixture(scope="package")
def plainly() -> Iterator[Side]:
    """Graphs as they are."""
    with side(accelerated=False) as made:
        yield made


@pytest.fixture(scope="package")
def sooner() -> Iterator[Side]:
    """Every graph accelerated."""
    with side(accelerated=True) as made:
        yield made


@pytest.fixture(autouse=True)
def nothing_fell_back(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """An equal result may be one that the accelerator had no part in: it would have said so."""
    yield
    warnings = [one for one in caplog.records if one.name.startswith("teola_plugin") and one.levelno >= logging.WARNING]
    assert not warnings, [one.getMessage() for one in warnings]
