"""What `explain()` tells of a graph's nodes: read from the plans of the graph and from what its nodes hold."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import FunctionType
from typing import Any

from langchain_core.prompts import BasePromptTemplate
from langchain_core.tools import BaseTool
from langgraph.constants import END, START

from teola_plugin.adapters.early_work import forms_matter
from teola_plugin.adapters.expectations import only_whole
from teola_plugin.adapters.held import below, held, is_own
from teola_plugin.adapters.langgraph.agent_facts import asked_by, described, engine_of, tools_of
from teola_plugin.adapters.langgraph.agents.eager_tools import EagerTools
from teola_plugin.adapters.langgraph.explain import FIRST, WORTH, CallFacts, Choice, NodeFacts
from teola_plugin.adapters.langgraph.plans import Plans
from teola_plugin.adapters.langgraph.pools import pools_by_node
from teola_plugin.adapters.langgraph.prompt_advice import Breaker, breakers_in, found_in, varying_partials
from teola_plugin.adapters.langgraph.waiting import known_tokens, label, once, waits_for, waits_for_code
from teola_plugin.graph import INPUT, Component, PromptPart, Ref
from teola_plugin.shims.langchain_agents import AgentModel, agent_model, tool_node_parts
from teola_plugin.shims.langgraph import functions_of
from teola_plugin.tracer.draft import Draft
from teola_plugin.tracer.functions import Fields, Symbol
from teola_plugin.tracer.functions.pruning import uses_engine
from teola_plugin.tracer.functions.symbols import Unknown
from teola_plugin.tracer.langgraph.lookahead import STATE, lookahead
from teola_plugin.tracer.langgraph.node import NOTHING, Visited, visit
from teola_plugin.tracer.langgraph.shape import ROOT, Branch, GraphShape, NodeShape, shape_of
from teola_plugin.tracer.report import Level

_LOOKED_AT = 2_000
"""Objects of one node that are looked into for functions that write prompts."""
_YOUR_CODE = "your code: runs once, in its place"
_JOINS = "pool-backed objects that it calls join the query"


@dataclass(frozen=True)
class GraphFacts:
    """Of one accelerated graph; nothing of it runs."""

    graph: Any
    """With what is bound to engines in its place."""
    plans: Plans | None
    tools: EagerTools | None

    @cached_property
    def nodes(self) -> tuple[NodeFacts, ...]:
        pools, shape = pools_by_node(self.graph), self._shape
        names = [name for name in self.graph.nodes if name != START]
        if shape is None:
            return tuple(self._unplanned(name, name in pools) for name in names)
        made = [self._node(shape.nodes[name], name in pools) for name in names]
        return tuple(_with_fillings(made, self._written))

    @property
    def starts(self) -> tuple[str, ...]:
        """Nodes that the static edges from the start lead to."""
        edges = getattr(getattr(self.graph, "builder", None), "edges", ())
        return tuple(sorted(end for start, end in edges if start == START and end in self.graph.nodes))

    @property
    def chosen(self) -> tuple[Choice, ...]:
        """The conditional edges from the start."""
        start = None if self._shape is None else self._shape.nodes.get(START)
        return () if start is None else tuple(_choice(branch, START) for branch in start.branches)

    # ------------------------------------------------------------ one node

    @cached_property
    def _shape(self) -> GraphShape | None:
        return shape_of(self.graph) if self.plans is None else self.plans.shape

    def _unplanned(self, name: str, has_pool: bool) -> NodeFacts:
        bound = self.graph.nodes[name].bound
        level, reason = _unseen(bound, has_pool)
        return NodeFacts(name, _kind(bound), level, reason, tools=tools_of(bound, self.tools), advice=_advice(bound))

    def _node(self, node: NodeShape, has_pool: bool) -> NodeFacts:
        draft, made = self._visited[node.name]
        asked = [c for c in draft.components.values() if uses_engine(c)]
        calls = tuple(self._call(node, c, c is asked[0]) for c in asked)
        level, reason = _level(node, draft, made, has_pool)
        if self._agent is not None and self._agent.node == node.name:
            calls, level, reason = (asked_by(self._agent, self.tools is not None),), "joined", described(self._agent)
        return NodeFacts(
            node.name,
            _kind(node.bound),
            level,
            reason,
            node.then,
            node.joins,
            tuple(_choice(branch, node.name) for branch in node.branches),
            calls,
            tools_of(node.bound, self.tools),
            _advice(node.bound),
        )

    @cached_property
    def _visited(self) -> dict[str, tuple[Draft, Visited]]:
        """What each node asks for, and writes, whatever the state is."""
        shape, found = self._shape, dict[str, tuple[Draft, Visited]]()
        for name, node in {} if shape is None else shape.nodes.items():
            draft = Draft()
            made = NOTHING if node.bound is None else visit(draft, node.bound, _reads(node), name)
            found[name] = draft, made
        return found

    @cached_property
    def _written(self) -> dict[str, list[tuple[str, Breaker]]]:
        """Channel of the state -> the nodes that fill it with what varies."""
        found: dict[str, list[tuple[str, Breaker]]] = {}
        for name, node in self.graph.nodes.items():
            for func in functions_of(node.bound) or ():
                for key, breaker in found_in(func).returned.items():
                    found.setdefault(key, []).append((name, breaker))
        return found

    # ------------------------------------------------------------ calls

    def _call(self, node: NodeShape, call: Component, first: bool) -> CallFacts:
        labels = {key: label(ref) for key, ref in call.inputs}
        prompt = tuple(
            replace(p, variable=labels.get(p.variable, p.variable)) if p.variable else p for p in call.prompt
        )
        early = self._early(node, call.name, first)
        why = "" if early else self._why(node, call.name, first)
        return CallFacts(call.name, call.engine or call.embedder, prompt, early, why, self._only_whole(call))

    def _only_whole(self, call: Component) -> bool:
        """Return True if requests for the call's whole answer, or for those of what it holds, are none for streams."""
        if self.plans is None:
            return False
        inside = () if call.body is None else call.body.components
        return forms_matter(call, self.plans.pool) or any(map(self._only_whole, inside))

    @cached_property
    def _agent(self) -> AgentModel | None:
        """What the model node of an agent asks, where that is an engine."""
        found = agent_model(self.graph)
        return found if found is not None and engine_of(found.model) else None

    def _early(self, node: NodeShape, call: str, first: bool) -> str:
        """With which node it begins: the one for whose plan it waits least."""
        plans = self.plans
        ways: list[tuple[int, str]] = []
        for name in self._visited:
            if plans is None or (name == node.name and first):
                continue
            plan = plans.traced(name, None, pushed=False)
            components = {} if plan is None else {c.name: c for c in plan.template.components}
            if plan is None or call not in components:
                continue
            waits = waits_for(plan, call)
            if any(self._is_left(components[one]) for one in (call, *waits)):
                continue
            begins = "when the graph begins" if name == START else f"when {_its(node, name)} begins"
            if waits_for_code(plan, waits):
                known = known_tokens(plan, call)
                ways += [(len(self._visited), f"its first {known} tokens, {begins}")] if known >= WORTH else []
            else:
                ways.append((len(waits), f"{begins}{once(waits)}"))
        return min(ways)[1] if ways else ""

    def _is_left(self, call: Component) -> bool:
        """Return True for a call that begins in its place whatever its query does, as its answer may be streamed."""
        inside = () if call.body is None else call.body.components
        unknown = call.attributes.form == "unknown" and self._only_whole(call)
        return unknown or any(map(self._is_left, inside))

    def _why(self, node: NodeShape, call: str, first: bool) -> str:
        assert self._shape is not None
        own = self._visited[node.name][0].components.get(call)
        if own is not None and self._is_left(own):
            return only_whole([call])
        before = [one for one in self._shape.nodes.values() if node.name in _follow(one) and one.name != START]
        if not before or node.name in self.starts:
            return FIRST
        if node.skippable:
            return "its node may not run: a result may be in a cache, or somebody is asked before"
        if all(one.pauses for one in before):
            return "the graph is interrupted before its node"
        needs = [waits for one in before if (waits := self._needs(one.name, call))]
        if needs:
            return f"it needs what {' and '.join(needs[0])} {'give' if len(needs[0]) > 1 else 'gives'}"
        unread = [one.name for one in before if self._visited[one.name][1].updates is None]
        if unread:
            return f"what {' and '.join(unread)} will write is not known"
        if node.name not in {name for one in before for name in (*one.then, *self._visited[one.name][1].goto)}:
            return "its node may be chosen or not, and a call for nothing is not made on a guess"
        return "what it reads is known when its node begins" if first else "it waits for what stands before it"

    def _needs(self, name: str, call: str) -> list[str]:
        """What a call would wait for that began with a node, if that were of any use."""
        assert self._shape is not None
        try:
            plan = lookahead(self._shape, name, pushed=False)
        except Exception:  # nothing is known of the way from there
            return []
        waits = waits_for(plan, call) if any(c.name == call for c in plan.template.components) else []
        return [] if waits_for_code(plan, waits) else waits


# ------------------------------------------------------------ what a node is


def _reads(node: NodeShape) -> Symbol:
    state = Ref(INPUT).at(STATE)
    if node.reads is None:
        return state.at(ROOT)
    return Fields({name: state.at(name) for name in node.reads}, attributes=True)


def _kind(bound: Any) -> str:
    if tool_node_parts(bound) is not None:
        return type(bound).__name__
    functions = functions_of(bound)
    func = None if functions is None else functions.func or functions.afunc
    name = getattr(func, "__name__", "") or getattr(func, "name", "")
    return name if type(name) is str and name else type(bound).__name__


def _level(node: NodeShape, draft: Draft, made: Visited, has_pool: bool) -> tuple[Level, str]:
    if functions_of(node.bound) is None:
        row = next((row for row in draft.nodes if row.level != "lowered"), None)
        return ("lowered", "") if row is None else (row.level, row.reason)
    if made.updates is not None and not any(isinstance(value, Unknown) for value in made.updates.values()):
        return "lowered", ""
    if any(map(uses_engine, draft.components.values())):
        return "joined", f"not all of its code is understood; {_JOINS}"
    return _unseen(node.bound, has_pool)


def _unseen(bound: Any, has_pool: bool) -> tuple[Level, str]:
    code = "each tool runs once" if tool_node_parts(bound) is not None else _YOUR_CODE
    return ("joined", f"{code}; {_JOINS}") if has_pool else ("original", code)


def _choice(branch: Branch, node: str) -> Choice:
    nodes = tuple("the end" if name == END else name for name in branch.nodes)
    return Choice(nodes, node if branch.path is None else _kind(branch.path))


def _follow(node: NodeShape) -> set[str]:
    return {*node.then, *node.joins, *(name for branch in node.branches for name in branch.nodes)}


def _its(node: NodeShape, name: str) -> str:
    return "its node" if name == node.name else name


# ------------------------------------------------------------ prompts


def _advice(bound: Any) -> tuple[str, ...]:
    """What the functions and templates of a node say of its prompts. Tools write none."""
    found: list[Breaker] = []
    for one in below(bound, _without_tools, most=_LOOKED_AT):
        if type(one) is FunctionType and is_own(one):
            found += breakers_in(one)
        elif issubclass(type(one), BasePromptTemplate):
            found += varying_partials(one)
    return tuple(dict.fromkeys(map(str, found)))


def _without_tools(node: Any) -> Iterable[Any]:
    return () if issubclass(type(node), BaseTool) else held(node)


def _with_fillings(nodes: Sequence[NodeFacts], written: Mapping[str, list[tuple[str, Breaker]]]) -> Iterator[NodeFacts]:
    """Nodes whose prompts have a variable that another node fills with what varies."""
    for node in nodes:
        said = [
            line for call in node.calls for part in _not_last(call.prompt) for line in _filling(call, part, written)
        ]
        yield replace(node, advice=(*node.advice, *dict.fromkeys(said)))


def _not_last(prompt: Sequence[PromptPart]) -> Iterator[PromptPart]:
    """Variables that something else stands behind."""
    yield from (part for part in prompt[:-1] if part.variable)


def _filling(call: CallFacts, part: PromptPart, written: Mapping[str, list[tuple[str, Breaker]]]) -> Iterator[str]:
    for name, breaker in written.get(part.variable, ()):
        yield f"{call.name} has {part.variable} in its prompt, which {name} fills; {breaker}"
