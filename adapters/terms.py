"""On which terms a call is made: what its caller asks for, the query that it belongs to, and its deadline."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from teola_plugin.errors import QueryTimeout, RegistrationError
from teola_plugin.graph import Terms
from teola_plugin.runtime.context import current_terms


@dataclass(frozen=True, slots=True)
class Asked:
    """What a caller asks for; None for what it says nothing of."""

    tenant: str | None = None
    deadline_s: float | None = None
    """Seconds from the start of what it is asked for."""
    weight: float | None = None

    @classmethod
    def of(cls, given: Mapping[str, Any], *, tenant: str, deadline_s: str, weight: str) -> Asked:
        """From the values under these keys; a tenant that is None has no name, other Nones say nothing.

        Raises `RegistrationError` for what is no number.
        """
        named = given.get(tenant, ...)
        found = None if named is ... else "" if named is None else str(named)
        seconds = _number(deadline_s, given.get(deadline_s), positive=False)
        return cls(found, seconds, _number(weight, given.get(weight), positive=True))

    def terms(self, base: Terms, now: float) -> Terms:
        """`base`, with what is asked for; of two deadlines the earlier."""
        own = None if self.deadline_s is None else now + self.deadline_s
        ends = [at for at in (own, base.deadline) if at is not None]
        return replace(
            base,
            tenant=base.tenant if self.tenant is None else self.tenant,
            weight=base.weight if self.weight is None else self.weight,
            deadline=min(ends, default=None),
        )

    def fits(self, base: Terms, now: float) -> bool:
        """Whether work under `base` is what is asked for: the same tenant and weight, and no earlier deadline."""
        return self.terms(base, now) == base


NOTHING = Asked()


class CallContext(NamedTuple):
    """Where a call belongs."""

    run: Any
    """The live query that it joins; None for none."""
    terms: Terms | None
    """Without a query; None for the ambient ones."""


def context_of(asked: Asked, runs: Iterable[Any], pool: Any) -> CallContext:
    """Of a call into `pool` that asks for this, made within `runs` (innermost first)."""
    runs = list(runs)
    if not runs and asked == NOTHING:
        return CallContext(None, None)
    now = pool.runtime.time()
    for run in runs:
        if not run.closed and run.runtime is pool.runtime and asked.fits(run.query.terms, now):
            return CallContext(run, None)
    if runs and runs[0].closed:  # what goes on after its query has its tenant, and no deadline any more
        asked = replace(asked, deadline_s=None)
    return CallContext(None, asked.terms(outer_terms(runs), now))


def outer_terms(runs: Iterable[Any]) -> Terms:
    """What a call is made under that says nothing itself."""
    run = next(iter(runs), None)
    if run is None:
        return current_terms.get() or Terms()
    terms: Terms = run.query.terms
    return replace(terms, deadline=None) if run.closed else terms


NO_APP = "default"


def named(terms: Terms, app: str) -> Terms:
    """Under the name of the accelerated object, where it has one; else that of the object around it."""
    return terms if app == NO_APP else replace(terms, app=app)


def unplanned(asked: Asked, runs: Sequence[Any], app: str, clock: Callable[[], float]) -> tuple[Terms | None, Any]:
    """Terms and `Deadline` of what runs without a query of its own; None and None in a live query that is as asked."""
    terms = asked.terms(outer_terms(runs), clock())
    if runs and not runs[0].closed and terms == runs[0].query.terms:
        return None, None
    terms = named(terms, app)
    deadline = None if terms.deadline is None else Deadline(terms.deadline, clock)
    return (terms if runs or terms != Terms() else None), deadline


def _number(key: str, value: Any, *, positive: bool) -> float | None:
    if value is None:
        return None
    number = isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)
    if not number or (positive and value <= 0):
        raise RegistrationError(
            f"{key} is {value!r:.80}, which is no {'positive ' if positive else ''}number.", hint=f"e.g. {key}=2.0"
        )
    return float(value)


# ------------------------------------------------------------ deadlines of callers


@dataclass(frozen=True, slots=True)
class Deadline:
    """When a caller has its answer, or `QueryTimeout`: also where nothing but the caller's own code is at work."""

    at: float
    clock: Callable[[], float]
    query: str = ""

    @classmethod
    def of(cls, run: Any) -> Deadline | None:
        """Of a live query; parts have their query's."""
        query = getattr(run, "query", None)
        if query is None or query.deadline is None:
            return None
        return cls(query.deadline, run.runtime.time, query.id)

    @property
    def passed(self) -> bool:
        return self.clock() >= self.at

    def check(self) -> None:
        """Raises `QueryTimeout` when it has passed."""
        if self.passed:
            raise self.error()

    def error(self) -> QueryTimeout:
        what = f"query {self.query}" if self.query else "the call"
        hint = "allow more time, or see fast.explain()"
        return QueryTimeout(f"{what} did not end before its deadline.", query_id=self.query, hint=hint)


def interrupting(deadline: Deadline | None) -> AbstractAsyncContextManager[None]:
    """Return a context whose body is interrupted when the deadline passes, with `QueryTimeout`."""
    return nullcontext() if deadline is None else _interrupting(deadline)


@asynccontextmanager
async def _interrupting(deadline: Deadline) -> AsyncIterator[None]:
    limit = asyncio.timeout(deadline.at - deadline.clock())
    try:
        async with limit:
            yield
    except TimeoutError as error:
        if limit.expired():
            raise deadline.error() from error
        raise
    deadline.check()
