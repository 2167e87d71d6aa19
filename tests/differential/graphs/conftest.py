from __future__ import annotations

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
