"""Before engines start: each says what it asks for, all of them are told where they compute, or nothing starts."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

from teola_plugin.engines.devices import cards
from teola_plugin.engines.devices.budget import Demand, Grant, allotted

log = logging.getLogger("teola_plugin")


@runtime_checkable
class OnCards(Protocol):
    """An engine that may compute on a GPU of this machine."""

    def demand(self) -> Demand:
        """Return the engine's demand, as its user declared it, whatever was granted before."""
        ...

    def grant(self, given: Grant) -> None:
        """Set where the engine computes from its next start on."""
        ...


def on_cards(engines: Iterable[Any]) -> list[OnCards]:
    return [engine for engine in engines if isinstance(engine, OnCards)]


def place(engines: Sequence[OnCards]) -> None:
    """Tell each of these engines of one process where it computes, and how much memory it may take.

    Takes seconds where it has to import torch. Raises `ConfigError`, `EngineUnavailable` (see `budget.allotted`).
    """
    demands = [engine.demand() for engine in engines]
    found = cards.seen() if _matters(demands) else ()
    grants = allotted(demands, found, "" if found else _why_none(demands))
    for engine, demand, given in zip(engines, demands, grants, strict=True):
        if found and not demand.device and given.device == "cpu":
            log.warning(
                "%s computes on the CPU: no GPU has %.1f GiB free",
                demand.engine,
                (demand.needs + demand.work) / cards.GIB,
            )
        engine.grant(given)


def _matters(demands: Sequence[Demand]) -> bool:
    """An LLM that is alone finds its cards by itself, and what computes on the CPU needs none."""
    maybe = [demand for demand in demands if not demand.device or demand.device.startswith("cuda")]
    return any(not demand.fills for demand in maybe) or len(maybe) > 1


def _why_none(demands: Sequence[Demand]) -> str:
    """Only worth a look where somebody asked for a card."""
    return cards.why_none() if any(demand.device.startswith("cuda") for demand in demands) else ""
