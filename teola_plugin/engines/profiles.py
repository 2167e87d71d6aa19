"""Latency profiles, named or measured: `{"llm": ..., "embedder": ..., "reranker": ..., "store": ...}`.

`fake_engines(scaled(rtx3090(), 0.1))` are engines of a tenth of the time. An engine is measured when it is first used;
later its profile is read from the user's cache.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from teola_plugin.engines.base import Engine
from teola_plugin.engines.model_cache import cache_folder
from teola_plugin.graph import Batching, Curve, EngineProfile, PrimitiveKind

_K = PrimitiveKind


def rtx3090() -> dict[str, EngineProfile]:
    """One RTX 3090 per model: Llama-2-7B, bge-large-en-v1.5 and bge-reranker-large in fp16, and pgvector (HNSW).

    Fitted to the logs that the Ayo prototype publishes (github.com/NetX-lab/Ayo, `examples/*.log`, commit 8f42787):

    * prefilling 0.35 ms a token; decoding 28.5 ms a token (27-30 in the logs);
    * embedding 0.022 + 0.00115 n seconds for n texts up to 128 (0.164 measured at 128), 0.00175 n at 666 (1.167);
    * reranking 0.03 + 0.0014 n (0.116 measured at 60); ingestion 0.02 + 0.0005 n (0.348 at 666);
    * searching 0.002 a vector (0.0058 measured at 3).

    Not in the logs: `interference` of prefilling and decoding on one GPU. 0.5 is half-way between free (0) and
    taking turns (1), where a mixed step lasts as long as both together. And what verifying drafts takes: `on_gpu`, of
    the two figures above. Nothing is drafted; `drafting(rtx3090())` does.
    """
    return {
        "llm": EngineProfile(
            {_K.PREFILLING: Curve.linear(0.0, 0.00035), _K.DECODING: Curve.linear(0.0, 0.0285)},
            batching=Batching.CONTINUOUS,
            max_batch=4096,
            max_efficient_batch=1024,
            max_requests=64,
            max_request_size=4096,
            device="gpu0",
            prefix_caching=True,
            verifying=on_gpu(0.0285, 0.00035),
            interference=0.5,
        ),
        "embedder": EngineProfile(
            {_K.EMBEDDING: Curve(((0, 0.022), (128, 0.022 + 0.00115 * 128), (666, 0.00175 * 666)))},
            max_batch=1024,
            max_efficient_batch=128,
            device="gpu1",
        ),
        "reranker": EngineProfile(
            {_K.RERANKING: Curve.linear(0.03, 0.0014)}, max_batch=256, max_efficient_batch=64, device="gpu2"
        ),
        "store": EngineProfile(
            {_K.INGESTION: Curve.linear(0.02, 0.0005), _K.SEARCHING: Curve.linear(0.0, 0.002)},
            batching=Batching.CONTINUOUS,
            max_batch=1024,
            max_efficient_batch=128,
            max_requests=1024,
            device="database",
        ),
    }


def on_gpu(step: float, token: float) -> dict[int, Curve]:
    """Return `EngineProfile.verifying` of an LLM on a GPU.

    A step of `b` requests that verifies `k` drafted tokens for each takes `step + token * k * b` seconds, `token` being
    what a prompt's token takes.

    A step is bound by reading the weights, which it does once however many tokens it has; what a drafted token adds is
    its arithmetic, as that of a prompt's token. The sum is the most that both can take: where they overlap wholly,
    it is the longer of the two (the roofline model: Williams et al., 2009), and a draft of 16 is free. The sum agrees
    with what was measured on an RTX 3090 with a model of this size, Vicuna-7B in fp16, one request at a time, up to 10
    drafted tokens (github.com/hemingkx/Spec-Bench, `Leaderboard.md`, PLD, commit 09244ff): 1.74 tokens a step made
    decoding 1.55 times as fast, so that a step took 1.12 times as long; this says 1.12 for 10. Reading more keys and
    values for more requests is not in it, as it is not in `rtx3090`'s decoding.
    """
    return {b: Curve.linear(step, token * b) for b in (1, 2, 4, 8, 16, 32, 64)}


def drafting(machine: Mapping[str, EngineProfile], tokens: int = 16) -> dict[str, EngineProfile]:
    """Return the machine with LLMs that verify up to `tokens` drafted tokens at once. Raise ValueError."""
    if not 1 <= tokens <= 64:
        raise ValueError(f"drafts of {tokens!r} tokens: give 1 to 64")
    drafted = {name: replace(profile, drafts=tokens) for name, profile in machine.items() if profile.verifying}
    if not drafted:
        raise ValueError("no engine of this machine says what verifying takes: give one a profile with `verifying`")
    return {**machine, **drafted}


def noop() -> dict[str, EngineProfile]:
    """Return engines that take no time, to measure the costs around them."""
    return {
        "llm": EngineProfile(batching=Batching.CONTINUOUS, max_batch=1_000_000, max_efficient_batch=1_000_000),
        "embedder": EngineProfile(),
        "reranker": EngineProfile(),
        "store": EngineProfile(batching=Batching.CONTINUOUS),
    }


def web_search(seconds: float = 0.5) -> EngineProfile:
    """Return a hosted search: each takes `seconds`, independent of others. The default is a guess."""
    return _waiting(_K.SEARCHING, seconds)


def tools(seconds: float = 0.5) -> EngineProfile:
    """Return functions that wait for something elsewhere: each call takes `seconds`. The default is a guess."""
    return _waiting(_K.TOOL, seconds)


def _waiting(kind: PrimitiveKind, seconds: float) -> EngineProfile:
    curves = {kind: Curve(((1, seconds), (2, seconds)))} if seconds else {}
    return EngineProfile(curves, batching=Batching.CONTINUOUS, max_batch=256, max_efficient_batch=256)


def scaled(machine: Mapping[str, EngineProfile], factor: float) -> dict[str, EngineProfile]:
    """Return the machine, `factor` times as slow. `EngineProfile.scaled` raises `ValueError`."""
    return {name: profile.scaled(factor) for name, profile in machine.items()}


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
    """Return the cache file of an engine's measured profile, named after all that the figures depend on.

    These are the class, device, drafts and versions of the engine, and how measurements are made.
    """
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
    """Write a measured profile to its cache file; only log a warning if that fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(to_json(profile), indent=1) + "\n")
    except OSError as error:
        log.warning("the profile could not be kept in %s: %s", path, error)


def _load(path: Path) -> dict[str, Any] | None:
    """Return the fields of a cached profile; None if the file is missing or not valid."""
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
