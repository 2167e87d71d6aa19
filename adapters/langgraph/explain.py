"""`fast.explain()` of an accelerated graph: its nodes and edges, its prompts, and the calls that start early."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from teola_plugin.adapters.explain import COMPARE, describe_measured_gain, only_whole, seconds_saved
from teola_plugin.adapters.plan_report import CallRow, PlanReport, Reason, Status
from teola_plugin.adapters.plan_summary import listed
from teola_plugin.graph import PromptPart
from teola_plugin.observe.spans import QueryTrace
from teola_plugin.observe.text import duration
from teola_plugin.tracer.report import Level, TraceNode, TraceReport

NOTHING_PREFETCHED = "no call in it can start before its place: the graph runs as it always did"
CACHE_BLOCK = 16
"""Tokens that the caches of most engines keep together; a shorter beginning is not kept."""
MIN_TOKENS = 2 * CACHE_BLOCK
"""Constant tokens from which on advice is given."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A conditional edge."""

    nodes: tuple[str, ...]
    """Its ends; empty if it may lead anywhere."""
    decider: str
    """The name of the function that chooses, or of the node itself."""


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """The facts of a node that are known before the graph runs."""

    name: str
    kind: str
    """The name of its function, or of its class."""
    level: Level
    reason: str = ""
    successors: tuple[str, ...] = ()
    """Nodes that static edges lead to."""
    joins: tuple[str, ...] = ()
    """Nodes that wait for it and for others."""
    choices: tuple[Choice, ...] = ()
    calls: tuple[CallRow, ...] = ()
    tools: tuple[CallRow, ...] = ()
    """A row for each tool of a node that runs tools."""


def explain_graph(
    nodes: Sequence[NodeFacts],
    first_nodes: Sequence[str],
    first_choices: Sequence[Choice] = (),
    note: str = "",
    trace: QueryTrace | None = None,
    left: Sequence[str] = (),
) -> PlanReport:
    """Return the report of a graph with these facts.

    `first_nodes`: the nodes that always start first. `first_choices`: the conditional edges from the start. `note`: why
    nothing starts early, if so. `trace`: that of the last call, if there was one. `left`: the calls that it left in
    their place, see `left_for_form`.
    """
    calls = [call for node in nodes for call in node.calls]
    tools = [tool for node in nodes for tool in node.tools]
    advice = dict.fromkeys(line for node in nodes for line in _advice(node))
    sections = (
        ("Edges", "\n".join(_edge_lines(nodes, first_nodes, first_choices))),
        ("Prompts", "\n".join(line for call in calls if call.prompt for line in _prompt_lines(call))),
    )
    starts = () if note else tuple(_start_lines(nodes))
    rows = [
        TraceNode(
            n.name,
            n.kind,
            n.level,
            tuple(call.name for call in n.calls if call.status is not Status.NOT_SEEN),
            n.reason,
        )
        for n in nodes
    ]
    expected = _expectation(calls, starts, note, trace, left)
    figures: Any = {} if trace is None else {"seconds": trace.seconds, "seconds_saved": seconds_saved(trace)}
    parts = TraceReport(tuple(rows))
    return PlanReport(parts, starts, expected, (*calls, *tools), tuple(advice), sections, **figures)


_WITH_THE_SAME_SETTINGS = "from the second call with the same settings on, unless something else is in the way"


def _start_lines(nodes: Sequence[NodeFacts]) -> Iterator[str]:
    """Yield a line for each time at which calls or tools start before their node."""
    names_by_start: dict[str, list[str]] = {}
    for node in nodes:
        for call in node.calls:
            if call.start:
                start = f"{call.start}, if its answer comes whole" if call.is_whole_only else call.start
                names_by_start.setdefault(start, []).append(call.name)
            elif call.reason is Reason.MODEL_OF_SETTINGS:
                names_by_start.setdefault(_WITH_THE_SAME_SETTINGS, []).append(call.name)
        for tool in node.tools:
            if tool.start:
                names_by_start.setdefault(tool.start, []).append(tool.name)
    yield from (f"{listed(names)}: {start}" for start, names in names_by_start.items())


def _expectation(
    calls: Sequence[CallRow], starts: Sequence[str], note: str, trace: QueryTrace | None, left: Sequence[str]
) -> str:
    """Return what to expect of the graph: no figure before a call, since a graph decides as it runs."""
    if not starts and not any(call.reason is Reason.PREFILLED for call in calls):
        in_place = sorted(
            (call for call in calls if call.status is Status.IN_PLACE), key=lambda call: call.reason is Reason.FIRST
        )
        reason = "no node is seen to call a model, a retriever or an engine"
        if in_place:
            reason = f"{in_place[0].name} starts at its usual time: {in_place[0].explanation}"
        return f"no gain: {reason if in_place or not note else note}"
    if trace is not None and left:
        return f"the last call took {duration(trace.seconds)}; {only_whole(left)}: {COMPARE}"
    unstreamed = [call.name for call in calls if call.start and call.is_whole_only]
    text = (
        f"not known yet, as a graph decides while it runs: {COMPARE}"
        if trace is None
        else describe_measured_gain(trace)
    )
    return f"{text}; {only_whole(unstreamed)}" if unstreamed else text


def _edge_lines(nodes: Sequence[NodeFacts], first: Sequence[str], choices: Sequence[Choice]) -> Iterator[str]:
    """Yield the lines of the section "Edges" of `explain()`: static edges, joins and conditional edges."""
    if first:
        yield f"start -> {', '.join(first)}"
    yield from (_choice_line("start", choice) for choice in choices)
    for node in nodes:
        if node.successors:
            yield f"{node.name} -> {', '.join(node.successors)}"
        for end in node.joins:
            siblings = [other.name for other in nodes if end in other.joins and other is not node]
            yield f"{node.name} -> {end}, when {_joined(siblings)} {'are' if len(siblings) > 1 else 'is'} done, too"
        yield from (_choice_line(node.name, choice) for choice in node.choices)


def _choice_line(name: str, choice: Choice) -> str:
    return f"{name} -> {_joined(choice.nodes, 'or') or 'any node'}, as {choice.decider} says"


def _prompt_lines(call: CallRow) -> Iterator[str]:
    """Yield a call's prompt, and a line on how much of its beginning is always the same and so can be cached."""
    yield f"{call.name}: {''.join(map(str, _merged(call.prompt)))}"
    constant_tokens = sum(part.tokens for part in call.prompt[: _first_variable(call.prompt)])
    variables = list(dict.fromkeys(part.variable for part in call.prompt if part.variable))
    beginning = "it begins with what varies"
    if constant_tokens >= CACHE_BLOCK:
        beginning = f"its first {constant_tokens} tokens are always the same"
    if variables:
        yield f"  {beginning}; {_joined(variables)} {'vary' if len(variables) > 1 else 'varies'}"
    else:
        yield "  always the same"


def _merged(prompt: Sequence[PromptPart]) -> Iterator[PromptPart]:
    """Yield the parts of a prompt, with constant parts in a row as one."""
    for variable, group in groupby(prompt, key=lambda part: part.variable):
        parts = list(group)
        yield parts[0] if variable else PromptPart(tokens=sum(part.tokens for part in parts))


def _first_variable(prompt: Sequence[PromptPart]) -> int:
    return next((i for i, part in enumerate(prompt) if part.variable), len(prompt))


def _advice(node: NodeFacts) -> Iterator[str]:
    """Yield what the author could change to gain more. It is never done for them, since it changes the prompts."""
    for call in node.calls:
        last = max(
            (i for i, part in enumerate(call.prompt) if part.tokens >= MIN_TOKENS and not part.variable), default=0
        )
        first = _first_variable(call.prompt[:last])
        constant_tokens = sum(part.tokens for part in call.prompt[first : last + 1] if not part.variable)
        names = list(dict.fromkeys(part.variable for part in call.prompt[first:last] if part.variable))
        if names:
            verb, pronoun = ("stand", "them") if len(names) > 1 else ("stands", "it")
            yield f"{call.name}: {_joined(names)} {verb} before {constant_tokens} constant tokens: put {pronoun} last"


def _joined(names: Sequence[str], word: str = "and") -> str:
    return f" {word} ".join(one for one in (", ".join(names[:-1]), *names[-1:]) if one)
