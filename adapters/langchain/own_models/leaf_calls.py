"""Calls of the user's own models and retrievers: where they stand, what was asked, what came of it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable, RunnableConfig

from teola_plugin.adapters.langchain.own_models.replay import EventLog
from teola_plugin.adapters.own_calls import Outcome, State
from teola_plugin.adapters.snapshots import exactly, snapshot
from teola_plugin.observe.spans import GENERATION
from teola_plugin.observe.waits import OwnCall
from teola_plugin.runtime.call_limits import ConcurrencyLimit


@dataclass(frozen=True, slots=True, eq=False)
class CallSite:
    """A leaf of the user's own at its place in the chain."""

    key: str
    leaf: Runnable[Any, Any]
    kwargs: Mapping[str, Any]
    """Arguments bound to it there."""
    config: RunnableConfig
    """What the bindings around it add to its config."""
    limit: ConcurrencyLimit | None
    """Of the object: one call at a time, unless it is known to be safe."""
    mapped: bool = False
    """Called once for each item of a list, so maybe with what an item is predicted to be."""
    within: str = ""
    """Path of the user's object that holds it, where that is planned with an equivalent chain."""
    changes_input: threading.Event = field(default_factory=threading.Event)
    """Set once the leaf was seen to change what it was called with: then it is called in its place."""

    @property
    def tags(self) -> list[str]:
        return list(getattr(self.leaf, "tags", None) or [])


@dataclass(slots=True, eq=False)
class LeafCall:
    """One call of a leaf, made or to be made."""

    site: CallSite
    asked: Any
    """What it is called with, as it was: shared with nobody, and never handed out."""
    state: State
    for_graph: bool = False
    for_plain: bool = False
    spoilt: bool = False
    """The leaf changed the copy that an early call gave it: the plain object's own values have yet to be changed so."""
    outcome: Future[Outcome] = field(default_factory=Future)
    """For the plain object, which takes it once."""
    shown: Future[Outcome] = field(default_factory=Future)
    """For the graph: a copy."""
    log: EventLog = field(default_factory=EventLog)
    stop: Callable[[], object] = bool
    """Gives an early call up, where that is possible."""
    told: OwnCall = field(default_factory=lambda: OwnCall("", "", ""))
    """What the trace says of it."""

    def fresh_input(self) -> Any:
        """What the leaf is called with: a copy that it may change."""
        return snapshot(self.asked)

    def end(self, outcome: Outcome) -> None:
        copied = outcome.copied()  # before the plain object has the value and may change it
        for future, one in ((self.shown, copied), (self.outcome, outcome)):
            with contextlib.suppress(Exception):  # given up before
                future.set_result(one)

    def note_changes(self, given: Any) -> None:
        """`given`: the copy that an early call was made with, after the call."""
        if not exactly(given, self.asked):
            self.spoilt = True
            self.site.changes_input.set()


def told_of(site: CallSite, asked: Any) -> OwnCall:
    """What the trace is to say of a call there with that input."""
    kind = "SEARCHING" if isinstance(site.leaf, BaseRetriever) else GENERATION

    def asked_by(payload: Any) -> bool:
        return payload.site == site.key and exactly(asked, payload.input)

    return OwnCall(type(site.leaf).__name__, kind, "wrapped", asked_by=asked_by)
