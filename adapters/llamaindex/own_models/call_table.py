"""The calls of one query: one table, shared by the plain object and what runs ahead of it.

Whoever comes first makes a call, the other gets its outcome: there is never a call that the plain object would not
make. What runs ahead makes only calls that the plain object is about to make one after the other; for all others it
waits until the plain object has made them. The plain object's call is an early one only if it comes with exactly what
that was made with, to the same method of the same object.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextvars import ContextVar, copy_context
from typing import Any

from teola_plugin.adapters.llamaindex.own_models.calls import Asked, Call, Turns
from teola_plugin.adapters.llamaindex.own_models.permission import Permission
from teola_plugin.adapters.llamaindex.own_models.telling import Telling
from teola_plugin.adapters.own_calls import Outcome, State, aoutcome_of, outcome_of
from teola_plugin.adapters.snapshots import NotCopied
from teola_plugin.runtime.query_run import QueryRun
from teola_plugin.shims.llamaindex.own_calls import EMBED, SEARCH, AsksAnother, below
from teola_plugin.tracer.symbols import NotUnderstood

AT_ONCE = 32
"""Early calls of one query that are under way together, on threads."""
_REPEATABLE = (*EMBED, *SEARCH)
"""Gives the same for the same: once for all that runs ahead."""

current_table: ContextVar[CallTable | None] = ContextVar("teola_own_calls", default=None)
"""Of the query that the plain object runs for."""


class CallTable:
    """Used by the plain object, by what runs ahead of it and by the early calls, each on threads of its own."""

    def __init__(self, permission: Permission, leaves: Iterable[Any], run: QueryRun | None = None) -> None:
        """`run`: the query that is told of the calls."""
        self._permission = permission
        self._telling = Telling(run)
        self._leaves = {_identity(leaf): leaf for leaf in leaves}
        self._context = copy_context()
        self._lock = threading.Lock()
        self._calls: dict[tuple[int, str], list[Call]] = {}
        self._queued: deque[Call] = deque()
        self._under_way = 0
        self._closed = False

    @contextlib.contextmanager
    def in_force(self) -> Iterator[None]:
        """In the body, the plain object's calls are looked up here."""
        token = current_table.set(self)
        try:
            yield
        finally:
            with contextlib.suppress(ValueError):  # a stream may be ended elsewhere
                current_table.reset(token)

    def close(self) -> None:
        """The query is over: what was not begun is not begun any more."""
        with self._lock:
            self._closed = True
            for call in (one for calls in self._calls.values() for one in calls if not one.for_plain):
                if call.state is State.WAITING:
                    call.state = State.DROPPED
                call.shown.cancel()

    def leaf(self, own: Any) -> Any:
        """The user's own object that this one stands for; None for another query's."""
        return self._leaves.get(_identity(own))

    # ------------------------------------------------------------ what runs ahead

    async def ahead(self, leaf: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], *, lead: bool) -> Any:
        """What the call gives, as a copy. `lead`: it may be made now; else the plain object makes it.

        Raises `Failed`, `NotUnderstood`.
        """
        call = self.wanted(leaf, name, args, kwargs, lead=lead)
        return await asyncio.shield(asyncio.wrap_future(call.shown))

    def wanted(self, leaf: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], *, lead: bool) -> Call:
        """The call, begun where it leads. Raises `NotUnderstood`."""
        try:
            asked = Asked.of(args, kwargs)
        except NotCopied as error:
            raise NotUnderstood(str(error)) from None
        starts = False
        with self._lock:
            if self._closed:
                raise NotUnderstood("the query is over")
            equal = self._equal(leaf, name, asked)
            call = next((one for one in equal if name in _REPEATABLE or not one.for_ahead), None)
            if call is None:
                call = Call(leaf, name, asked, State.WAITING, self._telling.asked(leaf, name))
                self._calls.setdefault((id(leaf), name), []).append(call)
                equal_first = [one for one in equal if one.state is not State.DROPPED]
                starts = lead and not equal_first  # equal calls come one after the other
            elif lead and call.state is State.WAITING:
                starts = True
            call.for_ahead = True
            if starts and self._permission.early(leaf) and call not in self._queued:
                self._queued.append(call)
        if starts:
            self._start_queued()
        return call

    def _start_queued(self) -> None:
        while True:
            with self._lock:
                if not self._queued or self._under_way >= AT_ONCE or self._closed:
                    return
                call = self._queued.popleft()
                if call.state is not State.WAITING:
                    continue
                call.state = State.EARLY
                self._under_way += 1
            work = (self._make, call)
            threading.Thread(target=self._context.copy().run, args=work, name="teola-early", daemon=True).start()

    def _make(self, call: Call) -> None:
        def make() -> Any:
            args, kwargs = call.asked.given()
            body = below(call.leaf, call.name)
            with _turn(self._permission.turns(call.leaf), early=True), self._telling.running(call.told):
                return outcome_of(lambda: body(*args, **kwargs))

        made = outcome_of(make)
        self._ended(call, Outcome(error=AsksAnother(repr(made.error))) if made.error is not None else made.value)

    def _ended(self, call: Call, outcome: Outcome) -> None:
        with self._lock:
            self._under_way -= 1
        if isinstance(outcome.error, AsksAnother):
            self._permission.never(call.leaf)
        call.end(outcome)
        self._start_queued()

    # ------------------------------------------------------------ the plain object

    def claimed(self, leaf: Any, name: str, args: Any, kwargs: Any, make: Callable[[], Any]) -> Any:
        """What the plain object's call gives: made ahead, or now by `make`."""
        call = self._claim(leaf, name, args, kwargs)
        if call is not None and call.state is State.EARLY:
            with self._telling.waiting(call.told):
                outcome = call.outcome.result()
            if not isinstance(outcome.error, AsksAnother):
                return outcome.get()
            call = None  # it was not made after all
        with _turn(self._permission.turns(leaf), early=False), self._here(call):
            outcome = outcome_of(make)
        if call is not None:
            call.end(outcome)
        return outcome.get()

    @contextlib.contextmanager
    def _here(self, call: Call | None) -> Iterator[None]:
        """The plain object makes the call in the body; for the trace."""
        if call is None:
            yield
            return
        with self._telling.waiting(call.told), self._telling.running(call.told):
            yield

    async def aclaimed(self, leaf: Any, name: str, args: Any, kwargs: Any, make: Callable[[], Awaitable[Any]]) -> Any:
        """`claimed` in a loop."""
        call = self._claim(leaf, name, args, kwargs)
        if call is not None and call.state is State.EARLY:
            with self._telling.waiting(call.told):
                outcome = await asyncio.shield(asyncio.wrap_future(call.outcome))
            if not isinstance(outcome.error, AsksAnother):
                return outcome.get()
            call = None
        with self._here(call):
            outcome = await aoutcome_of(make())
        if call is not None:
            call.end(outcome)
        return outcome.get()

    def _claim(self, leaf: Any, name: str, args: Any, kwargs: Any) -> Call | None:
        """The call that the plain object makes here; None for one that cannot be told from others."""
        try:
            asked = Asked.of(args, kwargs)
        except NotCopied:
            return None
        with self._lock:
            if self._closed:
                return None
            call = next((one for one in self._equal(leaf, name, asked) if not one.for_plain), None)
            if call is None:
                call = Call(leaf, name, asked, State.PLAIN, self._telling.asked(leaf, name))
                self._calls.setdefault((id(leaf), name), []).append(call)
            elif call.state is State.WAITING:
                call.state = State.PLAIN
            call.for_plain = True
        return call

    def _equal(self, leaf: Any, name: str, asked: Asked) -> list[Call]:
        calls = self._calls.get((id(leaf), name), ())
        return [one for one in calls if one.state is not State.DROPPED and one.asked.equals(asked)]


def _turn(turns: Turns | None, *, early: bool) -> Any:
    if turns is None:
        return contextlib.nullcontext()
    return turns.early() if early else turns.plain()


def _identity(leaf: Any) -> int:
    """The same for an object and what stands for it, which have one set of attributes."""
    return id(vars(leaf))


# ------------------------------------------------------------ what stands for the bodies of the user's objects


def call_here(own: Any, name: str, body: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """See `own_calls.leaf_of`."""
    table = current_table.get()
    leaf = None if table is None else table.leaf(own)
    if table is None or leaf is None:
        return body(own, *args, **kwargs)
    return table.claimed(leaf, name, args, kwargs, lambda: body(own, *args, **kwargs))


async def acall_here(own: Any, name: str, body: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """`call_here` in a loop."""
    table = current_table.get()
    leaf = None if table is None else table.leaf(own)
    if table is None or leaf is None:
        return await body(own, *args, **kwargs)
    return await table.aclaimed(leaf, name, args, kwargs, lambda: body(own, *args, **kwargs))
