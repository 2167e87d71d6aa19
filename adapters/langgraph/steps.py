"""Supersteps, nodes and calls of tools, as the trace of a query shows them."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from langgraph.errors import GraphBubbleUp

from teola_plugin.observe.steps import OpenStep
from teola_plugin.runtime.context import CallPlace, placed
from teola_plugin.runtime.query_run import QueryRun


class Steps:
    """Of one call of a graph. A superstep lasts until the next one begins. To be used from any thread."""

    def __init__(self, run: QueryRun) -> None:
        self._run = run
        self._lock = threading.Lock()
        self._number: int | None = None
        self._superstep: OpenStep | None = None

    @contextmanager
    def node(self, name: str, place: CallPlace, config: Mapping[str, Any]) -> Iterator[None]:
        """A task of the node runs in the body, at this place."""
        known = config.get("metadata") or {}
        around = self._within(known.get("langgraph_step", 0), place.step)
        step = self._run.step_began("node", name, around, triggers=known.get("langgraph_triggers", ()))
        outcome = "failed"
        try:
            with placed(replace(place, step=step)):
                yield
            outcome = "done"
        except GraphBubbleUp:  # an interrupt, a command for the graph around
            outcome = "interrupted"
            raise
        finally:
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
