"""What was asked of an engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from teola_plugin.engines.base import Engine, Request, Result


def record(engine: Engine) -> list[Request]:
    """From now on, every request that reaches the engine."""
    seen: list[Request] = []
    execute = engine.execute

    def spy(batch: Sequence[Request]) -> AsyncIterator[Result]:
        seen.extend(batch)
        return execute(batch)

    engine.execute = spy  # type: ignore[method-assign]
    return seen
