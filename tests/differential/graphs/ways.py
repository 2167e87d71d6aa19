"""Every way to call a graph, each as a function that returns everything the call gives."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Iterator
from typing import Any

from support.graphs.kit import Stop

MODES = ("values", "updates", "custom", "messages", "checkpoints", "tasks", "debug")

Way = Callable[..., Any]
"""(graph, input, config, **options) -> all that it gives."""


def _listed(stream: Any, into: list[Any]) -> list[Any]:
    into.extend(stream)
    return into


async def _alisted(stream: Any, into: list[Any]) -> list[Any]:
    async for part in stream:
        into.append(part)
    return into


def _two(config: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the config of the thread, and one of another thread."""
    other = {**config["configurable"], "thread_id": "other"}
    return [config, {**config, "configurable": other}]


def _batch(graph: Any, given: Any, config: dict[str, Any], **options: Any) -> Any:
    return graph.batch([given, copy.deepcopy(given)], _two(config), return_exceptions=True, **options)


async def _abatch(graph: Any, given: Any, config: dict[str, Any], **options: Any) -> Any:
    return await graph.abatch([given, copy.deepcopy(given)], _two(config), return_exceptions=True, **options)


async def _ainvoke(graph: Any, given: Any, config: dict[str, Any], **options: Any) -> Any:
    return await graph.ainvoke(given, config, **options)


def streamed(**more: Any) -> Way:
    """Return the chunks of a stream. An error is the last of them."""

    def way(graph: Any, given: Any, config: dict[str, Any], **options: Any) -> list[Any]:
        found: list[Any] = []
        try:
            _listed(graph.stream(given, config, **{**more, **options}), found)
        except (Exception, Stop) as error:
            found.append(error)
        return found

    return way


def astreamed(entry: str = "astream", **more: Any) -> Way:
    """Return the chunks of an async stream. An error is the last of them."""

    async def way(graph: Any, given: Any, config: dict[str, Any], **options: Any) -> list[Any]:
        found: list[Any] = []
        try:
            await _alisted(getattr(graph, entry)(given, config, **{**more, **options}), found)
        except (Exception, Stop) as error:
            found.append(error)
        return found

    return _in_a_loop(way)


def _in_a_loop(way: Way) -> Way:
    return lambda *args, **options: asyncio.run(way(*args, **options))


def _events_v3(graph: Any, given: Any, config: dict[str, Any], **options: Any) -> Any:
    run = graph.stream_events(given, config, version="v3", **options)
    found = _listed(run, [])
    return [*found, run.output, run.interrupted, run.interrupts]


async def _aevents_v3(graph: Any, given: Any, config: dict[str, Any], **options: Any) -> Any:
    run = await graph.astream_events(given, config, version="v3", **options)
    found = await _alisted(run, [])
    return [*found, await run.output(), await run.interrupted(), await run.interrupts()]


RUNNABLE: dict[str, Way] = {
    "invoke": lambda graph, given, config, **options: graph.invoke(given, config, **options),
    "ainvoke": _in_a_loop(_ainvoke),
    "batch": _batch,
    "abatch": _in_a_loop(_abatch),
    "stream": streamed(),
    "astream": astreamed(),
    "astream_events v1": astreamed("astream_events", version="v1"),
    "astream_events v2": astreamed("astream_events", version="v2"),
    "astream_log": astreamed("astream_log"),
}
"""Entry points of every Runnable."""


def _modes() -> Iterator[tuple[str, Way]]:
    """Return the streams of each mode alone and of all modes, with subgraphs and without."""
    for subgraphs in (False, True):
        for mode in (*MODES, list(MODES)):
            more: dict[str, Any] = {"stream_mode": mode, **({"subgraphs": True} if subgraphs else {})}
            name = f"{mode if isinstance(mode, str) else 'all'}{' subgraphs' if subgraphs else ''}"
            yield f"stream {name}", streamed(**more)
            yield f"astream {name}", astreamed(**more)


GRAPH: dict[str, Way] = {
    **RUNNABLE,
    **dict(_modes()),
    "invoke v2": lambda graph, given, config, **options: graph.invoke(given, config, **options, version="v2"),
    "stream v2": streamed(stream_mode=["values", "messages"], version="v2"),
    "astream_events subgraphs": astreamed("astream_events", version="v2", subgraphs=True),
    "stream_events v3": _events_v3,
    "astream_events v3": _in_a_loop(_aevents_v3),
}
"""Those, and LangGraph's own."""


def is_async(way: str) -> bool:
    return way.startswith("a")
