"""Supersteps and nodes, as the trace of a query shows them."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from langgraph.errors import GraphBubbleUp

from teola_plugin.observe.steps import OpenStep
from teola_plugin.runtime.query_run import QueryRun


class Steps:
    """Of one call of a graph. A superstep lasts until the next one begins. To be used from any thread."""

    def __init__(self, run: QueryRun) -> None:
        self._run = run
        self._lock = threading.Lock()
        self._number: int | None = None
        self._superstep: OpenStep | None = None

    def node_began(self, name: str, around: OpenStep | None, number: int, known: Mapping[str, Any]) -> OpenStep:
        """A task of the node begins, in the superstep of that number; `known`: what its config's metadata says."""
        triggers = known.get("langgraph_triggers", ())
        return self._run.step_began("node", name, self._within(number, around), triggers=triggers)

    def node_ended(self, step: OpenStep, error: BaseException | None) -> None:
        """Well, or by this error, which may be no failure: an interrupt, a command for the graph around."""
        outcome = "done" if error is None else "interrupted" if isinstance(error, GraphBubbleUp) else "failed"
        self._run.step_ended(step, outcome)

    def _within(self, number: int, around: OpenStep | None) -> OpenStep:
        with self._lock:
            if self._superstep is None or number != self._number:
                self._end()
                self._number = number
                self._superstep = self._run.step_began("superstep", str(number), around)
            return self._superstep

    def _end(self) -> None:
        if self._superstep is not None:
            self._run.step_ended(self._superstep)

    def close(self) -> None:
        """The call is over."""
        with self._lock:
            self._end()
            self._superstep = None
