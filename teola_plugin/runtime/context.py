"""Context variables: the query of running code, which calls of pool-backed objects join, and its place there."""

from __future__ import annotations

from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from teola_plugin.graph import RequestContext
from teola_plugin.observe.steps import OpenStep
from teola_plugin.observe.waits import TracedCall
from teola_plugin.requests.payloads import AnswerForm
from teola_plugin.runtime.forks import in_child

if TYPE_CHECKING:
    from teola_plugin.runtime.query_run import DeferredSubplan, QueryRun

current_run: ContextVar[QueryRun | None] = ContextVar("teola_current_run", default=None)

in_child(lambda: current_run.set(None))  # the query goes on in the parent, and only there

current_request_context: ContextVar[RequestContext | None] = ContextVar("teola_current_terms", default=None)
"""The request context of calls that belong to no live query, also where planning fell back."""


@dataclass(frozen=True, slots=True)
class CallPlace:
    """The place of running code in its query, for unplanned calls that it makes and for subplans that begin there."""

    depth: int = 0
    """Distance from the end of the code to the end of the query, in primitives."""
    gang: str = ""
    """Calls of one gang belong to branches that run side by side: the query goes on when the last one has ended."""
    step: OpenStep | None = None
    """The result of `QueryRun.step_began` for the node or the tool that runs, for traces."""
    deferred: DeferredSubplan | None = None
    """A subplan that begins when a call is made here that no subplan has made."""
    form: AnswerForm = AnswerForm.UNKNOWN
    """The form in which code here asks models for answers, unless it says otherwise."""


NOWHERE = CallPlace()

current_place: ContextVar[CallPlace] = ContextVar("teola_current_place", default=NOWHERE)

current_call: ContextVar[TracedCall | None] = ContextVar("teola_current_call", default=None)
"""The call of one of the user's own objects that runs here, for traces: an engine may serve it."""


class during(AbstractContextManager[None]):
    """A context in which a context variable has a value. A class, since a generator takes three times as long."""

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
