"""`fast.explain()` of an accelerated graph: its nodes and edges, its prompts, and what begins before its place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from teola_plugin.adapters.early_words import listed
from teola_plugin.adapters.expectations import COMPARE, only_whole
from teola_plugin.adapters.explain import Explanation
from teola_plugin.graph import PromptPart
from teola_plugin.observe.spans import QueryTrace
from teola_plugin.observe.text import duration
from teola_plugin.tracer.report import Level, TraceNode, TraceReport

NOTHING_AHEAD = "no pool-backed object was found and none was bound: the graph runs as it always did"
FIRST = "nothing stands before it"
PREFILLED = "its next prompts are prefilled while tools run"
BLOCK = 16
"""Tokens that an engine's cache keeps together, as most do: fewer are not kept."""
WORTH = 2 * BLOCK
"""Constant tokens that are worth a word."""


@dataclass(frozen=True, slots=True)
class CallFacts:
    """One call of an engine that a node makes."""

    name: str
    engine: str
    prompt: tuple[PromptPart, ...] = ()
    """Of a generation: text that is always the same, and variables by the names of what fills them."""
    early: str = ""
    """When it begins, if that is before its node does; empty for a call that is made in its place."""
    why: str = ""
    """Why it is made in its place."""
    only_whole: bool = False
    """Whether it begins early only where its answer comes whole; see `only_whole`."""


@dataclass(frozen=True, slots=True)
class ToolFacts:
    """One tool of a node that runs tools."""

    name: str
    early: str = ""
    why: str = ""
    """As of a call."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A conditional edge."""

    nodes: tuple[str, ...]
    """Empty where it may lead anywhere."""
    by: str
    """Who chooses: the name of a function, or of the node itself."""


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What is known of a node before the graph runs."""

    name: str
    kind: str
    """The name of its function, or of its class."""
    level: Level
    reason: str = ""
    then: tuple[str, ...] = ()
    """Nodes that static edges lead to."""
    joins: tuple[str, ...] = ()
    """Nodes that wait for it and for others."""
    choices: tuple[Choice, ...] = ()
    calls: tuple[CallFacts, ...] = ()
    tools: tuple[ToolFacts, ...] = ()
    advice: tuple[str, ...] = ()
    """What of its code breaks the reuse of a prompt's beginning."""


def explain_graph(
    nodes: Sequence[NodeFacts],
    starts: Sequence[str],
    chosen: Sequence[Choice] = (),
    note: str = "",
    trace: QueryTrace | None = None,
    left: Sequence[str] = (),
) -> Explanation:
    """`starts`: the nodes that begin first; `chosen`: those of which some do; `note`: why nothing runs ahead, if so;
    `trace`: of the last call, where there was one; `left`: what that left in its place, see `left_for_form`."""
    calls = [call for node in nodes for call in node.calls]
    prompts = "\n".join(line for call in calls if call.prompt for line in _prompt(call))
    ahead = [_when(one) for node in nodes for one in node.calls] + [_when(one) for node in nodes for one in node.tools]
    advice = dict.fromkeys(line for node in nodes for line in _advice(node))
    sections = (
        ("Edges", "\n".join(_edges(nodes, starts, chosen))),
        ("Prompts", prompts),
        ("Before their place", note or _columns(ahead)),
    )
    early = () if note else tuple(_early(nodes))
    return Explanation(_report(nodes), early, _expected(nodes, early, note, trace, left), tuple(advice), sections)


def _early(nodes: Sequence[NodeFacts]) -> Iterator[str]:
    """What begins before its node, by when it does."""
    when: dict[str, list[str]] = {}
    for node in nodes:
        begins = [(one.name, _condition(one)) for one in node.calls] + [(one.name, one.early) for one in node.tools]
        for name, early in begins:
            if early:
                when.setdefault(early, []).append(name)
    yield from (f"{listed(names)}: {early}" for early, names in when.items())


def _condition(call: CallFacts) -> str:
    return f"{call.early}, if its answer comes whole" if call.early and call.only_whole else call.early


def _expected(
    nodes: Sequence[NodeFacts], early: Sequence[str], note: str, trace: QueryTrace | None, left: Sequence[str]
) -> str:
    """Return what to expect of the graph: no figure before a call, since a graph decides as it runs."""
    waiting = sorted((call for node in nodes for call in node.calls if call.why), key=lambda one: one.why == FIRST)
    why = f"{waiting[0].name} starts in its place: {waiting[0].why}" if waiting else "no node is seen to call an engine"
    why = note or why
    if not early and not any(call.why and PREFILLED in call.why for node in nodes for call in node.calls):
        return f"no gain: {why}"
    took = f"the last call took {duration(trace.seconds)}" if trace is not None else ""
    if took and left:
        return f"{took}; {only_whole(left)}: {COMPARE}"
    whole = [call.name for node in nodes for call in node.calls if call.early and call.only_whole]
    text = f"faster; {took or 'not estimated, as a graph decides while it runs'}: {COMPARE}"
    return f"{text}; {only_whole(whole)}" if whole else text


def _report(nodes: Sequence[NodeFacts]) -> TraceReport:
    rows = [TraceNode(n.name, n.kind, n.level, tuple(call.name for call in n.calls), n.reason) for n in nodes]
    return TraceReport(tuple(rows))


def _edges(nodes: Sequence[NodeFacts], starts: Sequence[str], chosen: Sequence[Choice]) -> Iterator[str]:
    if starts:
        yield f"start -> {', '.join(starts)}"
    yield from (_choice("start", choice) for choice in chosen)
    for node in nodes:
        if node.then:
            yield f"{node.name} -> {', '.join(node.then)}"
        for end in node.joins:
            others = [other.name for other in nodes if end in other.joins and other is not node]
            yield f"{node.name} -> {end}, when {_listed(others)} {_are(others)} done, too"
        yield from (_choice(node.name, choice) for choice in node.choices)


def _choice(name: str, choice: Choice) -> str:
    return f"{name} -> {_listed(choice.nodes, 'or') or 'any node'}, as {choice.by} says"


def _prompt(call: CallFacts) -> Iterator[str]:
    yield f"{call.name}: {''.join(map(str, _merged(call.prompt)))}"
    before = sum(part.tokens for part in call.prompt[: _first_variable(call.prompt)])
    varying = list(dict.fromkeys(part.variable for part in call.prompt if part.variable))
    constant = f"its first {before} tokens are always the same" if before >= BLOCK else "it begins with what varies"
    yield (
        f"  {constant}; {_listed(varying)} {'vary' if len(varying) > 1 else 'varies'}"
        if varying
        else "  always the same"
    )


def _merged(prompt: Sequence[PromptPart]) -> Iterator[PromptPart]:
    for variable, parts in groupby(prompt, key=lambda part: part.variable):
        together = list(parts)
        yield together[0] if variable else PromptPart(tokens=sum(part.tokens for part in together))


def _first_variable(prompt: Sequence[PromptPart]) -> int:
    return next((i for i, part in enumerate(prompt) if part.variable), len(prompt))


def _when(one: CallFacts | ToolFacts) -> tuple[str, str, str]:
    return ("early", one.name, one.early) if one.early else ("in place", one.name, one.why)


def _columns(rows: Sequence[tuple[str, str, str]]) -> str:
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(2)]
    return "\n".join(f"{a.ljust(widths[0])}  {b.ljust(widths[1])}  {c}".rstrip() for a, b, c in rows)


# ------------------------------------------------------------ advice


def _advice(node: NodeFacts) -> Iterator[str]:
    """What the author of the graph could change for more; never done for them, since it changes the prompts."""
    for call in node.calls:
        yield from _order(call)
    yield from (f"{node.name}: {line}" for line in node.advice)


def _order(call: CallFacts) -> Iterator[str]:
    """Variables that stand before constant text."""
    last = max((i for i, part in enumerate(call.prompt) if part.tokens >= WORTH and not part.variable), default=0)
    first = _first_variable(call.prompt[:last])
    behind = sum(part.tokens for part in call.prompt[first : last + 1] if not part.variable)
    names = list(dict.fromkeys(part.variable for part in call.prompt[first:last] if part.variable))
    if names:
        stand, them = ("stand", "them") if len(names) > 1 else ("stands", "it")
        yield f"{call.name}: {_listed(names)} {stand} before {behind} constant tokens: put {them} last"


def _listed(names: Sequence[str], word: str = "and") -> str:
    return f" {word} ".join(one for one in (", ".join(names[:-1]), *names[-1:]) if one)


def _are(names: Sequence[str]) -> str:
    return "are" if len(names) > 1 else "is"
