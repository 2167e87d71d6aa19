"""Makes passes treat an engine as slower than it is, so that their decisions do not depend on the machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

from teola_plugin.graph import Curve, PrimitiveKind
from teola_plugin.pool import EnginePool


@contextmanager
def with_slow_profile(pool: EnginePool, engine: str, kind: PrimitiveKind, seconds: float) -> Iterator[None]:
    """In the body, the engine's profile says that a batch of any size takes `seconds`."""
    slow_engine = cast(Any, pool.engine(engine))
    before = slow_engine.profile
    slow_engine.adopt(replace(before, curves={**before.curves, kind: Curve(((1, seconds),))}))
    try:
        yield
    finally:
        slow_engine.adopt(before)
