"""Before engines start: each says what it asks for, all of them are told where they compute, or nothing starts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

from teola_plugin.engines.devices import cards
from teola_plugin.engines.devices.budget import Demand, Grant, allotted


@runtime_checkable
class OnCards(Protocol):
    """An engine that may compute on a GPU of this machine."""

    def demand(self) -> Demand:
        """What it asks for; always what its user said, whatever was granted before."""
        ...

    def grant(self, given: Grant) -> None:
        """Where it computes from its next start on."""
        ...


def on_cards(engines: Iterable[Any]) -> list[OnCards]:
    return [engine for engine in engines if isinstance(engine, OnCards)]


def place(engines: Sequence[OnCards]) -> None:
    """Tell each of these engines of one process where it computes, and how much memory it may take.

    Takes seconds where it has to import torch. Raises `ConfigError`, `EngineUnavailable` (see `budget.allotted`).
    """
    demands = [engine.demand() for engine in engines]
    found = cards.seen() if _matters(demands) else ()
    for engine, given in zip(engines, allotted(demands, found, "" if found else _why_none(demands)), strict=True):
        engine.grant(given)


def _matters(demands: Sequence[Demand]) -> bool:
    """An LLM that is alone finds its cards by itself, and what computes on the CPU needs none."""
    maybe = [demand for demand in demands if not demand.device or demand.device.startswith("cuda")]
    return any(not demand.fills for demand in maybe) or len(maybe) > 1


def _why_none(demands: Sequence[Demand]) -> str:
    """Only worth a look where somebody asked for a card."""
    return cards.why_none() if any(demand.device.startswith("cuda") for demand in demands) else ""
