"""Tests that the shared pool keeps the contract of runtimes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from teola_plugin.pool import EnginePool
from teola_plugin.runtime.conformance import RuntimeConformance


class TestSharedPool(RuntimeConformance):
    @pytest.fixture(autouse=True)
    def _connected(self, shared: EnginePool) -> None:
        self._pool = shared

    @contextmanager
    def pool(self) -> Iterator[EnginePool]:
        yield self._pool
