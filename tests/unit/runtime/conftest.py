"""A pool of fake engines."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from teola_plugin.engines.fake import fake_engines
from teola_plugin.pool import EnginePool


@pytest.fixture
def pool() -> Iterator[EnginePool]:
    with EnginePool.local(fake_engines()) as pool:
        yield pool
