"""Latency profiles: measured when an engine is first used, then read from the user's cache."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from teola_plugin.engines.base import Engine
from teola_plugin.engines.model_cache import cache_folder
from teola_plugin.graph import Batching, Curve, EngineProfile, PrimitiveKind

log = logging.getLogger("teola_plugin")
MEASURING_VERSION = 5
"""Part of the file's name. Raise it whenever engines measure in another way, so that older figures are ignored."""
MEASURED = ("curves", "max_efficient_batch", "warmup_chunk", "interference", "verifying")
"""Names of the measured fields; limits and devices are the running engine's own."""


@runtime_checkable
class Measurable(Protocol):
    """An engine that can measure its latencies. `measure` also adopts them.

    One that must not be measured (a server that is paid by the request) says so by `measurable = False`.
    """

    @property
    def profile(self) -> EngineProfile: ...

    measure: Callable[[], Awaitable[EngineProfile]]

    def adopt(self, profile: EngineProfile) -> None: ...


async def calibrate(engine: Engine, *, fresh: bool = False) -> EngineProfile:
    """Give a started engine its profile, from the cache or measured now. Engines that cannot measure keep theirs."""
    if not isinstance(engine, Measurable) or not getattr(engine, "measurable", True):
        return engine.profile
    path = _path(engine)
    figures = None if fresh else _load(path)
    if figures is not None:
        engine.adopt(dataclasses.replace(engine.profile, **{k: v for k, v in figures.items() if k in MEASURED}))
        return engine.profile
    try:
        await engine.measure()
    except Exception as error:  # a profile is a help, not a condition
        log.warning("engine %s could not be measured: %s", engine.name, error)
        return engine.profile
    _save(path, engine.profile)
    return engine.profile


def _path(engine: Engine) -> Path:
    profile = engine.profile
    facts = [
        MEASURING_VERSION,
        type(engine).__qualname__,
        profile.device,
        profile.drafts,
        sorted(engine.versions().items()),
    ]
    name = hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()[:16]
    return cache_folder() / "profiles" / f"{engine.name}-{name}.json"


def _save(path: Path, profile: EngineProfile) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(to_json(profile), indent=1) + "\n")
    except OSError as error:
        log.warning("the profile could not be kept in %s: %s", path, error)


def _load(path: Path) -> dict[str, Any] | None:
    try:
        return from_json(json.loads(path.read_text()))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def to_json(profile: EngineProfile) -> dict[str, Any]:
    """Return a profile as data that can be written as JSON."""
    data = {f.name: getattr(profile, f.name) for f in dataclasses.fields(profile)}
    data["batching"] = profile.batching.value
    data["curves"] = {kind.value: _points(curve) for kind, curve in profile.curves.items()}
    data["verifying"] = {str(batch): _points(curve) for batch, curve in profile.verifying.items()}
    return data


def from_json(data: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of an `EngineProfile`. Raise KeyError, TypeError or ValueError for invalid data."""
    curves = {PrimitiveKind(kind): _curve(points) for kind, points in data["curves"].items()}
    verifying = {int(batch): _curve(points) for batch, points in data["verifying"].items()}
    return {**data, "batching": Batching(data["batching"]), "curves": curves, "verifying": verifying}


def _points(curve: Curve) -> list[list[float]]:
    return [list(point) for point in curve.points]


def _curve(points: list[list[float]]) -> Curve:
    return Curve(tuple((int(size), float(seconds)) for size, seconds in points))
