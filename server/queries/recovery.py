"""What becomes of queries that a server has left unfinished: begun again, gone on with, or reported."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from teola_plugin.server.access.terms import Caller
from teola_plugin.server.models.apps import App
from teola_plugin.server.models.base import Model
from teola_plugin.server.queries.records import WAITING, Record
from teola_plugin.server.visits import Kept


@dataclass(frozen=True, slots=True)
class Begin:
    """It runs: from its beginning, or from its last checkpoint."""

    kept: Kept


@dataclass(frozen=True, slots=True)
class Wait:
    """It has stopped to ask somebody."""

    waiting: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Report:
    """It cannot go on, or must not."""

    error: dict[str, Any]


GONE = "it is gone."
WROTE = "the server was stopped while it ran, and it may have written something."


async def recovered(record: Record, caller: Caller | None, model: Model | None) -> Begin | Wait | Report:
    """What is to be done with a query that is not over. `caller`, `model`: those it was of, if they are still there."""
    if caller is None or model is None:
        return Report(_error(GONE))
    if record.status == WAITING and record.waiting is not None:
        return Wait(record.waiting)
    if record.status == "queued":
        return Begin(Kept(record.id))
    stop = await model.stopped(record) if isinstance(model, App) else None
    if stop is not None and isinstance(model, App):
        approved = str((record.waiting or {}).get("at", ""))
        if model.waits(stop, approved):
            return Wait(stop.told())
        return Begin(Kept(record.id, "checkpoint"))
    return Begin(Kept(record.id)) if record.repeatable else Report(_error(WROTE))


def _error(why: str) -> dict[str, Any]:
    return {"message": why, "type": "server_error", "param": None, "code": "interrupted"}
