"""The query that running code belongs to, and its place there: pool-backed objects called anywhere below join it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from teola_plugin.graph import Terms
from teola_plugin.observe.steps import OpenStep
from teola_plugin.observe.waits import OwnCall
from teola_plugin.requests.payloads import AnswerForm
from teola_plugin.runtime.forks import in_child

if TYPE_CHECKING:
    from teola_plugin.runtime.query_run import HeldPart, QueryRun

current_run: ContextVar[QueryRun | None] = ContextVar("teola_current_run", default=None)

in_child(lambda: current_run.set(None))  # it goes on in the parent, and nobody else can join it

current_terms: ContextVar[Terms | None] = ContextVar("teola_current_terms", default=None)
"""Of calls that belong to no live query: what their caller asked for, also where planning fell back."""


@dataclass(frozen=True, slots=True)
class CallPlace:
    """Where in its query the running code is. Calls that no graph has planned, and parts that begin there, go by it."""

    depth: int = 0
    """How far its end is from the end of the query, in primitives."""
    gang: str = ""
    """Calls of one gang are done with the last of them: branches that run side by side and are put together."""
    step: OpenStep | None = None
    """What `QueryRun.step_began` gave for the node or the tool that runs, for traces."""
    held: HeldPart | None = None
    """Begins when a call is made here that no part has asked for."""
    form: AnswerForm = AnswerForm.UNKNOWN
    """The form in which code here asks models for answers, unless it says otherwise."""


NOWHERE = CallPlace()

current_place: ContextVar[CallPlace] = ContextVar("teola_current_place", default=NOWHERE)

current_call: ContextVar[OwnCall | None] = ContextVar("teola_current_call", default=None)
"""The call of one of the user's own objects that runs, for traces: an engine may do its work."""


class during(AbstractContextManager[None]):
    """Gives a context variable this value in the body. A class, since a generator takes three times as long."""

    __slots__ = ("_token", "_value", "_variable")

    def __init__(self, variable: ContextVar[Any], value: Any) -> None:
        self._variable, self._value = variable, value

    def __enter__(self) -> None:
        self._token = self._variable.set(self._value)

    def __exit__(self, *_: object) -> None:
        try:
            self._variable.reset(self._token)
        except ValueError:  # a generator may be closed in another context than it began in
            pass
