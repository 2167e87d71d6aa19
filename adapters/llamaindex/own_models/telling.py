"""What the trace is told of a call of an accelerated object that the user's own models work for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from teola_plugin.observe.spans import GENERATION
from teola_plugin.observe.waits import OwnCall
from teola_plugin.runtime.query_run import QueryRun
from teola_plugin.shims.llamaindex.own_calls import EMBED, SEARCH

_KINDS = {**dict.fromkeys(EMBED, "EMBEDDING"), **dict.fromkeys(SEARCH, "SEARCHING")}


class Telling:
    """Of one query; nothing is kept without its run. May be told from any thread."""

    def __init__(self, run: QueryRun | None) -> None:
        self._run = run

    def asked(self, leaf: Any, name: str) -> OwnCall:
        """A call of the object is wanted, ahead of the plain object or by it."""
        call = OwnCall(type(leaf).__name__, _KINDS.get(name, GENERATION), "wrapped")
        if self._run is not None:
            self._run.waits.calls(call)
        return call

    @contextlib.contextmanager
    def running(self, call: OwnCall) -> Iterator[None]:
        """The call is made in the body."""
        if self._run is None:
            yield
            return
        call.began = self._run.runtime.time()
        try:
            yield
        finally:
            call.ended = self._run.runtime.time()

    @contextlib.contextmanager
    def waiting(self, call: OwnCall) -> Iterator[None]:
        """The plain object waits for the call in the body."""
        call.used = True
        if self._run is None:
            yield
            return
        wait = self._run.waits.asked(self._run.runtime.time())
        wait.own = call
        try:
            yield
        finally:
            wait.answered = self._run.runtime.time()
