"""Tests that the local runtime keeps the contract of runtimes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from teola_plugin.engines.fake import FakeEmbedder, fake_engines
from teola_plugin.graph import Curve, EngineProfile, PrimitiveKind
from teola_plugin.pool import EnginePool
from teola_plugin.runtime.conformance import RuntimeConformance


class TestLocalRuntime(RuntimeConformance):
    @contextmanager
    def pool(self) -> Iterator[EnginePool]:
        slow = EngineProfile({PrimitiveKind.EMBEDDING: Curve(((1, 0.25), (2, 0.25)))})
        with EnginePool.local([*fake_engines(), FakeEmbedder("slow", slow)]) as pool:
            yield pool
