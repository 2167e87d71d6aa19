"""The assignment of devices to the engines of a process before they start, and users' lists of CPU cores."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

from teola_plugin.engines.devices import cards
from teola_plugin.engines.devices.budget import Demand, Grant, allot

log = logging.getLogger("teola_plugin")


@runtime_checkable
class OnCards(Protocol):
    """An engine that may compute on a GPU of this machine."""

    def demand(self) -> Demand:
        """Return the engine's demand, as its user declared it, whatever was granted before."""
        ...

    def grant(self, grant: Grant) -> None:
        """Set the device of the engine from its next start on."""
        ...


def on_cards(engines: Iterable[Any]) -> list[OnCards]:
    return [engine for engine in engines if isinstance(engine, OnCards)]


def assign_devices(engines: Sequence[OnCards]) -> None:
    """Set the device of each of these engines of one process, and the memory that it may take.

    Takes seconds if it has to import torch. Raises `ConfigError`, `EngineUnavailable` (see `budget.allot`).
    """
    demands = [engine.demand() for engine in engines]
    visible = cards.visible_cards() if _needs_cards(demands) else ()
    grants = allot(demands, visible, "" if visible else _why_none(demands))
    for engine, demand, grant in zip(engines, demands, grants, strict=True):
        if visible and not demand.device and grant.device == "cpu":
            log.warning(
                "%s computes on the CPU: no GPU has %.1f GiB free",
                demand.engine,
                (demand.needs + demand.work) / cards.GIB,
            )
        engine.grant(grant)


def _needs_cards(demands: Sequence[Demand]) -> bool:
    """Return True if cards must be looked up: a single LLM finds them by itself, and the CPU needs none."""
    maybe = [demand for demand in demands if not demand.device or demand.device.startswith("cuda")]
    return any(not demand.fills for demand in maybe) or len(maybe) > 1


def _why_none(demands: Sequence[Demand]) -> str:
    """Return the reason why there is no card, if an engine demands one."""
    return cards.why_none() if any(demand.device.startswith("cuda") for demand in demands) else ""


def parse_cores(cores: str | Iterable[int] | None) -> tuple[int, ...]:
    """Return core numbers from `"0-2,5"` or from numbers; () for None. Raise ValueError for an invalid text."""
    if cores is None:
        return ()
    if not isinstance(cores, str):
        return tuple(sorted({int(core) for core in cores}))
    numbers: set[int] = set()
    for part in filter(None, (part.strip() for part in cores.split(","))):
        first, _, last = part.partition("-")
        numbers.update(range(int(first), int(last or first) + 1))
    return tuple(sorted(numbers))
