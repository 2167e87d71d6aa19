"""Measures engines one after the other, so that they do not disturb each other's figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from teola_plugin.cluster.config import PoolConfig
from teola_plugin.cluster.deployment.engine_factory import build_engine
from teola_plugin.cluster.names import engine_spec
from teola_plugin.engines.calibration import calibrate, to_json
from teola_plugin.observe import progress


async def measure(config: PoolConfig, names: Sequence[str]) -> dict[str, Any]:
    """Profiles as JSON-ready data, by engine; they are kept where the passes, the batcher and the simulator find them.

    Starts one instance of each engine here, without Ray. Raises what the engines raise.
    """
    found: dict[str, Any] = {}
    with progress(len(names), "calibrating") as bar:
        for name in names:
            bar.describe(f"calibrating {name}")
            engine = build_engine(engine_spec(name, config.engines[name]), 0)
            await engine.start()
            try:
                found[name] = to_json(await calibrate(engine, fresh=True))
            finally:
                await engine.stop()
            bar.advance()
    return found
