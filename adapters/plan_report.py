"""The plan report, `fast.report()`: what an accelerated object does with each call, why, and what would change it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from teola_plugin.adapters.plan_summary import listed
from teola_plugin.graph import Component, PromptPart
from teola_plugin.observe.spans import Cost
from teola_plugin.tracer.report import WORDS, TraceReport

Section = tuple[str, str]
"""A title and the text below it."""
_LEGEND = (
    "(optimized: may run ahead; shared: your code, its calls of engines belong to the query; unchanged: as always)"
)


class Status(Enum):
    """The answer to when the calls at one place of an app start."""

    PREFETCHED = "prefetched"
    """They start before the original comes to them, which is certain to make them."""
    SPECULATIVE = "speculative"
    """They start before it is known whether the original makes them."""
    IN_PLACE = "in place"
    """The original makes them, as it always did."""
    NOT_SEEN = "not seen"
    """The code is not understood, so nobody knows of its calls before it makes them."""


class Reason(Enum):
    """A reason why a call stays in its place: its text, and the line that would change it, if there is one."""

    def __init__(self, text: str, fix: str = "") -> None:
        self.text, self.fix = text, fix

    FIRST = "nothing stands before it"
    NEEDS_RESULTS = "it needs what {names} gives"
    BEHIND_CODE = "it waits for the code of {names}{where}"
    PROMPT_AT_RUN_TIME = "its prompt is known only at run time{where}"
    UNKNOWN_UPDATES = "the updates of {names} are known only at run time{where}"
    WAITS_FOR_EVENT = "it waits for an event, after which its step begins anew, so calls behind it are not known before"
    RUNS_WORKFLOW = "it runs {names}, whose steps and tools may do anything, so calls behind it are not known before"
    UNKNOWN_CODE = "this code is not understood, so its calls, and those behind it, are known only at run time"
    UNREAD_CALL = "its arguments, or the form in which it is called, are not understood before it is made"
    REDUCER = "the reducer of {names} is code of your own, so what it makes of an update is not known"
    IN_ITS_STEP = "its input is known only when its step begins"
    IN_ITS_NODE = "its input is known only when its node begins"
    BEHIND_OTHERS = "it waits for what stands before it in its node"
    MAY_BE_SKIPPED = "its node may be skipped, and the call would then be wasted"
    NODE_CACHE = "its node may not run, as a result may be in its cache", "add_node({names}, ..., cache_policy=None)"
    INTERRUPTED_BEFORE = "the graph is interrupted before its node"
    OBJECTS_CHANGED = "it may read objects that {names} changes"
    AGENT = "each call of an agent needs what the one before gave"
    PREFILLED = "nothing stands before its first call; its next prompts are prefilled while tools run"
    WRAPPED_TOOL = "its calls are handed to middleware, which may hold them back"
    TOOL_WITH_STATE = "it takes what only its place can give it: state, a store, the id of its call"
    TOOL_BEHIND_PERSON = "somebody may decide before it, or nothing runs ahead"
    NOT_READ_ONLY = (
        "it is neither declared read-only nor a retriever of the pool's alone",
        'accelerate(..., read_only=["{names}"])',
    )
    HINTED_READ_ONLY = (
        "its MCP server {names} says that it only reads (readOnlyHint), which counts once you allow that server",
        'accelerate(..., read_only=["mcp:{names}"])',
    )
    MCP_CALLBACKS = "interceptors or callbacks of its MCP client, or of its session, hear of its calls"
    STREAMED = (
        "it starts at its usual time where answers are streamed (stream, astream, events, a handler that streams), as "
        "no request is sent in both forms"
    )
    ONE_AT_A_TIME = (
        "{names} answers one call at a time, without async code of its own",
        "accelerate(..., concurrent=[{names}])",
    )
    ONE_THREAD = (
        "{names} is not known to take calls of several threads at once",
        "accelerate(..., concurrent=[{names}])",
    )
    RATE_LIMITER = "{names} has a rate limiter, which decides when it is called", "{names}(..., rate_limiter=None)"
    CACHE = "{names} has a cache of answers, which may have this one", "{names}(..., cache=None)"
    CACHE_OF_ALL = "a cache of answers is set for all models, which may have this one", "set_llm_cache(None)"
    DEBUG = "LangChain prints every call (set_debug)", "set_debug(False)"
    HANDLERS = (
        "{names} has handlers of its own, or prints (verbose): neither may hear of a call early",
        '{names}(..., callbacks=None, verbose=False), and invoke(..., config={{"callbacks": [...]}})',
    )
    ORDER = "{names} answers by the order of its calls"
    OWN_METHODS = "{names} has code of its own in a method that LangChain calls before its provider"
    OWN_BATCHES = "{names} has code of its own for several inputs at once"
    SWITCHED_OFF = 'nothing is prefetched (speculate="off")', 'accelerate(..., speculate="auto")'
    NO_WAIT = "calls of the last queries were answered at once, in less time than prefetching them takes"
    NO_USE = (
        "it is no longer prefetched, since the original made another call there: a handler, or code of the model's "
        "own, changes what it is asked"
    )
    NOT_SOONER = "another call takes as long, and its result is needed as soon: an early start would gain nothing"
    MODEL_INSIDE = (
        "{names} is called inside the function{where}, so which model it makes is not known before",
        "model = {names}(...)  # outside of the function",
    )
    MODEL_OF_SETTINGS = (
        "settings of the call choose its model: its calls are prefetched from the second call with the same settings on"
    )
    NOT_DEDICATED = (
        "no request is made on a guess without dedicated=True of {names}",
        "{names}(..., dedicated=True)",
    )
    NOT_DEDICATED_SHARED = (
        "no request is made on a guess without dedicated: true of the shared engine {names}",
        "options: {{dedicated: true}} of the engine {names} in the pool's file",
    )
    NO_SOURCE = "the source of {names} cannot be read"
    NOT_SHARED = "calls of {names} are never made side by side"


@dataclass(frozen=True, slots=True)
class Explanation:
    """The reason of one call."""

    reason: Reason
    names: tuple[str, ...] = ()
    """The objects, nodes, calls or functions that it is about."""
    source: str = ""
    """`file:line` of the code that it is about; empty if that is not known."""

    def __str__(self) -> str:
        where = f" ({relative_source(self.source)})" if self.source else ""
        text = self.reason.text.format(names=listed(self.names), where=where)
        return text.replace(" gives", " give") if len(self.names) > 1 else text

    @property
    def fix(self) -> str:
        """The line to write that changes it; empty if there is none. Where it begins with a name, one for each name."""
        fix = self.reason.fix
        if fix.startswith("{names}"):
            return ", ".join(fix.format(names=name) for name in self.names)
        return fix.format(names=", ".join(self.names))


@dataclass(slots=True)
class PrefetchCounts:
    """The number of calls that were prefetched at one place in all queries so far. Used from any thread."""

    hits: int = 0
    """Those that the original took."""
    wasted: int = 0
    """Those that nobody took."""
    _lock: Any = field(default_factory=threading.Lock, repr=False)

    def add(self, *, is_hit: bool) -> None:
        """Count one prefetched call, as a hit or as wasted.

        Called once for each call when it is known what became of it. May be called from any thread.
        """
        with self._lock:
            self.hits, self.wasted = self.hits + is_hit, self.wasted + (not is_hit)


@dataclass(frozen=True, slots=True)
class OwnCalls:
    """The call sites of the user's own models and retrievers in one plan, by key."""

    prefetchable: frozenset[str] = frozenset()
    """Call sites that may be prefetched."""
    one_by_one: Mapping[str, Any] = field(default_factory=dict)
    """Call sites whose object answers one call at a time, and that object."""
    sites: Mapping[str, Any] = field(default_factory=dict)
    """All of them, each with its `target`, the object that is called, and its `counts`."""
    explanations: Mapping[str, Explanation] = field(default_factory=dict)
    """Why nothing is prefetched at a site, where its object is the reason."""
    left: Mapping[str, tuple[str, Explanation]] = field(default_factory=dict)
    """Objects that are no site, by their path, or the location of their call: their class, and why nothing of them is
    prefetched."""


@dataclass(frozen=True, slots=True)
class CallRow:
    """One place of an app that makes calls of a model, a retriever, a tool or an engine."""

    name: str
    status: Status
    target: str = ""
    """The class of the object that is called, or the name of the engine."""
    source: str = ""
    """`file:line` of the call; for an object in a chain or an engine, its path there; empty if neither is known."""
    start: str = ""
    """When it starts, if that is before its place."""
    explanation: Explanation | None = None
    """The reason why it is made in its place."""
    is_whole_only: bool = False
    """True if it starts early only where its answer comes whole, not as a stream."""
    prompt: tuple[PromptPart, ...] = ()
    """The prompt of a generation in a graph: constant text, and variables by the names of what fills them."""
    counts: PrefetchCounts | None = None
    """What became of its prefetched calls; None for calls of engines, which traces tell of."""

    @property
    def reason(self) -> Reason | None:
        """Why it is made in its place, as an enum; None for a call that is prefetched."""
        return None if self.explanation is None else self.explanation.reason

    @property
    def fix(self) -> str:
        """The line to write that changes why it stays in its place; empty if there is none."""
        return "" if self.explanation is None else self.explanation.fix

    @property
    def remark(self) -> str:
        """A text on when it starts, or why it stays in its place, and how many calls were prefetched so far."""
        remark = self.start or ("" if self.explanation is None else str(self.explanation))
        remark += ", if its answer comes whole" if self.start and self.is_whole_only else ""
        counts = self.counts
        if self.status is not Status.PREFETCHED or counts is None or not counts.hits + counts.wasted:
            return remark
        so_far = f"so far {counts.hits} hits, {counts.wasted} wasted"
        return f"{remark}; {so_far}" if remark else so_far


def relative_source(source: str) -> str:
    """Return a place of code as texts show it: relative to the working directory, if it is below it."""
    path, colon, line = source.rpartition(":")
    if not line.isdigit() or not os.path.isabs(path):
        return source
    relative = os.path.relpath(path)
    return source if relative.startswith("..") else f"{relative}{colon}{line}"


def leaves_of(component: Component) -> Iterator[Component]:
    """Yield what makes calls in a component: itself, or what stands in its bodies."""
    bodies = [body for body in (component.body, component.otherwise) if body is not None]
    if not bodies and (component.engine or component.embedder):
        yield component
    for body in bodies:
        for inner in body.components:
            yield from leaves_of(inner)


def switched_off(rows: Iterable[CallRow], reason: Reason = Reason.SWITCHED_OFF) -> Iterator[CallRow]:
    """Yield the rows of an object of which nothing is prefetched, though these calls could be."""
    for row in rows:
        is_prefetched = row.status in (Status.PREFETCHED, Status.SPECULATIVE)
        yield (
            replace(row, status=Status.IN_PLACE, start="", explanation=Explanation(reason)) if is_prefetched else row
        )


# ------------------------------------------------------------ the report


@dataclass(frozen=True, slots=True)
class PlanReport:
    """The facts about an accelerated object, before its queries and after them. `text` is what `explain()` prints."""

    parts: TraceReport
    """What became of each part of the object, and why."""
    prefetched: tuple[str, ...]
    """A phrase for all that begins before its place; empty if nothing is known to."""
    expect: str
    """The expected gain, and why it is not more. Only measured figures."""
    calls: tuple[CallRow, ...] = ()
    """A row for each place that makes calls."""
    advice: tuple[str, ...] = ()
    """Changes by which the author would gain more, most important first."""
    sections: tuple[Section, ...] = ()
    """Everything else: titles and their texts."""
    engines_text: str = ""
    """The sections on what `engines=`, `prompt_cache=` and `prices=` did."""
    cost: Cost | None = None
    """The calls of models, tokens and dollars of the latest queries, at most 100. None without `prices=`, and before
    the first query."""
    seconds: float | None = None
    """How long the last query took; None before one, or if it was not traced."""
    seconds_saved: float | None = None
    """How much longer that query would have taken with each call in its place; None if its trace does not tell."""

    def __str__(self) -> str:
        return self.text(details=True)

    @property
    def expected_speed_up(self) -> float | None:
        """The expected time of the original over that of a query like the last one; None if that is not known yet.

        It is 1 where nothing starts before its place. Else it is what the last query shows.
        """
        if not self.prefetched:
            return 1.0
        if not self.seconds or self.seconds_saved is None:
            return None
        return (self.seconds + self.seconds_saved) / self.seconds

    def with_status(self, status: Status) -> tuple[CallRow, ...]:
        """Return the rows of this status."""
        return tuple(row for row in self.calls if row.status is status)

    def text(self, *, details: bool = False) -> str:
        """Return three lines; with `details`, sections below them, each with a title."""
        change = f"; change first: {self.advice[0]}" if self.advice else ""
        lines = "\n".join(
            (
                f"Understood:    {_understood(self.parts)}",
                f"Starts early:  {'; '.join(self.prefetched) or 'nothing'}",
                f"Expect:        {self.expect}{change}",
            )
        )
        understood = ("What was understood", f"{self.parts}\n{_LEGEND}")
        calls = ("Calls", "\n".join(_lines_of_calls(self.calls)))
        advice = ("Advice", "\n".join(self.advice))
        text = f"{lines}\n\n{in_sections((understood, calls, *self.sections, advice))}" if details else lines
        return text + self.engines_text


def _understood(report: TraceReport) -> str:
    """Return e.g. `5 parts: 4 optimized, 1 unchanged (RunnableLambda)`."""
    counts, parts = [], dict.fromkeys((row.path, row.class_name, row.level) for row in report)
    for level, word in WORDS.items():
        names = [name for _, name, at in parts if at == level]
        which = "" if level == "lowered" else f" ({listed(list(dict.fromkeys(names)))})"
        counts += [f"{len(names)} {word}{which}"] if names else []
    return f"{len(parts)} part{'' if len(parts) == 1 else 's'}: {', '.join(counts)}" if counts else "no parts"


def _lines_of_calls(rows: Iterable[CallRow]) -> Iterator[str]:
    """Yield a line for each call, and below it the line that would change what becomes of it."""
    table = [(row.status.value, row.name, row.target, relative_source(row.source), row.remark, row.fix) for row in rows]
    widths = [max((len(cells[i]) for cells in table), default=0) for i in range(4)]
    for *cells, remark, fix in table:
        columns = [cell.ljust(width) for cell, width in zip(cells, widths, strict=True) if width]
        yield "  ".join([*columns, remark]).rstrip()
        if fix:
            yield f"    write: {fix}"


def in_sections(sections: Iterable[Section]) -> str:
    """Join the sections, each with its title underlined; leave out those without a text."""
    return "\n\n".join(f"{title}\n{'-' * len(title)}\n{body}" for title, body in sections if body)
