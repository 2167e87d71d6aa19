"""Whether an app's provider calls take long enough for prefetching to be worth its own time.

Planning and prefetching a call takes 1 to 2 ms of CPU time, and saves no more than the time that the call waits for its
provider. A model behind a cache on the same machine, or a fake one in tests, may answer before that. So after a few
short queries of an app, one runs *in place*: nothing is prefetched, and the waits of its calls are measured. If they
are too short, later queries run in place as well, until one of them has to wait again.
"""

from __future__ import annotations

import threading
import time
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any

from teola_plugin.request_keys import UnknownValue
from teola_plugin.runtime.claims import Caller
from teola_plugin.runtime.provider_call import InsideCall
from teola_plugin.runtime.provider_calls import CallScope, ProviderCallTable
from teola_plugin.runtime.query_run import during

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator

    from teola_plugin.runtime.provider_call import Invocation, ProviderCall
    from teola_plugin.runtime.query_run import QueryRun

SHORT_QUERY_S = 0.25
"""A query that takes longer is worth planning."""
SHORT_QUERIES = 5
"""Queries in a row that were shorter, before one runs in place to measure its waits."""
WAITS_IN_ROW = 2
"""Short queries in place whose calls had to wait, before calls are prefetched. A busy machine delays single ones."""
QUERIES_UNTIL_NEXT = 50
"""Short queries that are prefetched then, before another one is measured."""
SHORTEST_WAIT_S = 0.004
"""Mean wait of the calls of a query from which on they are prefetched: twice what prefetching a call takes."""
_LONG_CALL_S = 0.05
"""All of a longer call counts as a wait: other tasks of the loop may have used the CPU meanwhile."""

scope_in_place: ContextVar[CallScope | None] = ContextVar("teola_scope_in_place", default=None)
"""The scope of the calls of a query that runs in place; None in all others."""


class CallWaits:
    """The time that the calls of a query waited for their providers. Used from any thread."""

    def __init__(self) -> None:
        self.calls = 0
        self.seconds = 0.0
        """Sum of the time in provider methods, without the CPU time of their threads."""
        self._lock = threading.Lock()

    @property
    def are_worth_prefetching(self) -> bool:
        """True if prefetching the calls would save more than it takes."""
        return self.seconds > SHORTEST_WAIT_S * self.calls

    def count_call(self, invocation: Invocation) -> Hashable:
        """Count a call of the original. Raises `UnknownValue` in place of a key: nobody else claims the call."""
        with self._lock:
            self.calls += 1
        raise UnknownValue("calls in place are not shared")

    def add(self, seconds: float, cpu_s: float) -> None:
        """Add the time that a provider method took, and what CPU time its thread used meanwhile."""
        with self._lock:
            self.seconds += seconds if seconds >= _LONG_CALL_S else max(0.0, seconds - cpu_s)


class _TimedCall(InsideCall):
    """Runs the body as part of a provider method, and adds its time to the waits of the query."""

    __slots__ = ("_began", "_cpu_began", "_waits")

    def __init__(self, waits: CallWaits, call: ProviderCall, invocation: Invocation) -> None:
        super().__init__(call, invocation)
        self._waits = waits

    def __enter__(self) -> None:
        super().__enter__()
        self._began, self._cpu_began = time.perf_counter(), time.thread_time()

    def __exit__(self, *error: object) -> None:
        self._waits.add(time.perf_counter() - self._began, time.thread_time() - self._cpu_began)
        super().__exit__(*error)


class GatedQuery:
    """One query of an app with a gate: it may prefetch, or runs in place. Close it at its end."""

    def __init__(self, gate: PrefetchGate | None, *, is_in_place: bool) -> None:
        """`gate`: hears how the query went; None inside another query that runs in place."""
        self.is_in_place = is_in_place
        self._gate, self._is_closed = gate, False
        self._began = time.perf_counter()
        self._waits: CallWaits | None = None
        self._scope: CallScope | None = None
        if gate is not None and is_in_place:
            self._waits = waits = CallWaits()
            inside: Any = partial(_TimedCall, waits)
            self._scope = CallScope(ProviderCallTable(), Caller.ORIGINAL, None, key_of=waits.count_call, inside=inside)

    @property
    def is_measured(self) -> bool:
        """True if it runs in place, and is no part of another query that does."""
        return self._scope is not None

    def trace_in(self, run: QueryRun) -> None:
        """Write the calls of a query in place to the trace of this one."""
        if self._scope is not None:
            self._scope.table.begin(run)

    def in_force(self) -> AbstractContextManager[None]:
        """Return a context whose calls are measured if this query runs in place. An exception closes it."""
        return nullcontext() if self._scope is None else self._measured(self._scope)

    @contextmanager
    def _measured(self, scope: CallScope) -> Iterator[None]:
        assert self._gate is not None
        self._gate.live_scopes.add(id(self))
        try:
            with during(scope_in_place, scope):
                yield
        except BaseException:
            self.close(has_answer=False)
            raise

    def close(self, *, has_answer: bool = True) -> None:
        """End the query. Its time counts if it `has_answer`."""
        if self._gate is not None and not self._is_closed:
            self._is_closed = True
            self._gate.live_scopes.discard(id(self))
            if has_answer:
                self._gate.note(time.perf_counter() - self._began, self._waits)


class PrefetchGate:
    """Decides for each query of an app whether its calls are prefetched.

    Used from any thread, without a lock: the counts may miss one of two queries that end at the same time.
    """

    def __init__(self, live_scopes: set[int]) -> None:
        """`live_scopes`: ids of what listens to the framework's provider calls, which are intercepted if it has any."""
        self.live_scopes = live_scopes
        self._short_queries = 0
        """In a row; below 0 after queries in place whose calls had to wait."""
        self._waits_in_row = 0
        """Short queries in place whose calls had to wait."""

    @property
    def is_closed(self) -> bool:
        """True if the next query runs in place."""
        return self._short_queries >= SHORT_QUERIES

    def begin(self, *, is_inside: bool) -> GatedQuery | None:
        """Return the query that begins here; None for a part of a query that prefetches.

        `is_inside`: it begins inside another query.
        """
        if scope_in_place.get() is not None:
            return GatedQuery(None, is_in_place=True)
        return None if is_inside else GatedQuery(self, is_in_place=self.is_closed)

    def note(self, seconds: float, waits: CallWaits | None) -> None:
        """Note how long a query took, and the waits of one that ran in place."""
        is_short = seconds < SHORT_QUERY_S
        if waits is None:
            self._short_queries = self._short_queries + 1 if is_short else min(self._short_queries, 0)
            return
        self._waits_in_row = self._waits_in_row + 1 if waits.are_worth_prefetching else 0
        if not is_short or self._waits_in_row >= WAITS_IN_ROW:
            self._short_queries, self._waits_in_row = -QUERIES_UNTIL_NEXT, 0
